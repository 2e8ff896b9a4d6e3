"""GEMMs of one quantized activation by several constant weights become one: q, k and v.

With few rows a GEMM costs its launch and its ramp besides the weight that it reads, and narrow ones
leave part of the chip idle. Where Inductor will fold constants the weights are put side by side,
once; the results are slices of one. Not where weights are inputs of the graph: to put them side by
side would be a copy in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from inductor_quant import _torch_compat as compat
from inductor_quant.ops import w8a8
from inductor_quant.patterns import graph
from inductor_quant.patterns.graph import aten

# With more rows, or wide products (gate and up), a result in slices costs more than a launch: what
# follows is not fused into the GEMM any more.
MAX_ROWS = 256
MAX_COLUMNS = 16384


def put_side_by_side(owner: fx.Graph, constants: set[fx.Node]) -> int:
    """Join w8a8 calls that share their activation, its scale and every option, and whose other
    operands are views of ``constants``. Returns how many calls are gone."""
    groups: dict[object, list[fx.Node]] = {}
    for call in owner.find_nodes(op="call_function", target=w8a8.op):
        if _may_be_joined(call, constants):
            groups.setdefault(_key(call), []).append(call)
    gone = 0
    for calls in groups.values():
        columns = sum(graph.value(call).shape[1] for call in calls)
        if len(calls) > 1 and columns <= MAX_COLUMNS:
            _join(calls)
            gone += len(calls) - 1
    return gone


def _may_be_joined(call: fx.Node, constants: set[fx.Node]) -> bool:
    """Few rows, no zero points, and constants with an entry for each column; and nobody who cares
    for the strides of the result: a slice has others."""
    if any(arg is not None for arg in call.args[5:]) or call.kwargs.get("a_zero"):
        return False
    if graph.is_returned(call) or graph.are_strides_read(call):
        return False
    rows, columns = graph.value(call).shape
    hint = graph.size_hint(rows)
    if graph.is_symbolic(columns) or hint is None or hint > MAX_ROWS:
        return False
    return all(
        graph.base(node) in constants and graph.same_size(graph.value(node).shape[-1], columns)
        for node in _of_columns(call)
    )


def _of_columns(call: fx.Node) -> list[fx.Node]:
    """The weight, and the scales and the bias of its columns if there are any."""
    given = (call.args[1], *call.args[3:5])
    return [item for item in given if isinstance(item, fx.Node)]


def _key(call: fx.Node) -> object:
    values = map(graph.value, _of_columns(call))
    kinds = [(value.dtype, tuple(value.shape[:-1])) for value in values]
    given = [arg is None for arg in call.args]
    return call.args[0], call.args[2], repr(sorted(call.kwargs.items())), repr((kinds, given))


def _join(calls: list[fx.Node]) -> None:
    first = calls[0]
    owner = first.graph

    def build(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = owner.call_function(target, args, kwargs)
        given = fx.map_arg((args, kwargs), lambda item: item.meta["val"])
        with compat.fake_mode_of([graph.value(first)]):
            node.meta["val"] = target(*given[0], **given[1])
        return node

    with owner.inserting_before(first):
        # along K, as the kernel wants it
        weights = [build(aten.permute.default, _here(c.args[1], first), [1, 0]) for c in calls]
        b = build(aten.permute.default, build(aten.cat.default, weights, 0), [1, 0])
        b_scale, bias = (_joined(calls, place, build) for place in (3, 4))
        a, a_scale = first.args[0], first.args[2]
        whole = build(w8a8.op, a, b, a_scale, b_scale, bias, **first.kwargs)
        whole.meta = {**first.meta, "val": whole.meta["val"]}
        begin = 0
        for call in calls:
            end = begin + graph.value(call).shape[1]
            call.replace_all_uses_with(build(aten.slice.Tensor, whole, 1, begin, end))
            begin = end
    for call in calls:
        owner.erase_node(call)


def _joined(calls: list[fx.Node], place: int, build: Callable[..., fx.Node]) -> fx.Node | None:
    """The scales or biases of all columns."""
    if calls[0].args[place] is None:
        return None
    return build(aten.cat.default, [_here(call.args[place], calls[0]) for call in calls], -1)


def _here(item: Any, call: fx.Node) -> fx.Node:
    """``item``, a view of a constant, before ``call``: itself, or made again."""
    assert isinstance(item, fx.Node)
    if item < call:
        return item
    inputs = {node: _here(node, call) for node in item.all_input_nodes}
    return call.graph.node_copy(item, inputs.__getitem__)
