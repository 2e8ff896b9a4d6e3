"""What is certain about the values of a node: between which numbers they lie, and whether they are
integers.

A quantizer that has no integer type (fake quantization) is seen by this alone: ``round`` of what is
clamped to -128 ... 127. NaN is not considered: what is quantized must be a number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant import _torch_compat as compat
from inductor_quant.patterns import graph
from inductor_quant.patterns.expression import FLOAT8, FLOATS, INTEGERS
from inductor_quant.patterns.graph import aten

prims = torch.ops.prims
MAX_DEPTH = 40
_VIEWS = (
    *graph.RESHAPES,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """``low`` <= value <= ``high``, and with ``is_integer`` all values are integers."""

    low: float = -math.inf
    high: float = math.inf
    is_integer: bool = False

    def is_within(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high

    def clamped(self, low: float, high: float) -> Bounds:
        """min(max(value, low), high)."""
        whole = all(math.isinf(end) or end == int(end) for end in (low, high))
        ends = [min(max(end, low), high) for end in (self.low, self.high)]
        return Bounds(ends[0], ends[1], self.is_integer and whole)

    def held_in(self, dtype: torch.dtype) -> Bounds:
        """The same values as they are once they are stored in ``dtype``."""
        if dtype in INTEGERS:
            info = torch.iinfo(dtype)
            fits = math.isfinite(self.low) and math.isfinite(self.high)
            if fits and info.min <= math.trunc(self.low) and math.trunc(self.high) <= info.max:
                return Bounds(math.trunc(self.low), math.trunc(self.high), is_integer=True)
            return Bounds(info.min, info.max, is_integer=True)
        if dtype in FLOAT8 and not self.is_within(-torch.finfo(dtype).max, torch.finfo(dtype).max):
            return Bounds()  # what is beyond may be a NaN
        if dtype not in (*FLOATS, *FLOAT8):
            return Bounds()
        # Rounding is monotonic; an integer stays one, exact or not, unless it becomes infinite.
        low, high = (torch.tensor(end, dtype=dtype).item() for end in (self.low, self.high))
        return Bounds(low, high, self.is_integer)


def bounds(node: Any) -> Bounds:
    """What is certain about the values of a node, or of a number."""
    return _bounds(node, 0, {})


def _bounds(node: Any, depth: int, known: dict[fx.Node, Bounds]) -> Bounds:
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return Bounds(node, node, float(node).is_integer()) if node == node else Bounds()
    if not graph.is_tensor_node(node):
        return Bounds()
    if node not in known:
        found = _of_op(node, depth, known) if depth <= MAX_DEPTH else None
        if found is not None and graph.is_mutated(node):
            found = None
        # An op whose exact result is not representable rounds, or wraps around.
        known[node] = (found or Bounds()).held_in(graph.value(node).dtype)
    return known[node]


def constant(node: Any) -> float | None:
    """The value of what is the same number everywhere; None where it is not, or is unknown."""
    if isinstance(node, bool) or node is None:
        return None
    if isinstance(node, (int, float)):
        return node if node == node else None
    found = bounds(node)
    return found.low if found.low == found.high else None


def _of_op(node: fx.Node, depth: int, known: dict[fx.Node, Bounds]) -> Bounds | None:
    if node.op == "get_attr":
        return _of_attribute(node)
    if node.op != "call_function":
        return None
    if node.target in _VIEWS:
        return _bounds(node.args[0], depth + 1, known)
    handler = _HANDLERS.get(node.target) or _HANDLERS.get(str(node.target))
    return None if handler is None else handler(node, lambda arg: _bounds(arg, depth + 1, known))


def _of_attribute(node: fx.Node) -> Bounds | None:
    tensor = graph.attribute(node) if graph.has_fixed_values(node) else None
    if tensor is None or tensor.numel() != 1 or tensor.dtype not in (*INTEGERS, *FLOATS):
        return None
    return bounds(*compat.values_of(tensor))


Ask = Callable[[Any], Bounds]


def _cast(node: fx.Node, ask: Ask) -> Bounds | None:
    return ask(node.args[0])


def _round(node: fx.Node, ask: Ask) -> Bounds | None:
    if node.kwargs.get("decimals", 0) or len(node.args) > 1:
        return None
    x = ask(node.args[0])
    ends = [end if math.isinf(end) else float(round(end)) for end in (x.low, x.high)]
    return Bounds(ends[0], ends[1], is_integer=True)


def _clamp(node: fx.Node, ask: Ask) -> Bounds | None:
    x, low, high = graph.arguments(node, "self", "min", "max")
    return _between(ask(x), low, high)


def _clamp_min(node: fx.Node, ask: Ask) -> Bounds | None:
    x, low = graph.arguments(node, "self", "min")
    return _between(ask(x), low, None)


def _clamp_max(node: fx.Node, ask: Ask) -> Bounds | None:
    x, high = graph.arguments(node, "self", "max")
    return _between(ask(x), None, high)


def _between(x: Bounds, low: Any, high: Any) -> Bounds:
    ends = [None if end is None else constant(end) for end in (low, high)]
    below = -math.inf if ends[0] is None else ends[0]
    above = math.inf if ends[1] is None else ends[1]
    found = x.clamped(below, above)
    is_known = all(
        (end is None) == (value is None) for end, value in zip((low, high), ends, strict=True)
    )
    return found if is_known else Bounds()


def _maximum(node: fx.Node, ask: Ask) -> Bounds | None:
    a, b = map(ask, node.args[:2])
    return Bounds(max(a.low, b.low), max(a.high, b.high), a.is_integer and b.is_integer)


def _minimum(node: fx.Node, ask: Ask) -> Bounds | None:
    a, b = map(ask, node.args[:2])
    return Bounds(min(a.low, b.low), min(a.high, b.high), a.is_integer and b.is_integer)


def _neg(node: fx.Node, ask: Ask) -> Bounds | None:
    x = ask(node.args[0])
    return Bounds(-x.high, -x.low, x.is_integer)


def _abs(node: fx.Node, ask: Ask) -> Bounds | None:
    x = ask(node.args[0])
    low = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return Bounds(low, max(abs(x.low), abs(x.high)), x.is_integer)


def _add(node: fx.Node, ask: Ask) -> Bounds | None:
    return _sum(node, ask, 1)


def _sub(node: fx.Node, ask: Ask) -> Bounds | None:
    return _sum(node, ask, -1)


def _sum(node: fx.Node, ask: Ask, sign: int) -> Bounds | None:
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    a, b = map(ask, node.args)
    ends = (b.low, b.high) if sign > 0 else (-b.high, -b.low)
    low, high = a.low + ends[0], a.high + ends[1]
    if math.isnan(low) or math.isnan(high):
        return None
    return Bounds(low, high, a.is_integer and b.is_integer)


def _mul(node: fx.Node, ask: Ask) -> Bounds | None:
    if len(node.args) != 2:
        return None
    a, b = map(ask, node.args)
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    if any(map(math.isnan, ends)):
        return None
    return Bounds(min(ends), max(ends), a.is_integer and b.is_integer)


def _total(node: fx.Node, ask: Ask) -> Bounds | None:
    """A sum over one dimension."""
    source, dims = graph.arguments(node, "self", "dim")
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or not graph.is_tensor_node(source):
        return None
    size = graph.value(source).shape[dims[0]]
    x = ask(source)
    if not isinstance(size, int) or not math.isfinite(x.low) or not math.isfinite(x.high):
        return None
    return Bounds(size * x.low, size * x.high, x.is_integer)


def may_wrap(node: fx.Node) -> bool:
    """Whether an integer sum or product may leave the range of its type."""
    dtype = graph.value(node).dtype
    if dtype not in INTEGERS:
        return False
    info = torch.iinfo(dtype)
    handler = _HANDLERS.get(node.target)
    found = None if handler is None else handler(node, bounds)
    return found is None or not found.is_within(info.min, info.max)


def _full(node: fx.Node, ask: Ask) -> Bounds | None:
    value = node.args[1] if node.target == aten.full.default else node.args[0]
    return bounds(value) if isinstance(value, (int, float)) else None


def _where(node: fx.Node, ask: Ask) -> Bounds | None:
    a, b = map(ask, node.args[1:3])
    return Bounds(min(a.low, b.low), max(a.high, b.high), a.is_integer and b.is_integer)


def _quantize(node: fx.Node, ask: Ask) -> Bounds | None:
    low, high = (_argument(node, name) for name in ("quant_min", "quant_max"))
    if isinstance(low, int) and isinstance(high, int):
        return Bounds(low, high, is_integer=True)
    return None


def _argument(node: fx.Node, name: str) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return graph.arguments(node, *names)[names.index(name)]


_QUANTIZE = ("quantize_per_tensor.default", "quantize_per_tensor.tensor",
             "quantize_per_tensor.tensor2", "quantize_per_channel.default",
             "quantize_per_token.default")  # fmt: skip
_HANDLERS: dict[Any, Callable[[fx.Node, Ask], Bounds | None]] = {
    prims.convert_element_type.default: _cast,
    aten.round.default: _round,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp_min,
    aten.clamp_min.Tensor: _clamp_min,
    aten.clamp_max.default: _clamp_max,
    aten.clamp_max.Tensor: _clamp_max,
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
    aten.neg.default: _neg,
    aten.abs.default: _abs,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _mul,
    aten.sum.dim_IntList: _total,
    aten.full.default: _full,
    aten.scalar_tensor.default: _full,
    aten.where.self: _where,
    **{f"quantized_decomposed.{name}": _quantize for name in _QUANTIZE},
}
