"""GELU before a quantization: an error function with fewer digits.

    quantize(x / 2 * (1 + erf(x / sqrt(2))), ...)   ->   ... inductor_quant.erf(x / sqrt(2)) ...

libdevice's erf bounds the time of the kernel that computes GELU and quantizes a row. It keeps its
relative error near 0, which a sum with 1 drops. Applies where that sum is the only user, and where
nothing but a quantization to 8 bits sees what is computed from it.
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.ops.fusion import erf, quantize, row_reduce

from .. import fx_utils
from ..fx_utils import aten
from .row_quant import replace

_CAST = torch.ops.prims.convert_element_type.default
_ENDS = (quantize.op, row_reduce.op)
_LIMIT = 16  # nodes between the sum and its quantization; GELU has one, and a few casts and views


def narrow_erf(owner: fx.Graph) -> int:
    """Returns how many error functions were replaced."""
    found = [
        node
        for node in owner.find_nodes(op="call_function", target=aten.erf.default)
        if fx_utils.value(node).dtype == torch.float32 and _is_quantized(node)
    ]
    for node in found:
        replace(node, erf.op, node.args[0])
    return len(found)


def _is_quantized(node: fx.Node) -> bool:
    total = fx_utils.single_user(node)
    if total is None or total.target != aten.add.Tensor or total.kwargs:
        return False
    if {*total.args} != {node, 1}:
        return False
    todo, seen = [total], {total}
    while todo:
        users = todo.pop().users
        if not users or len(seen) > _LIMIT:
            return False
        for user in set(users) - seen:
            if user.target in _ENDS:
                continue
            if user.target not in (aten.mul.Tensor, _CAST) and not fx_utils.is_view(user):
                return False
            seen.add(user)
            todo.append(user)
    return True
