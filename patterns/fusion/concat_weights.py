"""Concatenate the constant weights of GEMMs that read one quantized activation (q, k and v).

    w8a8(a, b0, ...)  ->  out[:, :n0]       b = cat(b0, b1, b2) along N
    w8a8(a, b1, ...)  ->  out[:, n0:n1]     out = w8a8(a, b, ...)
    w8a8(a, b2, ...)  ->  out[:, n1:]

Applies where Inductor folds constants, for M <= ``MAX_M`` and a total N <= ``MAX_N``. At small M a
GEMM pays for its launch and its ramp, and a narrow one leaves SMs idle. Weights that are inputs of
the graph would be copied on every call; for those see ``horizontal``.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from inductor_quant.ops import w8a8

from .. import fx_utils
from ..fx_utils import aten
from ..rewrite import add_node

# At larger M, or N (gate and up), the slices cost more than a launch: Inductor does not fuse what
# follows them into the GEMM.
MAX_M = 256
MAX_N = 16384


def concat_weights(owner: fx.Graph, constants: set[fx.Node]) -> int:
    """Join w8a8 calls with the same activation, scale and options whose other operands are views
    of ``constants``. Returns how many calls were removed."""
    groups: dict[object, list[fx.Node]] = {}
    for call in owner.find_nodes(op="call_function", target=w8a8.op):
        if _is_candidate(call, constants):
            groups.setdefault(_key(call), []).append(call)
    removed = 0
    for calls in groups.values():
        total_n = sum(fx_utils.value(call).shape[1] for call in calls)
        if len(calls) > 1 and total_n <= MAX_N:
            _join(calls)
            removed += len(calls) - 1
    return removed


def _is_candidate(call: fx.Node, constants: set[fx.Node]) -> bool:
    """Small M, no zero points, constant operands with one entry per column, and no user that sees
    the strides of the result: those of a slice differ."""
    if any(arg is not None for arg in call.args[5:]) or call.kwargs.get("a_zero"):
        return False
    if fx_utils.is_returned(call) or fx_utils.are_strides_read(call):
        return False
    m, n = fx_utils.value(call).shape
    hint = fx_utils.size_hint(m)
    if fx_utils.is_symbolic(n) or hint is None or hint > MAX_M:
        return False
    return all(
        fx_utils.base(node) in constants and fx_utils.same_size(fx_utils.value(node).shape[-1], n)
        for node in _column_operands(call)
    )


def _column_operands(call: fx.Node) -> list[fx.Node]:
    """The weight, and the column scales and bias if there are any."""
    return [item for item in (call.args[1], *call.args[3:5]) if isinstance(item, fx.Node)]


def _key(call: fx.Node) -> object:
    values = map(fx_utils.value, _column_operands(call))
    kinds = [(value.dtype, tuple(value.shape[:-1])) for value in values]
    is_none = [arg is None for arg in call.args]
    return call.args[0], call.args[2], repr(sorted(call.kwargs.items())), repr((kinds, is_none))


def _join(calls: list[fx.Node]) -> None:
    first = calls[0]

    def build(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return add_node(first, target, args, kwargs)

    def cat(position: int) -> fx.Node | None:
        if first.args[position] is None:
            return None
        return build(aten.cat.default, [_before(c.args[position], first) for c in calls], -1)

    with first.graph.inserting_before(first):
        # contiguous along K, as the kernel reads it
        weights = [build(aten.permute.default, _before(c.args[1], first), [1, 0]) for c in calls]
        b = build(aten.permute.default, build(aten.cat.default, weights, 0), [1, 0])
        out = build(w8a8.op, first.args[0], b, first.args[2], cat(3), cat(4), **first.kwargs)
        out.meta = {**first.meta, "val": out.meta["val"]}
        begin = 0
        for call in calls:
            end = begin + fx_utils.value(call).shape[1]
            call.replace_all_uses_with(build(aten.slice.Tensor, out, 1, begin, end))
            begin = end
    for call in calls:
        first.graph.erase_node(call)


def _before(item: Any, call: fx.Node) -> fx.Node:
    """``item``, a view of a constant, or its copy if it stands after ``call``."""
    assert isinstance(item, fx.Node)
    if item < call:
        return item
    inputs = {node: _before(node, call) for node in item.all_input_nodes}
    return call.graph.node_copy(item, inputs.__getitem__)
