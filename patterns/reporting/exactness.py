"""How close a canonical op is to the nodes that it replaces: the exactness class of a match.

The class comes from the nodes, not from the recognizer. A node that is not understood here gives
the weakest class; with ``numerics="strict"`` the canonical op ends before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from inductor_quant.ops import block_sparse, experts, w4a8, w8a8, weight_only
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.exactness import Exactness
from inductor_quant.spec.weight_format import WeightFormat

from .. import fx_utils
from ..fx_utils import aten
from ..match import Operand, RecognizedGemm

CAST = torch.ops.prims.convert_element_type.default
F32 = torch.float32
_NARROW = (torch.bfloat16, torch.float16)
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar)
# Positions in ``acc * alpha * a_scale * b_scale + bias``; views and exact casts have none.
_VIEW, _ALPHA, _ROW, _COLUMN, _BIAS = range(-1, 4)
_VIEWS = (*fx_utils.RESHAPES, aten.expand.default)


def classify(found: RecognizedGemm) -> Exactness:
    """The class of a match."""
    if _is_of_integers(found):
        return _classify_of_integers(found)
    if found.op in (weight_only.op, experts.op):
        return _classify_weight_only(found)
    if found.op is block_sparse.op:
        return found.weight_class
    return Exactness.REASSOCIATED


def strictly(found: RecognizedGemm) -> RecognizedGemm | Rejection:
    """The part of a recognized GEMM that is bit for bit what its nodes compute, in fp32.

    It ends before the first rounding, which stays in the graph with all nodes after it.
    """
    if not _is_of_integers(found):
        return _declined(found, "no product of integers with scales after it")
    exact = _exact_part(found)
    if not exact.taken:
        return _declined(found, f"{exact.stopped_at} rounds, or scales in another order")
    a, b, row, column, bias = found.args
    a_scale, b_scale, addend = (
        arg if position in exact.taken else None
        for position, arg in ((_ROW, row), (_COLUMN, column), (_BIAS, bias))
    )
    spec = dataclasses.replace(
        found.spec,
        a=found.spec.a if a_scale is not None else dataclasses.replace(found.spec.a, scale=None),
        b=found.spec.b if b_scale is not None else dataclasses.replace(found.spec.b, scale=None),
        out_dtype=F32,
        bias=addend is not None,
    )
    reshapes = [node for node in exact.nodes if node.target in fx_utils.RESHAPES]
    return dataclasses.replace(
        found,
        spec=spec,
        end=exact.nodes[-1],
        interior=(found.anchor, *exact.nodes),
        args=(a, b, a_scale, b_scale, addend),
        kwargs=found.kwargs
        | {
            "alpha": found.kwargs["alpha"] if _ALPHA in exact.taken else 1.0,
            "out_dtype": F32,
        },
        row_scale=found.row_scale if a_scale is not None else None,
        shape=reshapes[-1].args[1] if reshapes else None,  # type: ignore[arg-type]
    )


def _declined(found: RecognizedGemm, why: str) -> Rejection:
    return Rejection(RejectionCode.NUMERICS, f"{found.family} {found.spec}: {why}")


# ------------------------------------------------------------------------------------------
# w8a8, w4a8


@dataclasses.dataclass
class _Exact:
    """The nodes after the anchor that the op computes bit for bit, in fp32, and the positions of
    the operands that they read."""

    nodes: list[fx.Node]
    taken: list[int]
    stopped_at: str = ""


def _is_of_integers(found: RecognizedGemm) -> bool:
    """Whether the graph multiplies integers, without zero points and groups along K. (A
    fake-quantized graph multiplies floats: it scales each term of the sum.)"""
    is_product = found.anchor.target == aten._int_mm.default
    is_plain = len(found.args) == 5 and not found.spec.group_size
    return found.op in (w8a8.op, w4a8.op) and is_product and is_plain


def _chain(found: RecognizedGemm) -> Iterator[tuple[fx.Node | None, fx.Node]]:
    """(node, the node before it) from the anchor to the end; the node is None where the next one
    is not unique."""
    last, inside = found.anchor, {*found.interior, found.end}
    while last is not found.end:
        following = [user for user in fx_utils.users(last) if user in inside]
        if len(following) != 1:
            yield None, last
            return
        yield following[0], last
        last = following[0]


def _exact_part(found: RecognizedGemm) -> _Exact:
    exact = _Exact([], [])
    seen: list[fx.Node] = []
    positions: list[int] = []
    for node, last in _chain(found):
        position = None if node is None else _position(node, last, found)
        if node is None or position is None or 0 <= position <= max(positions, default=-1):
            exact.stopped_at = (node or last).name
            break
        if position != _VIEW:
            positions.append(position)
        seen.append(node)
        if fx_utils.value(node).dtype == F32:
            exact.nodes, exact.taken = list(seen), list(positions)
    return exact


def _position(node: fx.Node, last: fx.Node, found: RecognizedGemm) -> int | None:
    """The position of the operand that ``node`` applies to ``last``; None: it rounds, or is not
    understood."""
    before, after = fx_utils.value(last).dtype, fx_utils.value(node).dtype
    if node.target in _VIEWS:
        return _VIEW
    if node.target == CAST:
        return _VIEW if after in (before, F32) and before not in _NARROW else None
    return _operand_of(node, last, found) if after == F32 else None


def _operand_of(node: fx.Node, last: fx.Node, found: RecognizedGemm) -> int | None:
    """The position of the operand that ``node`` multiplies ``last`` by or adds to it."""
    if node.target not in (aten.mul.Tensor, aten.add.Tensor):
        return None
    if node.kwargs or len(node.args) != 2 or node.args.count(last) != 1:
        return None
    other = node.args[1] if node.args[0] is last else node.args[0]
    if node.target == aten.add.Tensor:
        return _BIAS if _stands_for(other, found.args[4]) else None
    if isinstance(other, (int, float)):
        return _ALPHA if other == found.kwargs["alpha"] else None
    for position, operand in ((_ROW, found.args[2]), (_COLUMN, found.args[3])):
        if _stands_for(other, operand):
            return position
    return None


def _stands_for(item: object, operand: object) -> bool:
    """Whether ``item`` is the operand, expanded or exactly converted."""
    wanted = operand.node if isinstance(operand, Operand) else operand
    while item is not wanted and isinstance(item, fx.Node):
        is_widened = item.target == CAST and fx_utils.value(item).dtype == F32
        if not is_widened and item.target not in _VIEWS:
            return False
        if is_widened and fx_utils.value(item.args[0]).dtype not in (F32, *_NARROW):  # type: ignore[arg-type]
            return False
        item = item.args[0]
    return wanted is not None and item is wanted


def _classify_of_integers(found: RecognizedGemm) -> Exactness:
    positions: list[int] = []
    for node, last in _chain(found):
        if node is None:
            return Exactness.REASSOCIATED
        if node.target == CAST or node.target in _VIEWS:
            continue
        position = _operand_of(node, last, found)
        if position is None or position <= max(positions, default=-1):
            return Exactness.REASSOCIATED
        positions.append(position)
    if positions != _exact_part(found).taken or _BIAS in positions:
        return Exactness.FEWER_ROUNDINGS
    return Exactness.BIT_EXACT


# ------------------------------------------------------------------------------------------
# weight_only


def _classify_weight_only(found: RecognizedGemm) -> Exactness:
    format = WeightFormat.decode(found.kwargs["format"])
    x = found.args[0].node if isinstance(found.args[0], Operand) else found.args[0]
    if not isinstance(x, fx.Node):
        return Exactness.REASSOCIATED
    x_dtype = fx_utils.value(x).dtype
    element = fx_utils.described(found.args[1][format.element.source]).dtype
    if weight_only.split_dequant_ops(format, x_dtype, element)[1]:
        return Exactness.REASSOCIATED
    if found.weight_class is not Exactness.REASSOCIATED and any(
        node.target in _ARITHMETIC for node in _after_anchor(found)
    ):
        return Exactness.FEWER_ROUNDINGS  # the product is not rounded before its scale or bias
    return found.weight_class


def _after_anchor(found: RecognizedGemm) -> set[fx.Node]:
    """The replaced nodes that are computed from the anchor."""
    inside, todo = {*found.interior, found.end}, [found.anchor]
    seen: set[fx.Node] = set()
    while todo:
        new = {user for user in todo.pop().users if user in inside} - seen
        seen |= new
        todo += new
    return seen
