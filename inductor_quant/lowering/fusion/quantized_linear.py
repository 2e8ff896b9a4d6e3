"""Lowering of ``inductor_quant::quantized_linear``: one kernel, or the quantization and the GEMM.

Fuses quantization into the GEMM only if x is already in memory; otherwise the kernel that computes
x (a norm, SiLU * up; with a static scale the previous GEMM) quantizes it for free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.shared.row_quantization import RowQuantization
from inductor_quant.lowering import fp8, w8a8
from inductor_quant.lowering.fusion import row_quant
from inductor_quant.lowering.select import describe_problem, lower_gemm, lowering_of
from inductor_quant.ops import fp8 as fp8_op
from inductor_quant.ops import w8a8 as w8a8_op
from inductor_quant.ops.fusion import quantized_linear as op
from inductor_quant.spec.gemm import ScaleSpec


@fallback.lowering(op.op)
def lower(
    x: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    dtype: torch.dtype,
    scale_ops: Sequence[str],
    low: int = -128,
    high: int = 127,
    alpha: float = 1.0,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> Any:
    rest: dict[str, Any] = {"alpha": alpha} if dtype == torch.int8 else {"fast_accum": fast_accum}
    rest["out_dtype"] = out_dtype
    if compat.is_in_memory(x, reduces=a_scale is None):
        steps = scale_ops if a_scale is None else None
        given = None if a_scale is None else a_scale.get_dtype()
        quantization = RowQuantization(x.get_dtype(), steps, low, high, dtype, scale_dtype=given)
        tensors = (compat.realize(x), compat.realize(b), a_scale, b_scale, bias)
        result = _in_one_kernel(tensors, quantization, rest)
        if result is not None:
            return result
    compat.keep_rows_in_registers(op.op, row_quant.LONGEST)
    a, scale = op.quantized(
        *(x, a_scale, scale_ops, low, high, dtype),
        call=lambda each, *args, **kwargs: lowering_of(each)(*args, **kwargs),
    )
    lower_quantized = w8a8.lower if dtype == torch.int8 else fp8.lower
    return lower_quantized(a, b, scale, b_scale, bias, **rest)


def _in_one_kernel(
    tensors: tuple[Any, ...], quantization: RowQuantization, rest: dict[str, Any]
) -> Any | None:
    """The output of a kernel that quantizes the first of ``tensors``; None: there is none."""
    x, b, a_scale, b_scale, bias = tensors
    out_dtype = rest["out_dtype"]
    problem = describe_problem(x, b, out_dtype)
    problem = dataclasses.replace(problem, quantized_bytes=x.get_dtype().itemsize)
    per_row = ScaleSpec(quantization.scale_dtype, (1, -1) if problem.m > 1 else (-1, -1))
    scales: dict[str, Any] = {
        "a_scale": w8a8.scale_spec(a_scale, (1, -1), dim=0) or per_row,
        "b_scale": w8a8.scale_spec(b_scale, (-1, 1), dim=1),
        "out_dtype": out_dtype,
        "bias": bias is not None,
    }
    if quantization.dtype == torch.int8:
        spec = w8a8_op.make_spec(**scales)
        constants = w8a8.W8A8Call(*tensors, **rest).constants(spec)
    else:
        spec = fp8_op.make_spec(b_dtype=b.get_dtype(), fast_accum=rest["fast_accum"], **scales)
        constants = {}
    inputs = [compat.realize(t) for t in tensors if t is not None]
    constants["QUANTIZATION"] = quantization
    layout = compat.FixedLayout(x.get_device(), out_dtype, [x.get_size()[0], b.get_size()[1]])
    family = op.FAMILIES[quantization.dtype]
    return lower_gemm(family, spec, problem, inputs, layout, constants)
