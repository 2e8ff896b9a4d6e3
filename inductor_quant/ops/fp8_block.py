"""``torch.ops.inductor_quant.fp8_block``: an FP8 GEMM with a scale for each block of K."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops.checks import check, check_matrices
from inductor_quant.ops.fp8 import ELEMENT_DTYPES, make_spec
from inductor_quant.ops.registration import define
from inductor_quant.ops.w8a8 import SCALE_DTYPES as FLOAT_DTYPES
from inductor_quant.ops.w8a8 import scaled
from inductor_quant.spec.gemm import QuantGemmSpec, ScaleSpec

SCHEMA = (
    "fp8_block(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, *, "
    "int block_k, int block_n, ScalarType out_dtype) -> Tensor"
)
# float8_e8m0fnu: a power of two, stored as its exponent (the block scale of OCP "MX").
SCALE_DTYPES = (*FLOAT_DTYPES, torch.float8_e8m0fnu)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    block_k: int,
    block_n: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[m, n] = (sum over k of a[m, k] * a_scale[m, k // block_k] * b[k, n] *
    b_scale[k // block_k, n // block_n]) + bias[n]``.

    Shapes and dtypes:
        a        [M, K]                                float8_e4m3fn or float8_e5m2
        b        [K, N]                                float8_e4m3fn or float8_e5m2
        a_scale  [M, ceil(K / block_k)]                fp32, bf16, fp16 or float8_e8m0fnu
        b_scale  [ceil(K / block_k), ceil(N / block_n)]  the same, with a type of its own
        bias     [N]                                   fp32, bf16 or fp16; None: 0
    ``block_k`` and ``block_n`` count elements; the last block may be partial. DeepSeek-V3: 128 and
    128; ``block_n=1``: a scale per group of K and channel. Any strides: scales may be contiguous
    along M or along K.
    Returns [M, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    The matrix unit accumulates one block of K; that sum is multiplied by both scales in fp32 and
    added to an fp32 accumulator (two-level accumulation; the reference adds in fp64). The bias is
    added in fp32, rounded once. NaN and infinity of operands propagate as in the formula; those of
    a scale multiply the sum of their block in a kernel, each of its terms in the reference. A block
    whose scale is 0 contributes 0.

    Raises SpecError for other shapes or dtypes, or a block size below 1.
    """
    sizes = {"block_k": block_k, "block_n": block_n}
    spec_of(a, b, a_scale, b_scale, bias, **sizes, out_dtype=out_dtype)
    (k, n) = b.shape
    # .double() first: repeat_interleave does not support e8m0
    rows = a_scale.double().repeat_interleave(block_k, 1)[:, :k]
    blocks = b_scale.double().repeat_interleave(block_k, 0).repeat_interleave(block_n, 1)[:k, :n]
    out = ((a.double() * rows) @ (b.double() * blocks)).float()
    return scaled(out, None, None, bias, out_dtype)


def fake(
    a: torch.Tensor, b: torch.Tensor, *scales: Any, out_dtype: torch.dtype, **sizes: Any
) -> torch.Tensor:
    spec_of(a, b, *scales, out_dtype=out_dtype, **sizes)
    return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)


def spec_of(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    block_k: int,
    block_n: int,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such GEMM.

    Symbolic sizes are not checked: that would add a guard.
    """
    check_matrices("fp8_block", a, b, ELEMENT_DTYPES)
    if block_k < 1 or block_n < 1:
        raise SpecError(f"fp8_block: block_k={block_k} and block_n={block_n} must be positive")
    m, (k, n) = a.shape[0], b.shape
    k_blocks, n_blocks = -(-k // block_k), -(-n // block_n)
    check(
        "fp8_block",
        {
            "a_scale": (a_scale, ((m, k_blocks),), SCALE_DTYPES),
            "b_scale": (b_scale, ((k_blocks, n_blocks),), SCALE_DTYPES),
            "bias": (bias, ((n,),), FLOAT_DTYPES),
        },
    )
    if out_dtype not in FLOAT_DTYPES:
        raise SpecError(f"fp8_block returns one of {FLOAT_DTYPES}, not {out_dtype}")
    return make_spec(
        a_dtype=a.dtype,
        b_dtype=b.dtype,
        a_scale=ScaleSpec(a_scale.dtype, (1, block_k)),
        b_scale=ScaleSpec(b_scale.dtype, (block_k, block_n)),
        out_dtype=out_dtype,
        bias=bias is not None,
    )


op = define(SCHEMA, reference, fake, flexible_layout=True)
