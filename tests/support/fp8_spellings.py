"""Spellings of FP8 GEMMs as producers write them, as data: what the recogniser has to make of
each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.fp8 import Case, Tensor, e4m3, gemm, is_fake, make_inputs, reference

bf16, f32 = torch.bfloat16, torch.float32
HAS_V2 = hasattr(torch.ops.aten, "_scaled_mm_v2") and hasattr(F, "scaled_mm")


@dataclasses.dataclass(frozen=True)
class Spelling:
    """``fn(*inputs(device))``, which means ``op``, the canonical op's case; ``finish`` is what the
    model computes from its result. ``spec``: what a report has to say."""

    name: str
    case: Case
    fn: Callable[..., Tensor]
    spec: str
    finish: Callable[[Tensor], Tensor] = lambda out: out
    make: Callable[[Case, str], tuple[Any, ...]] = make_inputs

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def inputs(self, device: str) -> tuple[Any, ...]:
        return self.make(self.case, device)

    def exact(self, inputs: tuple[Any, ...]) -> Tensor:
        return self.finish(reference(self.case, inputs))


def _mm(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, **kw: Any) -> Tensor:
    return torch._scaled_mm(a, w.t(), sa, sb, bias, out_dtype=bf16, **kw)


def _blocks(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    return _mm(a, w, sa, sb.t(), bias)


def _v2(recipes: tuple[str, str], transpose: bool = False) -> Callable[..., Tensor]:
    def fn(a: Tensor, w: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
        first, second = (getattr(F.ScalingType, name) for name in recipes)
        sb = sb.t() if transpose else sb
        return F.scaled_mm(a, w.t(), sa, first, sb, second, bias=bias, output_dtype=bf16)

    return fn


ROW = Case(32, 64, 128)
BLOCK = Case(48, 256, 512, block=(128, 128), a_scales="m", bias=False)
_ROW_SPEC = "(a=e4m3/token:f32, b=e4m3/channel:f32, out=bf16{})"
_BLOCK_SPEC = "(a=e4m3/1x128:f32, b=e4m3/128x{}:f32, out=bf16)"

SCALED_MM = [
    Spelling("row", ROW, _mm, _ROW_SPEC.format("+bias")),
    Spelling("row, fast", dataclasses.replace(ROW, fast_accum=True),
             lambda *given: _mm(*given, use_fast_accum=True),
             _ROW_SPEC.format("+bias, fast_accum").replace(")", "") + ")"),
    Spelling("row, bias outside", ROW,
             lambda a, w, sa, sb, bias: _mm(a, w, sa, sb, None) + bias, _ROW_SPEC.format("")),
    Spelling("row, gelu", ROW, lambda *given: F.gelu(_mm(*given)), _ROW_SPEC.format("+bias"),
             F.gelu),
    Spelling("tensor", Case(32, 64, 128, a_scale="tensor", b_scale="tensor"),
             lambda a, w, sa, sb, bias: _mm(a, w, sa.reshape(()), sb.reshape(()), bias),
             "(a=e4m3/tensor:f32, b=e4m3/tensor:f32, out=bf16+bias)"),
    Spelling("one row", Case(1, 64, 128), _mm,
             "(a=e4m3/tensor:f32, b=e4m3/channel:f32, out=bf16+bias)"),
]  # fmt: skip
BLOCKS = [
    Spelling("blocks", BLOCK, _blocks, _BLOCK_SPEC.format(128)),
    Spelling("blocks of one column", dataclasses.replace(BLOCK, block=(128, 1)), _blocks,
             _BLOCK_SPEC.format(1)),
]  # fmt: skip
VERSION_2 = [
    Spelling("v2, row", ROW, _v2(("RowWise", "RowWise")), _ROW_SPEC.format("+bias")),
    Spelling("v2, tensor", Case(32, 64, 128, a_scale="tensor", b_scale="tensor"),
             _v2(("TensorWise", "TensorWise")),
             "(a=e4m3/tensor:f32, b=e4m3/tensor:f32, out=bf16+bias)"),
]  # fmt: skip


def layer(kind: str) -> Callable[..., Tensor]:
    """A linear layer of bf16 in and out that quantizes its activation as it runs: ``x``, the
    weight [N, K] and its scale."""

    def row(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        amax = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12)
        q = (x.float() / (amax / 448)).clamp(-448, 448).to(e4m3)
        return torch._scaled_mm(q, w.t(), amax / 448, scale, out_dtype=bf16, use_fast_accum=True)

    def block(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        m, k = x.shape
        parts = x.float().reshape(m, k // 128, 128)
        amax = parts.abs().amax(-1).clamp_min(1e-12) / 448
        q = (parts / amax[..., None]).to(e4m3).reshape(m, k)
        return torch.ops.inductor_quant.fp8_block(
            q, w.t(), amax, scale.t(), None, block_k=128, block_n=128, out_dtype=bf16
        )

    return {"row": row, "block": block}[kind]


__all__ = ["BLOCKS", "HAS_V2", "SCALED_MM", "VERSION_2", "Spelling", "gemm", "is_fake", "layer"]
