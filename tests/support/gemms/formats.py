"""Weight formats of real producers, by hand: the format, random tensors, and plain torch code that
dequantizes them without it.

GROUP is small so that a few rows make several groups; K and N are free where the packing allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from inductor_quant.spec.weight_format import (
    NO_TENSOR,
    AffineIndex,
    DequantOp,
    Field,
    WeightFormat,
)
from tests.support.gemms import apart, channels, fp4
from tests.support.gemms.packed import Packed, form

GROUP = 32

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
i8, u8, i32, i64 = torch.int8, torch.uint8, torch.int32, torch.int64
f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2


def _nibbles(words: torch.Tensor, dim: int, shifts: Sequence[int]) -> torch.Tensor:
    """Unsigned nibbles of each word at ``shifts``, laid one after the other along ``dim``."""
    parts = [(words.to(i64) >> shift) & 15 for shift in shifts]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def _rows(group: torch.Tensor) -> torch.Tensor:
    return group.repeat_interleave(GROUP, 0)


def gptq(k: int, n: int) -> Packed:
    """Words along K; zeros packed along N, stored less one; fp16 scales."""
    half = GROUP // 8
    format = WeightFormat(
        (k // GROUP, half, 8),
        (n // 8, 8),
        Field(0, (form(("k0", half), ("k1", 1)), form(("n0", 8), ("n1", 1))), form(("k2", 4)), 4),
        (
            DequantOp(
                "sub", Field(1, (form(("k0", 1)), form(("n0", 1))), form(("n1", 4)), 4, add=1)
            ),
            DequantOp("mul", Field(2, (form(("k0", 1)), form(("n0", 8), ("n1", 1))))),
        ),
    )

    def read(words, zeros, scales):  # type: ignore[no-untyped-def]
        q = _nibbles(words, 0, range(0, 32, 4))
        z = _nibbles(zeros, 1, range(0, 32, 4)) + 1
        return (q - _rows(z)).double() * _rows(scales).double()

    tensors = (
        ("bits", (k // 8, n), i32),
        ("bits", (k // GROUP, n // 8), i32),
        ("scale", (k // GROUP, n), f16),
    )
    return Packed("gptq", format, tensors, read)


def awq(k: int, n: int) -> Packed:
    """Words along N in AWQ's order, zeros likewise; fp16 scales."""
    shifts = tuple(4 * AWQ_ORDER[i] for i in range(8))
    offset = AffineIndex(tables=(("n1", shifts),))
    row = form(("k0", GROUP), ("k1", 1))
    format = WeightFormat(
        (k // GROUP, GROUP),
        (n // 8, 8),
        Field(0, (row, form(("n0", 1))), offset, 4),
        (
            DequantOp("sub", Field(1, (form(("k0", 1)), form(("n0", 1))), offset, 4)),
            DequantOp("mul", Field(2, (form(("k0", 1)), form(("n0", 8), ("n1", 1))))),
        ),
    )

    def read(words, zeros, scales):  # type: ignore[no-untyped-def]
        q, z = _nibbles(words, 1, shifts), _nibbles(zeros, 1, shifts)
        return (q - _rows(z)).double() * _rows(scales).double()

    tensors = (
        ("bits", (k, n // 8), i32),
        ("bits", (k // GROUP, n // 8), i32),
        ("scale", (k // GROUP, n), f16),
    )
    return Packed("awq", format, tensors, read)


def hqq(k: int, n: int) -> Packed:
    """Rows j and j + N / 2 of the [N, K] weight share a byte, the first in the high half; float
    zeros."""
    column = form(("n0", n // 2), ("n1", 1))
    format = WeightFormat(
        (k // GROUP, GROUP),
        (2, n // 2),
        Field(0, (form(("n1", 1)), form(("k0", GROUP), ("k1", 1))), form(("n0", -4), const=4), 4),
        (
            DequantOp("sub", Field(1, (column, form(("k0", 1))))),
            DequantOp("mul", Field(2, (column, form(("k0", 1))))),
        ),
    )

    def read(words, zeros, scales):  # type: ignore[no-untyped-def]
        q = torch.cat([words >> 4, words & 15]).t()
        return (q.double() - _rows(zeros.t()).double()) * _rows(scales.t()).double()

    tensors = (
        ("bits", (n // 2, k), u8),
        ("zero", (n, k // GROUP), bf16),
        ("scale", (n, k // GROUP), bf16),
    )
    return Packed("hqq", format, tensors, read)


def _plain(k: int, n: int, steps: tuple[DequantOp, ...]) -> WeightFormat:
    """An [N, K] tensor of whole elements, K in groups."""
    element = Field(0, (form(("n0", 1)), form(("k0", GROUP), ("k1", 1))))
    return WeightFormat((k // GROUP, GROUP), (n,), element, steps)


def _grouped(source: int) -> Field:
    return Field(source, (form(("n0", 1)), form(("k0", 1))))


def int8_group(k: int, n: int) -> Packed:
    """int8 [N, K] with int8 zeros and bf16 scales for each group."""
    format = _plain(k, n, (DequantOp("sub", _grouped(1)), DequantOp("mul", _grouped(2))))

    def read(q, zeros, scales):  # type: ignore[no-untyped-def]
        q = q.t().to(i64) - _rows(zeros.t()).to(i64)
        return q.double() * _rows(scales.t()).double()

    shape = (n, k // GROUP)
    tensors = (("bits", (n, k), i8), ("zero", shape, i8), ("scale", shape, bf16))
    return Packed("int8_group", format, tensors, read)


def int8_divisor(k: int, n: int) -> Packed:
    """int8 [N, K]; the scale of a group divides; then a constant does."""
    format = _plain(
        k, n, (DequantOp("div", _grouped(1)), DequantOp("div", 12.0), DequantOp("mul", 0.25))
    )

    def read(q, scales):  # type: ignore[no-untyped-def]
        return q.t().double() / _rows(scales.t()).double() / 12 * 0.25

    return Packed(
        "int8_divisor",
        format,
        (("bits", (n, k), i8), ("zero", (n, k // GROUP), f32)),
        read,
    )


def int8_folded(k: int, n: int) -> Packed:
    """uint8 [N, K] times the scale of a group, less what is folded of scale and zero."""
    format = _plain(k, n, (DequantOp("mul", _grouped(1)), DequantOp("sub", _grouped(2))))

    def read(q, scales, folded):  # type: ignore[no-untyped-def]
        q = q.t().double() * _rows(scales.t()).double()
        return q - _rows(folded.t()).double()

    shape = (n, k // GROUP)
    tensors = (("bits", (n, k), u8), ("scale", shape, f16), ("float", shape, f16))
    return Packed("int8_folded", format, tensors, read)


def e5m2_group(k: int, n: int) -> Packed:
    """e5m2 [N, K] with bf16 scales for each group."""
    format = _plain(k, n, (DequantOp("mul", _grouped(1)),))
    tensors = (("float", (n, k), e5m2), ("scale", (n, k // GROUP), bf16))
    return Packed(
        "e5m2_group", format, tensors, lambda q, s: q.double().t() * _rows(s.t()).double()
    )


def fp8_words(k: int, n: int) -> Packed:
    """Four e4m3 along K in an int32; bf16 scales for each group."""
    part = GROUP // 4
    element = Field(
        0,
        (form(("k0", part), ("k1", 1)), form(("n0", 1))),
        form(("k2", 8)),
        8,
        float8="e4m3",
    )
    scale = DequantOp("mul", Field(1, (form(("k0", 1)), form(("n0", 1)))))
    format = WeightFormat((k // GROUP, part, 4), (n,), element, (scale,))

    def read(words, scales):  # type: ignore[no-untyped-def]
        parts = [((words >> shift) & 255).to(u8).view(e4m3) for shift in (0, 8, 16, 24)]
        q = torch.stack([part.double() for part in parts], 1).flatten(0, 1)
        return q * _rows(scales).double()

    tensors = (("fp8 words", (k // 4, n), i32), ("scale", (k // GROUP, n), bf16))
    return Packed("fp8_words", format, tensors, read)


def nibble_pairs(k: int, n: int) -> Packed:
    """Neighbours along K share a byte, the even one is low; 8 is zero; bf16 scales by group."""
    half = GROUP // 2
    format = WeightFormat(
        (k // GROUP, half, 2),
        (n,),
        Field(
            0,
            (form(("n0", 1)), form(("k0", half), ("k1", 1))),
            form(("k2", 4)),
            4,
            add=-8,
        ),
        (DequantOp("mul", _grouped(1)),),
    )

    def read(words, scales):  # type: ignore[no-untyped-def]
        q = _nibbles(words, 1, (0, 4)).t() - 8
        return q.double() * _rows(scales.t()).double()

    tensors = (("bits", (n, k // 2), u8), ("scale", (n, k // GROUP), bf16))
    return Packed("nibble_pairs", format, tensors, read)


def int4_words(k: int, n: int) -> Packed:
    """Signed int4, eight along K in an int32; one scale a column."""
    element = Field(0, (form(("k0", 1)), form(("n0", 1))), form(("k1", 4)), 4, True)
    format = WeightFormat(
        (k // 8, 8), (n,), element, (DequantOp("mul", Field(1, (form(("n0", 1)),))),)
    )

    def read(words, scales):  # type: ignore[no-untyped-def]
        q = _nibbles(words, 0, range(0, 32, 4))
        return torch.where(q > 7, q - 16, q).double() * scales.double()

    return Packed("int4_words", format, (("bits", (k // 8, n), i32), ("scale", (n,), f16)), read)


def uint2(k: int, n: int) -> Packed:
    """Four numbers along N in a byte; the same zero 2 and scale 1/4 for all."""
    element = Field(0, (form(("k0", 1)), form(("n0", 1))), form(("n1", 2)), 2)
    format = WeightFormat(
        (k,), (n // 4, 4), element, (DequantOp("sub", 2.0), DequantOp("mul", 0.25))
    )

    def read(words):  # type: ignore[no-untyped-def]
        parts = [(words >> shift) & 3 for shift in (0, 2, 4, 6)]
        return (torch.stack(parts, 2).flatten(1).double() - 2) / 4

    return Packed("uint2", format, (("bits", (k, n // 4), u8),), read)


def uint3(k: int, n: int) -> Packed:
    """Ten numbers of 3 bits along K in an int32, of which the top two bits are unused."""
    element = Field(0, (form(("k0", 1)), form(("n0", 1))), form(("k1", 3)), 3)
    scale = DequantOp("mul", Field(1, (form(("k0", 1)), form(("n0", 1)))))
    format = WeightFormat((k // 10, 10), (n,), element, (scale,))

    def read(words, scales):  # type: ignore[no-untyped-def]
        parts = [(words >> shift) & 7 for shift in range(0, 30, 3)]
        q = torch.stack(parts, 1).flatten(0, 1)
        return q.double() * scales.repeat_interleave(10, 0).double()

    tensors = (("bits", (k // 10, n), i32), ("scale", (k // 10, n), f16))
    return Packed("uint3", format, tensors, read)


def ten_parts(k: int, n: int) -> Packed:
    """HQQ's 3 bits: a tenth of all groups, rounded up, are the same bits of the words."""
    groups = n * k // GROUP
    rows = -(-groups // 10)
    place = form(("n0", k // GROUP), ("k0", 1))
    row = Field(NO_TENSOR, (place,), divisor=1, modulus=rows)
    shifts = tuple(range(27, -1, -3))
    shift = Field(NO_TENSOR, (place,), divisor=rows, modulus=10, table=shifts)
    code = Field(0, (form(data=row), form(("k1", 1))), form(data=shift), 3)
    steps = (DequantOp("sub", Field(1, (place,))), DequantOp("mul", Field(2, (place,))))

    def read(words, zeros, scales):  # type: ignore[no-untyped-def]
        q = torch.cat([words >> shift & 7 for shift in shifts])[:groups]
        return ((q - zeros[:, None].double()) * scales[:, None].double()).view(n, k).t()

    tensors = (("bits", (rows, GROUP), i32), ("zero", (groups,), f16), ("scale", (groups,), f16))
    return Packed("ten_parts", WeightFormat((k // GROUP, GROUP), (n,), code, steps), tensors, read)


def int4_in_int64(k: int, n: int) -> Packed:
    """Sixteen signed int4 along K in an int64; no scale at all."""
    element = Field(0, (form(("k0", 1)), form(("n0", 1))), form(("k1", 4)), 4, True)

    def read(words):  # type: ignore[no-untyped-def]
        q = _nibbles(words, 0, range(0, 64, 4))
        return torch.where(q > 7, q - 16, q)

    format = WeightFormat((k // 16, 16), (n,), element)
    return Packed("int4_in_int64", format, (("bits", (k // 16, n), i64),), read)


def nf4(k: int, n: int) -> Packed:
    """Positions in a table of 16 values, two a byte, the first one high, [N, K] in one row; one
    fp32 scale for each GROUP of them."""
    half, groups = GROUP // 2, k // GROUP
    code = Field(
        0,
        (form(("n0", k // 2), ("k0", half), ("k1", 1)),),
        form(("k2", -4), const=4),
        4,
    )
    format = WeightFormat(
        (groups, half, 2),
        (n,),
        Field(1, (form(data=code),)),
        (DequantOp("mul", Field(2, (form(("n0", groups), ("k0", 1)),))),),
    )

    def read(words, table, scales):  # type: ignore[no-untyped-def]
        values = table[torch.stack([words >> 4, words & 15], 1).flatten().to(i64)]
        return (values.double() * _rows(scales).double()).view(n, k).t()

    tensors = (("bits", (n * k // 2,), u8), ("table", (16,), f32), ("scale", (n * groups,), f32))
    return Packed("nf4", format, tensors, read)


def joined_table(k: int, n: int) -> Packed:
    """Numbers of 6 bits, four in one tensor and two in another, index a table of each channel."""
    high = Field(1, (form(("n0", 1)), form(("k0", 1))), form(("k1", 4), ("k2", 2)), 2)
    code = Field(0, (form(("n0", 1)), form(("k0", 2), ("k1", 1))), form(("k2", 4)), 4, high=high)
    element = Field(2, (form(("n0", 1)), form(data=code)))

    def read(low, high, table):  # type: ignore[no-untyped-def]
        above = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
        codes = torch.stack([low & 15, low >> 4], 2).flatten(1) + 16 * above
        return table.gather(1, codes.to(i64)).t()

    tensors = (("bits", (n, k // 2), u8), ("bits", (n, k // 4), u8), ("float", (n, 64), bf16))
    return Packed("joined_table", WeightFormat((k // 4, 2, 2), (n,), element), tensors, read)


def act_order(k: int, n: int) -> Packed:
    """GPTQ in which a tensor lists the group of each row."""
    groups = k // GROUP
    group = Field(3, (form(("k0", 8), ("k1", 1)),))
    column = form(("n0", 8), ("n1", 1))
    zero = Field(1, (form(data=group), form(("n0", 1))), form(("n1", 4)), 4, False, 1, True)
    format = WeightFormat(
        (k // 8, 8),
        (n // 8, 8),
        Field(0, (form(("k0", 1)), column), form(("k1", 4)), 4),
        (DequantOp("sub", zero), DequantOp("mul", Field(2, (form(data=group), column)))),
    )

    def read(words, zeros, scales, g_idx):  # type: ignore[no-untyped-def]
        q = _nibbles(words, 0, range(0, 32, 4))
        z = (_nibbles(zeros, 1, range(0, 32, 4)) + 1) & 15
        g_idx = g_idx.to(i64)
        return (q - z[g_idx]).double() * scales[g_idx].double()

    tensors = (
        ("bits", (k // 8, n), i32),
        ("bits", (groups, n // 8), i32),
        ("scale", (groups, n), f16),
        ("group", (k,), i32),
    )
    return Packed("act_order", format, tensors, read)


def shift_table(k: int, n: int) -> Packed:
    """Words along K; by how much each number is shifted stands in a tensor."""
    shift = Field(1, (AffineIndex(), form(("k1", 1)), AffineIndex()))
    element = Field(0, (form(("k0", 1)), form(("n0", 1))), form(data=shift), 4)
    format = WeightFormat(
        (k // 8, 8),
        (n,),
        element,
        (DequantOp("sub", 8.0), DequantOp("mul", Field(2, (form(("n0", 1)),)))),
    )

    def read(words, shifts, scales):  # type: ignore[no-untyped-def]
        q = ((words.to(i64)[:, None, :] >> shifts.to(i64)) & 15).flatten(0, 1)
        return (q - 8).double() * scales.double()

    tensors = (("bits", (k // 8, n), i32), ("shifts", (1, 8, 1), i32), ("scale", (n,), f16))
    return Packed("shift_table", format, tensors, read)


FORMATS: dict[str, Callable[[int, int], Packed]] = {
    build.__name__: build
    for build in (
        *(gptq, awq, hqq, int8_group, int8_divisor, int8_folded, channels.int8_channel),
        *(
            channels.int8_shuffled,
            channels.int8_zero_channel,
            channels.fp8_row,
            channels.fp8_block,
            fp8_words,
            e5m2_group,
        ),
        *(nibble_pairs, int4_words),
        *(uint2, uint3, ten_parts, int4_in_int64, nf4, joined_table, act_order, shift_table),
    )
}
for of_groups in (
    fp4.mxfp4,
    fp4.nvfp4,
    apart.shards,
    apart.halves_of_k,
    apart.quarters_of_k,
    apart.groups_of_n,
    apart.crossing,
):
    FORMATS[of_groups.__name__] = lambda k, n, build=of_groups: build(k, n, GROUP)


def sizes(name: str, k: int, n: int) -> tuple[int, int]:
    """The sizes next to (k, n), not below them, that format ``name`` can have."""
    multiple_k = {"uint3": 10, "int8_channel": 1, "int8_zero_channel": 1, "fp8_row": 1, "uint2": 1}
    multiple_n = {
        "gptq": 8,
        "awq": 8,
        "act_order": 8,
        "hqq": 2,
        "uint2": 4,
        "crossing": 32,
        "int8_shuffled": 64,
    }
    multiple_n["groups_of_n"] = GROUP
    multiple_k |= {"shards": 8 * GROUP, "halves_of_k": 2 * GROUP, "quarters_of_k": 4 * GROUP}
    of_k, of_n = multiple_k.get(name, GROUP), multiple_n.get(name, 1)
    if name == "fp8_block":
        of_k, of_n = min(128, k), min(128, n)
    return -(-k // of_k) * of_k, -(-n // of_n) * of_n


def build(name: str, k: int, n: int) -> Packed:
    """Format ``name`` at ``sizes(name, k, n)``."""
    return FORMATS[name](*sizes(name, k, n))
