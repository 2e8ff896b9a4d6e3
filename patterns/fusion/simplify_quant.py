"""Simplify the int8 quantization of an activation: the same values in fewer instructions.

    cast(clamp(round(x / scale)), int8)           ->   quantize(x, scale, low, high)
    max(-min(amin(x), 0), max(amax(x), 0))        ->   row_reduce(x, "absmax")

The op saturates; a cast to int8 does not: torch leaves open what an out-of-range value becomes, and
in practice it wraps. So the pass applies only to clamped values, and to those that are certain to
fit: x divided by absmax(x) / 127.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import quantize as op
from inductor_quant.ops import row_reduce, w8a8

from .. import fx_utils
from ..fx_utils import aten
from ..matching.value_range import constant
from .row_quant import FLOATS, replace

CAST = torch.ops.prims.convert_element_type.default
_BOUNDS = {
    aten.clamp.default: ("min", "max"),
    aten.clamp_min.default: ("min",),
    aten.clamp_max.default: ("max",),
}


def simplify_quantization(owner: fx.Graph) -> None:
    """Simplify every activation that the graph quantizes to int8 for a w8a8 call."""
    for node in owner.find_nodes(op="call_function", target=aten.maximum.default):
        _reduce_once(node)
    for node in owner.find_nodes(op="call_function", target=w8a8.op):
        quantized = _before_reshapes(node.args[0])
        if quantized.target == CAST and fx_utils.value(quantized).dtype == torch.int8:
            _simplify(quantized)


def _reduce_once(node: fx.Node) -> None:
    """torchao's ``max(-min(amin(x), 0), max(amax(x), 0))`` becomes one reduction."""
    negative, positive = node.args[:2]
    lowest, highest = _limited(_negated(negative), aten.minimum), _limited(positive, aten.maximum)
    if lowest is None or highest is None:
        return
    if any(r.target != row_reduce.op or not _is_alike(r, node) for r in (lowest, highest)):
        return
    source, kind, keepdim = lowest.args
    if kind != "amin" or highest.args != (source, "amax", keepdim):
        return
    if fx_utils.is_mutated(source) or fx_utils.value(source).dtype not in FLOATS:  # type: ignore[arg-type]
        return
    replace(node, row_reduce.op, source, "absmax", keepdim)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """Equal in shape and dtype: nothing was expanded or promoted between the two."""
    x, y = fx_utils.value(a), fx_utils.value(b)
    return x.shape == y.shape and x.dtype == y.dtype


def _negated(node: Any) -> Any:
    is_negated = fx_utils.is_tensor_node(node) and node.target == aten.neg.default
    return node.args[0] if is_negated else None


def _limited(node: Any, op: Any) -> fx.Node | None:
    """``y`` of ``op(y, 0)``."""
    is_op = fx_utils.is_tensor_node(node) and node.target == op.default
    if not is_op or constant(node.args[1]) != 0:
        return None
    y = node.args[0]
    return y if fx_utils.is_tensor_node(y) and _is_alike(y, node) else None


def _before_reshapes(node: Any) -> fx.Node:
    while node.target in fx_utils.RESHAPES:
        node = node.args[0]
    return node


def _simplify(cast: fx.Node) -> None:
    """Replace ``cast(clamp(round(x / scale)))``, if it reads so, by one op.

    The bounds are integers, so the clamp is exact before and after rounding.
    """
    low, high = -math.inf, math.inf
    node: Any = cast.args[0]
    clamped = _bounds(node)
    while clamped is not None and fx_utils.single_user(node) is not None:
        low, high = max(low, clamped[0]), min(high, clamped[1])
        node = node.args[0]
        clamped = _bounds(node)
    is_rounded = node.target == aten.round.default and fx_utils.single_user(node) is not None
    if not is_rounded or low > high or fx_utils.value(node).dtype not in FLOATS:
        return
    x = node.args[0]
    if not math.isfinite(high - low):
        if not _is_held_by_int8(x):
            return
        low, high = max(low, -128.0), min(high, 127.0)
    scale = None
    if x.target == aten.div.Tensor and fx_utils.single_user(x) is node and _divides_rows(x):
        x, scale = x.args
    replace(cast, op.op, x, scale, int(low), int(high))


def _bounds(node: fx.Node) -> tuple[float, float] | None:
    """The bounds of a clamp between int8 integers, infinite where it is open."""
    if node.target not in _BOUNDS:
        return None
    names = _BOUNDS[node.target]
    bounds = {"min": -math.inf, "max": math.inf}
    for name, bound in zip(names, fx_utils.arguments(node, "self", *names)[1:], strict=True):
        if bound is None:
            continue
        if bound not in range(-128, 128):  # no integer, or beyond int8, where casts wrap
            return None
        bounds[name] = float(bound)
    return bounds["min"], bounds["max"]


def _divides_rows(node: fx.Node) -> bool:
    """Whether ``node`` divides each row by one value, in fp32."""
    x, scale = node.args[:2]
    if not fx_utils.is_tensor_node(x) or not fx_utils.is_tensor_node(scale):
        return False
    assert isinstance(x, fx.Node)
    assert isinstance(scale, fx.Node)
    quotient, dividend, divisor = map(fx_utils.value, (node, x, scale))
    is_whole = dividend.dim() == quotient.dim() and all(
        map(fx_utils.same_size, dividend.shape, quotient.shape)
    )
    is_row = divisor.dim() == 0 or fx_utils.is_one(divisor.shape[-1])
    return (
        is_whole
        and is_row
        and quotient.dtype == torch.float32
        and dividend.dtype in FLOATS
        and divisor.dtype == torch.float32
        and not fx_utils.is_mutated(x)  # the new op reads both later
        and not fx_utils.is_mutated(scale)
    )


# With every op rounded in fp32, and even with divisor and quotient rounded to bf16 (to which a 0-d
# scale is promoted), the quotient stays below 127.25, which rounds to 127.
_MOST = 127.0001
_REDUCTIONS = (aten.amax.default, row_reduce.op)


def _is_held_by_int8(quotient: fx.Node) -> bool:
    """Whether it is ``x / (absmax(x) / 127)``, the scale in fp32: at most 127 once rounded.

    A subnormal scale may give more; torch leaves that open, as for NaN.
    """
    if len(quotient.args) != 2:
        return False
    x, scale = quotient.args
    if quotient.target == aten.mul.Tensor:
        x, scale = (x, inverted(scale)) if inverted(scale) else (scale, inverted(x))
    elif quotient.target != aten.div.Tensor:
        return False
    if not fx_utils.is_tensor_node(x) or not fx_utils.is_tensor_node(scale):
        return False
    assert isinstance(scale, fx.Node)
    divisor = 1.0
    while scale.target not in _REDUCTIONS:
        found = _lower_bound(scale)
        if found is None:
            return False
        scale, divisor = found[0], divisor * found[1]
    source, is_absolute = _reduced(scale)
    is_aligned = fx_utils.value(scale).dim() in (0, fx_utils.value(source).dim())
    is_same = before_casts(source) is before_casts(x) and not fx_utils.is_mutated(source)
    return is_absolute and is_aligned and is_same and divisor <= _MOST


def inverted(node: Any) -> Any:
    """``y`` of ``1 / y``, which the graph writes as ``reciprocal(y) * 1``."""
    if isinstance(node, fx.Node) and node.target == aten.mul.Tensor and node.args[1] == 1:
        node = node.args[0]
    is_inverse = isinstance(node, fx.Node) and node.target == aten.reciprocal.default
    return node.args[0] if is_inverse else None


def _lower_bound(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(y, c) with ``node >= y / c``: (y, 127) of ``y / 127``, (y, 1) of ``clamp_min(y, _)``."""
    if not node.args or not fx_utils.is_tensor_node(node.args[0]):
        return None
    (y, *rest), dtype = node.args, fx_utils.value(node).dtype
    before = fx_utils.value(y).dtype  # type: ignore[arg-type]
    if node.target == CAST and dtype == torch.float32 and before in FLOATS:
        return y, 1.0  # type: ignore[return-value]
    if dtype not in FLOATS or before != dtype or len(rest) != 1 or node.kwargs:
        return None
    if node.target in (aten.clamp_min.default, aten.maximum.default):
        return y, 1.0  # type: ignore[return-value]
    number = constant(rest[0]) or 0.0
    if dtype != torch.float32 or not number > 0:
        return None
    parts = {aten.add.Tensor: 1.0, aten.div.Tensor: number, aten.mul.Tensor: 1 / number}
    return (y, parts[node.target]) if node.target in parts else None  # type: ignore[return-value]


def _reduced(node: fx.Node) -> tuple[fx.Node, bool]:
    """The input of a reduction, and whether that is an absmax."""
    source: Any = node.args[0]
    if node.target == row_reduce.op and node.args[1] != "amax":
        return source, node.args[1] == "absmax"
    if source.target == aten.abs.default:
        return source.args[0], True
    return source, False


def before_casts(node: Any) -> Any:
    """``node`` without the casts to fp32."""
    while node.target == CAST and fx_utils.value(node).dtype == torch.float32:
        node = node.args[0]
    return node
