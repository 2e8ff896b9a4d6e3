"""Scales and bias behind a matrix product: reads forward from the accumulator.

From the anchor on, each node that is the only user of the last is read as a factor, an addend, a
cast or a reshape of ``[M, N]``; the first that is none of these ends the walk. What was read so far
becomes part of the canonical op, and the rest stays in the graph, where the scheduler fuses it. So
nothing has to be understood twice, and stopping early is always right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.patterns import graph
from inductor_quant.patterns.correction import Correction, read_correction
from inductor_quant.patterns.graph import aten

INT_MM = aten._int_mm.default
CAST = torch.ops.prims.convert_element_type.default
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32 = torch.finfo(torch.float32)
_OUTER_PRODUCTS = ({"row", "column"}, {"row", "tensor"}, {"column", "tensor"})


@dataclasses.dataclass
class Epilogue:
    """``((acc - correction) * alpha * row_scale * column_scale) + bias``, cast to ``out_dtype``, in
    the shape of ``end``.

    ``row_scale`` and ``column_scale`` may also be of one element. ``interior`` lists the nodes
    read, anchor and ``end`` included; ``reshape`` is the last of them that changes the shape.
    """

    end: fx.Node
    out_dtype: torch.dtype
    interior: list[fx.Node]
    reshape: fx.Node | None = None
    alpha: float = 1.0
    row_scale: fx.Node | None = None
    column_scale: fx.Node | None = None
    bias: fx.Node | None = None
    correction: Correction | None = None
    # of the scales, the one that is divided by
    divisor: fx.Node | None = None

    @property
    def is_scaled(self) -> bool:
        return self.row_scale is not None or self.column_scale is not None or self.alpha != 1.0


def read_column_epilogue(anchor: fx.Node, *, has_scale: bool, has_bias: bool) -> Epilogue:
    """What may be taken of the epilogue behind ``anchor``, a product of floats: at most one scale
    of the columns or the tensor, and a bias, of which the product may have either already. The
    least is nothing, ``end`` is then ``anchor``."""
    reader = _Reader(anchor, columns_only=True)
    reader.has_scale, reader.has_bias = has_scale, has_bias
    while (node := graph.single_user(reader.last)) is not None and reader.read(node) is None:
        pass
    assert reader.committed is not None
    return reader.committed


def read_epilogue(anchor: fx.Node) -> Epilogue | Rejection:
    """The epilogue behind ``anchor``, an integer product [M, N].

    Rejects what is not multiplied by a scale at all, and an integer result that has other users.
    """
    reader = _Reader(anchor)
    stopped: Rejection | None = None
    while (node := graph.single_user(reader.last)) is not None:
        stopped = reader.read(node)
        if stopped is not None:
            break
    found = reader.committed
    if found is None or not found.is_scaled:
        return stopped or _no_single_user(reader.last)
    if found.out_dtype not in FLOATS:
        return Rejection(
            RejectionCode.SCALE_DTYPE, f"the result is {found.out_dtype}", found.end.name
        )
    return found


def _no_single_user(node: fx.Node) -> Rejection:
    code = RejectionCode.EXTRA_USER if graph.users(node) else RejectionCode.NO_SCALE
    names = ", ".join(user.name for user in graph.users(node)) or "nobody"
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
) -> Epilogue:
    """The epilogue behind ``anchor``, a product of floats that stand for integers times these
    scales. The least is nothing, ``end`` is then ``anchor``."""
    reader = _Reader(anchor)
    reader.has_bias = has_bias
    now = reader.current
    now.alpha = alpha
    for scale, is_row in ((row_scale, True), (column_scale, False)):
        if scale is not None:
            setattr(now, "row_scale" if is_row else "column_scale", _source(scale))
    reader.committed = dataclasses.replace(now, interior=[anchor])
    while (node := graph.single_user(reader.last)) is not None and reader.read(node) is None:
        pass
    return reader.committed


class _Reader:
    """State of the walk. ``committed`` is the longest prefix worth taking: a reshape or a widening
    cast at its end is left to the graph, because taking it would only store more bytes.
    """

    def __init__(self, anchor: fx.Node, *, columns_only: bool = False) -> None:
        self.anchor = anchor
        self.last = anchor
        self.current = Epilogue(anchor, graph.value(anchor).dtype, [anchor])
        # A product of floats is one without an epilogue too.
        self.committed: Epilogue | None = None
        if columns_only:
            self.committed = dataclasses.replace(self.current, interior=[anchor])
        self.columns_only = columns_only
        self.has_scale = self.has_bias = False

    def read(self, node: fx.Node) -> Rejection | None:
        """Advance over ``node``; a Rejection says why the walk ends before it."""
        if node.target in graph.RESHAPES:
            return self._reshape(node)
        if node.target == CAST:
            return self._cast(node)
        if node.target == aten.mul.Tensor:
            return self._multiply(node)
        if node.target == aten.div.Tensor and node.args[0] is self.last:
            return self._divide(node)
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            if self._correct(node):
                return None
            if node.target == aten.add.Tensor:
                return self._add(node)
        return Rejection(RejectionCode.NO_SCALE, f"{node.target} is no scale", node.name)

    def _advance(self, node: fx.Node, *, commit: bool) -> None:
        self.last = node
        self.current.interior.append(node)
        self.current.out_dtype = graph.value(node).dtype
        self.current.end = node
        if commit:
            self.committed = dataclasses.replace(self.current, interior=list(self.current.interior))

    def _reshape(self, node: fx.Node) -> Rejection | None:
        before, after = graph.value(self.last).shape, graph.value(node).shape
        if len(after) < 2 or not graph.same_size(before[-1], after[-1]):
            return Rejection(RejectionCode.SCALE_AXIS, "a reshape moves the columns", node.name)
        self.current.reshape = node
        self._advance(node, commit=False)
        return None

    def _cast(self, node: fx.Node) -> Rejection | None:
        before, after = graph.value(self.last).dtype, graph.value(node).dtype
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
        if graph.value(node).dtype not in FLOATS:
            return Rejection(
                RejectionCode.SCALE_DTYPE,
                f"the scaled result is {graph.value(node).dtype}",
                node.name,
            )
        saved = dataclasses.replace(self.current)
        for factor in self._others(node):
            rejection = self._take_factor(factor, node)
            if rejection is not None:
                self.current = saved
                return rejection
        self._advance(node, commit=True)
        return None

    def _divide(self, node: fx.Node) -> Rejection | None:
        """A scale that is divided by, if it is the first: behind others the division is left to the
        scheduler, which fuses it as it is."""
        divisor = node.args[1]
        is_first = self.anchor.target == INT_MM and not self.current.is_scaled
        if not is_first or node.kwargs:
            return Rejection(RejectionCode.NO_SCALE, "a division behind a scale", node.name)
        if not self._keeps_shape(node) or graph.value(node).dtype not in FLOATS:
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
        before, after = graph.value(self.last).shape, graph.value(node).shape
        return len(before) == len(after) and all(map(graph.same_size, before, after))

    def _others(self, node: fx.Node) -> list[object]:
        """The factors of a multiplication beside the value so far; a product of two scales of
        different axes counts as its two factors: the kernel multiplies them anyway."""
        left, right = graph.arguments(node, "self", "other")
        other = right if left is self.last else left
        if other is self.last:
            return [other]  # a square: _take_factor refuses it
        if graph.is_tensor_node(other) and other.target == aten.mul.Tensor:
            parts = [part for part in other.args if graph.is_tensor_node(part)]
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
        if not graph.is_tensor_node(factor) or factor is self.last:
            return Rejection(RejectionCode.SCALE_AXIS, "the factor is no scale", node.name)
        assert isinstance(factor, fx.Node)
        if graph.value(factor).device != graph.value(self.anchor).device:
            return Rejection(
                RejectionCode.DEVICE, f"the scale is on {graph.value(factor).device}", node.name
            )
        if graph.value(factor).dtype not in FLOATS:
            return Rejection(
                RejectionCode.SCALE_DTYPE, f"the scale is {graph.value(factor).dtype}", node.name
            )
        axis = self._axis(factor)
        if isinstance(axis, Rejection):
            return axis
        return self._place(_source(factor), axis, node)

    def _place(self, scale: fx.Node, axis: str, node: fx.Node) -> Rejection | None:
        """Put a scale in its slot; one of a single element goes where there is room."""
        now = self.current
        if self.columns_only:
            if axis == "row" or self.has_scale or now.column_scale is not None:
                return Rejection(RejectionCode.SCALE_AXIS, f"a {axis} scale", node.name)
            now.column_scale = scale
            return None
        if scale is now.divisor:
            return Rejection(RejectionCode.SCALE_AXIS, "a scale that was divided by", node.name)
        # A per-tensor scale that came first has taken the slot: move it over if the other is free.
        row, column = now.row_scale, now.column_scale
        is_row_taken = row is not None and _is_scalar(row) and column is None
        is_column_taken = column is not None and _is_scalar(column) and row is None
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
        """Along what ``operand`` varies when it is broadcast against the value so far: "tensor",
        "row" or "column".
        """
        assert isinstance(operand, fx.Node)
        target = graph.value(self.last).shape
        axis = axis_of(operand, target)
        if axis is not None:
            return axis
        shape = list(graph.value(_source(operand)).shape)
        is_unknown = any(graph.is_symbolic(size) for size in shape)
        code = RejectionCode.SCALE_DYNAMIC_SHAPE if is_unknown else RejectionCode.SCALE_AXIS
        return Rejection(code, f"a scale of shape {shape} against {list(target)}", operand.name)

    def _correct(self, node: fx.Node) -> bool:
        """Whether ``node`` subtracts what a zero point has added, and is read as that."""
        left, right = graph.arguments(node, "self", "other")
        is_sub = node.target == aten.sub.Tensor
        term = right if left is self.last else left
        now = self.current
        taken = (now.bias, now.correction, now.divisor, self.anchor.target != INT_MM)
        is_free = not (self.columns_only or self.has_bias or any(taken))
        if not is_free or node.kwargs.get("alpha", 1) != 1 or (is_sub and left is not self.last):
            return False
        if not graph.is_tensor_node(term) or term is self.last or not self._keeps_shape(node):
            return False
        if graph.value(term).device != graph.value(self.anchor).device or now.alpha == 0:
            return False
        if graph.value(node).dtype not in (*FLOATS, torch.int32, torch.int64):
            return False
        placed = ((now.row_scale, "row"), (now.column_scale, "column"))
        scales = [(scale, axis) for scale, axis in placed if scale is not None]
        found = read_correction(
            term,
            1 if is_sub else -1,
            graph.value(self.last).shape,
            axis_of,
            scales,
            now.alpha,
            graph.arguments(self.anchor, "self", "mat2")[1],
            graph.value(node).dtype,
        )
        if found is None:
            return False
        now.correction = found
        self._advance(node, commit=now.is_scaled and graph.value(node).dtype in FLOATS)
        return True

    def _add(self, node: fx.Node) -> Rejection | None:
        left, right = graph.arguments(node, "self", "other")
        other = right if left is self.last else left
        is_plain = node.kwargs.get("alpha", 1) == 1 and self.current.bias is None
        is_first = not self.has_bias and (self.current.is_scaled or self.columns_only)
        is_other = graph.is_tensor_node(other) and other is not self.last
        if not is_plain or not is_first or not is_other:
            return Rejection(RejectionCode.NO_SCALE, "an addition that is no bias", node.name)
        assert isinstance(other, fx.Node)
        bias = graph.value(other)
        is_float = bias.dtype in FLOATS and graph.value(node).dtype in FLOATS
        is_beside = bias.device == graph.value(self.anchor).device and self._keeps_shape(node)
        if not (is_float and is_beside) or self._axis(other) != "column":
            return Rejection(RejectionCode.NO_SCALE, "an addition that is no bias", node.name)
        self.current.bias = _source(other)
        self._advance(node, commit=True)
        return None


def axis_of(operand: fx.Node, target: Sequence[Any]) -> str | None:
    """Along what ``operand`` varies when it is broadcast to ``target``: "tensor", "row" or
    "column"; None: along neither alone."""
    # of what will be stored: behind a cast there may be a second expand
    shape = list(graph.value(_source(operand)).shape)
    if len(shape) > len(target):
        if any(not graph.is_one(size) for size in shape[: -len(target)]):
            return None
        shape = shape[-len(target) :]
    shape = [1] * (len(target) - len(shape)) + shape
    if all(graph.is_one(size) for size in shape):
        return "tensor"
    lead, last = shape[:-1], shape[-1]
    if graph.same_size(last, target[-1]) and all(graph.is_one(size) for size in lead):
        return "column"
    leads_agree = all(graph.same_size(a, b) for a, b in zip(lead, target, strict=False))
    return "row" if graph.is_one(last) and leads_agree else None


def _unexpanded(node: fx.Node) -> fx.Node:
    """The source of an expand of the same rank or less: broadcasting it gives the same value."""
    while node.target == aten.expand.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _source(node: fx.Node) -> fx.Node:
    """Where the same values lie: behind expands, and behind an exact cast of an input of the graph.

    A constant bf16 bias that the graph casts to fp32 would otherwise cost a kernel for the cast;
    the cast of a computed scale is part of the kernel that computes it.
    """
    node = _unexpanded(node)
    while node.target == CAST and _is_exact(node) and _is_input(node.args[0]):
        node = _unexpanded(node.args[0])  # type: ignore[arg-type]
    return node


def _is_exact(cast: fx.Node) -> bool:
    before = graph.value(cast.args[0]).dtype  # type: ignore[arg-type]
    return before in FLOATS and graph.value(cast).dtype == torch.float32


def _is_input(item: object) -> bool:
    return isinstance(item, fx.Node) and graph.base(item).op in ("placeholder", "get_attr")


def _is_scalar(node: fx.Node) -> bool:
    return all(graph.is_one(size) for size in graph.value(node).shape)
