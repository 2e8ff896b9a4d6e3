"""``torch.ops.inductor_quant.block_sparse``: a product with a weight of stored blocks."""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops.checks import check, differ
from inductor_quant.ops.registration import define
from inductor_quant.ops.w8a8 import SCALE_DTYPES, max_k, scaled
from inductor_quant.spec.gemm import BlockSpec, OperandSpec, QuantGemmSpec, ScaleSpec

SCHEMA = (
    "block_sparse(Tensor x, Tensor values, Tensor crow, Tensor col, Tensor? place, Tensor? order, "
    "Tensor? scale, Tensor? bias, *, int n, int longest=0) -> Tensor"
)
DTYPES = (torch.bfloat16, torch.float16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
# dtype of x -> those of stored values
STORED = {
    torch.int8: (torch.int8,),
    **{dtype: (dtype, *QUANTIZED) for dtype in DTYPES},
}
INDEX_DTYPES = (torch.int32, torch.int64)
BLOCK_SIZES = (16, 32, 64, 128)
# The largest stored share of a weight at which we are faster than the dense product, by the smaller
# side of a block, for up to MAX_ROWS rows (kernels/block_sparse/README.md).
MAX_ROWS = (16, 64, 256, math.inf)
MAX_SHARE = {
    16: (0.50, 0.18, 0.09, 0.07),
    32: (0.65, 0.40, 0.26, 0.26),
    64: (0.65, 0.45, 0.45, 0.45),
    128: (0.65, 0.45, 0.42, 0.65),
}

MAX_QUANTIZED_SHARE = 0.5  # by block_sparse_mm: casting int8 and e4m3 takes longer than reading
# How many rows of blocks share a list of columns, by the rows of a block: from MIN_RESULT elements
# of the result on, if the lists have at most MAX_LISTED places for each stored block.
TOGETHER = {32: 2}
MIN_RESULT = 2**23
MAX_LISTED = 1.82


def reference(
    x: torch.Tensor,
    values: torch.Tensor,
    crow: torch.Tensor,
    col: torch.Tensor,
    place: torch.Tensor | None,
    order: torch.Tensor | None,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    n: int,
    longest: int = 0,
) -> torch.Tensor:
    """``out[m, r BN + i] = (sum over p in crow[r] .. crow[r + 1] - 1 of the sum over j of
    block_p[i, j] * x[m, col[p] BK + j]) + bias[r BN + i]``: x @ W^T with W [N, K] in BSR.

    Shapes and dtypes:
        x       [M, K]                        bf16 or fp16; int8
        values  [P, BN, BK]                   block_p = values[place[p]]; or
                [N / BN, K / BK, BN, BK]      block_p = values[r, col[p]], in place in a dense W
                                              of x's dtype, or int8 or e4m3 for bf16 and fp16
        crow    [N / BN + 1]                  int32 or int64, ascending from 0 to ``len(col)``
        col     [count]                       the same; 0 <= col[p] < K / BK
        place   [count]                       the same, for values of 3 dimensions; None: p
                [count, R]                    the same: R rows of blocks have one list of columns.
                                              Row i of them has block ``values[place[p, i]]`` at
                                              col[p] (in place: that of W), none if it is negative;
                                              crow and order are of N / BN / R lists
        order   [N / BN]                      the same: in which order a kernel takes the rows of
                                              blocks, a permutation; it does not change the result
        scale   [N]                           of each row of an int8 or e4m3 W, fp32, bf16 or fp16:
                                              multiplies the sum; None: 1
                [P, BN] or [P, 1]             of each row of a block, or each block, as ``values``
                                              (of 3 dimensions) has them
        bias    [N]                           fp32, bf16 or fp16; None: 0
    BN and BK are 16, 32, 64 or 128. Any strides. Returns [M, N] in x's dtype, contiguous; for x in
    int8 the exact sum in int32, without scale and bias (K is 131071 at most). ``longest``, the
    columns of the longest list (0: unknown), is for the choice of a kernel.

    Sums and bias are fp32, rounded once (the reference adds in fp64). With a scale of blocks
    ``value * scale`` is computed in fp32 and rounded to x's dtype; a kernel may multiply the sums
    of a block by its scale instead. A row without blocks is the bias. What is not stored takes no
    part: an infinity of x at a column without blocks is not seen, where the dense product has a
    NaN. A column that is listed twice in a row counts twice. Indices that are out of range, or
    descend in ``crow``, are undefined behaviour.

    Raises SpecError for other shapes or dtypes.
    """
    spec_of(x, values, crow, col, place, order, scale, bias, n=n)
    block_n, block_k = values.shape[-2:]
    if scale is not None and scale.dim() == 2:
        values = (values.float() * scale.float()[:, :, None]).to(x.dtype)
        scale = None
    if values.dtype == torch.float8_e4m3fn:
        values = values.to(x.dtype)  # exact; not every device indexes fp8
    count = crow.diff().long()
    lists = torch.repeat_interleave(
        torch.arange(len(count), device=x.device), count, output_size=len(col)
    )
    number = torch.arange(len(col), device=x.device) if place is None else place.long()
    number = number if number.dim() == 2 else number[:, None]
    within = torch.arange(number.shape[1], device=x.device)
    is_there = number >= 0
    row = (lists[:, None] * number.shape[1] + within)[is_there]
    column = col.long()[:, None].expand_as(number)[is_there]
    blocks = values[row, column] if values.dim() == 4 else values[number[is_there]]
    wide = x.double().view(len(x), -1, block_k).transpose(0, 1)[column]
    parts = torch.bmm(wide, blocks.double().transpose(1, 2))
    out = parts.new_zeros(n // block_n, len(x), block_n).index_add_(0, row, parts)
    out = out.transpose(0, 1).reshape(len(x), n)
    if x.dtype == torch.int8:
        return out.to(torch.int32)
    return scaled(out.float(), None, scale, bias, x.dtype)


def fake(x: torch.Tensor, *tensors: Any, n: int, longest: int = 0) -> torch.Tensor:
    spec = spec_of(x, *tensors, n=n, longest=longest)
    return torch.empty((x.shape[0], n), dtype=spec.out_dtype, device=x.device)


def spec_of(
    x: torch.Tensor,
    values: torch.Tensor,
    crow: torch.Tensor,
    col: torch.Tensor,
    place: torch.Tensor | None,
    order: torch.Tensor | None,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    n: int,
    longest: int = 0,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such product.

    Symbolic sizes are not checked: that would add a guard.
    """
    if x.dim() != 2 or values.dim() not in (3, 4) or values.dtype not in STORED.get(x.dtype, ()):
        shapes = f"x is {x.dtype} {list(x.shape)}, values {values.dtype} {list(values.shape)}"
        raise SpecError(
            "block_sparse takes x [M, K] in bf16, fp16 or int8, and blocks in x's dtype, or int8 "
            f"or e4m3 for floats; {shapes}"
        )
    k, (block_n, block_k) = x.shape[1], values.shape[-2:]
    if block_n not in BLOCK_SIZES or block_k not in BLOCK_SIZES or n % block_n:
        raise SpecError(f"block_sparse: blocks of {block_n} x {block_k} in N = {n}")
    if isinstance(k, int) and k % block_k:
        raise SpecError(f"block_sparse: blocks of {block_n} x {block_k} in K = {k}")
    count, together = col.shape[0], rows_together(place)
    rows = n // block_n // together
    in_place = (n // block_n, k // block_k, block_n, block_k)
    if n // block_n % together:
        raise SpecError(f"block_sparse: {n // block_n} rows of blocks, {together} together")
    is_misplaced = place is not None and together == 1
    if values.dim() == 4 and (is_misplaced or differ(values.shape, in_place)):
        raise SpecError(f"block_sparse: values are {list(values.shape)}, not {list(in_place)}")
    if values.dim() == 3 and place is None and differ(values.shape[:1], (count,)):
        raise SpecError(f"block_sparse: {values.shape[0]} blocks for {count} columns")
    if x.dtype == torch.int8 and (scale is not None or bias is not None):
        raise SpecError("block_sparse: sums of int8 have neither scale nor bias")
    if x.dtype == torch.int8 and isinstance(k, int) and k > max_k("", ""):
        raise SpecError(f"block_sparse: K = {k} of int8, {max_k('', '')} is the most")
    if values.dtype == x.dtype and scale is not None:
        raise SpecError(f"block_sparse: a scale of {values.dtype} blocks")
    of_blocks = [(values.shape[0], size) for size in (1, block_n) if values.dim() == 3]
    check(
        "block_sparse",
        {
            "crow": (crow, ((rows + 1,),), INDEX_DTYPES),
            "col": (col, ((count,),), INDEX_DTYPES),
            "place": (place, ((count,), (count, together)), INDEX_DTYPES),
            "order": (order, ((rows,),), INDEX_DTYPES),
            "scale": (scale, ((n,), *of_blocks), SCALE_DTYPES),
            "bias": (bias, ((n,),), SCALE_DTYPES),
        },
    )
    scales = None
    if scale is not None:
        scales = ScaleSpec(scale.dtype, scale_block(tuple(scale.shape), block_n, block_k))
    return make_spec(
        x.dtype,
        (block_n, block_k),
        stored_count(tuple(values.shape), count, together),
        bias=bias is not None,
        stored=values.dtype,
        scale=scales,
        rows=together,
        longest=longest,
    )


def rows_together(place: torch.Tensor | None) -> int:
    """How many rows of blocks have one list of columns."""
    return 1 if place is None or place.dim() == 1 else int(place.shape[1])


def stored_count(values: tuple[Any, ...], listed: int, together: int) -> int:
    """The number of blocks, at most: those of ``values``, or all that may be listed."""
    is_list = together > 1 and len(values) == 3
    return int(values[0]) if is_list else listed * together


def scale_block(shape: tuple[Any, ...], block_n: int, block_k: int) -> tuple[int, int]:
    """What of b [K, N] shares a scale, by the shape of the scales."""
    return (-1, 1) if len(shape) == 1 else (block_k, block_n if shape[1] == 1 else 1)


def make_spec(
    dtype: torch.dtype,
    block: tuple[int, int],
    count: int,
    *,
    bias: bool,
    stored: torch.dtype | None = None,
    scale: ScaleSpec | None = None,
    rows: int = 1,
    longest: int = 0,
) -> QuantGemmSpec:
    """``count`` stored blocks of shape ``block`` (n, k); ``stored``: their dtype, if not x's;
    ``rows``: how many rows of blocks have one list of columns; ``longest``: of the longest list."""
    return QuantGemmSpec(
        a=OperandSpec(dtype),
        b=OperandSpec(stored or dtype, scale, blocks=BlockSpec(*block, count, rows, longest)),
        out_dtype=torch.int32 if dtype == torch.int8 else dtype,
        bias=bias,
    )


def prefers_dense(m: int | None, n: int, k: int, spec: QuantGemmSpec) -> bool:
    """Whether the dense product of M rows is faster, by ``MAX_SHARE``; M None: unknown, so not."""
    blocks = spec.b.blocks
    assert blocks is not None
    limits = MAX_SHARE[min(blocks.n, blocks.k)]
    share = next(share for most, share in zip(MAX_ROWS, limits, strict=True) if (m or 1) <= most)
    if spec.b.dtype in QUANTIZED:
        share = min(share, MAX_QUANTIZED_SHARE)
    return blocks.stored_share(n, k) > share


op = define(SCHEMA, reference, fake, flexible_layout=True)
