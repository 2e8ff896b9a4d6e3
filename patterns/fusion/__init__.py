"""Graph passes that run after recognition, on canonical ops.

In this order (``graph_pass.py``); ``row_quant`` runs with each match:

    cse                 q, k and v quantize the same activation: once is enough
    experts             what surrounds experts: ids, quantization, rows, routing, gate
    concat_weights      constant weights of one activation become one weight
    weight_k_major      an int8 weight that is contiguous along N is copied, contiguous along K
    simplify_quant      round, clamp and cast to int8 become one op
    norm_group_quant    group quantization moves into the kernel of the norm
    horizontal          GEMMs of one activation become one op, for one launch
    quantize_in_gemm    the GEMM quantizes its activation itself
    duplicate_casts     each user of a GEMM's result gets its own cast

Thresholds of M:

    concat_weights.MAX_M                     256    M, or its hint if symbolic
    weight_k_major.MIN_M                    1024    M, or its hint if symbolic
    duplicate_casts.MAX_M                     32    M, or its bound
    ops.fusion.horizontal.MAX_ROWS   128, 16, 32    w8a8, w4a8, weight_only; M, or its bound
    ops.fusion.quantized_linear.MAX_ROWS       4    M, or its bound
"""
