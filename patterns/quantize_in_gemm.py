"""The quantization of an activation becomes part of the GEMM that alone reads it, for few rows.

    w8a8(round_to_int8(x, scale), b, scale, ...)  ->  w8a8_linear(x, b, ...)

where ``scale`` is stored, or computed of the largest absolute value of each row of x in steps that
are written down (``scale_recipe``). Whether there is a kernel for both, and whether it pays, is for
the lowering to say: without one the op is lowered to the ops that it stands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_quant import report, scale_recipe
from inductor_quant.ops import quantize, row_reduce, w8a8, w8a8_linear
from inductor_quant.patterns import graph
from inductor_quant.patterns.bounds import constant
from inductor_quant.patterns.canonicalize import add_node, erase_if_dead
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.quantize import CAST, FLOATS, before_casts, inverted
from inductor_quant.scale_recipe import Step

_STEPS = {
    aten.add.Tensor: "add",
    aten.clamp_min.default: "clamp_min",
    aten.div.Tensor: "div",
    aten.maximum.default: "clamp_min",
    aten.mul.Tensor: "mul",
}
_VIEWS = (*graph.RESHAPES, aten.unsqueeze.default)


@dataclasses.dataclass(frozen=True)
class _Quantized:
    """``round_to_int8(x, scale, low, high)``; ``recipe`` makes the scale; None: it is stored."""

    x: fx.Node
    recipe: tuple[Step, ...] | None
    low: int
    high: int


def quantize_in_gemms(owner: fx.Graph) -> int:
    """Returns how many GEMMs may quantize their activation themselves."""
    count = 0
    for call in owner.find_nodes(op="call_function", target=w8a8.op):
        found = _read(call)
        if found is not None:
            _replace(call, found)
            count += 1
    return count


def _read(call: fx.Node) -> _Quantized | None:
    rows = graph.value(call).shape[0]
    if not isinstance(rows, int) or not 0 < rows <= w8a8_linear.MAX_ROWS:
        return None
    a, _, a_scale, b_scale, *rest = call.args
    has_zeros = any(zero is not None for zero in rest[1:]) or call.kwargs.get("a_zero")
    if a_scale is None or has_zeros or _has_groups(a_scale, 1) or _has_groups(b_scale, 0):
        return None
    q: Any = a
    while graph.single_user(q) is not None and q.target in graph.RESHAPES:
        q = q.args[0]
    if q.target != quantize.op or graph.single_user(q) is None:
        return None
    x, scale, low, high = q.args
    if scale is None and x.target == aten.mul.Tensor:
        x, scale = _product_with_inverse(x)
    is_divided = graph.is_tensor_node(x) and graph.is_tensor_node(scale)
    if not is_divided or _same_values(scale) is not _same_values(a_scale):
        return None
    is_row = graph.same_size(graph.value(x).shape[-1], graph.value(a).shape[-1])  # type: ignore[arg-type]
    if graph.value(scale).dtype != torch.float32 or not is_row or not _is_of_rows(scale, x):
        return None
    x, recipe = before_casts(x), _recipe(scale, x)
    is_stored = _same_values(scale).op in ("placeholder", "get_attr")
    if (recipe is None and not is_stored) or graph.value(x).dtype not in FLOATS:
        return None
    if any(map(graph.is_mutated, (x, scale))):  # they are read where the GEMM stands
        return None
    return _Quantized(x, recipe, low, high)


def _has_groups(scale: Any, dim: int) -> bool:
    """Whether a scale of the GEMM varies along K."""
    return scale is not None and not graph.is_one(graph.value(scale).shape[dim])


def _product_with_inverse(product: fx.Node) -> tuple[Any, Any]:
    """x and scale of ``x * (1 / scale)``, in either order, in fp32."""
    x, factor = product.args[:2]
    if inverted(factor) is None:
        x, factor = factor, x
    is_float = graph.value(product).dtype == torch.float32
    return (x, inverted(factor)) if is_float else (None, None)


def _is_of_rows(scale: fx.Node, x: fx.Node) -> bool:
    """Whether it is one value, or one for each row of ``x``."""
    of, shape = graph.value(x).shape, graph.value(scale).shape
    if all(map(graph.is_one, shape)):
        return True
    return len(shape) == len(of) and all(map(graph.same_size, shape, (*of[:-1], 1)))


def _same_values(node: Any) -> Any:
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _recipe(scale: fx.Node, x: fx.Node) -> tuple[Step, ...] | None:
    """The steps from the largest absolute value of each row of ``x`` to ``scale``."""
    steps: list[Step] = []
    node = _same_values(scale)
    while node.target != row_reduce.op:
        step = _step(node)
        if step is None:
            return None
        steps.insert(0, step)
        node = _same_values(node.args[0])
    source, kind = node.args[:2]
    if kind != "absmax" or before_casts(source) is not before_casts(x):
        return None
    dtype = graph.value(node).dtype
    if dtype != graph.value(before_casts(x)).dtype:
        steps.insert(0, Step("to", dtype=dtype))
    return tuple(steps)


def _step(node: fx.Node) -> Step | None:
    if not node.args or not graph.is_tensor_node(node.args[0]):
        return None
    before, *rest = node.args
    dtype = graph.value(node).dtype
    is_alike = graph.value(before).shape == graph.value(node).shape  # type: ignore[arg-type]
    if not is_alike or graph.value(before).dtype not in FLOATS or dtype not in FLOATS:  # type: ignore[arg-type]
        return None
    if node.target == CAST:
        return Step("to", dtype=dtype)
    number = constant(rest[0]) if len(rest) == 1 and not node.kwargs else None
    is_plain = node.target in _STEPS and graph.value(before).dtype == dtype  # type: ignore[arg-type]
    if number is None or not is_plain or not scale_recipe.holds(number):
        return None
    return Step(_STEPS[node.target], float(number))  # type: ignore[index]


def _replace(call: fx.Node, found: _Quantized) -> None:
    a, b, a_scale, b_scale, bias = (*call.args, None, None)[:5]
    assert isinstance(a, fx.Node)
    shape = graph.value(a).shape
    with call.graph.inserting_before(call):
        x = found.x
        if graph.value(x).shape != shape:
            x = add_node(x, aten.reshape.default, (x, list(shape)), {})
        is_dynamic = found.recipe is not None
        args = (x, b, None if is_dynamic else a_scale, b_scale, bias)
        kwargs = {
            "recipe": list(map(str, found.recipe or ())),
            "low": found.low,
            "high": found.high,
            "alpha": call.kwargs.get("alpha", 1.0),
            "out_dtype": call.kwargs["out_dtype"],
        }
        new = add_node(call, w8a8_linear.op, args, kwargs)
    report.add(report.Grouped(new.name, (call.name,)))
    call.replace_all_uses_with(new)
    erase_if_dead(call)
