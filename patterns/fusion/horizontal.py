"""Horizontal fusion: GEMMs of one activation become one op, which one launch may compute.

    w8a8(a, b0, ...)         out = w8a8_horizontal(a, [b0, b1, b2], ...)
    w8a8(a, b1, ...)    ->   out[0], out[1], out[2]
    w8a8(a, b2, ...)

The same for ``fp8``, ``w4a8`` and ``weight_only``. Applies to calls that differ in N and in their
weights only: q, k and v, or gate and up. M is at most ``MAX_ROWS`` of ``ops/fusion/horizontal``, or
a ``w8a8`` of more rows ``may_pay``. A short GEMM pays for its launch, its ramp and its last round
of tiles, and a narrow one leaves SMs idle. The kernel takes all the weights, so nothing is copied
(constant weights: see ``concat_weights``). The lowering decides whether a kernel exists and pays;
otherwise it lowers the op to the GEMMs that it stands for.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from torch import fx

from inductor_quant.ops import fp8, w4a8, w8a8, weight_only
from inductor_quant.ops.fusion import horizontal
from inductor_quant.report import events
from inductor_quant.spec.weight_format import WeightFormat

from .. import fx_utils
from ..matching.value_numbering import is_function
from ..reporting import matrix_products
from ..rewrite import add_node
from .cse import is_canonical

MAX_MEMBERS = 8  # each is a few kernel arguments, and a branch at the start of the kernel


@dataclasses.dataclass(frozen=True)
class _Family:
    """``op``: of several calls. Of the ``operands`` of a call without zero points, in their order,
    those at ``shared`` are the same for all of them."""

    name: str
    op: Any
    operands: int
    shared: tuple[int, ...]


_FAMILIES = {
    w8a8.op: _Family("w8a8", horizontal.w8a8_op, 5, (0, 2)),
    fp8.op: _Family("fp8", horizontal.fp8_op, 5, (0, 2)),
    w4a8.op: _Family("w4a8", horizontal.w4a8_op, 5, (0, 2)),
    weight_only.op: _Family("weight_only", horizontal.weight_only_op, 4, (0,)),
}


def horizontal_fusion(owner: fx.Graph) -> int:
    """Fuse calls of one family with the same activation and options. Returns how many launches this
    may save."""
    saved = 0
    for op in _FAMILIES:
        groups: dict[object, list[fx.Node]] = {}
        for call in owner.find_nodes(op="call_function", target=op):
            if _is_candidate(call):
                groups.setdefault(_key(call), []).append(call)
        for calls in groups.values():
            movable = [call for call in calls if _inputs_after(call, calls[0]) is not None]
            for begin in range(0, len(movable), MAX_MEMBERS):
                members = movable[begin : begin + MAX_MEMBERS]
                if len(members) > 1:
                    _replace(members)
                    saved += len(members) - 1
    return saved


_ZEROS = ("a_zero_point", "b_zero_point", "b_sum", "a_zero")


def _is_candidate(call: fx.Node) -> bool:
    """Small M or a short GEMM, no zero points of integers, and a result whose memory nobody sees:
    it may become a part of a larger matrix, with the strides of that one."""
    family = _FAMILIES[call.target]
    m, n = fx_utils.value(call).shape
    most = fx_utils.limit(m)
    if most is None or not isinstance(n, int):
        return False
    if most == 0 or n == 0:
        return False
    if most > horizontal.MAX_ROWS[family.name] and not _may_pay(call, most, n):
        return False
    zeros = (*call.args[family.operands :], *(call.kwargs.get(name) for name in _ZEROS))
    if len(call.args) < family.operands or any(item not in (None, 0) for item in zeros):
        return False
    is_seen = (
        fx_utils.is_returned(call) or fx_utils.are_strides_read(call) or fx_utils.is_mutated(call)
    )
    # A call moves to the place of the first member.
    return not is_seen and not any(map(fx_utils.is_mutated, call.all_input_nodes))


def _may_pay(call: fx.Node, m: int, n: int) -> bool:
    activation = call.args[0]
    if call.target is not w8a8.op or not isinstance(activation, fx.Node):
        return False
    if fx_utils.has_fixed_strides(call):  # a copy of many rows costs more than a launch
        return False
    k = fx_utils.value(activation).shape[1]
    return isinstance(k, int) and horizontal.may_pay(m, n, k, fx_utils.value(call).dtype)


def _key(call: fx.Node) -> object:
    """Equal for calls of the same activation that differ in N alone."""
    family, options = _FAMILIES[call.target], dict(call.kwargs)
    shared = tuple(call.args[i] for i in family.shared)
    own = [call.args[i] for i in range(family.operands) if i not in family.shared]
    weight = own[0] if isinstance(own[0], (list, tuple)) else own[:1]
    kinds: object = tuple(map(_kind, (*weight, *own[1:])))
    if "format" in options:
        # N is the radix of the first digit of n
        format = WeightFormat.decode(str(options.pop("format")))
        kinds = kinds, dataclasses.replace(format, n=format.n[1:]), len(format.n)
    return call.target, shared, kinds, repr(sorted(options.items()))


def _kind(item: Any) -> object:
    """The dtype and rank of an operand, and whether it has one element, or one row: no groups."""
    if item is None:
        return None
    value = fx_utils.value(item)
    is_one = tuple(map(fx_utils.is_one, value.shape))
    return value.dtype, value.dim(), all(is_one), is_one[:1]


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


def _replace(calls: list[fx.Node]) -> None:
    first = calls[0]
    for call in calls[1:]:
        inputs = _inputs_after(call, first)
        assert inputs is not None, call
        for node in inputs:
            first.prepend(node)
    with first.graph.inserting_before(first):
        fused = add_node(first, *_joined(calls))
        results = [add_node(call, operator.getitem, (fused, i), {}) for i, call in enumerate(calls)]
    names = tuple(call.name for call in calls)
    for call, result in zip(calls, results, strict=True):
        result.meta["original_aten"] = fused.target
        call.replace_all_uses_with(result)
        call.graph.erase_node(call)
    events.add(events.Grouped(fused.name, names))


def _joined(calls: list[fx.Node]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(op, args, kwargs) of the one call."""
    first = calls[0]
    family, kwargs = _FAMILIES[first.target], dict(first.kwargs)
    args: list[Any] = [
        first.args[i] if i in family.shared else [call.args[i] for call in calls]
        for i in range(family.operands)
    ]
    if "format" in kwargs:
        kwargs["format"] = [call.kwargs["format"] for call in calls]
        args[1] = [tensor for weight in args[1] for tensor in weight]
    kwargs = {name: item for name, item in kwargs.items() if name not in _ZEROS}
    return family.op, tuple(args), kwargs
