"""Eliminate common subexpressions among the inputs of canonical ops.

    w8a8(quantize(x), b0, ...)        a = quantize(x)
    w8a8(quantize(x), b1, ...)   ->   w8a8(a, b0, ...)
                                      w8a8(a, b1, ...)

q, k and v, or gate and up, each quantize the same activation. No pass before this one merges them,
and Inductor would store one copy for each. Applies to pure ops with equal arguments, up to the
matrix products that the inputs come from.
"""

from __future__ import annotations

from torch import fx

from inductor_quant.ops.fusion import group_reduce, quantize, row_reduce

from .. import fx_utils
from ..matching.value_numbering import Numbering
from ..reporting import matrix_products

_OURS = "inductor_quant"
# parts of a quantization
_HELPERS = (row_reduce.op, quantize.op, group_reduce.reduce_op, group_reduce.value_op)


def eliminate_common_subexpressions(owner: fx.Graph) -> int:
    """Returns how many nodes were merged into another one."""
    inputs = _inputs([node for node in owner.nodes if is_canonical(node)])
    numbering = Numbering()
    merged = 0
    for node in list(owner.nodes):
        if node not in inputs:
            continue
        first = numbering.first(node)
        # Two results of the graph must not be one tensor: the caller may write to either.
        if first is node or (fx_utils.is_returned(node) and fx_utils.is_returned(first)):
            continue
        node.replace_all_uses_with(first)
        owner.erase_node(node)
        merged += 1
    return merged


def is_canonical(node: fx.Node) -> bool:
    """Whether ``node`` is a GEMM of ours."""
    return getattr(node.target, "namespace", "") == _OURS and node.target not in _HELPERS


def _inputs(calls: list[fx.Node]) -> set[fx.Node]:
    """The nodes that the inputs of ``calls`` are computed from, up to matrix products."""
    todo = [node for call in calls for node in call.all_input_nodes]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in found or node.op != "call_function":
            continue
        if is_canonical(node) or matrix_products.is_matrix_product(node):
            continue
        found.add(node)
        todo += node.all_input_nodes
    return found
