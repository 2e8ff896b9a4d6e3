"""Simplify the quantization of an activation: the same values in fewer instructions.

    cast(clamp(round(x / scale)), int8)           ->   quantize(x, scale, low, high)
    cast(clamp(x / scale, -448, 448), e4m3)       ->   quantize(x, scale)
    max(-min(amin(x), 0), max(amax(x), 0))        ->   row_reduce(x, "absmax")

The op saturates; a cast to int8 does not: torch leaves open what an out-of-range value becomes, and
in practice it wraps. A cast to e4m3 gives NaN. So the pass applies only to clamped values, and to
those that are certain to fit: x divided by absmax(x) / 127, or / 448.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import fp8, w8a8
from inductor_quant.ops.fusion import quantize as op
from inductor_quant.ops.fusion import row_reduce

from .. import fx_utils
from ..fx_utils import aten
from ..matching.value_range import constant
from ..rewrite import add_node
from .row_quant import FLOATS, replace

CAST = torch.ops.prims.convert_element_type.default
_BOUNDS = {
    aten.clamp.default: ("min", "max"),
    aten.clamp_min.default: ("min",),
    aten.clamp_min.Tensor: ("min",),
    aten.clamp_max.default: ("max",),
    aten.clamp_max.Tensor: ("max",),
}
_E4M3 = torch.float8_e4m3fn


def simplify_quantization(owner: fx.Graph) -> None:
    """Simplify every activation that the graph quantizes for a w8a8 or fp8 call."""
    for node in owner.find_nodes(op="call_function", target=aten.maximum.default):
        _reduce_once(node)
    for target, dtype, simplify in (
        (w8a8.op, torch.int8, _simplify),
        (fp8.op, _E4M3, _simplify_float),
    ):
        for node in owner.find_nodes(op="call_function", target=target):
            quantized = _before_reshapes(node.args[0])
            if quantized.target == CAST and fx_utils.value(quantized).dtype == dtype:
                simplify(quantized)


def _reduce_once(node: fx.Node) -> None:
    """torchao's ``max(-min(amin(x), 0), max(amax(x), 0))`` becomes one reduction, and so does
    compressed-tensors' ``max(abs(min(amin(x), 0)), abs(max(amax(x), 0)))``."""
    negative, positive = node.args[:2]
    lowest = _limited(_argument_of(negative, aten.neg.default, aten.abs.default), aten.minimum)
    highest = _limited(_argument_of(positive, aten.abs.default) or positive, aten.maximum)
    if lowest is None or highest is None:
        return
    if not _is_alike(lowest, node) or not _is_alike(highest, node):
        return
    targets = (lowest.target, highest.target)
    if targets not in ((row_reduce.op, row_reduce.op), (aten.amin.default, aten.amax.default)):
        return
    source, *how = lowest.args
    if fx_utils.is_mutated(source) or fx_utils.value(source).dtype not in FLOATS:  # type: ignore[arg-type]
        return
    if lowest.target == row_reduce.op:
        kind, keepdim = how
        if kind == "amin" and highest.args == (source, "amax", keepdim):
            replace(node, row_reduce.op, source, "absmax", keepdim)
    elif lowest.args == highest.args and lowest.kwargs == highest.kwargs:  # of groups
        with node.graph.inserting_before(node):
            absolute = add_node(source, aten.abs.default, (source,), {})  # type: ignore[arg-type]
        replace(node, aten.amax.default, absolute, *how, **lowest.kwargs)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """Equal in shape and dtype: nothing was expanded or promoted between the two."""
    x, y = fx_utils.value(a), fx_utils.value(b)
    return x.shape == y.shape and x.dtype == y.dtype


def _argument_of(node: Any, *ops: Any) -> Any:
    """``y`` of ``op(y)`` for one of ``ops``."""
    return node.args[0] if fx_utils.is_tensor_node(node) and node.target in ops else None


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
    node, low, high, dtypes = _unclamped(cast, range(-128, 128))
    is_rounded = node.target == aten.round.default and fx_utils.single_user(node) is not None
    if not is_rounded or low > high or dtypes or fx_utils.value(node).dtype not in FLOATS:
        return
    x = node.args[0]
    if not math.isfinite(high - low):
        if not _is_held(x, _MOST):
            return
        low, high = max(low, -128.0), min(high, 127.0)
    scale = None
    is_single = x.target == aten.div.Tensor and fx_utils.single_user(x) is node
    if is_single and _divides_rows(x) and fx_utils.value(x.args[1]).dtype == torch.float32:
        x, scale = x.args
    replace(cast, op.op, x, scale, int(low), int(high), dtype=torch.int8)


def _simplify_float(cast: fx.Node) -> None:
    """Replace ``cast(clamp(x / scale))``, if it reads so, by one op: where scale has one value for
    each row, and the casts in between keep the quotient's values."""
    quotient, low, high, dtypes = _unclamped(cast, (-_LARGEST, _LARGEST))
    is_single = quotient.target == aten.div.Tensor and fx_utils.single_user(quotient) is not None
    if not is_single or not _divides_rows(quotient):
        return
    if not dtypes <= {torch.float32, fx_utils.value(quotient).dtype}:
        return
    if (low, high) == (-_LARGEST, _LARGEST) or _is_held(quotient, _MOST_FLOAT):
        x, scale = quotient.args
        replace(cast, op.op, before_casts(x), scale, dtype=_E4M3)


def _unclamped(
    cast: fx.Node, allowed: Container[float]
) -> tuple[Any, float, float, set[torch.dtype]]:
    """What ``cast`` casts, before it is clamped: the value, the bounds, infinite where they are
    open, and the dtypes of casts in between. No other node reads what is in between."""
    low, high, dtypes = -math.inf, math.inf, set()
    node: Any = cast.args[0]
    while fx_utils.single_user(node) is not None:
        if node.target == CAST and fx_utils.value(node).dtype in FLOATS:
            dtypes.add(fx_utils.value(node).dtype)
        elif (clamped := _bounds(node, allowed)) is not None:
            low, high = max(low, clamped[0]), min(high, clamped[1])
        else:
            break
        node = node.args[0]
    return node, low, high, dtypes


def _bounds(node: fx.Node, allowed: Container[float]) -> tuple[float, float] | None:
    """The bounds of a clamp, of ``allowed`` numbers, infinite where it is open."""
    if node.target not in _BOUNDS or not _is_alike(node, node.args[0]):  # type: ignore[arg-type]
        return None
    names = _BOUNDS[node.target]
    bounds = {"min": -math.inf, "max": math.inf}
    for name, bound in zip(names, fx_utils.arguments(node, "self", *names)[1:], strict=True):
        if bound is None:
            continue
        number = constant(bound)
        if number is None or number not in allowed:
            return None
        bounds[name] = float(number)
    return bounds["min"], bounds["max"]


def _divides_rows(node: fx.Node) -> bool:
    """Whether ``node`` divides each row by one value, in the dtype that both promote to; casts of
    the dividend to fp32 do not count."""
    x, scale = before_casts(node.args[0]), node.args[1]
    if not fx_utils.is_tensor_node(x) or not fx_utils.is_tensor_node(scale):
        return False
    assert isinstance(scale, fx.Node)
    quotient, dividend, divisor = map(fx_utils.value, (node, x, scale))
    is_whole = dividend.dim() == quotient.dim() and all(
        map(fx_utils.same_size, dividend.shape, quotient.shape)
    )
    is_row = divisor.dim() == 0 or fx_utils.is_one(divisor.shape[-1])
    return (
        is_whole
        and is_row
        and dividend.dtype in FLOATS
        and divisor.dtype in FLOATS
        and quotient.dtype == torch.promote_types(dividend.dtype, divisor.dtype)
        and not fx_utils.is_mutated(x)  # the new op reads both later
        and not fx_utils.is_mutated(scale)
    )


# With every op rounded in fp32, and even with divisor and quotient rounded to bf16 (to which a 0-d
# scale is promoted), the quotient stays below 127.25, which rounds to 127.
_MOST = 127.0001
# e4m3 rounds what is below 464 to 448, its largest number.
_LARGEST, _MOST_FLOAT = 448.0, 448.001
_REDUCTIONS = (aten.amax.default, row_reduce.op)


def _is_held(quotient: fx.Node, most: float) -> bool:
    """Whether it is ``x / (absmax(x) / most)``, the scale in fp32: at most ``most`` once rounded.

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
    return is_absolute and is_aligned and is_same and divisor <= most


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
