"""Hand-written weight-only layers that pack 4 bits or fewer, and near misses."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.support.producers.base import (
    PackedLinear,
    Producer,
    Tensor,
    f32,
    field,
    octets,
    scales,
    signed,
    words,
    zeros,
)
from tests.support.producers.bytes import Channel


class K32Arange(PackedLinear):
    """Eight signed int4 along K in an int32, by an iota of shifts; a per-channel scale."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(packed=words(n, k // 8), scale=scales(n, bits=4, dtype=dtype))

    def weight(self) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.packed.device)
        codes = (self.packed[:, :, None] >> shifts[None, None]) & 0xF
        codes = ((codes ^ 8) - 8).reshape(self.n, self.k)
        return codes.to(self.dtype) * self.scale[:, None]

    def dense(self) -> Tensor:
        n, k = self.grid()
        code = signed(field(self.packed[n, k // 8], 4 * (k % 8), 4), 4)
        return code * self.scale.double()[:, None]


class K32TwoShifts(K32Arange):
    """Sign-extended by a left shift and an arithmetic right shift."""

    def weight(self) -> Tensor:
        codes = [(self.packed << (28 - 4 * i)) >> 28 for i in range(8)]
        return torch.stack(codes, dim=-1).flatten(1).to(self.dtype) * self.scale[:, None]


class K32Strided(K32Arange):
    """compressed-tensors' former spelling: writes every eighth column of zeros, subtracts 8."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(packed=words(n, k // 8), scale=scales(n, k // 64, bits=4, dtype=dtype))

    def weight(self) -> Tensor:
        codes = torch.zeros(self.n, self.k, dtype=torch.int32, device=self.packed.device)
        for position in range(8):
            codes[:, position::8] = (self.packed >> 4 * position) & 15
        codes = (codes - 8).to(torch.int8).unflatten(1, (-1, 64))
        return (codes.to(self.dtype) * self.scale.unsqueeze(-1)).flatten(1)

    def dense(self) -> Tensor:
        n, k = self.grid()
        code = field(self.packed[n, k // 8], 4 * (k % 8), 4) - 8
        return code * self.scale.double()[n, k // 64]


class Ternary(PackedLinear):
    """BitNet-like: four blocks of channels in the bits of a byte, 1 subtracted, one scale."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(packed=octets(n // 4, k), scale=scales(1, bits=2, dtype=dtype))

    def weight(self) -> Tensor:
        codes = torch.zeros(self.n, self.k, dtype=torch.uint8, device=self.packed.device)
        rows = self.n // 4
        for block in range(4):
            part = (self.packed & (3 << 2 * block)) >> 2 * block
            codes[block * rows : (block + 1) * rows] = part
        return codes.to(self.dtype) - 1

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(nn.functional.linear(x, self.weight()) * self.scale)

    def dense(self) -> Tensor:
        n, k = self.grid()
        rows = self.n // 4
        code = field(self.packed[n % rows, k], 2 * (n // rows), 2) - 1
        return code * self.scale.double()


class Nibbles(PackedLinear):
    """Two nibbles of a byte stacked along K, the low one first; a float zero point per group."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        groups = k // self.group
        self.keep(packed=octets(n, k // 2), zero=zeros(n, groups, 1, bits=4, dtype=dtype))
        self.keep(scale=scales(n, groups, 1, bits=4, dtype=dtype))

    def codes(self) -> Tensor:
        return torch.stack((self.packed & 0xF, self.packed >> 4), dim=-1)

    def weight(self) -> Tensor:
        codes = self.codes().reshape(self.n, -1, self.group).to(self.dtype)
        return ((codes - self.zero) * self.scale).reshape(self.n, self.k)

    def code(self, n: Tensor, k: Tensor) -> Tensor:
        return field(self.packed[n, k // 2], 4 * (k % 2), 4)

    def dense(self) -> Tensor:
        n, k = self.grid()
        group = k // self.group
        zero, scale = self.zero.double()[n, group, 0], self.scale.double()[n, group, 0]
        return (self.code(n, k) - zero) * scale


class Quads(Nibbles):
    """Four fields of two bits in a byte, along K."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().store(k, n, dtype)
        self.keep(packed=octets(n, k // 4), zero=zeros(n, k // self.group, 1, bits=2, dtype=dtype))

    def codes(self) -> Tensor:
        return torch.stack([(self.packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)

    def code(self, n: Tensor, k: Tensor) -> Tensor:
        return field(self.packed[n, k // 4], 2 * (k % 4), 2)


class NibblesFolded(Nibbles):
    """q * s - t, with t = zero * s stored."""

    def weight(self) -> Tensor:
        codes = self.codes().reshape(self.n, -1, self.group).to(self.dtype)
        return (codes * self.scale - self.zero * 0.01).reshape(self.n, self.k)

    def dense(self) -> Tensor:
        n, k = self.grid()
        group = k // self.group
        folded, scale = self.zero.double()[n, group, 0] * 0.01, self.scale.double()[n, group, 0]
        return self.code(n, k) * scale - folded


class NibblesAdded(NibblesFolded):
    """q * s + t, in fp32."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().store(k, n, f32)
        self.keep(added=self.zero * -0.01)

    def weight(self) -> Tensor:
        codes = self.codes().reshape(self.n, -1, self.group).float()
        return (codes * self.scale + self.added).reshape(self.n, self.k).to(self.dtype)


class Symmetric(Nibbles):
    """The low nibble first, 8 subtracted in int8."""

    def codes(self) -> Tensor:
        low, high = (self.packed & 0xF).to(torch.int8) - 8, (self.packed >> 4).to(torch.int8) - 8
        return torch.stack((low, high), dim=-1)

    def weight(self) -> Tensor:
        codes = self.codes().reshape(self.n, -1, self.group).to(self.dtype)
        return (codes * self.scale).reshape(self.n, self.k)

    def dense(self) -> Tensor:
        n, k = self.grid()
        return (self.code(n, k) - 8) * self.scale.double()[n, k // self.group, 0]


class HighFirst(Symmetric):
    """The high nibble first, masked before the shift."""

    def codes(self) -> Tensor:
        pair = torch.stack(((self.packed & 0xF0) >> 4, self.packed & 0x0F), dim=-1)
        return pair.view(self.n, self.k).to(self.dtype) - 8

    def code(self, n: Tensor, k: Tensor) -> Tensor:
        return field(self.packed[n, k // 2], 4 * (1 - k % 2), 4)


class EvenOdd(Symmetric):
    """Written into a new tensor, one column in two; the high nibble first."""

    def codes(self) -> Tensor:
        codes = torch.empty(self.n, self.k, dtype=torch.int8, device=self.packed.device)
        codes[:, ::2] = (self.packed >> 4).to(torch.int8) - 8
        codes[:, 1::2] = (self.packed & 0xF).to(torch.int8) - 8
        return codes

    def code(self, n: Tensor, k: Tensor) -> Tensor:
        return field(self.packed[n, k // 2], 4 * (1 - k % 2), 4)


class Halves(Symmetric):
    """The low nibbles are the first half of K, the high ones the second."""

    def codes(self) -> Tensor:
        packed = self.packed.to(torch.int32)
        return torch.cat((packed & 0xF, packed >> 4), dim=1).to(self.dtype) - 8

    def code(self, n: Tensor, k: Tensor) -> Tensor:
        half = self.k // 2
        return field(self.packed[n, k % half], 4 * (k // half), 4)


class Codebook(Nibbles):
    """An NF4-like table of 16 floats, indexed by the nibble."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().store(k, n, dtype)
        self.keep(table=torch.linspace(-1, 1, 16).pow(3).to(dtype))

    def weight(self) -> Tensor:
        values = self.table[self.codes().long()].reshape(self.n, -1, self.group)
        return (values * self.scale * 8).reshape(self.n, self.k)

    def dense(self) -> Tensor:
        n, k = self.grid()
        scale = self.scale.double()[n, k // self.group, 0]
        return self.table.double()[self.code(n, k)] * scale * 8


# ------------------------------------------------------------------------------------------
# near misses


class CrossWords(PackedLinear):
    """32 fields of three bits along K in three int32: the 11th and the 22nd straddle two."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(packed=words(n, 3 * k // 32), scale=scales(n, 1, bits=3, dtype=dtype))

    def weight(self) -> Tensor:
        parts = self.packed.reshape(self.n, -1, 3).long() & 0xFFFFFFFF
        first, second, third = parts.unbind(-1)
        middle, last = (first >> 30) | (second << 2), (second >> 31) | (third << 1)
        codes = [(first >> 3 * i) & 7 for i in range(10)]
        codes += [(middle >> 3 * i) & 7 for i in range(11)]
        codes += [(last >> 3 * i) & 7 for i in range(11)]
        stacked = torch.stack(codes, dim=-1).reshape(self.n, self.k)
        return (stacked - 4).to(self.dtype) * self.scale

    def dense(self) -> Tensor:
        n, k = self.grid()
        code = torch.zeros(self.n, self.k, dtype=torch.long)
        for bit in range(3):
            at = 3 * (k % 32) + bit
            code += field(self.packed[n, 3 * (k // 32) + at // 32], at % 32, 1) << bit
        return (code - 4) * self.scale.double()


class Wrapping(Symmetric):
    """8 subtracted in uint8: values below 8 wrap to 248 and above."""

    def codes(self) -> Tensor:
        return torch.stack(((self.packed & 0xF) - 8, (self.packed >> 4) - 8), dim=-1)

    def dense(self) -> Tensor:
        n, k = self.grid()
        return (self.code(n, k) - 8) % 256 * self.scale.double()[n, k // self.group, 0]


class Clamped(Channel):
    """Dequantized and then clamped: no affine function of the stored element."""

    def weight(self) -> Tensor:
        return super().weight().clamp(-0.05, 0.05)

    def dense(self) -> Tensor:
        return super().dense().clamp(-0.05, 0.05)


class Dense(PackedLinear):
    """No quantization at all."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=(torch.randn(n, k) * 0.1).to(dtype))

    def weight(self) -> Tensor:
        return self.data

    def dense(self) -> Tensor:
        return self.data.double()


@torch.library.custom_op("inductor_quant_tests::codebook_linear", mutates_args=())
def codebook_linear(x: Tensor, packed: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
    weight = table[codes.long()].unflatten(1, (scale.shape[1], -1)) * scale * 8
    return x @ weight.flatten(1).t()


@codebook_linear.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


class Opaque(Codebook):
    """bitsandbytes-like: one custom op for the whole layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(codebook_linear(x, self.packed, self.scale, self.table))


_u4: Any = functools.partial(Producer, bits=4, signed=False, group_size=64)
_MISS: Any = {"expected_matches": 0}

HANDMADE = [
    Producer("gptfast_int4_k32_arange", K32Arange, bits=4, given=True),
    Producer("int4_k32_two_shifts", K32TwoShifts, bits=4),
    _u4("int4_k32_strided_zeros", K32Strided, zero="const"),
    Producer("int2_ternary", Ternary, bits=2, signed=False, group_n=None, zero="const", bias="add",
             scaled="result"),
    _u4("gptfast_int4_u8_group_stack", Nibbles, zero="float", given=True),
    _u4("int2_u8_quads", Quads, bits=2, zero="float"),
    _u4("int4_folded", NibblesFolded, zero="folded"),
    _u4("int4_added_f32", NibblesAdded, zero="folded"),
    _u4("int4_u8_sym", Symmetric, zero="const"),
    _u4("int4_u8_high_first", HighFirst, zero="const"),
    _u4("int4_u8_even_odd", EvenOdd, zero="const"),
    _u4("int4_u8_halves", Halves, zero="const"),
    _u4("lut4_u8", Codebook, element="lut"),
    Producer("int3_cross_words", CrossWords, bits=3, signed=False, zero="const"),
    _u4("int4_u8_wrapping", Wrapping, element="lut"),
    Producer("int8_clamped", Clamped, bits=8, **_MISS, reason="the dequantized weight is clamped"),
    Producer("dense", Dense, bits=16, element="float", **_MISS, reason="nothing is quantized"),
    _u4("nf4_opaque", Opaque, element="lut", bias="add", **_MISS,
        anchors=("inductor_quant_tests.codebook_linear",),
        reason="an op that nothing is known about"),
]  # fmt: skip
