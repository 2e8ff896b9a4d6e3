"""How an activation was quantized, in words for a report: reads the nodes between it and its
scale.

Decides nothing. What it does not find it leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_quant.decisions import Activation
from inductor_quant.ops import row_reduce
from inductor_quant.patterns import graph
from inductor_quant.patterns.bounds import bounds, constant
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.pattern import Derived, Operand, RecognizedGemm
from inductor_quant.spec import dtype_name

_REDUCTIONS = {aten.amax.default: "amax", aten.amin.default: "amin", row_reduce.op: ""}
_GUARDS: dict[Any, str] = {
    aten.clamp_min.default: "clamp_min",
    aten.clamp.default: "clamp_min",
    aten.maximum.default: "maximum",
    aten.add.Tensor: "add",
}
_SEARCH_LIMIT = 60
# 7 to 9 bits of range: 127, 127.5, 128, 255, 256, or the like
_DIVISORS = (60.0, 300.0)


def describe(found: RecognizedGemm) -> Activation | None:
    """The quantization of the activation of a match; None where that is not of eight bits."""
    q = _node(found.args[0])
    if found.spec.a.dtype != torch.int8 or q is None:
        return None
    values = bounds(q)
    is_byte = not values.is_within(-128, 127) and values.is_within(0, 255)
    recipe = Activation(
        is_dynamic=False,
        granularity=_granularity(found),
        dtype="uint8" if is_byte else "int8",
        is_symmetric=not found.spec.a.zero,
    )
    scale = found.row_scale
    if recipe.granularity == "per_group":
        scale = _node(found.args[2])
    return recipe if scale is None else _with_scale(recipe, scale)


def _node(item: Any) -> fx.Node | None:
    while isinstance(item, (Operand, Derived)):
        item = item.node if isinstance(item, Operand) else item.args[0]
    return item if graph.is_tensor_node(item) else None


def _granularity(found: RecognizedGemm) -> str:
    rows, columns = (-1, -1) if found.spec.a.scale is None else found.spec.a.scale.block
    if rows == -1:
        return "per_tensor"
    return "per_token" if columns == -1 else "per_group"


def _with_scale(recipe: Activation, scale: fx.Node) -> Activation:
    kinds: set[str] = set()
    for node in _upwards(scale):
        if node.target in _REDUCTIONS:
            kind, granularity = _reduction(node)
            kinds.add(kind)
            if recipe.granularity != "per_group":
                recipe = dataclasses.replace(recipe, granularity=granularity)
            recipe = dataclasses.replace(recipe, is_dynamic=True)
        divisor = _divisor(node)
        if divisor is not None and not recipe.divisor:
            dtype = dtype_name(graph.value(node).dtype)
            recipe = dataclasses.replace(recipe, divisor=divisor, scale_dtype=dtype)
        guard = _guard(node)
        if guard and not recipe.guard:
            recipe = dataclasses.replace(recipe, guard=guard)
    if not recipe.is_dynamic:
        return dataclasses.replace(recipe, divisor=0.0, scale_dtype="", guard="")
    statistic = "aminmax" if kinds == {"amin", "amax"} else "".join(kinds)
    return dataclasses.replace(recipe, statistic=statistic)


def _upwards(scale: fx.Node) -> Iterator[fx.Node]:
    """The scale and what it is computed from, up to the reductions."""
    todo, seen = [scale], {scale}
    while todo and len(seen) < _SEARCH_LIMIT:
        node = todo.pop(0)
        yield node
        if node.target in _REDUCTIONS:
            continue
        for parent in node.all_input_nodes:
            is_known = parent.target in _REDUCTIONS or parent.op == "call_function"
            if is_known and parent not in seen:
                seen.add(parent)
                todo.append(parent)


def _reduction(node: fx.Node) -> tuple[str, str]:
    """("amax" or "amin", "per_token" or "per_tensor")."""
    if node.target is row_reduce.op:
        return str(node.args[1]).replace("absmax", "amax"), "per_token"
    source, dims = graph.arguments(node, "self", "dim")
    rank = graph.value(source).dim()
    is_last = isinstance(dims, (list, tuple)) and [d % rank for d in dims] == [rank - 1]
    return _REDUCTIONS[node.target], "per_token" if is_last else "per_tensor"  # type: ignore[index]


def _divisor(node: fx.Node) -> float | None:
    """The number of steps that an extreme value is divided by, in a division or as a factor."""
    if node.target not in (aten.div.Tensor, aten.mul.Tensor) or len(node.args) != 2:
        return None
    for position, arg in enumerate(node.args):
        number = constant(arg)
        if number is None or number == 0:
            continue
        if node.target == aten.mul.Tensor:
            number = 1 / number
        elif position == 0:  # 127 / amax
            continue
        if _DIVISORS[0] <= number <= _DIVISORS[1]:
            return round(number, 3)
    return None


def _guard(node: fx.Node) -> str:
    """What keeps a scale from being 0."""
    if node.target == aten.where.self:
        return "where"
    kind = _GUARDS.get(node.target)
    if kind is None or len(node.args) < 2:
        return ""
    number = constant(node.args[1])
    return f"{kind} {number:.3g}" if number is not None and 0 < number < 1 else ""
