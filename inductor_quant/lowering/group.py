"""Lowering of ``inductor_quant::w8a8_group`` and ``weight_only_group``: one launch, or one each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from inductor_quant import _torch_compat as compat
from inductor_quant.kernels.group import together
from inductor_quant.lowering import w8a8, weight_only
from inductor_quant.lowering.common import Gemm, lower_gemm, lowering_of
from inductor_quant.lowering.epilogue import lost_fusions
from inductor_quant.ops import group

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], dict[str, Any]]


@compat.register_lowering(group.w8a8_op, type_promotion_kind=None)
def lower_w8a8(
    a: Any,
    b: list[Any],
    a_scale: Any,
    b_scale: list[Any],
    bias: list[Any],
    *,
    alpha: float = 1.0,
    out_dtype: torch.dtype,
) -> list[Any]:
    calls = list(group.w8a8_members(a, b, a_scale, b_scale, bias, alpha, out_dtype))
    results = _in_one_launch("w8a8", calls, w8a8.described)
    if results is not None:
        return results
    return [w8a8.lower(*args, **kwargs) for args, kwargs in calls]


@compat.register_lowering(group.weight_only_op, type_promotion_kind=None)
def lower_weight_only(
    x: Any,
    weight: list[Any],
    column_scale: list[Any],
    bias: list[Any],
    *,
    format: list[str],
    out_dtype: torch.dtype,
) -> list[Any]:
    calls = list(group.weight_only_members(x, weight, column_scale, bias, format, out_dtype))
    results = _in_one_launch("weight_only", calls, weight_only.described)
    if results is None:
        return [weight_only.lower(*args, **kwargs) for args, kwargs in calls]
    return [
        weight_only.finished(result, *args, **kwargs)
        for result, (args, kwargs) in zip(results, calls, strict=True)
    ]


def _in_one_launch(
    family: str, calls: Iterable[Call], described: Callable[..., Gemm]
) -> list[Any] | None:
    """The columns of each GEMM in what a kernel gives for all; None: no kernel takes them.

    Their memory is one matrix, of which each result is a part with the matrix's strides. Where K is
    in parts the results are computed from them, as those of a GEMM alone.
    """
    gemms = [described(*args, **kwargs) for args, kwargs in calls]
    first, node = gemms[0], compat.current_node()
    is_alike = all((g.spec, g.constants) == (first.spec, first.constants) for g in gemms)
    is_static = all(gemm.problem.m_is_static for gemm in gemms)
    columns = [gemm.problem.n for gemm in gemms]
    is_empty = not all((first.problem.m, *columns))
    if len(gemms) == 1 or node is None or not is_alike or not is_static or is_empty:
        return None
    problem = together([g.problem for g in gemms], lost_fusions=lost_fusions(node))
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
