"""How near a recognised GEMM's canonical op is to its nodes, and what of them is bit for bit equal.

Read off the nodes themselves, not off the recogniser that found them: a node that is not understood
here gets the weakest class, and in strict mode it is where the canonical op ends.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.numerics import Exactness
from inductor_quant.ops import w8a8, weight_only
from inductor_quant.patterns import graph
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.pattern import Operand, RecognizedGemm
from inductor_quant.weight_format import WeightFormat

CAST = torch.ops.prims.convert_element_type.default
F32 = torch.float32
_NARROW = (torch.bfloat16, torch.float16)
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar)
# Where a factor stands in ``acc * alpha * a_scale * b_scale + bias``.
_ALPHA, _ROW, _COLUMN, _BIAS = range(4)


def classify(found: RecognizedGemm) -> Exactness:
    """The class of a match."""
    if _is_plain_w8a8(found):
        return _classify_w8a8(found)
    if found.op is weight_only.op:
        return _classify_weight_only(found)
    return Exactness.REASSOCIATED


def strictly(found: RecognizedGemm) -> RecognizedGemm | Rejection:
    """As much of a recognised GEMM as is bit for bit what its nodes compute, in fp32.

    It ends before the first rounding: that, and all behind it, stays in the graph.
    """
    if not _is_plain_w8a8(found):
        return _declined(found, "no product of integers with scales behind it")
    exact = _exact_part(found)
    if not exact.taken:
        return _declined(found, f"{exact.stopped_at} rounds, or scales in another order")
    a, b, row, column, bias = found.args
    kept = (
        a,
        b,
        row if _ROW in exact.taken else None,
        column if _COLUMN in exact.taken else None,
        bias if _BIAS in exact.taken else None,
    )
    spec = w8a8.make_spec(
        a_scale=found.spec.a.scale if kept[2] is not None else None,
        b_scale=found.spec.b.scale if kept[3] is not None else None,
        out_dtype=F32,
        bias=kept[4] is not None,
    )
    reshapes = [node for node in exact.nodes if node.target in graph.RESHAPES]
    return dataclasses.replace(
        found,
        spec=spec,
        end=exact.nodes[-1],
        interior=(found.anchor, *exact.nodes),
        args=kept,
        kwargs={
            "alpha": found.kwargs["alpha"] if _ALPHA in exact.taken else 1.0,
            "out_dtype": F32,
        },
        row_scale=found.row_scale if kept[2] is not None else None,
        shape=reshapes[-1].args[1] if reshapes else None,  # type: ignore[arg-type]
    )


def _declined(found: RecognizedGemm, why: str) -> Rejection:
    return Rejection(RejectionCode.NUMERICS, f"{found.family} {found.spec}: {why}")


# ------------------------------------------------------------------------------------------
# w8a8


@dataclasses.dataclass
class _Exact:
    """The nodes behind the anchor that the op computes bit for bit, in fp32, and which of its
    operands they take."""

    nodes: list[fx.Node]
    taken: list[int]
    stopped_at: str = ""


def _is_plain_w8a8(found: RecognizedGemm) -> bool:
    """Whether the graph multiplies integers, and has no zero point and no groups along K. (In a
    fake-quantized graph it multiplies floats, so that the scales are applied to the terms of the
    sum.)"""
    is_product = found.anchor.target == aten._int_mm.default
    is_plain = len(found.args) == 5 and not found.spec.group_size
    return found.op is w8a8.op and is_product and is_plain


def _exact_part(found: RecognizedGemm) -> _Exact:
    exact = _Exact([], [])
    seen: list[fx.Node] = []
    places: list[int] = []
    last, inside = found.anchor, {*found.interior, found.end}
    while last is not found.end:
        following = [user for user in graph.users(last) if user in inside]
        if len(following) != 1:
            exact.stopped_at = last.name
            break
        (node,) = following
        place = _place(node, last, found)
        if place is None or (places and isinstance(place, int) and place <= places[-1]):
            exact.stopped_at = node.name
            break
        if isinstance(place, int):
            places.append(place)
        seen.append(node)
        if graph.value(node).dtype == F32:
            exact.nodes, exact.taken = list(seen), list(places)
        last = node
    return exact


def _place(node: fx.Node, last: fx.Node, found: RecognizedGemm) -> int | str | None:
    """Which operand ``node`` applies to ``last``; "" for none; None: it rounds, or is not known."""
    before, after = graph.value(last).dtype, graph.value(node).dtype
    if node.target in (*graph.RESHAPES, aten.expand.default):
        return ""
    if node.target == CAST:
        return "" if after in (before, F32) and before not in _NARROW else None
    return _operand_of(node, last, found) if after == F32 else None


def _operand_of(node: fx.Node, last: fx.Node, found: RecognizedGemm) -> int | None:
    """Which operand ``node`` multiplies ``last`` by, or adds to it, whatever it rounds."""
    if node.target not in (aten.mul.Tensor, aten.add.Tensor):
        return None
    if node.kwargs or len(node.args) != 2 or node.args.count(last) != 1:
        return None
    other = node.args[1] if node.args[0] is last else node.args[0]
    if node.target == aten.add.Tensor:
        return _BIAS if _stands_for(other, found.args[4]) else None
    if isinstance(other, (int, float)):
        return _ALPHA if other == found.kwargs["alpha"] else None
    for place, operand in ((_ROW, found.args[2]), (_COLUMN, found.args[3])):
        if _stands_for(other, operand):
            return place
    return None


def _stands_for(item: object, operand: object) -> bool:
    """Whether ``item`` holds the operand's values: it, expanded or exactly converted."""
    wanted = operand.node if isinstance(operand, Operand) else operand
    while item is not wanted and isinstance(item, fx.Node):
        is_widened = item.target == CAST and graph.value(item).dtype == F32
        if not (is_widened or item.target in (*graph.RESHAPES, aten.expand.default)):
            return False
        if is_widened and graph.value(item.args[0]).dtype not in (F32, *_NARROW):  # type: ignore[arg-type]
            return False
        item = item.args[0]
    return wanted is not None and item is wanted


def _classify_w8a8(found: RecognizedGemm) -> Exactness:
    exact = _exact_part(found)
    views = (CAST, *graph.RESHAPES, aten.expand.default)
    inside, last = {*found.interior, found.end}, found.anchor
    places: list[int] = []
    while last is not found.end:
        following = [user for user in graph.users(last) if user in inside]
        if len(following) != 1:
            return Exactness.REASSOCIATED
        (node,) = following
        if node.target not in views:
            place = _operand_of(node, last, found)
            if place is None or (places and place <= places[-1]):
                return Exactness.REASSOCIATED
            places.append(place)
        last = node
    if places != exact.taken or _BIAS in places:
        return Exactness.FEWER_ROUNDINGS
    return Exactness.BIT_EXACT


# ------------------------------------------------------------------------------------------
# weight_only


def _classify_weight_only(found: RecognizedGemm) -> Exactness:
    format = WeightFormat.decode(found.kwargs["format"])
    x = found.args[0].node if isinstance(found.args[0], Operand) else found.args[0]
    if not isinstance(x, fx.Node):
        return Exactness.REASSOCIATED
    x_dtype = graph.value(x).dtype
    element = graph.value(found.args[1][format.element.source]).dtype
    if weight_only.split_steps(format, x_dtype, element)[1]:
        return Exactness.REASSOCIATED
    behind = _behind(found)
    if any(node.target in _ARITHMETIC for node in behind):
        return Exactness.FEWER_ROUNDINGS  # the product is not rounded before its scale or bias
    weight_side = [n for n in found.interior if n is not found.anchor and n not in behind]
    roundings = [node for node in weight_side if _rounds(node)]
    is_once = len(roundings) <= 1 and all(graph.value(n).dtype == x_dtype for n in roundings)
    return Exactness.SAME_WEIGHT_ROUNDING if is_once else Exactness.FEWER_ROUNDINGS


def _behind(found: RecognizedGemm) -> set[fx.Node]:
    """The nodes that the op takes the place of from the anchor on, without it."""
    inside, todo = {*found.interior, found.end}, [found.anchor]
    seen: set[fx.Node] = set()
    while todo:
        new = {user for user in todo.pop().users if user in inside} - seen
        seen |= new
        todo += new
    return seen


def _rounds(node: fx.Node) -> bool:
    """Whether ``node`` rounds to a narrow float. (Numbers of eight bits and differences of two are
    exact in all of them.)"""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in _NARROW:
        return False
    if node.target == CAST:
        before = graph.value(node.args[0]).dtype  # type: ignore[arg-type]
        return before.is_floating_point and before.itemsize > 1 and before != value.dtype
    return node.target in _ARITHMETIC
