"""An activation that went through quantization and back: ``(q - zero) * scale`` in a float type.

Read backwards from the operand of a product: a scale of the rows or the tensor, a zero point, and
behind them a tensor of which ``bounds`` proves that all its values are integers of eight bits. It
may be of an integer type, or of a float type that only ever holds integers (fake quantization).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_quant.patterns import graph
from inductor_quant.patterns.bounds import Bounds, bounds, constant
from inductor_quant.patterns.epilogue import CAST, axis_of
from inductor_quant.patterns.expression import FLOATS, INTEGERS
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.pattern import Derived, Operand

_MAX_STEPS = 30
_DEQUANTIZE = (
    "quantized_decomposed.dequantize_per_tensor.default",
    "quantized_decomposed.dequantize_per_tensor.tensor",
    "quantized_decomposed.dequantize_per_tensor.tensor2",
    "quantized_decomposed.dequantize_per_token.default",
)


@dataclasses.dataclass(frozen=True)
class Vector:
    """A tensor of one value a row, or of one value."""

    node: fx.Node
    axis: str  # "row" or "tensor"

    @property
    def shape(self) -> tuple[int, int]:
        return (-1, 1) if self.axis == "row" else (1, 1)


@dataclasses.dataclass(frozen=True)
class FakeQuantized:
    """``(q - zero) * scale * alpha``; ``values`` are those of ``q``."""

    q: fx.Node
    values: Bounds
    scale: Vector | None = None
    zero: Vector | int = 0
    alpha: float = 1.0

    @property
    def shift(self) -> int:
        """What is subtracted from q so that it is an int8."""
        return 0 if self.values.is_within(-128, 127) else 128

    def int8(self) -> fx.Node | Derived:
        """q as int8, shifted."""
        dtype = graph.value(self.q).dtype
        if dtype == torch.int8:
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
        node, dtype = self.zero.node, graph.value(self.zero.node).dtype
        if dtype == torch.int8 and not self.shift:
            return Operand(node, self.zero.shape), "int"
        known = bounds(node)
        low, high = known.low - self.shift, known.high - self.shift
        is_int8 = known.is_integer and Bounds(low, high).is_within(-128, 127)
        # A small integer is exact in fp32, and so is what remains of it.
        value: fx.Node | Derived = Derived(CAST, (node, torch.float32))
        if self.shift:
            value = Derived(aten.sub.Tensor, (value, float(self.shift)))
        if is_int8:
            return Operand(Derived(CAST, (value, torch.int8)), self.zero.shape), "int"
        return Operand(value, self.zero.shape), "float"


def read_fake_quantized(node: fx.Node) -> FakeQuantized | None:
    """How the values of ``node`` are made of small integers; None if they are not."""
    found = _Reader()
    read: list[fx.Node] = []
    while graph.is_tensor_node(node) and len(read) < _MAX_STEPS:
        read.append(node)
        if found.is_integer(node):
            return None if any(map(graph.is_mutated, read)) else found.result(node)
        step = found.step(node)
        if step is None:
            return None
        node = step
    return None


class _Reader:
    def __init__(self) -> None:
        self.scale: Vector | None = None
        self.zero: Vector | int | None = None
        self.alpha = 1.0

    def is_integer(self, node: fx.Node) -> bool:
        if node.op != "call_function" and graph.value(node).dtype in FLOATS:
            return False
        found = bounds(node)
        is_small = found.is_within(-128, 127) or found.is_within(0, 255)
        return found.is_integer and is_small

    def result(self, node: fx.Node) -> FakeQuantized | None:
        # before the cast of what has an integer type already
        while node.target == CAST and graph.is_tensor_node(node.args[0]):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if not self.is_integer(source) or graph.is_mutated(source):
                break
            node = source
        if graph.value(node).dtype not in (*FLOATS, *INTEGERS):
            return None
        return FakeQuantized(node, bounds(node), self.scale, self.zero or 0, self.alpha)

    def step(self, node: fx.Node) -> fx.Node | None:
        """Takes what ``node`` does; what it does it to."""
        if graph.value(node).dtype not in FLOATS:
            return None
        source = node.args[0] if node.args else None
        if node.target == CAST:
            is_float = graph.is_tensor_node(source) and graph.value(source).dtype in FLOATS  # type: ignore[arg-type]
            return source if is_float else None  # type: ignore[return-value]
        if node.target in (*graph.RESHAPES, aten.clone.default):
            return self._reshaped(node, source)
        if node.target == aten.mul.Tensor:
            return self._multiplied(node)
        if node.target == aten.sub.Tensor and not node.kwargs and self.zero is None:
            return self._subtracted(node, node.args[0], node.args[1])
        if str(node.target) in _DEQUANTIZE:
            return self._dequantized(node)
        return None

    def _reshaped(self, node: fx.Node, source: Any) -> fx.Node | None:
        """What keeps the rows whole."""
        if not graph.is_tensor_node(source):
            return None
        before, after = graph.value(source).shape, graph.value(node).shape
        is_kept = before and after and graph.same_size(before[-1], after[-1])
        # a scale of rows is then one of the same rows
        return source if is_kept else None

    def _multiplied(self, node: fx.Node) -> fx.Node | None:
        for value, factor in (node.args[:2], node.args[1::-1]):
            vector = self._vector(factor, value, node)
            if vector is not None and self.zero is None and self._take(vector):
                return value  # type: ignore[return-value]
        return None

    def _take(self, factor: Vector | float) -> bool:
        if not isinstance(factor, Vector):
            self.alpha *= factor
            return True
        node = factor.node
        while node.target == CAST and graph.value(node).dtype == torch.float64:
            node = node.args[0]  # type: ignore[assignment]
        if self.scale is not None or graph.value(node).dtype not in _SCALES:
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
        """``item`` as one value a row, or one in all, of ``value``, which has the shape of
        ``node``."""
        if not graph.is_tensor_node(value):
            return None
        before, after = graph.value(value).shape, graph.value(node).shape
        if len(before) != len(after) or not all(map(graph.same_size, before, after)):
            return None
        number = constant(item)
        if number is not None:
            return number
        if not graph.is_tensor_node(item):
            return None
        axis = axis_of(item, after)
        return Vector(item, axis) if axis in ("row", "tensor") else None

    def _dequantized(self, node: fx.Node) -> fx.Node | None:
        is_token = "per_token" in str(node.target)
        names = ("input", "scales", "zero_points") if is_token else ("input", "scale", "zero_point")
        q, scale, zero = graph.arguments(node, *names)
        if not graph.is_tensor_node(q) or self.zero is not None or self.scale is not None:
            return None
        small = (torch.int8, torch.uint8)
        if is_token and {graph.value(n).dtype for n in (q, zero)} <= {*small}:
            return None  # that op subtracts in this type, and may wrap around
        factor = self._vector(scale, q, node)
        if factor is None or not self._take(factor):
            return None
        return self._subtracted(node, q, zero)


_SCALES = (torch.float32, torch.bfloat16, torch.float16)
