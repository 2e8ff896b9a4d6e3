"""Weights whose words hold values, or whose groups hold columns, that are far apart."""

from __future__ import annotations

import torch

from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat
from tests.support.gemms.packed import Packed, form

u8, bf16 = torch.uint8, torch.bfloat16


def _parts(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of each byte, the lowest bits first: whole rows of them one after the other."""
    return torch.cat([words >> at & ((1 << bits) - 1) for at in range(0, 8, bits)], 1)


def shards(k: int, n: int, group: int) -> Packed:
    """Three bits, as torchao stores them: the two lowest of four quarters of K in a byte, the
    highest of eight eighths in another; zero points and scales of groups."""
    eighth = k // 8
    each = eighth // group
    place = form(("n0", 1)), form(("k1", eighth), ("k2", group), ("k3", 1))
    high = Field(1, (place[0], form(("k2", group), ("k3", 1))), form(("k0", 2), ("k1", 1)), 1)
    code = Field(0, place, form(("k0", 2)), 2, high=high)
    at = form(("n0", 1)), form(("k0", 2 * each), ("k1", each), ("k2", 1))
    steps = DequantOp("sub", Field(2, at)), DequantOp("mul", Field(3, at))

    def read(low, high, zeros, scales):  # type: ignore[no-untyped-def]
        codes = (_parts(low, 2) + 4 * _parts(high, 1)).double()
        zeros, scales = (each.double().repeat_interleave(group, 1) for each in (zeros, scales))
        return ((codes - zeros) * scales).t()

    tensors = (
        ("bits", (n, k // 4), u8),
        ("bits", (n, eighth), u8),
        ("zero", (n, k // group), bf16),
        ("scale", (n, k // group), bf16),
    )
    return Packed("shards", WeightFormat((4, 2, each, group), (n,), code, steps), tensors, read)


def halves_of_k(k: int, n: int, group: int) -> Packed:
    """Two halves of K share bytes, the first is low; 8 is zero; scales of groups."""
    half = k // 2
    code = Field(0, (form(("n0", 1)), form(("k1", group), ("k2", 1))), form(("k0", 4)), 4, add=-8)
    scale = Field(1, (form(("n0", 1)), form(("k0", half // group), ("k1", 1))))

    def read(words, scales):  # type: ignore[no-untyped-def]
        return ((_parts(words, 4) - 8.0) * scales.double().repeat_interleave(group, 1)).t()

    format = WeightFormat((2, half // group, group), (n,), code, (DequantOp("mul", scale),))
    tensors = (("bits", (n, half), u8), ("scale", (n, k // group), bf16))
    return Packed("halves_of_k", format, tensors, read)


def groups_of_n(k: int, n: int, group: int) -> Packed:
    """HQQ with axis 0: each ``n / group``-th column and all of its K are one row, of which the
    first half is high; a zero point and a scale for each column of these."""
    every = n // group
    column = form(("k0", 1), ("n2", k))
    code = Field(0, (form(("n1", 1)), column), form(("n0", -4), const=4), 4)
    steps = DequantOp("sub", Field(1, (column,))), DequantOp("mul", Field(2, (column,)))

    def read(words, zeros, scales):  # type: ignore[no-untyped-def]
        codes = torch.cat([words >> 4, words & 15]).double()
        return ((codes - zeros.double()) * scales.double()).view(n, k).t()

    tensors = (
        ("bits", (group // 2, every * k), u8),
        ("zero", (every * k,), bf16),
        ("scale", (every * k,), bf16),
    )
    return Packed(
        "groups_of_n", WeightFormat((k,), (2, group // 2, every), code, steps), tensors, read
    )
