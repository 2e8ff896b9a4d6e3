"""Quantization of an activation, after recognition: the same values by fewer instructions.

The one op of it saturates. A cast to int8 does not: torch leaves open what becomes of a number that
int8 does not hold, and in practice it wraps. So only what is clamped is taken, or certain to fit:
a number divided by a 127th of the largest of its row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import quantize as op
from inductor_quant.ops import row_reduce, w8a8
from inductor_quant.patterns import graph
from inductor_quant.patterns.bounds import constant
from inductor_quant.patterns.canonicalize import erase_if_dead
from inductor_quant.patterns.graph import aten

CAST = torch.ops.prims.convert_element_type.default
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BOUNDS = {
    aten.clamp.default: ("min", "max"),
    aten.clamp_min.default: ("min",),
    aten.clamp_max.default: ("max",),
}


def simplify_quantization(gm: fx.Graph) -> None:
    """Wherever a canonical op reads an activation that the graph quantizes to int8."""
    for node in gm.find_nodes(op="call_function", target=aten.maximum.default):
        _reduce_once(node)
    for node in gm.find_nodes(op="call_function", target=w8a8.op):
        quantized = _behind_reshapes(node.args[0])
        if quantized.target == CAST and graph.value(quantized).dtype == torch.int8:
            _simplify(quantized)


def _reduce_once(node: fx.Node) -> None:
    """``max(-min(amin(x), 0), max(amax(x), 0))``, as torchao writes it, is the largest absolute
    value, by one reduction instead of two."""
    negative, positive = node.args[:2]
    lowest, highest = _limited(_negated(negative), aten.minimum), _limited(positive, aten.maximum)
    if lowest is None or highest is None:
        return
    reductions = (lowest, highest)
    if any(r.target != row_reduce.op or graph.is_mutated(r.args[0]) for r in reductions):  # type: ignore[arg-type]
        return
    same = (lowest.args[0], lowest.args[2]) == (highest.args[0], highest.args[2])
    same &= _is_alike(lowest, node) and _is_alike(highest, node)
    if not same or (lowest.args[1], highest.args[1]) != ("amin", "amax"):
        return
    source, _, keepdim = lowest.args
    if graph.value(source).dtype not in FLOATS:  # type: ignore[arg-type]
        return
    with node.graph.inserting_before(node):
        new = node.graph.call_function(row_reduce.op, (source, "absmax", keepdim))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    erase_if_dead(node)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """In shape and type: nothing was expanded or promoted between the two."""
    x, y = graph.value(a), graph.value(b)
    return x.shape == y.shape and x.dtype == y.dtype


def _negated(node: Any) -> Any:
    return node.args[0] if graph.is_tensor_node(node) and node.target == aten.neg.default else None


def _limited(node: Any, op: Any) -> fx.Node | None:
    """``y`` of ``op(y, 0)``."""
    if not graph.is_tensor_node(node) or node.target != op.default or constant(node.args[1]) != 0:
        return None
    y = node.args[0]
    return y if graph.is_tensor_node(y) and _is_alike(y, node) else None


def _behind_reshapes(node: Any) -> fx.Node:
    while node.target in graph.RESHAPES:
        node = node.args[0]
    return node


def _simplify(cast: fx.Node) -> None:
    """``cast(clamp(round(x / scale)))`` becomes one op; what reads otherwise stays as it is.

    The clamp is exact behind the rounding as before it, its bounds being integers.
    """
    low, high = -math.inf, math.inf
    node: Any = cast.args[0]
    clamped = _bounds(node)
    while clamped is not None and graph.single_user(node) is not None:
        low, high = max(low, clamped[0]), min(high, clamped[1])
        node = node.args[0]
        clamped = _bounds(node)
    is_rounded = node.target == aten.round.default and graph.single_user(node) is not None
    if not is_rounded or low > high or graph.value(node).dtype not in FLOATS:
        return
    x = node.args[0]
    if not math.isfinite(high - low):
        if not _is_held_by_int8(x):
            return
        low, high = max(low, -128.0), min(high, 127.0)
    scale = None
    if x.target == aten.div.Tensor and graph.single_user(x) is node and _divides_rows(x):
        x, scale = x.args
    with cast.graph.inserting_before(cast):
        new = cast.graph.call_function(op.op, (x, scale, int(low), int(high)))
    new.meta = dict(cast.meta)
    cast.replace_all_uses_with(new)
    erase_if_dead(cast)


def _bounds(node: fx.Node) -> tuple[float, float] | None:
    """What a clamp between int8 integers, or open on a side, clamps to."""
    if node.target not in _BOUNDS:
        return None
    names = _BOUNDS[node.target]
    bounds = {"min": -math.inf, "max": math.inf}
    for name, bound in zip(names, graph.arguments(node, "self", *names)[1:], strict=True):
        if bound is None:
            continue
        if bound not in range(-128, 128):  # no number, no integer, or beyond int8, where casts wrap
            return None
        bounds[name] = float(bound)
    return bounds["min"], bounds["max"]


def _divides_rows(node: fx.Node) -> bool:
    """Whether ``node`` divides a tensor by one value for all of a row, in fp32."""
    x, scale = node.args[:2]
    if not graph.is_tensor_node(x) or not graph.is_tensor_node(scale):
        return False
    assert isinstance(x, fx.Node)
    assert isinstance(scale, fx.Node)
    quotient, dividend, divisor = map(graph.value, (node, x, scale))
    is_whole = dividend.dim() == quotient.dim() and all(
        map(graph.same_size, dividend.shape, quotient.shape)
    )
    is_row = divisor.dim() == 0 or graph.is_one(divisor.shape[-1])
    return (
        is_whole
        and is_row
        and quotient.dtype == torch.float32
        and dividend.dtype in FLOATS
        and divisor.dtype == torch.float32
        and not graph.is_mutated(x)  # they are read where the cast stands
        and not graph.is_mutated(scale)
    )


# With the roundings of the steps in fp32, even where divisor and quotient are then rounded to bf16
# (a scale of no dimension is promoted to that), the quotient stays below 127.25, and is rounded to
# 127.
_MOST = 127.0001
_REDUCTIONS = (aten.amax.default, row_reduce.op)


def _is_held_by_int8(quotient: fx.Node) -> bool:
    """Whether it is ``x / (amax(abs(x)) / 127)``, the scale in fp32: at most 127, once rounded.

    (Where the scale is a subnormal number it may be more: then torch says nothing, as for NaN.)
    """
    if len(quotient.args) != 2:
        return False
    x, scale = quotient.args
    if quotient.target == aten.mul.Tensor:
        x, scale = (x, inverted(scale)) if inverted(scale) else (scale, inverted(x))
    elif quotient.target != aten.div.Tensor:
        return False
    if not graph.is_tensor_node(x) or not graph.is_tensor_node(scale):
        return False
    assert isinstance(scale, fx.Node)
    divisor = 1.0
    while scale.target not in _REDUCTIONS:
        step = _step_down(scale)
        if step is None:
            return False
        scale, divisor = step[0], divisor * step[1]
    source, is_absolute = _reduced(scale)
    is_aligned = graph.value(scale).dim() in (0, graph.value(source).dim())
    is_same = before_casts(source) is before_casts(x) and not graph.is_mutated(source)
    return is_absolute and is_aligned and is_same and divisor <= _MOST


def inverted(node: Any) -> Any:
    """``y`` of ``1 / y``, which the graph writes as ``reciprocal(y) * 1``."""
    if isinstance(node, fx.Node) and node.target == aten.mul.Tensor and node.args[1] == 1:
        node = node.args[0]
    is_inverse = isinstance(node, fx.Node) and node.target == aten.reciprocal.default
    return node.args[0] if is_inverse else None


def _step_down(node: fx.Node) -> tuple[fx.Node, float] | None:
    """What a scale is not less than a part of, and that part: 127 of ``y / 127``, 1 of
    ``clamp_min(y, c)``."""
    if not node.args or not graph.is_tensor_node(node.args[0]):
        return None
    (y, *rest), dtype = node.args, graph.value(node).dtype
    before = graph.value(y).dtype  # type: ignore[arg-type]
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
    """What a reduction is of, and whether it is the largest absolute value."""
    source: Any = node.args[0]
    if node.target == row_reduce.op and node.args[1] != "amax":
        return source, node.args[1] == "absmax"
    if source.target == aten.abs.default:
        return source.args[0], True
    return source, False


def before_casts(node: Any) -> Any:
    """Before casts to fp32 and to itself."""
    while node.target == CAST and graph.value(node).dtype == torch.float32:
        node = node.args[0]
    return node
