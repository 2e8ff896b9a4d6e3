"""Quantization of an activation, after recognition: the same values by fewer instructions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant.ops import quantize as op
from inductor_quant.ops import w8a8
from inductor_quant.patterns import graph
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
    for node in gm.find_nodes(op="call_function", target=w8a8.op):
        quantized = _behind_reshapes(node.args[0])
        if quantized.target == CAST and graph.value(quantized).dtype == torch.int8:
            _simplify(quantized)


def _behind_reshapes(node: Any) -> fx.Node:
    while node.target in graph.RESHAPES:
        node = node.args[0]
    return node


def _simplify(cast: fx.Node) -> None:
    """``cast(clamp(round(x / scale)))`` becomes one op; what reads otherwise stays as it is.

    The clamp is exact behind the rounding as before it, its bounds being integers.
    """
    low, high = -128.0, 127.0
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
    bounds = {"min": -128.0, "max": 127.0}
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
