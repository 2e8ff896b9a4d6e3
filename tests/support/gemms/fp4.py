"""Weights of E2M1 by a table, two codes a byte, the even k low, with scales of eight bits."""

from __future__ import annotations

import torch

from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat
from tests.support.gemms.packed import Packed, form

u8, f32, bf16, e4m3 = torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn


def _format(k: int, n: int, group: int, *steps: DequantOp) -> WeightFormat:
    half = group // 2
    code = Field(0, (form(("n0", 1)), form(("k0", half), ("k1", 1))), form(("k2", 4)), 4)
    element = Field(1, (form(data=code),), entries="e2m1")
    return WeightFormat((k // group, half, 2), (n,), element, steps)


def _of_groups(**bits: int | str) -> DequantOp:
    return DequantOp("mul", Field(2, (form(("n0", 1)), form(("k0", 1))), **bits))  # type: ignore[arg-type]


def _values(words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([words & 15, words >> 4], 2).flatten(1)
    return table[codes.long()].t().double()


def mxfp4(k: int, n: int, group: int) -> Packed:
    """A power of two for each group: an exponent."""

    def read(words, table, scales):  # type: ignore[no-untyped-def]
        powers = (scales.t().double() - 127).exp2()
        return _values(words, table) * powers.repeat_interleave(group, 0)

    tensors = (
        ("bits", (n, k // 2), u8),
        ("e2m1", (16,), bf16),
        ("exponent", (n, k // group), u8),
    )
    scale = _of_groups(width=8, float8="e8m0")
    return Packed("mxfp4", _format(k, n, group, scale), tensors, read)


def nvfp4(k: int, n: int, group: int) -> Packed:
    """An e4m3 for each group, and one fp32 that divides."""
    overall = DequantOp("div", Field(3, (AffineIndex(),)))

    def read(words, table, scales, overall):  # type: ignore[no-untyped-def]
        scales = scales.t().double().repeat_interleave(group, 0)
        return _values(words, table) * scales / overall.double()

    tensors = (
        ("bits", (n, k // 2), u8),
        ("e2m1", (16,), bf16),
        ("float", (n, k // group), e4m3),
        ("zero", (1,), f32),
    )
    return Packed("nvfp4", _format(k, n, group, _of_groups(), overall), tensors, read)
