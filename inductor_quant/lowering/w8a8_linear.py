"""Lowering of ``inductor_quant::w8a8_linear``: one kernel, or the quantization and the GEMM.

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
from inductor_quant.lowering import row_quant, w8a8
from inductor_quant.lowering.select import describe_problem, lower_gemm, lowering_of
from inductor_quant.ops import w8a8 as canonical
from inductor_quant.ops import w8a8_linear as op
from inductor_quant.spec.gemm import ScaleSpec


@fallback.lowering(op.op)
def lower(
    x: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    scale_ops: Sequence[str],
    low: int = -128,
    high: int = 127,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> Any:
    if compat.is_in_memory(x, reduces=a_scale is None):
        steps = scale_ops if a_scale is None else None
        quantization = RowQuantization(x.get_dtype(), steps, low, high)
        call = w8a8.W8A8Call(x, b, a_scale, b_scale, bias, alpha=alpha, out_dtype=out_dtype)
        result = _in_one_kernel(call, quantization)
        if result is not None:
            return result
    compat.keep_rows_in_registers(op.op, row_quant.LONGEST)
    a, scale = op.quantized(
        x, a_scale, scale_ops, low, high, call=lambda each, *args: lowering_of(each)(*args)
    )
    return w8a8.lower(a, b, scale, b_scale, bias, alpha=alpha, out_dtype=out_dtype)


def _in_one_kernel(call: w8a8.W8A8Call, quantization: RowQuantization) -> Any | None:
    """The output of a kernel that quantizes ``call.a``, which is x; None: there is none."""
    call = call.realized()
    x, b, out_dtype = call.a, call.b, call.out_dtype
    problem = describe_problem(x, b, out_dtype)
    problem = dataclasses.replace(problem, quantized_bytes=x.get_dtype().itemsize)
    per_row = ScaleSpec(torch.float32, (1, -1) if problem.m > 1 else (-1, -1))
    spec = canonical.make_spec(
        a_scale=w8a8.scale_spec(call.a_scale, (1, -1), dim=0) or per_row,
        b_scale=w8a8.scale_spec(call.b_scale, (-1, 1), dim=1),
        out_dtype=out_dtype,
        bias=call.bias is not None,
    )
    given = (x, b, call.a_scale, call.b_scale, call.bias)
    inputs = [compat.realize(t) for t in given if t is not None]
    constants = call.constants(spec) | {"QUANTIZATION": quantization}
    layout = compat.FixedLayout(x.get_device(), out_dtype, [x.get_size()[0], b.get_size()[1]])
    return lower_gemm("w8a8", spec, problem, inputs, layout, constants)
