"""``torch.ops.inductor_quant.scaled_experts``: each row of an 8-bit x times the 8-bit weight of its
expert."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import fp8, fp8_block, w8a8
from inductor_quant.ops.checks import check, differ
from inductor_quant.ops.experts import count_of, gathered, routes, rows_of_each
from inductor_quant.ops.registration import define
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec

SCHEMA = (
    "scaled_experts(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? offsets, "
    "Tensor? ids, Tensor? rows=None, *, int repeats=1, int block_k=0, int block_n=1, "
    "bool fast_accum=False, ScalarType out_dtype) -> Tensor"
)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    offsets: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: torch.Tensor | None = None,
    *,
    repeats: int = 1,
    block_k: int = 0,
    block_n: int = 1,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[s, n] = sum over k of a[r(s), k] * a_scale[r(s), k // block_k] * b[e(s), k, n] *
    b_scale[e(s), k // block_k, n // block_n]``.

    Exactly one of ``offsets`` and ``ids`` says which expert e(s) is, ``rows`` and ``repeats`` which
    row r(s), as in ``experts``.

    Shapes and dtypes:
        a        [T, K]     int8, or float8_e4m3fn or float8_e5m2
        b        [E, K, N]  int8 with int8, else float8_e4m3fn or float8_e5m2
        a_scale  [T, ceil(K / block_k)], [T, 1] if ``block_k`` is 0    fp32, bf16 or fp16; in blocks
                 of FP8 float8_e8m0fnu too; None, not in blocks: 1
        b_scale  [E, ceil(K / block_k), ceil(N / block_n)]    likewise
        offsets  [E]        int32 or int64; rising, from 0 to S
        ids      [S]        int32 or int64; -E to E - 1
        rows     [S]        int32 or int64; -T * repeats to T * repeats - 1
    ``block_k`` and ``block_n`` count elements; ``block_k`` of 0: a scale for all of K, for which
    ``block_n`` is 1. Blocks are those of FP8. Any strides. ``fast_accum`` as of ``fp8``.
    Returns [S, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    Sums as of ``w8a8``, ``fp8`` and ``fp8_block``: of int8 exact in int32.

    Raises SpecError for other shapes or dtypes, or a K whose int32 sums may overflow.
    """
    options: dict[str, Any] = {"block_k": block_k, "block_n": block_n, "fast_accum": fast_accum}
    which = (offsets, ids, rows)
    spec_of(a, b, a_scale, b_scale, *which, repeats=repeats, **options, out_dtype=out_dtype)
    count, k, n = b.shape
    step = block_k or k
    a = gathered(a, rows, repeats)
    a_scale = None if a_scale is None else gathered(a_scale, rows, repeats)
    out = torch.zeros(a.shape[0], n, dtype=torch.float32, device=a.device)
    for expert, its in enumerate(rows_of_each(count, offsets, ids)):
        left, right = a[its].double(), b[expert].double()
        if a_scale is not None:
            left = left * a_scale[its].double().repeat_interleave(step, 1)[:, :k]
        if b_scale is not None:
            of_k = b_scale[expert].double().repeat_interleave(step, 0)[:k]
            right = right * of_k.repeat_interleave(block_n, 1)[:, :n]
        out[its] = (left @ right).float()
    return out.to(out_dtype)


def fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    offsets: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: torch.Tensor | None = None,
    *,
    repeats: int = 1,
    out_dtype: torch.dtype,
    **options: Any,
) -> torch.Tensor:
    others, which = (a_scale, b_scale), (offsets, ids, rows)
    spec_of(a, b, *others, *which, repeats=repeats, out_dtype=out_dtype, **options)
    shape = (count_of(a, rows, repeats), b.shape[2])
    return torch.empty(shape, dtype=out_dtype, device=a.device)


def spec_of(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    offsets: torch.Tensor | None,
    ids: torch.Tensor | None,
    rows: torch.Tensor | None = None,
    *,
    repeats: int = 1,
    block_k: int = 0,
    block_n: int = 1,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such product.

    Symbolic sizes are not checked: that would add a guard.
    """
    dtypes = (torch.int8,) if a.dtype == torch.int8 else fp8.ELEMENT_DTYPES
    if a.dtype not in dtypes or b.dtype not in dtypes:
        raise SpecError(f"scaled_experts: a is {a.dtype}, b is {b.dtype}; both int8, or both FP8")
    if a.dim() != 2 or b.dim() != 3 or differ(a.shape[1:], b.shape[1:2]):
        shapes = f"a is {list(a.shape)}, b is {list(b.shape)}"
        raise SpecError(f"scaled_experts takes a [T, K] and b [E, K, N]; {shapes}")
    if (offsets is None) == (ids is None):
        raise SpecError("scaled_experts takes either offsets or ids")
    is_whole = block_k == 0 and block_n == 1
    if not is_whole and (a.dtype == torch.int8 or block_k < 1 or block_n < 1):
        raise SpecError(f"scaled_experts: blocks of {block_k} x {block_n} of {a.dtype}")
    if not is_whole and (a_scale is None or b_scale is None):
        raise SpecError("scaled_experts: blocks without scales")
    (tokens, k), (count, _, n) = a.shape, b.shape
    k_blocks = -(-k // block_k) if block_k else 1
    scales = w8a8.SCALE_DTYPES if is_whole else fp8_block.SCALE_DTYPES
    check(
        "scaled_experts",
        {
            "a_scale": (a_scale, ((tokens, k_blocks),), scales),
            "b_scale": (b_scale, ((count, k_blocks, -(-n // block_n)),), scales),
        }
        | routes(a, offsets, ids, rows, repeats, count),
    )
    if a.dtype == torch.int8 and isinstance(k, int) and k > w8a8.max_k("", ""):
        raise SpecError(f"scaled_experts: K={k} may overflow int32")
    if out_dtype not in w8a8.SCALE_DTYPES:
        raise SpecError(f"scaled_experts returns one of {w8a8.SCALE_DTYPES}, not {out_dtype}")
    return make_spec(
        a_dtype=a.dtype,
        b_dtype=b.dtype,
        scales=(
            a_scale.dtype if a_scale is not None else None,
            b_scale.dtype if b_scale is not None else None,
        ),
        block=(block_k, block_n),
        out_dtype=out_dtype,
        fast_accum=fast_accum,
    )


def make_spec(
    *,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    scales: tuple[torch.dtype | None, torch.dtype | None],
    block: tuple[int, int],
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> QuantGemmSpec:
    """The spec of a product whose scales, if it has any, have these dtypes and blocks (K, N)."""
    block_k, block_n = block[0] or -1, block[1]
    a_scale, b_scale = (
        None if dtype is None else ScaleSpec(dtype, shape)
        for dtype, shape in zip(scales, ((1, block_k), (block_k, block_n)), strict=True)
    )
    if a_dtype == torch.int8:
        return w8a8.make_spec(a_scale=a_scale, b_scale=b_scale, out_dtype=out_dtype, bias=False)
    return fp8.make_spec(
        a_dtype=a_dtype,
        b_dtype=b_dtype,
        a_scale=a_scale,
        b_scale=b_scale,
        out_dtype=out_dtype,
        bias=False,
        fast_accum=fast_accum,
    )


op = define(SCHEMA, reference, fake, flexible_layout=True)
