"""Lowering of ``inductor_quant::w8a8_linear``: one kernel, or the quantization and the GEMM.

One kernel is for an activation that is in memory anyhow. What another kernel computes is quantized
there, which costs nothing: a norm, SiLU * up, and where the scale is stored the GEMM before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant import _torch_compat as compat
from inductor_quant.kernels.quantization import RowQuantization
from inductor_quant.lowering import row_reduce, w8a8
from inductor_quant.lowering.common import describe_problem, lower_gemm, lowering_of
from inductor_quant.ops import w8a8 as canonical
from inductor_quant.ops import w8a8_linear as op
from inductor_quant.spec import ScaleSpec


@compat.register_lowering(op.op, type_promotion_kind=None)
def lower(
    x: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    *,
    recipe: Sequence[str],
    low: int = -128,
    high: int = 127,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> Any:
    if compat.is_in_memory(x, reduces=a_scale is None):
        steps = recipe if a_scale is None else None
        quantization = RowQuantization(x.get_dtype(), steps, low, high)
        result = _in_one_kernel(x, b, a_scale, b_scale, bias, quantization, alpha, out_dtype)
        if result is not None:
            return result
    compat.keep_rows_in_registers(op.op, row_reduce.LONGEST)
    a, scale = op.quantized(x, a_scale, recipe, low, high, call=_lowered)
    return w8a8.lower(a, b, scale, b_scale, bias, alpha=alpha, out_dtype=out_dtype)


def _lowered(op: torch._ops.OpOverload, *args: Any) -> Any:
    return lowering_of(op)(*args)


def _in_one_kernel(
    x: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    quantization: RowQuantization,
    alpha: float,
    out_dtype: torch.dtype,
) -> Any | None:
    x, b = compat.realize(x), compat.realize(b)
    (m, _), n = x.get_size(), b.get_size()[1]
    problem = describe_problem(x, b, out_dtype)
    problem = dataclasses.replace(problem, quantized_bytes=x.get_dtype().itemsize)
    rows = ScaleSpec(torch.float32, (1, -1) if problem.m > 1 else (-1, -1))
    spec = canonical.make_spec(
        a_scale=w8a8.scale_spec(a_scale, (1, -1), dim=0) or rows,
        b_scale=w8a8.scale_spec(b_scale, (-1, 1), dim=1),
        out_dtype=out_dtype,
        bias=bias is not None,
    )
    inputs = [compat.realize(t) for t in (x, b, a_scale, b_scale, bias) if t is not None]
    constants = w8a8.constants(spec, alpha) | {"QUANTIZATION": quantization}
    layout = compat.FixedLayout(x.get_device(), out_dtype, [m, n])
    return lower_gemm("w8a8", spec, problem, inputs, layout, constants)
