"""Proves between which values the elements of a node are, and whether they are integers.

Fake quantization has no integer dtype; only this analysis finds it: ``round`` of a value clamped to
-128 ... 127 is an int8. NaN is not considered: it has no quantized value.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..symbolic.expr import FLOAT8, FLOATS, INTEGERS, rounded

MAX_DEPTH = 40
_VIEWS = (
    *(*fx_utils.RESHAPES, *fx_utils.SQUEEZES, aten.expand.default),
    *(aten.permute.default, aten.t.default, aten.transpose.int),
    *(aten.slice.Tensor, aten.select.int),
    *(aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default),
)


@dataclasses.dataclass(frozen=True)
class ValueRange:
    """``low`` <= value <= ``high``, and with ``is_integer`` all values are integers."""

    low: float = -math.inf
    high: float = math.inf
    is_integer: bool = False

    def is_within(self, low: float, high: float) -> bool:
        return low <= self.low and self.high <= high

    def clamped(self, low: float, high: float) -> ValueRange:
        """min(max(value, low), high)."""
        whole = all(math.isinf(end) or end == int(end) for end in (low, high))
        ends = [min(max(end, low), high) for end in (self.low, self.high)]
        return ValueRange(ends[0], ends[1], self.is_integer and whole)

    def held_in(self, dtype: torch.dtype) -> ValueRange:
        """The same values after a cast to ``dtype``."""
        if dtype in INTEGERS:
            info = torch.iinfo(dtype)
            fits = math.isfinite(self.low) and math.isfinite(self.high)
            if fits and info.min <= math.trunc(self.low) and math.trunc(self.high) <= info.max:
                return ValueRange(math.trunc(self.low), math.trunc(self.high), is_integer=True)
            return ValueRange(info.min, info.max, is_integer=True)
        if dtype in FLOAT8 and not self.is_within(-torch.finfo(dtype).max, torch.finfo(dtype).max):
            return ValueRange()  # out of range may become NaN
        if dtype not in (*FLOATS, *FLOAT8):
            return ValueRange()
        # Rounding is monotonic, and a rounded integer is an integer (or infinite).
        low, high = (rounded(end, dtype) for end in (self.low, self.high))
        return ValueRange(low, high, self.is_integer)


_ANY = ValueRange()


def value_range(node: Any) -> ValueRange:
    """The proven range of a node or of a Python number."""
    return _value_range(node, 0, {})


def _value_range(node: Any, depth: int, known: dict[fx.Node, ValueRange]) -> ValueRange:
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return ValueRange(node, node, float(node).is_integer()) if node == node else ValueRange()
    if not fx_utils.is_tensor_node(node):
        return ValueRange()
    if node not in known:
        found = _of_op(node, depth, known) if depth <= MAX_DEPTH else None
        if found is not None and found != _ANY and fx_utils.is_mutated(node):
            found = None
        # an inexact result rounds or wraps around
        known[node] = (found or ValueRange()).held_in(fx_utils.value(node).dtype)
    return known[node]


def constant(node: Any) -> float | None:
    """The one value of all elements; None if they differ or are unknown."""
    if isinstance(node, bool) or node is None:
        return None
    if isinstance(node, (int, float)):
        return node if node == node else None
    found = value_range(node)
    return found.low if found.low == found.high else None


def _of_op(node: fx.Node, depth: int, known: dict[fx.Node, ValueRange]) -> ValueRange | None:
    if node.op == "get_attr":
        return _of_attribute(node)
    if node.op != "call_function":
        return None
    if node.target in _VIEWS:
        return _value_range(node.args[0], depth + 1, known)
    handler = _HANDLERS.get(node.target) or _HANDLERS.get(str(node.target))
    return (
        None if handler is None else handler(node, lambda arg: _value_range(arg, depth + 1, known))
    )


def _of_attribute(node: fx.Node) -> ValueRange | None:
    tensor = fx_utils.attribute(node) if fx_utils.has_fixed_values(node) else None
    if tensor is None or tensor.numel() != 1 or tensor.dtype not in (*INTEGERS, *FLOATS):
        return None
    return value_range(*compat.values_of(tensor))


Ask = Callable[[Any], ValueRange]


def _cast(node: fx.Node, ask: Ask) -> ValueRange | None:
    return ask(node.args[0])


def _round(node: fx.Node, ask: Ask) -> ValueRange | None:
    if node.kwargs.get("decimals", 0) or len(node.args) > 1:
        return None
    x = ask(node.args[0])
    ends = [end if math.isinf(end) else float(round(end)) for end in (x.low, x.high)]
    return ValueRange(ends[0], ends[1], is_integer=True)


def _clamp(node: fx.Node, ask: Ask) -> ValueRange | None:
    """clamp, clamp_min or clamp_max; an end that is given must be known."""
    low, high = _argument(node, "min"), _argument(node, "max")
    below = -math.inf if low is None else constant(low)
    above = math.inf if high is None else constant(high)
    if below is None or above is None:
        return None
    return ask(node.args[0]).clamped(below, above)


def _maximum(node: fx.Node, ask: Ask) -> ValueRange | None:
    return _combined(ask, node.args[:2], max, max)


def _minimum(node: fx.Node, ask: Ask) -> ValueRange | None:
    return _combined(ask, node.args[:2], min, min)


def _where(node: fx.Node, ask: Ask) -> ValueRange | None:
    return _combined(ask, node.args[1:3], min, max)


def _combined(
    ask: Ask, args: Any, low: Callable[..., float], high: Callable[..., float]
) -> ValueRange:
    a, b = map(ask, args)
    return ValueRange(low(a.low, b.low), high(a.high, b.high), a.is_integer and b.is_integer)


def _neg(node: fx.Node, ask: Ask) -> ValueRange | None:
    x = ask(node.args[0])
    return ValueRange(-x.high, -x.low, x.is_integer)


def _abs(node: fx.Node, ask: Ask) -> ValueRange | None:
    x = ask(node.args[0])
    low = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return ValueRange(low, max(abs(x.low), abs(x.high)), x.is_integer)


def _sum(node: fx.Node, ask: Ask) -> ValueRange | None:
    """add or sub."""
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    a, b = map(ask, node.args)
    ends = (b.low, b.high) if node.target == aten.add.Tensor else (-b.high, -b.low)
    low, high = a.low + ends[0], a.high + ends[1]
    if math.isnan(low) or math.isnan(high):
        return None
    return ValueRange(low, high, a.is_integer and b.is_integer)


def _mul(node: fx.Node, ask: Ask) -> ValueRange | None:
    if len(node.args) != 2:
        return None
    a, b = map(ask, node.args)
    ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
    if any(map(math.isnan, ends)):
        return None
    return ValueRange(min(ends), max(ends), a.is_integer and b.is_integer)


def _total(node: fx.Node, ask: Ask) -> ValueRange | None:
    """A sum over one dimension."""
    source, dims = fx_utils.arguments(node, "self", "dim")
    if not isinstance(dims, (list, tuple)) or len(dims) != 1 or not fx_utils.is_tensor_node(source):
        return None
    size = fx_utils.value(source).shape[dims[0]]
    x = ask(source)
    if not isinstance(size, int) or not math.isfinite(x.low) or not math.isfinite(x.high):
        return None
    return ValueRange(size * x.low, size * x.high, x.is_integer)


def may_wrap(node: fx.Node) -> bool:
    """Whether an integer sum or product may overflow its dtype."""
    dtype = fx_utils.value(node).dtype
    if dtype not in INTEGERS:
        return False
    info = torch.iinfo(dtype)
    handler = _HANDLERS.get(node.target)
    found = None if handler is None else handler(node, value_range)
    return found is None or not found.is_within(info.min, info.max)


def _full(node: fx.Node, ask: Ask) -> ValueRange | None:
    value = node.args[1] if node.target == aten.full.default else node.args[0]
    return value_range(value) if isinstance(value, (int, float)) else None


def _quantize(node: fx.Node, ask: Ask) -> ValueRange | None:
    low, high = (_argument(node, name) for name in ("quant_min", "quant_max"))
    if isinstance(low, int) and isinstance(high, int):
        return ValueRange(low, high, is_integer=True)
    return None


def _second(node: fx.Node, ask: Ask) -> ValueRange | None:
    """The second result of an op that chooses a scale and a zero point, or of topk: where its
    values are."""
    source, number = node.args
    if number != 1 or not isinstance(source, fx.Node):
        return None
    if source.target == aten.topk.default:
        scores, _, dim = fx_utils.arguments(source, "self", "k", "dim")
        sizes = fx_utils.value(scores).shape or (1,)
        size = sizes[-1 if dim is None else dim]
        return ValueRange(0, size - 1, is_integer=True) if isinstance(size, int) else None
    if str(source.target) == "quantized_decomposed.choose_qparams_symmetric.tensor":
        is_int8 = _argument(source, "dtype") == torch.int8
        return ValueRange(0, 0, is_integer=True) if is_int8 else None
    if str(source.target) == "quantized_decomposed.choose_qparams_per_token_asymmetric.default":
        return ValueRange(-128, 127, is_integer=True)
    return None


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of this name; None if the op has none, or its call."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return fx_utils.arguments(node, *names)[names.index(name)] if name in names else None


_QUANTIZE = ("quantize_per_tensor.default", "quantize_per_tensor.tensor",
             "quantize_per_tensor.tensor2", "quantize_per_channel.default",
             "quantize_per_token.default")  # fmt: skip
_HANDLERS: dict[Any, Callable[[fx.Node, Ask], ValueRange | None]] = {
    CAST: _cast,
    aten.round.default: _round,
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor), _clamp),
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_min.Tensor), _clamp),
    **dict.fromkeys((aten.clamp_max.default, aten.clamp_max.Tensor), _clamp),
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
    aten.neg.default: _neg,
    aten.abs.default: _abs,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.mul.Tensor: _mul,
    aten.sum.dim_IntList: _total,
    aten.full.default: _full,
    aten.scalar_tensor.default: _full,
    aten.where.self: _where,
    operator.getitem: _second,
    **{f"quantized_decomposed.{name}": _quantize for name in _QUANTIZE},
}
