"""``torch.ops.inductor_quant.fp8``: an FP8 GEMM with scales per token, channel, group or tensor."""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops.checks import check, check_matrices
from inductor_quant.ops.registration import define
from inductor_quant.ops.w8a8 import SCALE_DTYPES, groups_of, scale_spec, scaled
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec, ScaleSpec

SCHEMA = (
    "fp8(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, *, "
    "bool fast_accum=False, ScalarType out_dtype) -> Tensor"
)
# The OCP types (https://www.opencompute.org, "OFP8"), not the "fnuz" ones, whose exponent bias
# differs: the same byte is half the value.
ELEMENT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# For large M cuBLASLt, which ``aten._scaled_mm`` calls, beats our Triton kernels: block scales, or
# sums promoted to fp32 on the way (no fast_accum), take a second accumulator, which halves the
# tile. The Gluon kernel for large M keeps up if its tiles fill MIN_FILLED of the SMs. Up to
# MAX_SPLIT_ROWS our split-K kernels win if tiles would leave half of the SMs idle. With fast_accum
# and beyond these rows cuBLASLt is ahead by a few percent from MIN_LIBRARY_PRODUCTS multiply-adds
# on, up to MAX_LIBRARY_K, which any epilogue outweighs. (H200.)
MAX_PROMOTED_ROWS = 64
MAX_SPLIT_ROWS = 256
HOPPER_SMS = 132
GLUON_TILES = ((128, 256), (128, 192))
MIN_GLUON_ROWS = 256
MIN_FILLED = 0.65
MIN_LIBRARY_PRODUCTS = 6 * 10**9
MAX_LIBRARY_K = 8191
# cuBLASLt takes scales of blocks for multiples of so many rows, and reads those of 128 x 128 as if
# a row had a multiple of four: versions of torch that do not check this compute something else
# (pytorch#166752).
LIBRARY_ROWS, LIBRARY_K = 4, 512


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[m, n] = a_scale[m] * b_scale[n] * (sum over k of a[m, k] * b[k, n]) + bias[n]``.

    Shapes and dtypes:
        a        [M, K]            float8_e4m3fn or float8_e5m2
        b        [K, N]            float8_e4m3fn or float8_e5m2
        a_scale  [M, 1] or [1, 1]  fp32, bf16 or fp16; per token or per tensor; None: 1
        b_scale  [1, N] or [1, 1]  fp32, bf16 or fp16; per channel or per tensor; None: 1
                 [G, N]            likewise, one for each of G groups of K
        bias     [N]               fp32, bf16 or fp16; None: 0
    Returns [M, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    Accumulation. Products of FP8 values are exact in fp32; Hopper's matrix unit adds them with
    about 14 bits. ``fast_accum=False`` promotes its sum to fp32 every 128 of K (two-level
    accumulation); ``fast_accum=True`` never does, like ``use_fast_accum`` of ``torch._scaled_mm``.
    Other architectures and this reference accumulate in fp32 or wider either way. Scales and bias
    are applied in fp32, in the order of the formula, and rounded once. NaN and infinity propagate
    as in the formula.

    G > 1 groups divide K into groups of K / G: the sum over each, added as without ``fast_accum``,
    is multiplied by the group's scale and accumulated in fp32 (the reference adds in fp64).

    Raises SpecError for other shapes or dtypes.
    """
    spec_of(a, b, a_scale, b_scale, bias, fast_accum=fast_accum, out_dtype=out_dtype)
    if (groups := groups_of(None, b_scale)) > 1:
        assert b_scale is not None
        right = b.double() * b_scale.double().repeat_interleave(b.shape[0] // groups, 0)
        return scaled((a.double() @ right).float(), a_scale, None, bias, out_dtype)
    return scaled((a.double() @ b.double()).float(), a_scale, b_scale, bias, out_dtype)


def fake(
    a: torch.Tensor, b: torch.Tensor, *scales: Any, out_dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    spec_of(a, b, *scales, out_dtype=out_dtype, **options)
    return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)


def spec_of(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    fast_accum: bool = False,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such GEMM.

    Symbolic sizes are not checked: that would add a guard.
    """
    check_matrices("fp8", a, b, ELEMENT_DTYPES)
    m, (k, n), groups = a.shape[0], b.shape, groups_of(None, b_scale)
    if groups > 1 and isinstance(k, int) and k % groups:
        raise SpecError(f"fp8: K={k} is no multiple of the {groups} groups of b_scale")
    check(
        "fp8",
        {
            "a_scale": (a_scale, ((m, 1), (1, 1)), SCALE_DTYPES),
            "b_scale": (b_scale, ((1, n), (1, 1), (groups, n)), SCALE_DTYPES),
            "bias": (bias, ((n,),), SCALE_DTYPES),
        },
    )
    if out_dtype not in SCALE_DTYPES:
        raise SpecError(f"fp8 returns one of {SCALE_DTYPES}, not {out_dtype}")
    return make_spec(
        a_dtype=a.dtype,
        b_dtype=b.dtype,
        a_scale=scale_spec(a_scale, (1, -1), dim=0),
        b_scale=ScaleSpec(b_scale.dtype, (k // groups, 1))
        if b_scale is not None and groups > 1
        else scale_spec(b_scale, (-1, 1), dim=1),
        out_dtype=out_dtype,
        bias=bias is not None,
        fast_accum=fast_accum,
    )


def make_spec(
    *,
    a_scale: ScaleSpec | None,
    b_scale: ScaleSpec | None,
    out_dtype: torch.dtype,
    bias: bool,
    a_dtype: torch.dtype = torch.float8_e4m3fn,
    b_dtype: torch.dtype = torch.float8_e4m3fn,
    fast_accum: bool = False,
) -> QuantGemmSpec:
    """The spec of an FP8 GEMM with these scales, of blocks or not."""
    a, b = OperandSpec(a_dtype, a_scale), OperandSpec(b_dtype, b_scale)
    return QuantGemmSpec(a, b, out_dtype, bias, fast_accum)


def prefers_library(
    spec: QuantGemmSpec,
    m: int,
    n: int,
    k: int,
    *,
    divisor: int | None = None,
    m_is_bounded: bool = True,
    has_gluon: bool = True,
    has_epilogue: bool = True,
) -> bool:
    """Whether ``aten._scaled_mm`` is right for these sizes and faster than our kernels.

    ``divisor``: what divides M in any call; None: ``m``. ``has_epilogue``: more than a bias
    follows.
    """
    has_blocks = spec.b.scale is not None and spec.b.scale.block[0] > 1
    if has_blocks and ((m if divisor is None else divisor) % LIBRARY_ROWS or k % LIBRARY_K):
        return False
    halves = 2 * math.ceil(m / 128) * math.ceil(n / 128)
    is_split = m_is_bounded and m <= MAX_SPLIT_ROWS and halves <= HOPPER_SMS
    if is_split or m <= MAX_PROMOTED_ROWS:
        return False
    if spec.fast_accum:
        is_library = m > MAX_SPLIT_ROWS and k <= MAX_LIBRARY_K and not has_epilogue
        return is_library and m * n * k >= MIN_LIBRARY_PRODUCTS
    suits_gluon = has_gluon and m >= MIN_GLUON_ROWS and spec.out_dtype.itemsize <= 2
    return not (suits_gluon and _fills_the_gpu(m, n))


def _fills_the_gpu(m: int, n: int) -> bool:
    """Whether M x N is a large enough share of the elements that whole waves of tiles compute."""

    def computed(tile: tuple[int, int]) -> int:
        tiles = math.ceil(m / tile[0]) * math.ceil(n / tile[1])
        return math.ceil(tiles / HOPPER_SMS) * HOPPER_SMS * tile[0] * tile[1]

    return m * n >= MIN_FILLED * min(map(computed, GLUON_TILES))


op = define(SCHEMA, reference, fake, flexible_layout=True)
