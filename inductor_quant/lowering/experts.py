"""Lowering of ``inductor_quant::experts``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.problem import Groups
from inductor_quant.lowering.select import lower_gemm, lowering_of
from inductor_quant.lowering.weight_only import LoweredEvaluator, describe_packed
from inductor_quant.ops import experts as op
from inductor_quant.ops import weight_only
from inductor_quant.spec.weight_format import WeightFormat

aten = torch.ops.aten


@fallback.lowering(op.op)
def lower(
    x: Any, weight: list[Any], offsets: Any, ids: Any, *, format: str, out_dtype: torch.dtype
) -> Any:
    parsed = WeightFormat.decode(format)
    n, rows, device = parsed.shape[1], x.get_size()[0], x.get_device()
    if compat.known_int(rows) == 0:
        return lowering_of(aten.full.default)([rows, n], 0, dtype=out_dtype, device=device)
    spec = weight_only.make_spec(
        parsed,
        [t.get_dtype() for t in weight],
        x_dtype=x.get_dtype(),
        column_scale=None,
        out_dtype=out_dtype,
        bias=False,
    )
    inputs = [compat.realize(t) for t in (x, *weight, ids if offsets is None else offsets)]
    problem = dataclasses.replace(
        describe_packed(inputs[0], parsed, inputs[1:-1]),
        groups=Groups(parsed.experts, is_sorted=ids is None),
    )
    layout = compat.FixedLayout(device, out_dtype, [rows, n])
    result = lower_gemm("experts", spec, problem, inputs, layout, {})
    return _unfused(x, weight, offsets, ids, parsed, out_dtype) if result is None else result


def _unfused(
    x: Any, weight: list[Any], offsets: Any, ids: Any, format: WeightFormat, out_dtype: torch.dtype
) -> Any:
    """Dequantize the stack, then multiply, as the matched graph did."""
    evaluator = LoweredEvaluator(format, weight, x.get_device())
    dense = evaluator.convert(evaluator.weight(torch.float32), x.get_dtype())
    if ids is None:
        out = lowering_of(aten._grouped_mm.default)(x, dense, offsets)
    else:
        chosen = lowering_of(aten.index.Tensor)(dense, [ids])
        row = lowering_of(aten.unsqueeze.default)(x, 1)
        out = lowering_of(aten.squeeze.dim)(lowering_of(aten.bmm.default)(row, chosen), 1)
    return evaluator.convert(out, out_dtype)
