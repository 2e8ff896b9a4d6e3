"""``torch.ops.inductor_quant.fp8``: an FP8 GEMM with scales per token, channel or tensor."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops.checks import check, check_matrices
from inductor_quant.ops.w8a8 import SCALE_DTYPES, scale_spec, scaled
from inductor_quant.spec import OperandSpec, QuantGemmSpec, ScaleSpec

SCHEMA = (
    "fp8(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, *, "
    "bool fast_accum=False, ScalarType out_dtype) -> Tensor"
)
# The OCP types (https://www.opencompute.org, "OFP8"), not the "fnuz" ones, whose exponents have
# another bias: the same byte is half the number.
ELEMENT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


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
        bias     [N]               fp32, bf16 or fp16; None: 0
    Returns [M, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    Accumulation. Products of FP8 numbers are exact in fp32; Hopper's matrix unit adds them with
    about 14 bits. ``fast_accum=False``: what it has added is moved to an fp32 sum every 128 of K
    (two-level accumulation). ``fast_accum=True``: never, as ``use_fast_accum`` of
    ``torch._scaled_mm``. Other architectures and this reference add in fp32 or wider either way.
    Scales and bias follow in fp32, in the order of the formula, rounded once. NaN and infinity of
    operands and scales travel as in the formula.

    Raises SpecError where shapes or dtypes are others.
    """
    spec_of(a, b, a_scale, b_scale, bias, fast_accum=fast_accum, out_dtype=out_dtype)
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
    """The spec that the op's arguments encode. Raises SpecError where they form no such GEMM.

    Symbolic sizes are not judged: that would add a guard.
    """
    check_matrices("fp8", a, b, ELEMENT_DTYPES)
    m, n = a.shape[0], b.shape[1]
    check(
        "fp8",
        {
            "a_scale": (a_scale, ((m, 1), (1, 1)), SCALE_DTYPES),
            "b_scale": (b_scale, ((1, n), (1, 1)), SCALE_DTYPES),
            "bias": (bias, ((n,),), SCALE_DTYPES),
        },
    )
    if out_dtype not in SCALE_DTYPES:
        raise SpecError(f"fp8 returns one of {SCALE_DTYPES}, not {out_dtype}")
    return make_spec(
        a_dtype=a.dtype,
        b_dtype=b.dtype,
        a_scale=scale_spec(a_scale, (1, -1), dim=0),
        b_scale=scale_spec(b_scale, (-1, 1), dim=1),
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
    """The spec of an FP8 GEMM, of blocks or not, with these scales."""
    return QuantGemmSpec(
        a=OperandSpec(a_dtype, a_scale),
        b=OperandSpec(b_dtype, b_scale),
        out_dtype=out_dtype,
        acc_dtype=torch.float32,
        bias=bias,
        fast_accum=fast_accum,
    )


_library = torch.library.Library("inductor_quant", "FRAGMENT")
_library.define(SCHEMA, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
_library.impl("fp8", reference, "CompositeExplicitAutograd")
torch.library.register_fake("inductor_quant::fp8", fake, lib=_library)
op = torch.ops.inductor_quant.fp8.default
