"""Graph passes on layers of experts, in this order (``graph_pass.py``):

    ids              experts read topk's indices without a clamp that changes none
    quantize_tokens  experts quantize a token once, not once for each of its experts
    rows             experts read rows of x where they are: a gather before them goes
    routing          ids are counted instead of sorted; a token's experts are added in one thread
    gate             the activation of gated experts becomes a part of their first product
    token_order      what is computed by expert and gathered by token is computed by token

``ops.fusion.expert_routing.MAX_IDS`` = 4096: ids, or their bound, that are counted.
"""
