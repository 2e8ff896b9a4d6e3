"""Horizontal fusion: GEMMs of one activation become one op, which one launch may compute.

    w8a8(a, b0, ...)         out = w8a8_horizontal(a, [b0, b1, b2], ...)
    w8a8(a, b1, ...)    ->   out[0], out[1], out[2]
    w8a8(a, b2, ...)

The same for ``weight_only``. Applies to M <= ``ops.horizontal.MAX_ROWS`` (by family) and
calls that differ in N and in their weights only: q, k and v, or gate and up. At small M a GEMM pays
for its launch and its ramp, and a narrow one leaves SMs idle. The kernel takes all the weights, so
nothing is copied (constant weights: see ``concat_weights``). The lowering decides whether a kernel
exists and pays; otherwise it lowers the op to the GEMMs that it stands for.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from inductor_quant.ops import horizontal, w8a8, weight_only
from inductor_quant.report import events
from inductor_quant.spec.weight_format import WeightFormat

from .. import fx_utils
from ..matching.value_numbering import is_function
from ..reporting import matrix_products
from ..rewrite import add_node
from .cse import is_canonical

MAX_MEMBERS = 8  # each is a few kernel arguments, and a branch at the start of the kernel


def horizontal_fusion(owner: fx.Graph) -> int:
    """Fuse w8a8 calls, and weight_only calls, with the same activation and options. Returns how
    many launches this may save."""
    saved = 0
    for op, join in ((w8a8.op, _join_w8a8), (weight_only.op, _join_weight_only)):
        groups: dict[object, list[fx.Node]] = {}
        for call in owner.find_nodes(op="call_function", target=op):
            if _is_candidate(call):
                groups.setdefault(_key(call), []).append(call)
        for calls in groups.values():
            movable = [call for call in calls if _inputs_after(call, calls[0]) is not None]
            for begin in range(0, len(movable), MAX_MEMBERS):
                members = movable[begin : begin + MAX_MEMBERS]
                if len(members) > 1:
                    _replace(members, join)
                    saved += len(members) - 1
    return saved


_ZEROS = ("a_zero_point", "b_zero_point", "b_sum", "a_zero")


def _is_candidate(call: fx.Node) -> bool:
    """Small M, no zero points of a w8a8 GEMM, and a result whose memory nobody sees: it may
    become a part of a larger matrix, with the strides of that one."""
    family, operands = ("w8a8", 5) if call.target is w8a8.op else ("weight_only", 4)
    m, n = fx_utils.value(call).shape
    most = fx_utils.limit(m)
    if most is None or not isinstance(n, int):
        return False
    if not 0 < most <= horizontal.MAX_ROWS[family] or n == 0:
        return False
    zeros = (*call.args[operands:], *(call.kwargs.get(name) for name in _ZEROS))
    if len(call.args) < operands or any(item not in (None, 0) for item in zeros):
        return False
    is_seen = (
        fx_utils.is_returned(call) or fx_utils.are_strides_read(call) or fx_utils.is_mutated(call)
    )
    # A call moves to the place of the first member.
    return not is_seen and not any(map(fx_utils.is_mutated, call.all_input_nodes))


def _key(call: fx.Node) -> object:
    """Equal for calls of the same activation that differ in N alone."""
    options = dict(call.kwargs)
    if call.target is w8a8.op:
        _, b, a_scale, b_scale, bias = call.args[:5]
        kinds: object = tuple(map(_kind, (b, b_scale, bias))), a_scale
    else:
        _, weight, column_scale, bias = call.args
        format = WeightFormat.decode(str(options.pop("format")))
        # N is the radix of the first digit of n
        kinds = (
            tuple(map(_kind, (*weight, column_scale, bias))),  # type: ignore[misc]
            dataclasses.replace(format, n=format.n[1:]),
            len(format.n),
        )
    return call.target, call.args[0], kinds, repr(sorted(options.items()))


def _kind(item: Any) -> object:
    """The dtype and rank of an operand, and whether it has one element."""
    if item is None:
        return None
    value = fx_utils.value(item)
    return value.dtype, value.dim(), all(map(fx_utils.is_one, value.shape))


def _inputs_after(call: fx.Node, first: fx.Node) -> list[fx.Node] | None:
    """The nodes that ``call`` is computed from and that stand after ``first``, in order; None if
    one of them may not move: a matrix product, or a node that is no pure function."""
    todo, found = list(call.all_input_nodes), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in found or node < first:
            continue
        if node.op != "get_attr" and not _may_move(node):
            return None
        found.add(node)
        todo += node.all_input_nodes
    return sorted(found)


def _may_move(node: fx.Node) -> bool:
    if not is_function(node) or is_canonical(node) or matrix_products.is_matrix_product(node):
        return False
    return not any(map(fx_utils.is_mutated, (node, *node.all_input_nodes)))


def _replace(calls: list[fx.Node], join: Callable[[list[fx.Node]], _Call]) -> None:
    first = calls[0]
    for call in calls[1:]:
        inputs = _inputs_after(call, first)
        assert inputs is not None, call
        for node in inputs:
            first.prepend(node)
    with first.graph.inserting_before(first):
        fused = add_node(first, *join(calls))
        results = [add_node(call, operator.getitem, (fused, i), {}) for i, call in enumerate(calls)]
    names = tuple(call.name for call in calls)
    for call, result in zip(calls, results, strict=True):
        result.meta["original_aten"] = fused.target
        call.replace_all_uses_with(result)
        call.graph.erase_node(call)
    events.add(events.Grouped(fused.name, names))


_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _join_w8a8(calls: list[fx.Node]) -> _Call:
    a, _, a_scale = calls[0].args[:3]
    b, b_scale, bias = ([call.args[i] for call in calls] for i in (1, 3, 4))
    options = calls[0].kwargs
    kwargs = {"alpha": options.get("alpha", 1.0), "out_dtype": options["out_dtype"]}
    return horizontal.w8a8_op, (a, b, a_scale, b_scale, bias), kwargs


def _join_weight_only(calls: list[fx.Node]) -> _Call:
    weights: list[Any] = [call.args[1] for call in calls]
    column_scale, bias = ([call.args[i] for call in calls] for i in (2, 3))
    kwargs = {
        "format": [call.kwargs["format"] for call in calls],
        "out_dtype": calls[0].kwargs["out_dtype"],
    }
    tensors = [tensor for weight in weights for tensor in weight]
    return horizontal.weight_only_op, (calls[0].args[0], tensors, column_scale, bias), kwargs
