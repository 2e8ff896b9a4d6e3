"""GEMMs of one activation become one op, which a kernel may compute in one launch: q, k and v, or
gate and up, each with a weight of its own.

With few rows a GEMM costs its launch and its ramp besides the weight that it reads, and a narrow
one leaves part of the chip idle. Nothing is copied: the kernel takes all the weights. (Where
weights are constants see ``side_by_side``.) Whether there is such a kernel, and whether it pays, is
for the lowering to say: without one the op is lowered to the GEMMs that it stands for.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from inductor_quant import report
from inductor_quant.ops import group, w8a8, weight_only
from inductor_quant.patterns import graph, survey
from inductor_quant.patterns.canonicalize import add_node
from inductor_quant.patterns.sharing import is_canonical, is_function
from inductor_quant.weight_format import WeightFormat

# More weights are several launches: each is a few arguments and a branch where the kernel begins.
MAX_MEMBERS = 8


def group_gemms(owner: fx.Graph) -> int:
    """Make one op of the w8a8, and of the weight_only, calls that share their activation and agree
    in all but the number of columns. Returns how many launches fewer there may be."""
    gone = 0
    for op, join in ((w8a8.op, _join_w8a8), (weight_only.op, _join_weight_only)):
        groups: dict[object, list[fx.Node]] = {}
        for call in owner.find_nodes(op="call_function", target=op):
            if _may_be_grouped(call):
                groups.setdefault(_key(call), []).append(call)
        for calls in groups.values():
            together = [call for call in calls if _behind(call, calls[0]) is not None]
            for begin in range(0, len(together), MAX_MEMBERS):
                members = together[begin : begin + MAX_MEMBERS]
                if len(members) > 1:
                    _replace(members, join)
                    gone += len(members) - 1
    return gone


_ZEROS = ("a_zero_point", "b_zero_point", "b_sum", "a_zero")


def _may_be_grouped(call: fx.Node) -> bool:
    """Few rows, a number that is known; no zero points of a w8a8 GEMM; and a result whose memory
    nobody sees: it may become a part of a larger matrix, with that one's strides."""
    family, operands = ("w8a8", 5) if call.target is w8a8.op else ("weight_only", 4)
    rows, columns = graph.value(call).shape
    if not isinstance(rows, int) or not isinstance(columns, int):
        return False
    if not 0 < rows <= group.MAX_ROWS[family] or columns == 0:
        return False
    zeros = (*call.args[operands:], *(call.kwargs.get(name) for name in _ZEROS))
    if len(call.args) < operands or any(item not in (None, 0) for item in zeros):
        return False
    is_seen = graph.is_returned(call) or graph.are_strides_read(call) or graph.is_mutated(call)
    # A call is moved to where the first of the group stands.
    return not is_seen and not any(map(graph.is_mutated, call.all_input_nodes))


def _key(call: fx.Node) -> object:
    """Equal for calls of the same activation that differ in columns alone."""
    options = dict(call.kwargs)
    if call.target is w8a8.op:
        _, b, a_scale, b_scale, bias = call.args[:5]
        own = (b, b_scale, bias)
        kinds: object = tuple(map(_kind, own)), a_scale
    else:
        _, weight, column_scale, bias = call.args
        format = WeightFormat.decode(str(options.pop("format")))
        # the number of columns is the radix of their first digit
        kinds = (
            tuple(map(_kind, (*weight, column_scale, bias))),  # type: ignore[misc]
            dataclasses.replace(format, n=format.n[1:]),
            len(format.n),
        )
    return call.target, call.args[0], kinds, repr(sorted(options.items()))


def _kind(item: Any) -> object:
    """The type of an operand, and whether it is one value."""
    if item is None:
        return None
    value = graph.value(item)
    return value.dtype, value.dim(), all(map(graph.is_one, value.shape))


def _behind(call: fx.Node, first: fx.Node) -> list[fx.Node] | None:
    """What ``call`` computes with that does not stand before ``first``, in order; None where it may
    not be moved there: a matrix product, or no function of what it had then."""
    todo, found = list(call.all_input_nodes), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in found or node < first:
            continue
        if node.op != "get_attr" and not _may_be_moved(node):
            return None
        found.add(node)
        todo += node.all_input_nodes
    return sorted(found)


def _may_be_moved(node: fx.Node) -> bool:
    if not is_function(node) or is_canonical(node) or survey.is_matrix_product(node):
        return False
    return not any(map(graph.is_mutated, (node, *node.all_input_nodes)))


def _replace(calls: list[fx.Node], join: Callable[[list[fx.Node]], _Call]) -> None:
    first = calls[0]
    for call in calls[1:]:
        behind = _behind(call, first)
        assert behind is not None, call
        for node in behind:
            first.prepend(node)
    with first.graph.inserting_before(first):
        whole = add_node(first, *join(calls))
        results = [add_node(call, operator.getitem, (whole, i), {}) for i, call in enumerate(calls)]
    names = tuple(call.name for call in calls)
    for call, result in zip(calls, results, strict=True):
        result.meta["original_aten"] = whole.target
        call.replace_all_uses_with(result)
        call.graph.erase_node(call)
    report.add(report.Grouped(whole.name, names))


_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _join_w8a8(calls: list[fx.Node]) -> _Call:
    a, _, a_scale = calls[0].args[:3]
    b, b_scale, bias = ([call.args[place] for call in calls] for place in (1, 3, 4))
    kwargs = {"alpha": 1.0, **calls[0].kwargs}
    kwargs = {name: kwargs[name] for name in ("alpha", "out_dtype")}
    return group.w8a8_op, (a, b, a_scale, b_scale, bias), kwargs


def _join_weight_only(calls: list[fx.Node]) -> _Call:
    weights: list[Any] = [call.args[1] for call in calls]
    column_scale, bias = ([call.args[place] for call in calls] for place in (2, 3))
    kwargs = {
        "format": [call.kwargs["format"] for call in calls],
        "out_dtype": calls[0].kwargs["out_dtype"],
    }
    tensors = [tensor for weight in weights for tensor in weight]
    return group.weight_only_op, (calls[0].args[0], tensors, column_scale, bias), kwargs
