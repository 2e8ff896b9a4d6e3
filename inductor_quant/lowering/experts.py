"""Lowering of ``inductor_quant::experts``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.problem import Groups, Problem
from inductor_quant.lowering import expert_rows
from inductor_quant.lowering.select import lower_gemm, lowering_of
from inductor_quant.lowering.weight_only import LoweredEvaluator, describe_packed
from inductor_quant.ops import experts as op
from inductor_quant.ops import weight_only
from inductor_quant.spec.weight_format import WeightFormat

aten, prims = torch.ops.aten, torch.ops.prims


@fallback.lowering(op.op)
def lower(
    x: Any,
    weight: list[Any],
    offsets: Any,
    ids: Any,
    rows: Any = None,
    *,
    repeats: int = 1,
    format: str,
    out_dtype: torch.dtype,
) -> Any:
    parsed = WeightFormat.decode(format)
    n, count, device = parsed.shape[1], expert_rows.count_of(x, rows, repeats), x.get_device()
    if compat.known_int(count) == 0:
        return lowering_of(aten.full.default)([count, n], 0, dtype=out_dtype, device=device)
    spec = weight_only.make_spec(
        parsed,
        [t.get_dtype() for t in weight],
        x_dtype=x.get_dtype(),
        column_scale=None,
        out_dtype=out_dtype,
        bias=False,
    )
    stored = [compat.realize(t) for t in weight]
    route = compat.realize(ids if offsets is None else offsets)

    def described(x: Any, groups: Groups) -> Problem:
        return dataclasses.replace(describe_packed(x, parsed, stored, count), groups=groups)

    taken = compat.realize(x)
    problem = described(taken, Groups(parsed.experts, ids is None, repeats, rows is not None))
    if problem.is_gathered and expert_rows.is_gathered_before("experts", spec, problem, device):
        x, rows = expert_rows.gathered(x, rows, repeats), None
        taken = compat.realize(x)
        problem = described(taken, Groups(parsed.experts, ids is None))
    inputs = [taken, *stored, *([] if rows is None else [compat.realize(rows)]), route]
    layout = compat.FixedLayout(device, out_dtype, [count, n])
    result = lower_gemm("experts", spec, problem, inputs, layout, {})
    if result is not None:
        return result
    x = expert_rows.gathered(x, rows, repeats) if problem.is_gathered else x
    return _unfused(x, weight, offsets, ids, parsed, out_dtype)


def _unfused(
    x: Any, weight: list[Any], offsets: Any, ids: Any, format: WeightFormat, out_dtype: torch.dtype
) -> Any:
    """Dequantize the stack, then multiply, as the matched graph did."""
    if ids is None and x.get_dtype() != torch.bfloat16:  # ``_grouped_mm`` takes nothing else
        eager = compat.fallback_handler(op.op, add_to_fallback_set=False)
        return eager(x, weight, offsets, ids, format=format.encode(), out_dtype=out_dtype)
    evaluator = LoweredEvaluator(format, weight, x.get_device())
    dense = evaluator.convert(evaluator.weight(torch.float32), x.get_dtype())
    if ids is None:
        offsets = evaluator.convert(offsets, torch.int32)
        out = lowering_of(aten._grouped_mm.default)(x, dense, offsets)
        out = _zero_without_expert(out, offsets)
    else:
        chosen = lowering_of(aten.index.Tensor)(dense, [ids])
        row = lowering_of(aten.unsqueeze.default)(x, 1)
        out = lowering_of(aten.squeeze.dim)(lowering_of(aten.bmm.default)(row, chosen), 1)
    return evaluator.convert(out, out_dtype)


def _zero_without_expert(out: Any, offsets: Any) -> Any:
    """``out`` with 0 in the rows after the last offset, which ``_grouped_mm`` does not write."""
    count, device = out.get_size()[0], out.get_device()
    place = lowering_of(prims.iota.default)(
        count, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False
    )
    end = lowering_of(aten.select.int)(offsets, 0, -1)
    has_expert = lowering_of(aten.lt.Tensor)(place, end)
    has_expert = lowering_of(aten.unsqueeze.default)(has_expert, 1)
    return lowering_of(aten.where.ScalarOther)(has_expert, out, 0.0)
