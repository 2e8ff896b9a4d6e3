"""Weight formats of 8 bits with scales of channels, or of blocks of 128 x 128. Those with groups
along K are in ``formats``."""

from __future__ import annotations

import torch

from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat
from tests.support.gemms.packed import Packed, form

# Of rows. As one integer it takes 384 bits, and tiles have parts of it.
SHUFFLED = tuple((5 * i + 3) % 64 for i in range(64))

_CHANNEL = (form(("n0", 1)), AffineIndex())


def _whole(k: int, n: int, steps: tuple[DequantOp, ...]) -> WeightFormat:
    return WeightFormat((k,), (n,), Field(0, (form(("n0", 1)), form(("k0", 1)))), steps)


def int8_channel(k: int, n: int) -> Packed:
    """int8 [N, K], one bf16 scale a channel."""
    format = _whole(k, n, (DequantOp("mul", Field(1, _CHANNEL)),))
    tensors = (("bits", (n, k), torch.int8), ("scale", (n, 1), torch.bfloat16))
    return Packed("int8_channel", format, tensors, lambda q, s: q.t().double() * s.t().double())


def int8_shuffled(k: int, n: int) -> Packed:
    """int8 [N, K], every 64 rows of which are stored in the order SHUFFLED."""
    row = AffineIndex(linear=(("n0", 64),), tables=(("n1", SHUFFLED),))
    scale = DequantOp("mul", Field(1, (form(("n0", 64), ("n1", 1)), AffineIndex())))
    element = Field(0, (row, form(("k0", 1))))
    format = WeightFormat((k,), (n // 64, 64), element, (scale,))

    def read(q, scales):  # type: ignore[no-untyped-def]
        rows = q.unflatten(0, (-1, 64))[:, list(SHUFFLED)].flatten(0, 1)
        return rows.t().double() * scales.t().double()

    tensors = (("bits", (n, k), torch.int8), ("scale", (n, 1), torch.bfloat16))
    return Packed("int8_shuffled", format, tensors, read)


def int8_zero_channel(k: int, n: int) -> Packed:
    """int8 [K, N] less an int32 zero, times one fp32 scale, for each channel; and one for all."""
    element = Field(0, (form(("k0", 1)), form(("n0", 1))))
    steps = (
        DequantOp("sub", Field(1, (form(("n0", 1)),))),
        DequantOp("mul", Field(2, (form(("n0", 1)),))),
        DequantOp("mul", Field(3, ())),
    )
    tensors = (
        ("bits", (k, n), torch.int8),
        ("zero", (n,), torch.int32),
        ("scale", (n,), torch.float32),
        ("scale", (), torch.float32),
    )
    return Packed(
        "int8_zero_channel",
        WeightFormat((k,), (n,), element, steps),
        tensors,
        lambda q, z, s, t: (q.to(torch.int64) - z).double() * s.double() * t.double(),
    )


def fp8_row(k: int, n: int) -> Packed:
    """e4m3 [N, K], one fp32 scale a channel."""
    format = _whole(k, n, (DequantOp("mul", Field(1, _CHANNEL)),))
    tensors = (("float", (n, k), torch.float8_e4m3fn), ("scale", (n, 1), torch.float32))
    return Packed("fp8_row", format, tensors, lambda q, s: q.double().t() * s.t().double())


def fp8_block(k: int, n: int) -> Packed:
    """e4m3 [N, K], one fp32 scale for each 128 x 128 block, smaller in small weights."""
    rows, columns = min(128, k), min(128, n)
    format = WeightFormat(
        (k // rows, rows),
        (n // columns, columns),
        Field(0, (form(("n0", columns), ("n1", 1)), form(("k0", rows), ("k1", 1)))),
        (DequantOp("mul", Field(1, (form(("n0", 1)), form(("k0", 1))))),),
    )

    def read(q, scales):  # type: ignore[no-untyped-def]
        wide = scales.repeat_interleave(columns, 0).repeat_interleave(rows, 1)
        return (q.double() * wide.double()).t()

    tensors = (
        ("float", (n, k), torch.float8_e4m3fn),
        ("scale", (n // columns, k // rows), torch.float32),
    )
    return Packed("fp8_block", format, tensors, read)
