"""Lowering of the ops of ``ops/fusion/horizontal``: one launch, or one each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.shared.horizontal import together
from inductor_quant.lowering import fp8, w4a8, w8a8, weight_only
from inductor_quant.lowering.fusion_lookahead import lost_fusions
from inductor_quant.lowering.select import Gemm, lower_gemm, lowering_of
from inductor_quant.ops.fusion import horizontal

aten = torch.ops.aten


@fallback.lowering(horizontal.w8a8_op)
def lower_w8a8(*given: Any, **options: Any) -> list[Any]:
    calls = list(horizontal.members_of_8_bits(*given, **options))
    gemms = [w8a8.W8A8Call(*args, **kwargs).gemm() for args, kwargs in calls]
    results = _in_one_launch("w8a8", gemms)
    return results or [w8a8.lower(*args, **kwargs) for args, kwargs in calls]


@fallback.lowering(horizontal.fp8_op)
def lower_fp8(*given: Any, **options: Any) -> list[Any]:
    calls = list(horizontal.members_of_8_bits(*given, **options))
    results = _in_one_launch("fp8", [fp8.Fp8Call(*args, **kwargs).gemm() for args, kwargs in calls])
    return results or [fp8.lower(*args, **kwargs) for args, kwargs in calls]


@fallback.lowering(horizontal.w4a8_op)
def lower_w4a8(*given: Any, **options: Any) -> list[Any]:
    members = list(horizontal.w4a8_members(*given, **options))
    calls = [w4a8.W4A8Call(*args, **kwargs) for args, kwargs in members]
    results = _finished("w4a8", calls) or _in_16_bits(calls)
    return results or [w4a8.lower(*args, **kwargs) for args, kwargs in members]


def _in_16_bits(calls: Sequence[w4a8.W4A8Call]) -> list[Any] | None:
    """The values of ``calls`` by a kernel of ``weight_only``, if each alone ran as that."""
    if not all(call.is_in_16_bits(call.gemm()) for call in calls):
        return None
    others = [call.of_weight_only() for call in calls]
    x = others[0][0][0]
    sums = _finished(
        "weight_only",
        [weight_only.WeightOnlyCall(x, *args[1:], **options) for args, options in others],
    )
    if sums is None:
        return None
    return [call.scaled_in_16_bits(each) for call, each in zip(calls, sums, strict=True)]


@fallback.lowering(horizontal.weight_only_op)
def lower_weight_only(*given: Any, **options: Any) -> list[Any]:
    members = list(horizontal.weight_only_members(*given, **options))
    calls = [weight_only.WeightOnlyCall(*args, **kwargs) for args, kwargs in members]
    results = _finished("weight_only", calls)
    return results or [weight_only.lower(*args, **kwargs) for args, kwargs in members]


def _finished(family: str, calls: Sequence[Any]) -> list[Any] | None:
    """The values of ``calls``, of a packed weight each; None: no kernel takes them together."""
    results = _in_one_launch(family, [call.gemm() for call in calls])
    if results is None:
        return None
    return [call.finished(result) for call, result in zip(calls, results, strict=True)]


def _in_one_launch(family: str, gemms: Sequence[Gemm]) -> list[Any] | None:
    """Each GEMM's columns of one kernel's output; None: no kernel takes them together.

    The output is one matrix, and each result a view with its strides. Split-K partials are split
    likewise, and each result is computed from its own.
    """
    first, node = gemms[0], compat.current_node()
    is_alike = all((g.spec, g.constants) == (first.spec, first.constants) for g in gemms)
    is_bounded = all(gemm.problem.m_is_bounded for gemm in gemms)
    columns = [gemm.problem.n for gemm in gemms]
    is_empty = not all((first.problem.m, *columns))
    if len(gemms) == 1 or node is None or not is_alike or not is_bounded or is_empty:
        return None
    problem = together([g.problem for g in gemms], lost_fusions=lost_fusions(node))
    if problem.lost_fusions and problem.m > horizontal.MAX_ROWS[family]:
        return None  # with many rows a kernel for an epilogue costs more than a launch
    x = first.shared[0]
    out_dtype = first.spec.out_dtype
    layout = compat.FixedLayout(x.get_device(), out_dtype, [x.get_size()[0], problem.n])
    inputs = [*first.shared, *(tensor for gemm in gemms for tensor in gemm.own)]
    whole = lower_gemm(family, first.spec, problem, inputs, layout, first.constants)
    if whole is None:
        return None
    ends = list(itertools.accumulate(columns))
    slice_of = lowering_of(aten.slice.Tensor)
    return [slice_of(whole, -1, *ends_of) for ends_of in zip([0, *ends], ends, strict=False)]
