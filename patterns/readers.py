"""A cast of a GEMM's result that several nodes read is written once for each of them.

With few rows a kernel may leave its result in parts of K, which whatever reads it adds up
(``lowering/parts.py``). Inductor stores a value that reads so much at the first node that has two
users. A view has no value of its own, but ``q.float()``, of which rotary embedding reads all and
both halves, has: it would cost a launch to add up, and one to rotate.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from inductor_quant.ops import fp8_block, group, weight_only
from inductor_quant.patterns import graph

# GEMMs of which a kernel may leave parts, and for how many rows at most.
_OPS = (weight_only.op, group.weight_only_op, fp8_block.op)
MAX_ROWS = 32
# More copies are more work than the launch that they save.
MAX_READERS = 4
_CAST = torch.ops.prims.convert_element_type.default


def repeat_casts(owner: fx.Graph) -> int:
    """Give each reader of such a cast one of its own. Returns how many nodes more there are."""
    before = len(owner.nodes)
    for op in _OPS:
        for call in owner.find_nodes(op="call_function", target=op):
            for result in _results(call):
                rows = graph.value(result).shape[0]
                if isinstance(rows, int) and rows <= MAX_ROWS and not graph.is_mutated(result):
                    _separate(result, is_cast=False)
    return len(owner.nodes) - before


def _results(call: fx.Node) -> Iterator[fx.Node]:
    if isinstance(graph.value(call), torch.Tensor):
        yield call
    else:
        yield from list(call.users)


def _separate(node: fx.Node, *, is_cast: bool) -> None:
    """Behind ``node``, the result or what was viewed and cast of it, let nothing that is cast have
    more than one reader; what does not fit stays."""
    for user in list(node.users):
        if user.target is _CAST or graph.is_view(user):
            _separate(user, is_cast=is_cast or user.target is _CAST)
    readers = list(node.users)
    if not is_cast or not 1 < len(readers) <= MAX_READERS:
        return
    if graph.is_returned(node) or graph.is_mutated(node) or graph.are_strides_read(node):
        return
    for reader in readers[1:]:
        with node.graph.inserting_before(node):
            reader.replace_input_with(node, node.graph.node_copy(node))
