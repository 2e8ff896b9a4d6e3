"""Give each user of a cast GEMM result its own cast.

    q = gemm(x); wide = q.float()         wide0, wide1, wide2 = q.float(), q.float(), q.float()
    wide * cos + cat(-wide[half:],   ->   wide0 * cos + cat(-wide1[half:],
                     wide[:half])                           wide2[:half])

A kernel may leave its result as split-K partials, which each user adds up
(``lowering/split_k_sum.py``). Inductor materializes such a many-input value at its first node with
several users. A view is never materialized, but the cast of a rotary embedding is: one launch to
add up, and another one to rotate. Applies to M <= ``MAX_M`` and up to ``MAX_USERS`` users.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from inductor_quant.ops import fp8_block, weight_only
from inductor_quant.ops.fusion import horizontal

from .. import fx_utils

_OPS = (weight_only.op, horizontal.weight_only_op, fp8_block.op)  # their kernels split K
MAX_M = 32  # the regimes decode and small_m, whose kernels leave partials
MAX_USERS = 4  # more copies cost more than the launch that they save
_CAST = torch.ops.prims.convert_element_type.default


def duplicate_casts(owner: fx.Graph) -> int:
    """Returns how many nodes were added."""
    before = len(owner.nodes)
    for op in _OPS:
        for call in owner.find_nodes(op="call_function", target=op):
            for result in _results(call):
                most = fx_utils.limit(fx_utils.value(result).shape[0])
                if most is not None and most <= MAX_M and not fx_utils.is_mutated(result):
                    _separate(result, is_cast=False)
    return len(owner.nodes) - before


def _results(call: fx.Node) -> Iterator[fx.Node]:
    if isinstance(fx_utils.value(call), torch.Tensor):
        yield call
    else:
        yield from list(call.users)


def _separate(node: fx.Node, *, is_cast: bool) -> None:
    """Walk the views and casts of a result, the last ones first, and copy a cast, or a view of
    one, for each of its users."""
    for user in list(node.users):
        if user.target is _CAST or fx_utils.is_view(user):
            _separate(user, is_cast=is_cast or user.target is _CAST)
    users = list(node.users)
    if not is_cast or not 1 < len(users) <= MAX_USERS:
        return
    if fx_utils.is_returned(node) or fx_utils.is_mutated(node) or fx_utils.are_strides_read(node):
        return
    for user in users[1:]:
        with node.graph.inserting_before(node):
            user.replace_input_with(node, node.graph.node_copy(node))
