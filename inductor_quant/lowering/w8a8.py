"""Lowering of ``inductor_quant::w8a8``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant import _torch_compat as compat
from inductor_quant.lowering.common import Gemm, describe_problem, lower_gemm, lowering_of
from inductor_quant.ops import w8a8 as op
from inductor_quant.spec import QuantGemmSpec, ScaleSpec

aten, prims = torch.ops.aten, torch.ops.prims
# Up to so many rows a tile has one to spare for the sums of the columns of b; beyond, a kernel of
# their own reads the weight once more. H200, N = K = 4096, microseconds (CUDA graphs, cold weights;
# no command here prints them) without a zero point, with sums in the kernel or apart, with given
# sums: 1 row 7.4, 9.2, 7.4; 16 rows 7.6, 10.1, 7.6; 48 rows
# 8.3, 15.4, 8.5; apart 64 rows 8.0, 17.2, 8.3; 256 rows 11.9, 21.2, 12.1; 4096 rows 98, 109, 100.
MAX_SPARE_ROW = 63


@compat.register_lowering(op.op, type_promotion_kind=None)
def lower(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    a_zero_point: Any = None,
    b_zero_point: Any = None,
    b_sum: Any = None,
    *,
    alpha: float = 1.0,
    a_zero: int = 0,
    out_dtype: torch.dtype,
) -> Any:
    m, n = a.get_size()[0], b.get_size()[1]
    device = a.get_device()
    if compat.known_int(m) == 0 or compat.known_int(n) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=out_dtype, device=device)
    layout = compat.FixedLayout(device, out_dtype, [m, n])
    a, b = compat.realize(a), compat.realize(b)
    spec = _spec(a, b, a_scale, b_scale, bias, a_zero_point, b_zero_point, a_zero, out_dtype)
    problem = describe_problem(a, b, out_dtype)
    found = _constants(spec, alpha, a_zero, a_zero_point, b_zero_point, b_sum)
    a_sum = None
    if b_zero_point is not None:
        a_sum = _sum_of_rows(a, a_zero_point if a_zero_point is not None else a_zero)

    def attempt(column_sum: Any, problem: Any) -> Any | None:
        parts = (a, b, a_scale, b_scale, bias, a_zero_point, column_sum, b_zero_point, a_sum)
        inputs = [compat.realize(t) for t in parts if t is not None]
        given = found | {"HAS_B_SUM": column_sum is not None}
        return lower_gemm("w8a8", spec, problem, inputs, layout, given)

    result = None
    if spec.a.zero and b_sum is None:
        rows = compat.known_int(m)
        if rows is not None and rows <= MAX_SPARE_ROW and problem.m * problem.n > 1:
            result = attempt(None, dataclasses.replace(problem, needs_spare_row=True))
        if result is None:
            b_sum = lowering_of(aten.sum.dim_IntList)(b, [0], True, dtype=torch.int32)
    if result is None:
        result = attempt(b_sum, problem)
    if result is not None:
        return result
    if spec.group_size:
        eager = compat.fallback_handler(op.op, add_to_fallback_set=False)
        return eager(a, b, a_scale, b_scale, bias, alpha=alpha, out_dtype=out_dtype)
    zeros = (a_zero_point if a_zero_point is not None else a_zero, b_sum, b_zero_point, a_sum)
    return _unfused(a, b, a_scale, b_scale, bias, zeros, alpha=alpha, out_dtype=out_dtype)


def described(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> Gemm:
    """A call of the op without zero points, as kernels see it."""
    a, b = compat.realize(a), compat.realize(b)
    spec = _spec(a, b, a_scale, b_scale, bias, None, None, 0, out_dtype)
    shared, own = (
        [compat.realize(t) for t in tensors if t is not None]
        for tensors in ((a, a_scale), (b, b_scale, bias))
    )
    return Gemm(spec, describe_problem(a, b, out_dtype), shared, own, constants(spec, alpha))


def constants(spec: QuantGemmSpec, alpha: float) -> dict[str, Any]:
    """Of a GEMM without zero points."""
    return _constants(spec, alpha, 0, None, None, None) | {"HAS_B_SUM": False}


def _spec(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    a_zero_point: Any,
    b_zero_point: Any,
    a_zero: int,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    k = compat.known_int(b.get_size()[0])  # of a stored weight: never symbolic
    a_group, b_group = _group(a_scale, 1, k), _group(b_scale, 0, k)
    return op.make_spec(
        a_scale=scale_spec(a_scale, (1, a_group), dim=0 if a_group < 0 else 1),
        b_scale=scale_spec(b_scale, (b_group, 1), dim=1 if b_group < 0 else 0),
        out_dtype=out_dtype,
        bias=bias is not None,
        a_zero=op.zero_kind(_dtype(a_zero_point), a_zero),
        b_zero=op.zero_kind(_dtype(b_zero_point)),
    )


def _constants(
    spec: QuantGemmSpec,
    alpha: float,
    a_zero: int,
    a_zero_point: Any,
    b_zero_point: Any,
    b_sum: Any,
) -> dict[str, Any]:
    return {
        "ALPHA": alpha,
        "A_ZERO": a_zero,
        "A_ZERO_PER_TOKEN": _is_long(a_zero_point, 0),
        "B_ZERO_PER_CHANNEL": _is_long(b_zero_point, 1),
        "EXACT_A_ZERO": spec.a.zero in ("const", "int")
        and (b_sum is None or b_sum.get_dtype() == torch.int32),
        "EXACT_B_ZERO": spec.b.zero == "int" and spec.a.zero != "float",
    }


def scale_spec(scale: Any, full: tuple[int, int], *, dim: int) -> ScaleSpec | None:
    if scale is None:
        return None
    return ScaleSpec(scale.get_dtype(), full if _is_long(scale, dim) else (-1, -1))


def _group(scale: Any, dim: int, k: int | None) -> int:
    """How many of ``k`` share an entry of ``scale``, whose groups lie along ``dim``; -1: all."""
    groups = 1 if scale is None else compat.known_int(scale.get_size()[dim])
    return -1 if k is None or groups is None or groups == 1 else k // groups


def _dtype(tensor: Any) -> torch.dtype | None:
    return None if tensor is None else tensor.get_dtype()


def _is_long(tensor: Any, dim: int) -> bool:
    return tensor is not None and compat.known_int(tensor.get_size()[dim]) != 1


def _sum_of_rows(a: Any, zero: Any) -> Any:
    """The sum over k of a[m, k] - zero[m], as IR [M, 1]: int32, or fp32 where zero is a float."""
    total = lowering_of(aten.sum.dim_IntList)(a, [1], True, dtype=torch.int32)
    k = a.get_size()[1]
    if isinstance(zero, int):
        return lowering_of(aten.sub.Tensor)(total, k * zero) if zero else total
    dtype = torch.float32 if zero.get_dtype().is_floating_point else torch.int32
    cast, multiply = lowering_of(prims.convert_element_type.default), lowering_of(aten.mul.Tensor)
    return lowering_of(aten.sub.Tensor)(cast(total, dtype), multiply(cast(zero, dtype), k))


def _unfused(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    zeros: tuple[Any, Any, Any, Any],
    *,
    alpha: float,
    out_dtype: torch.dtype,
) -> Any:
    """The graph that was matched, in Inductor's own lowerings: for a device without a kernel."""
    cast = lowering_of(prims.convert_element_type.default)
    multiply, subtract = lowering_of(aten.mul.Tensor), lowering_of(aten.sub.Tensor)
    out = lowering_of(aten._int_mm.default)(a, b)
    a_zero, b_sum, b_zero, a_sum = zeros
    for zero, total in ((a_zero, b_sum), (b_zero, a_sum)):
        if total is None:
            continue
        is_exact = not any(
            dtype.is_floating_point
            for dtype in (
                out.get_dtype(),
                total.get_dtype(),
                torch.int8 if isinstance(zero, int) else zero.get_dtype(),
            )
        )
        dtype = torch.int32 if is_exact else torch.float32
        factor = zero if isinstance(zero, int) else cast(zero, dtype)
        out = subtract(cast(out, dtype), multiply(cast(total, dtype), factor))
    out = cast(out, torch.float32)
    if alpha != 1.0:
        out = multiply(out, alpha)
    for scale in (a_scale, b_scale):
        if scale is not None:
            out = multiply(out, cast(scale, torch.float32))
    if bias is not None:
        out = lowering_of(aten.add.Tensor)(out, cast(bias, torch.float32))
    return cast(out, out_dtype)
