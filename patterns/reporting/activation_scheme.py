"""Describe for a report how an activation is quantized, from the nodes that compute its scale.

Decides nothing, and leaves out what it does not find.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_quant.ops.fusion import row_reduce
from inductor_quant.spec.decisions import Activation
from inductor_quant.spec.gemm import dtype_name

from .. import fx_utils
from ..fx_utils import aten
from ..match import Derived, Operand, RecognizedGemm
from ..matching.value_range import constant, value_range

_REDUCTIONS = {aten.amax.default: "amax", aten.amin.default: "amin", row_reduce.op: ""}
_GUARDS: dict[Any, str] = {
    aten.clamp_min.default: "clamp_min",
    aten.clamp.default: "clamp_min",
    aten.maximum.default: "maximum",
    aten.add.Tensor: "add",
}
_CHOICE = "quantized_decomposed.choose_qparams"
_SEARCH_LIMIT = 60
# 7 to 9 bits of range: 127, 127.5, 128, 255, 256
_DIVISORS = (60.0, 300.0)


def describe(found: RecognizedGemm) -> Activation | None:
    """How the activation of a match is quantized; None if not to 8 bits."""
    q = _node(found.args[0])
    if found.spec.a.dtype != torch.int8 or q is None:
        return None
    values = value_range(q)
    is_byte = not values.is_within(-128, 127) and values.is_within(0, 255)
    scheme = Activation(
        is_dynamic=False,
        granularity=_granularity(found),
        dtype="uint8" if is_byte else "int8",
        is_symmetric=not found.spec.a.zero,
    )
    scale = found.row_scale
    if scheme.granularity == "per_group":
        scale = _node(found.args[2])
    return scheme if scale is None else _with_scale(scheme, scale)


def _node(item: Any) -> fx.Node | None:
    while isinstance(item, (Operand, Derived)):
        item = item.node if isinstance(item, Operand) else item.args[0]
    return item if fx_utils.is_tensor_node(item) else None


def _granularity(found: RecognizedGemm) -> str:
    rows, columns = (-1, -1) if found.spec.a.scale is None else found.spec.a.scale.block
    if rows == -1:
        return "per_tensor"
    return "per_token" if columns == -1 else "per_group"


def _with_scale(scheme: Activation, scale: fx.Node) -> Activation:
    kinds: set[str] = set()
    granularity, divisor, dtype, guard = scheme.granularity, 0.0, "", ""
    for node in _upwards(scale):
        if _CHOICE in str(node.target):  # of an op that measures x itself
            kinds |= {"amin", "amax"}
            granularity = "per_token" if "per_token" in str(node.target) else "per_tensor"
        if node.target in _REDUCTIONS:
            kind, extent = _reduction(node)
            kinds.add(kind)
            if granularity != "per_group":
                granularity = extent
        if not divisor and (divisor := _divisor(node)):
            dtype = dtype_name(fx_utils.value(node).dtype)
        guard = guard or _guard(node)
    if not kinds:
        return scheme
    return dataclasses.replace(
        scheme,
        is_dynamic=True,
        granularity=granularity,
        statistic="aminmax" if kinds == {"amin", "amax"} else "".join(kinds),
        divisor=divisor,
        scale_dtype=dtype,
        guard=guard,
    )


def _upwards(scale: fx.Node) -> Iterator[fx.Node]:
    """The scale and the nodes that it is computed from, up to the reductions."""
    todo, seen = [scale], {scale}
    while todo and len(seen) < _SEARCH_LIMIT:
        node = todo.pop(0)
        yield node
        if node.target in _REDUCTIONS:
            continue
        for parent in node.all_input_nodes:
            if parent.op == "call_function" and parent not in seen:
                seen.add(parent)
                todo.append(parent)


def _reduction(node: fx.Node) -> tuple[str, str]:
    """("amax" or "amin", "per_token" or "per_tensor")."""
    if node.target is row_reduce.op:
        return str(node.args[1]).replace("absmax", "amax"), "per_token"
    source, dims = fx_utils.arguments(node, "self", "dim")
    rank = fx_utils.value(source).dim()
    is_last = isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1]
    return _REDUCTIONS[node.target], "per_token" if is_last else "per_tensor"


def _divisor(node: fx.Node) -> float:
    """What an extreme value is divided by, or multiplied by as an inverse; 0: neither."""
    if node.target not in (aten.div.Tensor, aten.mul.Tensor) or len(node.args) != 2:
        return 0.0
    for position, arg in enumerate(node.args):
        number = constant(arg)
        if not number:
            continue
        if node.target == aten.mul.Tensor:
            number = 1 / number
        elif position == 0:  # 127 / amax
            continue
        if _DIVISORS[0] <= number <= _DIVISORS[1]:
            return round(number, 3)
    return 0.0


def _guard(node: fx.Node) -> str:
    """What keeps the scale above 0."""
    if node.target == aten.where.self:
        return "where"
    kind = _GUARDS.get(node.target)
    if kind is None or len(node.args) < 2:
        return ""
    number = constant(node.args[1])
    return f"{kind} {number:.3g}" if number is not None and 0 < number < 1 else ""
