"""Lowering of ``inductor_quant::scaled_experts``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import group_reduce as groups
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.problem import Groups, Problem
from inductor_quant.kernels.scaled_mm.fp8 import decodes
from inductor_quant.lowering import expert_rows
from inductor_quant.lowering.fusion_lookahead import is_narrowed
from inductor_quant.lowering.select import describe_device, lower_gemm, lowering_of
from inductor_quant.ops import scaled_experts as op

aten = torch.ops.aten


@fallback.lowering(op.op)
def lower(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    offsets: Any,
    ids: Any,
    rows: Any = None,
    *,
    repeats: int = 1,
    block_k: int = 0,
    block_n: int = 1,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> Any:
    scales, device = (a_scale, b_scale), a.get_device()
    k, (count, _, n) = a.get_size()[1], b.get_size()
    m = expert_rows.count_of(a, rows, repeats)
    if compat.known_int(m) == 0:
        return lowering_of(aten.full.default)([m, n], 0, dtype=out_dtype, device=device)
    of_a, of_b = (None if scale is None else scale.get_dtype() for scale in scales)
    spec = op.make_spec(
        a_dtype=a.get_dtype(),
        b_dtype=b.get_dtype(),
        scales=(of_a, of_b),
        block=(block_k, block_n),
        out_dtype=out_dtype,
        fast_accum=fast_accum,
    )
    experts, result = compat.known_int(count), None
    if experts is not None:
        hint_m, hint_n, hint_k = compat.size_hints((m, n, k))
        route, stack = compat.realize(ids if offsets is None else offsets), compat.realize(b)
        problem = Problem(
            hint_m,
            hint_n,
            hint_k,
            k_is_static=compat.known_int(k) is not None,
            m_is_static=compat.known_int(m) is not None,
            m_is_bounded=compat.limit(m) is not None,
            groups=Groups(experts, ids is None, repeats, rows is not None),
            is_stored_narrow=out_dtype.itemsize <= 2 or is_narrowed(compat.current_node()),
        )

        def described(a: Any, **changes: Any) -> Problem:
            has_aligned_rows = (
                compat.may_make_descriptors()
                and compat.has_aligned_rows(a, 0)
                and _has_aligned_columns(stack)
            )
            return dataclasses.replace(problem, has_aligned_rows=has_aligned_rows, **changes)

        taken = compat.realize(a)
        if block_k and compat.runs_triton(device) and not compat.uses_cpp_wrapper():
            groups.quantize_in_tiles(taken, block_k)
        problem = described(taken)
        if problem.is_gathered and expert_rows.is_gathered_before(
            "scaled_experts", spec, problem, device
        ):
            a = expert_rows.gathered(a, rows, repeats)
            if a_scale is not None:
                scales = (expert_rows.gathered(a_scale, rows, repeats), b_scale)
            rows, repeats = None, 1
            taken = compat.realize(a)
            problem = described(taken, groups=Groups(experts, ids is None))
        stored = [compat.realize(t) for t in (*scales, rows) if t is not None]
        inputs = [taken, stack, *stored, route]
        has_no_fp8 = compat.runs_triton(device) and decodes(describe_device(device))
        result = lower_gemm(
            "scaled_experts",
            spec,
            problem,
            inputs,
            compat.FixedLayout(device, out_dtype, [m, n]),
            {"triton_meta": compat.BytePointers()} if has_no_fp8 else {},
        )
    if result is not None:
        return result
    eager = compat.fallback_handler(op.op, add_to_fallback_set=False)
    options = {"block_k": block_k, "block_n": block_n, "fast_accum": fast_accum}
    which = (offsets, ids, rows)
    return eager(a, b, *scales, *which, repeats=repeats, **options, out_dtype=out_dtype)


def _has_aligned_columns(stack: Any) -> bool:
    """Whether the columns of all matrices of ``stack`` [E, K, N], one after another, are the rows
    of a matrix that a tensor descriptor describes (``compat.has_aligned_rows``)."""
    (count, _, n), strides = stack.get_size(), stack.get_stride()
    columns = compat.known_int(n)
    between, inside, apart = (compat.known_int(stride) for stride in strides)
    return (
        compat.is_aligned(stack)
        and columns is not None
        and inside == 1
        and apart is not None
        and apart * stack.get_dtype().itemsize % 16 == 0
        and apart != 0
        and (between == columns * apart or compat.known_int(count) == 1)
    )
