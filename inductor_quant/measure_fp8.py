"""Operands and calls of FP8 GEMMs for ``measure``: what a spec describes, and what stock torch has
for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inductor_quant.spec import OperandSpec, QuantGemmSpec

ELEMENT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_fp8(spec: QuantGemmSpec) -> bool:
    return spec.a.dtype in ELEMENT_DTYPES and spec.b.dtype in ELEMENT_DTYPES


def is_block(spec: QuantGemmSpec) -> bool:
    return spec.b.scale is not None and spec.b.scale.block[0] != -1


def inputs(
    spec: QuantGemmSpec, m: int, n: int, k: int, device: torch.device, copies: int
) -> list[tuple[torch.Tensor | None, ...]]:
    """Arguments of the GEMM, ``copies`` times with other weights. The scales of blocks lie along M,
    as cuBLASLt wants them."""

    def elements(rows: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, k, device=device).to(dtype)

    def scale(operand: OperandSpec, shape: tuple[int, int]) -> torch.Tensor | None:
        if operand.scale is None:
            return None
        pairs = zip(shape, operand.scale.block, strict=True)
        rows, columns = (1 if block == -1 else -(-size // block) for size, block in pairs)
        found = torch.rand(rows, columns, device=device).to(operand.scale.dtype)
        return found.t().contiguous().t() if is_block(spec) else found

    a = elements(m, spec.a.dtype)
    a_scale, b_scale = scale(spec.a, (m, k)), scale(spec.b, (k, n))
    bias = torch.randn(n, device=device).to(spec.out_dtype) if spec.bias else None
    more = (a_scale, b_scale, bias)
    return [(a, elements(n, spec.b.dtype).t(), *more) for _ in range(copies)]


def canonical(spec: QuantGemmSpec) -> Callable[..., torch.Tensor]:
    op: Any = torch.ops.inductor_quant.fp8
    options: dict[str, Any] = {"fast_accum": spec.fast_accum, "out_dtype": spec.out_dtype}
    if is_block(spec):
        assert spec.b.scale is not None
        block_k, block_n = spec.b.scale.block
        op = torch.ops.inductor_quant.fp8_block
        options = {"block_k": block_k, "block_n": block_n, "out_dtype": spec.out_dtype}

    def run(*arguments: torch.Tensor | None) -> torch.Tensor:
        return op(*arguments, **options)

    return run


def plain(spec: QuantGemmSpec) -> Callable[..., torch.Tensor]:
    """``torch._scaled_mm``; it takes fp32 scales, in pairs of one kind, or raises."""

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        one = torch.ones((), device=a.device)
        out = torch._scaled_mm(
            *(a, b, one if a_scale is None else a_scale, one if b_scale is None else b_scale),
            out_dtype=spec.out_dtype,
            use_fast_accum=spec.fast_accum,
        )
        return out if bias is None else out + bias

    return run
