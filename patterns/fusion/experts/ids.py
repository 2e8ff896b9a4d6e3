"""Ids that ``topk`` gives are within range: experts read them as they are.

    ids = clamp(topk(scores [T, E], 8)[1], 0, E - 1)   ->   experts(..., ids=topk(scores, 8)[1])

``transformers`` clamps what another process may own; for one that has all experts, that is a kernel
for a few integers.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from inductor_quant.ops import experts, scaled_experts

from ... import fx_utils
from ...fx_utils import aten
from ...rewrite import add_node, erase_if_dead

_OPS = (experts.op, scaled_experts.op)
_CLAMPS = {
    aten.clamp.default: ("min", "max"),
    aten.clamp_min.default: ("min",),
    aten.clamp_max.default: ("max",),
}


def read_ids_of_topk(owner: fx.Graph) -> int:
    """Returns how many calls read ids that are not clamped any more."""
    changed = 0
    for op in _OPS:
        place = [argument.name for argument in op._schema.arguments].index("ids")
        for call in owner.find_nodes(op="call_function", target=op):
            ids: Any = call.args[place]
            found = _unclamped(ids) if ids is not None else None
            if found is None:
                continue
            with owner.inserting_before(call):
                flat = add_node(call, aten.reshape.default, (found, [-1]), {})
            call.update_arg(place, flat)
            erase_if_dead(ids)
            changed += 1
    return changed


def _unclamped(ids: fx.Node) -> fx.Node | None:
    """The indices of ``topk`` that ``ids`` holds, in their order; None: it may hold others."""
    node: Any = ids
    least, most = -1, None
    clamps: list[fx.Node] = []
    while node.target in (*_CLAMPS, *fx_utils.RESHAPES, *fx_utils.SQUEEZES):
        if node.target in _CLAMPS:
            names = _CLAMPS[node.target]
            bounds = dict(zip(names, fx_utils.arguments(node, "self", *names)[1:], strict=True))
            low, high = bounds.get("min"), bounds.get("max")
            if not all(bound is None or isinstance(bound, int) for bound in (low, high)):
                return None
            least = max(least, -1 if low is None else low)
            most = high if most is None or (high is not None and high < most) else most
            clamps.append(node)
        node = node.args[0]
    if not clamps or node.target is not operator.getitem or node.args[1] != 1:
        return None
    topk = node.args[0]
    if topk.target != aten.topk.default or fx_utils.mutated([node, *clamps]) is not None:
        return None
    scores, _, dim = fx_utils.arguments(topk, "self", "k", "dim")
    size = fx_utils.value(scores).shape[-1 if dim is None else dim]
    is_within = isinstance(size, int) and least <= 0 and (most is None or most >= size - 1)
    return node if is_within else None
