"""An activation that was quantized and dequantized: ``(q - zero) * scale`` in a float dtype.

Read backwards from the operand of a product: a scale per token or per tensor, a zero point, and a
tensor whose elements ``value_range`` proves to be 8-bit integers. Its dtype may be an integer or a
float (fake quantization). Or, on request, a tensor of e4m3, without a zero point.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_quant.ops.w8a8 import SCALE_DTYPES

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..match import Derived, Operand
from ..symbolic.expr import FLOATS, INTEGERS
from .epilogue import axis_of
from .value_range import ValueRange, constant, value_range

_MAX_STEPS = 30
E4M3 = torch.float8_e4m3fn
_DEQUANTIZE = (
    "quantized_decomposed.dequantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.tensor",
    "quantized_decomposed.dequantize_per_tensor.tensor2",
    "quantized_decomposed.dequantize_per_token.default",
)
# Its results have the dtype of x, or fp32; its meta says fp64. Only eager ops may read them.
_OTHERWISE_THAN_ITS_META = "quantized_decomposed.choose_qparams_per_token.default"


@dataclasses.dataclass(frozen=True)
class Vector:
    """A tensor with one element for each row or column, or a single element."""

    node: fx.Node
    axis: str  # as in ``axis_of``

    @property
    def shape(self) -> tuple[int, int]:
        return (-1, 1) if self.axis == "row" else (1, 1)


@dataclasses.dataclass(frozen=True)
class FakeQuantized:
    """``(q - zero) * scale * alpha``, or ``/ scale`` if it ``divides``; ``values`` are those of
    ``q``."""

    q: fx.Node
    values: ValueRange
    scale: Vector | None = None
    zero: Vector | int = 0
    alpha: float = 1.0
    divides: bool = False

    @property
    def shift(self) -> int:
        """What must be subtracted from q so that it fits int8."""
        return 0 if self.values.is_within(-128, 127) or not self.values.is_integer else 128

    def int8(self) -> fx.Node | Derived:
        """``q - shift`` as int8; e4m3 as it is."""
        dtype = fx_utils.value(self.q).dtype
        if dtype in (torch.int8, E4M3):
            return self.q
        q: fx.Node | Derived = self.q
        if self.shift:
            if dtype == torch.uint8:
                q = Derived(CAST, (q, torch.int16))
            q = Derived(aten.sub.Tensor, (q, self.shift))
        return Derived(CAST, (q, torch.int8))

    def zero_point(self) -> tuple[Operand | int, str]:
        """The zero point of ``int8``, and its kind as in OperandSpec.zero."""
        if isinstance(self.zero, int):
            number = self.zero - self.shift
            return number, "const" if number else ""
        node, dtype = self.zero.node, fx_utils.value(self.zero.node).dtype
        if dtype == torch.int8 and not self.shift:
            return Operand(node, self.zero.shape), "int"
        known = value_range(node)
        low, high = known.low - self.shift, known.high - self.shift
        is_int8 = known.is_integer and ValueRange(low, high).is_within(-128, 127)
        # small integers are exact in fp32, and so is their difference
        value: fx.Node | Derived = Derived(CAST, (node, torch.float32))
        if self.shift:
            value = Derived(aten.sub.Tensor, (value, float(self.shift)))
        if is_int8:
            return Operand(Derived(CAST, (value, torch.int8)), self.zero.shape), "int"
        return Operand(value, self.zero.shape), "float"


def read_fake_quantized(node: fx.Node, element: torch.dtype = torch.int8) -> FakeQuantized | None:
    """The integers, or with ``element`` e4m3 the elements, the scale and the zero point that
    ``node`` is made from; None if it is not."""
    found = _Reader(element)
    read: list[fx.Node] = []
    while fx_utils.is_tensor_node(node) and len(read) < _MAX_STEPS:
        read.append(node)
        if found.is_element(node):
            return None if any(map(fx_utils.is_mutated, read)) else found.result(node)
        step = found.step(node)
        if step is None:
            return None
        node = step
    return None


class _Reader:
    def __init__(self, element: torch.dtype) -> None:
        self.element = element
        self.scale: Vector | None = None
        self.zero: Vector | int | None = None
        self.alpha = 1.0
        self.divides = False

    def is_element(self, node: fx.Node) -> bool:
        if self.element == E4M3:
            return fx_utils.value(node).dtype == E4M3
        return self.is_integer(node)

    def is_integer(self, node: fx.Node) -> bool:
        if node.op != "call_function" and fx_utils.value(node).dtype in FLOATS:
            return False
        found = value_range(node)
        return found.is_integer and (found.is_within(-128, 127) or found.is_within(0, 255))

    def result(self, node: fx.Node) -> FakeQuantized | None:
        if self.element == E4M3:
            most = torch.finfo(E4M3).max
            found = FakeQuantized(
                *(node, ValueRange(-most, most), self.scale, 0, self.alpha, self.divides)
            )
            return None if self.zero else found
        # skip casts of a tensor that is integer already
        while node.target == CAST and fx_utils.is_tensor_node(node.args[0]):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if not self.is_integer(source) or fx_utils.is_mutated(source):
                break
            node = source
        if fx_utils.value(node).dtype not in (*FLOATS, *INTEGERS):
            return None
        zero = self.zero or 0
        return FakeQuantized(node, value_range(node), self.scale, zero, self.alpha, self.divides)

    def step(self, node: fx.Node) -> fx.Node | None:
        """Record the operation of ``node``; returns its input, None if it is something else."""
        if fx_utils.value(node).dtype not in FLOATS:
            return None
        source = node.args[0] if node.args else None
        if node.target == CAST:
            floats = (*FLOATS, E4M3) if self.element == E4M3 else FLOATS
            is_float = fx_utils.is_tensor_node(source) and fx_utils.value(source).dtype in floats  # type: ignore[arg-type]
            return source if is_float else None  # type: ignore[return-value]
        if node.target in (*fx_utils.RESHAPES, aten.clone.default):
            return self._reshaped(node, source)
        if node.target == aten.mul.Tensor:
            return self._multiplied(node)
        if node.target == aten.div.Tensor and not node.kwargs:
            return self._divided(node)
        if node.target == aten.sub.Tensor and not node.kwargs and self.zero is None:
            return self._subtracted(node, node.args[0], node.args[1])
        if str(node.target) in _DEQUANTIZE:
            return self._dequantized(node)
        return None

    def _reshaped(self, node: fx.Node, source: Any) -> fx.Node | None:
        """A reshape that keeps the last dimension: a scale per row stays one."""
        if not fx_utils.is_tensor_node(source):
            return None
        before, after = fx_utils.value(source).shape, fx_utils.value(node).shape
        is_kept = before and after and fx_utils.same_size(before[-1], after[-1])
        return source if is_kept else None

    def _multiplied(self, node: fx.Node) -> fx.Node | None:
        for value, factor in (node.args[:2], node.args[1::-1]):
            vector = self._vector(factor, value, node)
            if vector is not None and self.zero is None and self._take(vector):
                return value  # type: ignore[return-value]
        return None

    def _divided(self, node: fx.Node) -> fx.Node | None:
        value, divisor = node.args
        vector = self._vector(divisor, value, node)
        if vector is None or self.zero is not None:
            return None
        if not isinstance(vector, Vector):
            self.alpha *= 1 / vector if vector else 0.0  # a product with 0 is not recognized
            return value  # type: ignore[return-value]
        self.divides = self._take(vector)
        return value if self.divides else None  # type: ignore[return-value]

    def _take(self, factor: Vector | float) -> bool:
        if not isinstance(factor, Vector):
            self.alpha *= factor
            return True
        node = factor.node
        while node.target == CAST and fx_utils.value(node).dtype == torch.float64:
            node = node.args[0]  # type: ignore[assignment]
        dtype = fx_utils.value(node).dtype
        if self.scale is not None or dtype not in (*SCALE_DTYPES, torch.float64):
            return False
        if any(str(item.target) == _OTHERWISE_THAN_ITS_META for item in node.all_input_nodes):
            return False
        self.scale = Vector(node, factor.axis)
        return True

    def _subtracted(self, node: fx.Node, value: Any, zero: Any) -> fx.Node | None:
        vector = self._vector(zero, value, node)
        if vector is None:
            return None
        if not isinstance(vector, Vector):
            if vector not in range(-128, 256):
                return None
            vector = int(vector)
        self.zero = vector
        return value

    def _vector(self, item: Any, value: Any, node: fx.Node) -> Vector | float | None:
        """``item`` as one element for each row of ``value``, or for all, if ``value`` has the shape
        of ``node``."""
        after = fx_utils.value(node).shape
        if not fx_utils.is_tensor_node(value):
            return None
        if not fx_utils.same_shape(fx_utils.value(value).shape, after):
            return None
        number = constant(item)
        if number is not None:
            return number
        if not fx_utils.is_tensor_node(item):
            return None
        axis = axis_of(item, after)
        return Vector(item, axis) if axis in ("row", "tensor") else None

    def _dequantized(self, node: fx.Node) -> fx.Node | None:
        is_token = "per_token" in str(node.target)
        names = ("input", "scales", "zero_points") if is_token else ("input", "scale", "zero_point")
        q, scale, zero = fx_utils.arguments(node, *names)
        if not fx_utils.is_tensor_node(q) or self.zero is not None or self.scale is not None:
            return None
        small = (torch.int8, torch.uint8)
        if is_token and {fx_utils.value(n).dtype for n in (q, zero)} <= {*small}:
            return None  # the op subtracts in this dtype and may wrap around
        factor = self._vector(scale, q, node)
        if factor is None or not self._take(factor):
            return None
        return self._subtracted(node, q, zero)
