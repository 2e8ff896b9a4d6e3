"""Quantize the activation inside the GEMM that alone reads it.

    a = quantize(x, scale)
    w8a8(a, b, scale, ...)     ->    quantized_linear(x, b, ...)

The same of ``fp8``. Applies to M <= ``MAX_ROWS`` of ``ops/fusion/quantized_linear``, if the scale
is stored, or is computed from the absmax of each row of x by a few ops (``spec/row_scale.py``):
every CTA recomputes it while its weights load. The lowering decides whether a kernel exists and
pays; otherwise it lowers the op to the ops that it stands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import fp8, w8a8
from inductor_quant.ops.fusion import quantize, quantized_linear, row_reduce
from inductor_quant.report import events
from inductor_quant.spec import row_scale
from inductor_quant.spec.row_scale import ScaleOp

from .. import fx_utils
from ..fx_utils import aten
from ..matching.value_range import constant
from ..rewrite import add_node, erase_if_dead
from .row_quant import FLOATS
from .simplify_quant import CAST, before_casts, inverted

_SCALE_OPS = {
    aten.add.Tensor: "add",
    aten.clamp_min.default: "clamp_min",
    aten.div.Tensor: "div",
    aten.maximum.default: "clamp_min",
    aten.mul.Tensor: "mul",
}
_KEPT = ("alpha", "fast_accum", "out_dtype")
_VIEWS = (*fx_utils.RESHAPES, aten.unsqueeze.default)


@dataclasses.dataclass(frozen=True)
class _Quantized:
    """``quantize(x, scale, *bounds, dtype)``; ``scale_ops``: None if scale is stored."""

    x: fx.Node
    scale_ops: tuple[ScaleOp, ...] | None
    dtype: torch.dtype
    bounds: tuple[int, ...]


def quantize_in_gemms(owner: fx.Graph) -> int:
    """Returns how many GEMMs were rewritten."""
    count = 0
    for target in (w8a8.op, fp8.op):
        for call in owner.find_nodes(op="call_function", target=target):
            found = _read(call)
            if found is not None:
                _replace(call, found)
                count += 1
    return count


def _read(call: fx.Node) -> _Quantized | None:
    most = fx_utils.limit(fx_utils.value(call).shape[0])
    if most is None or not 0 < most <= quantized_linear.MAX_ROWS:
        return None
    a, _, a_scale, b_scale, *rest = call.args
    has_zeros = any(zero is not None for zero in rest[1:]) or call.kwargs.get("a_zero")
    if a_scale is None or has_zeros or _varies_along_k(a_scale, 1) or _varies_along_k(b_scale, 0):
        return None
    q: Any = a
    while fx_utils.single_user(q) is not None and q.target in fx_utils.RESHAPES:
        q = q.args[0]
    if q.target != quantize.op or fx_utils.single_user(q) is None:
        return None
    x, scale, *bounds = q.args
    dtype = q.kwargs["dtype"]
    if scale is None and x.target == aten.mul.Tensor:
        x, scale = _product_with_inverse(x)
    if not fx_utils.is_tensor_node(x) or not fx_utils.is_tensor_node(scale):
        return None
    # The kernel has one scale, for the quantization and for the result.
    origin, given = _before_views(scale), _before_views(a_scale)
    is_stored = origin.op in ("placeholder", "get_attr")
    is_widened = not is_stored and origin is _before_views(before_casts(given))
    if origin is not given and not is_widened:
        return None
    is_row = fx_utils.same_size(fx_utils.value(x).shape[-1], fx_utils.value(a).shape[-1])  # type: ignore[arg-type]
    is_taken = fx_utils.value(scale).dtype == torch.float32 or dtype != torch.int8
    if not is_taken or not is_row or not _is_of_rows(scale, x):
        return None
    x, scale_ops = before_casts(x), _scale_ops(scale, x)
    if (scale_ops is None and not is_stored) or fx_utils.value(x).dtype not in FLOATS:
        return None
    if any(map(fx_utils.is_mutated, (x, scale))):  # the GEMM reads them later
        return None
    return _Quantized(x, scale_ops, dtype, tuple(bounds))


def _varies_along_k(scale: Any, dim: int) -> bool:
    return scale is not None and not fx_utils.is_one(fx_utils.value(scale).shape[dim])


def _product_with_inverse(product: fx.Node) -> tuple[Any, Any]:
    """x and scale of ``x * (1 / scale)``, in either order, in fp32."""
    x, factor = product.args[:2]
    if inverted(factor) is None:
        x, factor = factor, x
    is_float = fx_utils.value(product).dtype == torch.float32
    return (x, inverted(factor)) if is_float else (None, None)


def _is_of_rows(scale: fx.Node, x: fx.Node) -> bool:
    """Whether ``scale`` has one value, or one per row of ``x``."""
    of, shape = fx_utils.value(x).shape, fx_utils.value(scale).shape
    if all(map(fx_utils.is_one, shape)):
        return True
    return len(shape) == len(of) and all(map(fx_utils.same_size, shape, (*of[:-1], 1)))


def _before_views(node: Any) -> Any:
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _scale_ops(scale: fx.Node, x: fx.Node) -> tuple[ScaleOp, ...] | None:
    """The operations from the absmax of each row of ``x`` to ``scale``; None if not such."""
    ops: list[ScaleOp] = []
    node = _before_views(scale)
    while node.target != row_reduce.op:
        before = _operand(node)
        op = None if before is None else _scale_op(node, before)
        if op is None:
            return None
        ops.insert(0, op)
        node = _before_views(before)
    source, kind = node.args[:2]
    if kind != "absmax" or before_casts(source) is not before_casts(x):
        return None
    dtype = fx_utils.value(node).dtype
    if dtype != fx_utils.value(before_casts(x)).dtype:
        ops.insert(0, ScaleOp("to", dtype=dtype))
    return tuple(ops)


def _operand(node: fx.Node) -> fx.Node | None:
    """What a step from the absmax to the scale is computed from."""
    at = 2 if node.target == aten.where.self else 0
    found = node.args[at] if len(node.args) > at else None
    return found if fx_utils.is_tensor_node(found) else None  # type: ignore[return-value]


def _scale_op(node: fx.Node, before: fx.Node) -> ScaleOp | None:
    dtype = fx_utils.value(node).dtype
    is_alike = fx_utils.value(before).shape == fx_utils.value(node).shape
    if not is_alike or fx_utils.value(before).dtype not in FLOATS or dtype not in FLOATS:
        return None
    if node.target == CAST:
        return ScaleOp("to", dtype=dtype)
    rest = [arg for arg in node.args if arg is not before]
    kind = _SCALE_OPS.get(node.target)  # type: ignore[call-overload]
    if node.target == aten.where.self and _is_zero(rest.pop(0), before):
        kind = "if_zero"
    number = constant(rest[0]) if len(rest) == 1 and not node.kwargs else None
    is_plain = kind is not None and fx_utils.value(before).dtype == dtype
    if number is None or not is_plain or not row_scale.holds(number):
        return None
    return ScaleOp(kind, float(number))


def _is_zero(condition: Any, of: fx.Node) -> bool:
    is_equal = fx_utils.is_tensor_node(condition) and condition.target == aten.eq.Scalar
    return is_equal and condition.args[0] is of and condition.args[1] == 0


def _replace(call: fx.Node, found: _Quantized) -> None:
    a, b, a_scale, b_scale, bias = (*call.args, None, None)[:5]
    assert isinstance(a, fx.Node)
    shape = fx_utils.value(a).shape
    with call.graph.inserting_before(call):
        x = found.x
        if fx_utils.value(x).shape != shape:
            x = add_node(x, aten.reshape.default, (x, [-1, shape[-1]]), {})
        is_dynamic = found.scale_ops is not None
        args = (x, b, None if is_dynamic else a_scale, b_scale, bias)
        kwargs = {
            "dtype": found.dtype,
            "scale_ops": list(map(str, found.scale_ops or ())),
            **dict(zip(("low", "high"), found.bounds, strict=False)),
            **{name: value for name, value in call.kwargs.items() if name in _KEPT},
        }
        new = add_node(call, quantized_linear.op, args, kwargs)
    events.add(events.Grouped(new.name, (call.name,)))
    call.replace_all_uses_with(new)
    erase_if_dead(call)
