"""The epilogue of a matrix product: scales, zero point and bias, read forward from the accumulator.

Each node that is the only user of the one before it is read as a factor, an addend, a cast or a
reshape of ``[M, N]``; the first node that is none of these ends the walk. What was read becomes
part of the canonical op. The rest stays in the graph, where the scheduler fuses it, so stopping
early is always correct.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant.spec.decisions import Rejection, RejectionCode

from .. import fx_utils
from ..fx_utils import CAST, aten
from .zero_point import ZeroPoint, read_zero_point

INT_MM = aten._int_mm.default
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32 = torch.finfo(torch.float32)
_OUTER_PRODUCTS = ({"row", "column"}, {"row", "tensor"}, {"column", "tensor"})


@dataclasses.dataclass
class Epilogue:
    """``((acc - zero_point) * alpha * row_scale * column_scale) + bias``, cast to ``out_dtype``, in
    the shape of ``end``.

    ``row_scale`` and ``column_scale`` may have a single element; the graph divides by ``divisor``,
    if that is one of them. ``interior``: the nodes read, from the anchor to ``end``; ``reshape``:
    the last of them that changes the shape.
    """

    end: fx.Node
    interior: list[fx.Node]
    reshape: fx.Node | None = None
    alpha: float = 1.0
    row_scale: fx.Node | None = None
    column_scale: fx.Node | None = None
    bias: fx.Node | None = None
    zero_point: ZeroPoint | None = None
    divisor: fx.Node | None = None

    @property
    def out_dtype(self) -> torch.dtype:
        return fx_utils.value(self.end).dtype

    @property
    def shape(self) -> tuple[Any, ...] | None:
        """The arguments of a reshape to the shape of ``end``; None if nothing reshapes."""
        return None if self.reshape is None else self.reshape.args[1]  # type: ignore[return-value]

    @property
    def is_scaled(self) -> bool:
        return self.row_scale is not None or self.column_scale is not None or self.alpha != 1.0


def read_column_epilogue(anchor: fx.Node, *, has_scale: bool, has_bias: bool) -> Epilogue:
    """The epilogue of a float product: at most one scale, per channel or per tensor, and a bias.

    ``has_scale``, ``has_bias``: the product has one already. The epilogue may be empty.
    """
    reader = _Reader(anchor, columns_only=True)
    reader.has_scale, reader.has_bias = has_scale, has_bias
    reader.walk()
    assert reader.committed is not None
    return reader.committed


def read_epilogue(anchor: fx.Node) -> Epilogue | Rejection:
    """The epilogue of an integer product [M, N].

    Rejects a product without a scale, and one whose integer result has other users.
    """
    reader = _Reader(anchor)
    stopped = reader.walk()
    found = reader.committed
    if found is None or not found.is_scaled:
        return stopped or _no_single_user(reader.last)
    if found.out_dtype not in FLOATS:
        return Rejection(
            RejectionCode.SCALE_DTYPE, f"the result is {found.out_dtype}", found.end.name
        )
    return found


def _no_single_user(node: fx.Node) -> Rejection:
    code = RejectionCode.EXTRA_USER if fx_utils.users(node) else RejectionCode.NO_SCALE
    names = ", ".join(user.name for user in fx_utils.users(node)) or "nobody"
    if any(user.op == "output" for user in node.users):
        names += " (returned, or saved for a backward pass, which torch.no_grad() avoids)"
    return Rejection(code, f"the unscaled result is used by {names}", node.name)


def read_float_epilogue(
    anchor: fx.Node,
    *,
    has_bias: bool,
    row_scale: fx.Node | None,
    column_scale: fx.Node | None,
    alpha: float,
    divides: bool = False,
) -> Epilogue:
    """The epilogue of a float product of integers times these scales. It may be empty.

    ``divides``: ``row_scale`` is a divisor.
    """
    reader = _Reader(anchor)
    reader.has_bias, reader.may_divide = has_bias, True
    now = reader.current
    now.alpha = alpha
    now.row_scale = row_scale and _source(row_scale)
    now.divisor = now.row_scale if divides else None
    now.column_scale = column_scale and _source(column_scale)
    reader.committed = dataclasses.replace(now, interior=[anchor])
    reader.walk()
    return reader.committed


class _Reader:
    """State of the walk. ``committed`` is the longest prefix worth taking: it never ends in a
    reshape or a widening cast, which would only store more bytes.
    """

    def __init__(self, anchor: fx.Node, *, columns_only: bool = False) -> None:
        self.anchor = anchor
        self.last = anchor
        self.current = Epilogue(anchor, [anchor])
        # A float product may have no epilogue at all.
        self.committed: Epilogue | None = None
        if columns_only:
            self.committed = dataclasses.replace(self.current, interior=[anchor])
        self.columns_only = columns_only
        self.has_scale = self.has_bias = False
        self.may_divide = anchor.target == INT_MM

    def walk(self) -> Rejection | None:
        """Read as far as possible; returns why the walk ended, None if there is no single user."""
        while (node := fx_utils.single_user(self.last)) is not None:
            if (stopped := self.read(node)) is not None:
                return stopped
        return None

    def read(self, node: fx.Node) -> Rejection | None:
        """Advance over ``node``; a Rejection says why the walk ends before it."""
        if node.target in fx_utils.RESHAPES:
            return self._reshape(node)
        if node.target == CAST:
            return self._cast(node)
        if node.target == aten.mul.Tensor:
            return self._multiply(node)
        if node.target == aten.div.Tensor and node.args[0] is self.last:
            return self._divide(node)
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            if self._subtract_zero_point(node):
                return None
            if node.target == aten.add.Tensor:
                return self._add(node)
        return Rejection(RejectionCode.NO_SCALE, f"{node.target} is no scale", node.name)

    def _advance(self, node: fx.Node, *, commit: bool) -> None:
        self.last = node
        self.current.interior.append(node)
        self.current.end = node
        if commit:
            self.committed = dataclasses.replace(self.current, interior=list(self.current.interior))

    def _reshape(self, node: fx.Node) -> Rejection | None:
        before, after = fx_utils.value(self.last).shape, fx_utils.value(node).shape
        if len(after) < 2 or not fx_utils.same_size(before[-1], after[-1]):
            return Rejection(RejectionCode.SCALE_AXIS, "a reshape moves the columns", node.name)
        self.current.reshape = node
        self._advance(node, commit=False)
        return None

    def _cast(self, node: fx.Node) -> Rejection | None:
        before, after = fx_utils.value(self.last).dtype, fx_utils.value(node).dtype
        if (before, after) == (torch.int32, torch.int64):
            self._advance(node, commit=False)
            return None
        if after not in FLOATS:
            return Rejection(RejectionCode.SCALE_DTYPE, f"a cast to {after}", node.name)
        is_narrowing = before.is_floating_point and after.itemsize < before.itemsize
        self._advance(node, commit=is_narrowing)
        return None

    def _multiply(self, node: fx.Node) -> Rejection | None:
        if self.current.bias is not None or self.has_bias:
            return Rejection(RejectionCode.SCALE_AXIS, "a factor after the bias", node.name)
        if not self._keeps_shape(node):
            return Rejection(RejectionCode.SCALE_AXIS, "the factor adds rows", node.name)
        if (dtype := fx_utils.value(node).dtype) not in FLOATS:
            return Rejection(RejectionCode.SCALE_DTYPE, f"the scaled result is {dtype}", node.name)
        saved = dataclasses.replace(self.current)
        for factor in self._others(node):
            rejection = self._take_factor(factor, node)
            if rejection is not None:
                self.current = saved
                return rejection
        self._advance(node, commit=True)
        return None

    def _divide(self, node: fx.Node) -> Rejection | None:
        """Read a division by the first scale; the scheduler fuses a later division as it is."""
        divisor = node.args[1]
        is_first = self.may_divide and not (self.current.is_scaled or self.has_bias)
        if not is_first or node.kwargs:
            return Rejection(RejectionCode.NO_SCALE, "a division after a scale", node.name)
        if not self._keeps_shape(node) or fx_utils.value(node).dtype not in FLOATS:
            return Rejection(RejectionCode.SCALE_AXIS, "the divisor adds rows", node.name)
        if isinstance(divisor, (int, float)):
            divisor = 1 / divisor if divisor else 0.0
            rejection = self._take_factor(divisor or float("nan"), node)
        else:
            rejection = self._take_factor(divisor, node)
            self.current.divisor = self.current.row_scale or self.current.column_scale
        if rejection is None:
            self._advance(node, commit=True)
        return rejection

    def _keeps_shape(self, node: fx.Node) -> bool:
        return fx_utils.same_shape(fx_utils.value(self.last).shape, fx_utils.value(node).shape)

    def _others(self, node: fx.Node) -> list[object]:
        """The factors of a multiplication besides the value so far. A product of two scales of
        different axes counts as two factors: the kernel multiplies them anyway."""
        left, right = fx_utils.arguments(node, "self", "other")
        other = right if left is self.last else left
        if other is self.last:
            return [other]  # a square, which _take_factor rejects
        if fx_utils.is_tensor_node(other) and other.target == aten.mul.Tensor:
            parts = [part for part in other.args if fx_utils.is_tensor_node(part)]
            axes = [self._axis(part) for part in parts]
            if len(parts) == 2 and set(axes) in _OUTER_PRODUCTS:
                return list(parts)
        return [other]

    def _take_factor(self, factor: object, node: fx.Node) -> Rejection | None:
        if isinstance(factor, (int, float)) and not isinstance(factor, bool):
            if self.columns_only:
                return Rejection(RejectionCode.SCALE_AXIS, "a factor that is a number", node.name)
            alpha = self.current.alpha * factor
            if alpha != 0 and not FLOAT32.tiny <= abs(alpha) <= FLOAT32.max:
                return Rejection(RejectionCode.SCALE_DTYPE, f"a factor of {alpha}", node.name)
            self.current.alpha = alpha
            return None
        if not fx_utils.is_tensor_node(factor) or factor is self.last:
            return Rejection(RejectionCode.SCALE_AXIS, "the factor is no scale", node.name)
        assert isinstance(factor, fx.Node)
        scale = fx_utils.value(factor)
        if scale.device != fx_utils.value(self.anchor).device:
            return Rejection(RejectionCode.DEVICE, f"the scale is on {scale.device}", node.name)
        if scale.dtype not in FLOATS:
            return Rejection(RejectionCode.SCALE_DTYPE, f"the scale is {scale.dtype}", node.name)
        axis = self._axis(factor)
        if isinstance(axis, Rejection):
            return axis
        return self._place(_source(factor), axis, node)

    def _place(self, scale: fx.Node, axis: str, node: fx.Node) -> Rejection | None:
        """Put a scale into its slot; a single element fits either slot."""
        now = self.current
        if self.columns_only:
            if axis == "row" or self.has_scale or now.column_scale is not None:
                return Rejection(RejectionCode.SCALE_AXIS, f"a {axis} scale", node.name)
            now.column_scale = scale
            return None
        if scale is now.divisor:
            return Rejection(RejectionCode.SCALE_AXIS, "a scale that was divided by", node.name)
        # A per-tensor scale that came first may move to the other slot if that is free.
        row, column = now.row_scale, now.column_scale
        is_row_taken = row is not None and fx_utils.is_single(row) and column is None
        is_column_taken = column is not None and fx_utils.is_single(column) and row is None
        if (axis == "row" and is_row_taken) or (axis == "column" and is_column_taken):
            now.row_scale, now.column_scale = column, row
        if axis in ("row", "tensor") and now.row_scale is None:
            now.row_scale = scale
        elif axis in ("column", "tensor") and now.column_scale is None:
            now.column_scale = scale
        else:
            return Rejection(RejectionCode.SCALE_AXIS, f"a second {axis} scale", node.name)
        return None

    def _axis(self, operand: object) -> str | Rejection:
        """``axis_of`` an operand that is broadcast to the value so far."""
        assert isinstance(operand, fx.Node)
        target = fx_utils.value(self.last).shape
        axis = axis_of(operand, target)
        if axis is not None:
            return axis
        shape = list(fx_utils.value(_source(operand)).shape)
        is_unknown = any(fx_utils.is_symbolic(size) for size in shape)
        code = RejectionCode.SCALE_DYNAMIC_SHAPE if is_unknown else RejectionCode.SCALE_AXIS
        return Rejection(code, f"a scale of shape {shape} against {list(target)}", operand.name)

    def _subtract_zero_point(self, node: fx.Node) -> bool:
        """Read ``node`` if it subtracts the term of a zero point; returns whether it does."""
        left, right = fx_utils.arguments(node, "self", "other")
        is_sub = node.target == aten.sub.Tensor
        term = right if left is self.last else left
        now = self.current
        taken = (now.bias, now.zero_point, now.divisor, self.anchor.target != INT_MM)
        is_free = not (self.columns_only or self.has_bias or any(taken))
        if not is_free or node.kwargs.get("alpha", 1) != 1 or (is_sub and left is not self.last):
            return False
        if not fx_utils.is_tensor_node(term) or term is self.last or not self._keeps_shape(node):
            return False
        if fx_utils.value(term).device != fx_utils.value(self.anchor).device or now.alpha == 0:
            return False
        if fx_utils.value(node).dtype not in (*FLOATS, torch.int32, torch.int64):
            return False
        placed = ((now.row_scale, "row"), (now.column_scale, "column"))
        scales = [(scale, axis) for scale, axis in placed if scale is not None]
        found = read_zero_point(
            term,
            1 if is_sub else -1,
            fx_utils.value(self.last).shape,
            axis_of,
            scales,
            now.alpha,
            fx_utils.arguments(self.anchor, "self", "mat2")[1],
            fx_utils.value(node).dtype,
        )
        if found is None:
            return False
        now.zero_point = found
        self._advance(node, commit=now.is_scaled and fx_utils.value(node).dtype in FLOATS)
        return True

    def _add(self, node: fx.Node) -> Rejection | None:
        left, right = fx_utils.arguments(node, "self", "other")
        other = right if left is self.last else left
        is_plain = node.kwargs.get("alpha", 1) == 1 and self.current.bias is None
        is_first = not self.has_bias and (self.current.is_scaled or self.columns_only)
        is_other = fx_utils.is_tensor_node(other) and other is not self.last
        if not is_plain or not is_first or not is_other:
            return Rejection(RejectionCode.NO_SCALE, "an addition that is no bias", node.name)
        assert isinstance(other, fx.Node)
        bias = fx_utils.value(other)
        is_float = bias.dtype in FLOATS and fx_utils.value(node).dtype in FLOATS
        is_beside = bias.device == fx_utils.value(self.anchor).device and self._keeps_shape(node)
        if not (is_float and is_beside) or self._axis(other) != "column":
            return Rejection(RejectionCode.NO_SCALE, "an addition that is no bias", node.name)
        self.current.bias = _source(other)
        self._advance(node, commit=True)
        return None


def axis_of(operand: fx.Node, target: Sequence[Any]) -> str | None:
    """The axis along which ``operand``, broadcast to ``target``, varies: "row", "column" or, for a
    single element, "tensor". None: along both, or in blocks."""
    # the shape in memory: a cast may hide a second expand
    shape = list(fx_utils.value(_source(operand)).shape)
    if len(shape) > len(target):
        if any(not fx_utils.is_one(size) for size in shape[: -len(target)]):
            return None
        shape = shape[-len(target) :]
    shape = [1] * (len(target) - len(shape)) + shape
    if all(map(fx_utils.is_one, shape)):
        return "tensor"
    lead, last = shape[:-1], shape[-1]
    if fx_utils.same_size(last, target[-1]) and all(fx_utils.is_one(size) for size in lead):
        return "column"
    leads_agree = all(fx_utils.same_size(a, b) for a, b in zip(lead, target, strict=False))
    return "row" if fx_utils.is_one(last) and leads_agree else None


def _unexpanded(node: fx.Node) -> fx.Node:
    """The source of an expand: broadcasting it gives the same value."""
    while node.target == aten.expand.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _source(node: fx.Node) -> fx.Node:
    """The tensor with the same values before expands, and before an exact cast of a graph input.

    Otherwise a stored bf16 bias that the graph casts to fp32 would need a kernel for the cast. The
    cast of a computed scale is part of the kernel that computes the scale.
    """
    node = _unexpanded(node)
    while node.target == CAST and _is_exact(node) and fx_utils.is_stored(node.args[0]):  # type: ignore[arg-type]
        node = _unexpanded(node.args[0])  # type: ignore[arg-type]
    return node


def _is_exact(cast: fx.Node) -> bool:
    before = fx_utils.value(cast.args[0]).dtype  # type: ignore[arg-type]
    return before in FLOATS and fx_utils.value(cast).dtype == torch.float32
