"""Weights whose words hold values, or whose groups hold columns, that are far apart, or whose
numbers cross words."""

from __future__ import annotations

import torch

from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat
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


def quarters_of_k(k: int, n: int, group: int) -> Packed:
    """Four quarters of K share bytes, the first has the lowest bits; int8 zero points and scales of
    groups."""
    quarter = k // 4
    code = Field(0, (form(("n0", 1)), form(("k1", group), ("k2", 1))), form(("k0", 2)), 2)
    at = form(("n0", 1)), form(("k0", quarter // group), ("k1", 1))
    steps = DequantOp("sub", Field(1, at)), DequantOp("mul", Field(2, at))

    def read(words, zeros, scales):  # type: ignore[no-untyped-def]
        zeros, scales = (each.double().repeat_interleave(group, 1) for each in (zeros, scales))
        return ((_parts(words, 2) - zeros) * scales).t()

    tensors = (
        ("bits", (n, quarter), u8),
        ("zero", (n, k // group), torch.int8),
        ("scale", (n, k // group), bf16),
    )
    format = WeightFormat((4, quarter // group, group), (n,), code, steps)
    return Packed("quarters_of_k", format, tensors, read)


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


def crossing(k: int, n: int, group: int) -> Packed:
    """GPTQ's 3 bits: 32 numbers along K in three words, zero points likewise along N."""
    of_group = group // 32
    along, across = form(("k0", 3 * of_group), ("k1", 3)), form(("n0", 32), ("n1", 1))
    code = bit_by_bit(0, (along, across), 0, "k2", 3)
    zero = bit_by_bit(1, (form(("k0", 1)), form(("n0", 3))), 1, "n1", 3)
    scale = Field(2, (form(("k0", 1)), across))

    def read(words, zeros, scales):  # type: ignore[no-untyped-def]
        zeros = _numbers(zeros.t()).t().repeat_interleave(group, 0)
        return (_numbers(words) - zeros) * scales.double().repeat_interleave(group, 0)

    steps = DequantOp("sub", zero), DequantOp("mul", scale)
    tensors = (
        ("bits", (k * 3 // 32, n), torch.int32),
        ("bits", (k // group, n * 3 // 32), torch.int32),
        ("scale", (k // group, n), torch.float16),
    )
    format = WeightFormat((k // group, of_group, 32), (n // 32, 32), code, steps)
    return Packed("crossing", format, tensors, read)


def bit_by_bit(
    source: int, first: tuple[AffineIndex, ...], dim: int, digit: str, bits: int
) -> Field:
    """Numbers that follow one another. ``first``: the first of ``bits`` words along ``dim``."""
    field = None
    for bit in reversed(range(bits)):
        at = [bits * number + bit for number in range(32)]
        words, offsets = (
            ((digit, tuple(b)),) for b in ([b // 32 for b in at], [b % 32 for b in at])
        )
        index = list(first)
        index[dim] = AffineIndex(linear=first[dim].linear, tables=words)
        field = Field(source, tuple(index), AffineIndex(tables=offsets), 1, high=field)
    assert field is not None
    return field


def _numbers(words: torch.Tensor) -> torch.Tensor:
    """[3 * rows, columns] -> [32 * rows, columns], fp64."""
    bits = (
        words.unsqueeze(1) >> torch.arange(32, dtype=words.dtype, device=words.device)[:, None] & 1
    )
    bits = bits.reshape(-1, 3, words.shape[1]).double()
    return bits[:, 0] + 2 * bits[:, 1] + 4 * bits[:, 2]
