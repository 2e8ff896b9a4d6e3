"""GGUF: blocks of bytes along K that hold a scale, smaller scales, and fields of 4, 5, 6 or 8 bits.

Those named ``split`` are spelled as in diffusers: a block is split, and a constant tensor has the
shifts. The others are transformers' own layer, which has no Q4_0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.support.producers.base import PackedLinear, Producer, Tensor, f16, field, octets, signed


def put_half(blocks: Tensor, at: int, low: float, high: float) -> None:
    """Random fp16 values between two bounds, at byte ``at`` of each block."""
    values = low + (high - low) * torch.rand(*blocks.shape[:-1], 1)
    blocks[..., at : at + 2] = values.half().view(torch.uint8)


class Blocks:
    """``data`` [N, bytes of a row] by n, the block along K, and the byte in it."""

    def __init__(self, data: Tensor, size: int) -> None:
        self.blocks = data.unflatten(1, (-1, size))

    def byte(self, n: Tensor, block: Tensor, at: Tensor | int) -> Tensor:
        return self.blocks[n, block, at].long()

    def half(self, n: Tensor, block: Tensor, at: int) -> Tensor:
        return self.blocks[:, :, at : at + 2].contiguous().view(f16)[n, block, 0].double()


class Split(PackedLinear):
    def shifts(self, *amounts: int) -> Tensor:
        made = torch.tensor(amounts, device=self.data.device, dtype=torch.uint8)
        return made.reshape(1, 1, -1, 1)


class Q40(Split):
    """18 bytes for 32 values: fp16, then the low nibbles are the first 16 values."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        blocks = octets(n, k // 32, 18)
        put_half(blocks, 0, 0.005, 0.04)
        self.keep(data=blocks.flatten(1))

    def weight(self) -> Tensor:
        blocks = self.data.reshape(-1, 18)
        scale, packed = torch.split(blocks, [2, 16], dim=1)
        codes = (packed.reshape(-1, 1, 1, 16) >> self.shifts(0, 4)) & 0x0F
        codes = codes.reshape(-1, 32).to(torch.int8) - 8
        return (scale.view(f16).to(self.dtype) * codes).reshape(self.n, self.k)

    def dense(self) -> Tensor:
        n, k = self.grid()
        blocks, block, at = Blocks(self.data, 18), k // 32, k % 32
        code = field(blocks.byte(n, block, 2 + at % 16), 4 * (at // 16), 4) - 8
        return code * blocks.half(n, block, 0)


class Q4K(Split):
    """144 bytes for 256 values in 8 groups, each with a scale and a minimum of 6 bits."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=random_blocks("Q4_K", n, k).flatten(1))

    def weight(self) -> Tensor:
        blocks = self.data.reshape(-1, 144)
        scale, least, packed, codes = torch.split(blocks, [2, 2, 12, 128], dim=1)
        first, second, both = torch.split(packed.reshape(-1, 3, 4), 1, dim=1)
        low = torch.cat([first & 0x3F, (both & 0x0F) | ((first >> 2) & 0x30)], dim=-1)
        high = torch.cat([second & 0x3F, (both >> 4) | ((second >> 2) & 0x30)], dim=-1)
        scale = (scale.view(f16).to(self.dtype) * low.reshape(-1, 8)).reshape(-1, 8, 1)
        least = (least.view(f16).to(self.dtype) * high.reshape(-1, 8)).reshape(-1, 8, 1)
        codes = (codes.reshape(len(blocks), -1, 1, 32) >> self.shifts(0, 4)) & 0x0F
        return (scale * codes.reshape(-1, 8, 32) - least).reshape(self.n, self.k)

    def dense(self) -> Tensor:
        n, k = self.grid()
        return q4_k(Blocks(self.data, 144), n, k)


class Q6K(Split):
    """210 bytes for 256 values in 16 groups, each with a scale of 8 bits."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=random_blocks("Q6_K", n, k).flatten(1))

    def weight(self) -> Tensor:
        blocks = self.data.reshape(-1, 210)
        low, high, scales, scale = torch.split(blocks, [128, 64, 16, 2], dim=1)
        scale = scale.view(f16).to(self.dtype) * scales.view(torch.int8).to(self.dtype)
        low = (low.reshape(len(blocks), -1, 1, 64) >> self.shifts(0, 4)) & 0x0F
        high = (high.reshape(len(blocks), -1, 1, 32) >> self.shifts(0, 2, 4, 6)) & 0x03
        codes = low.reshape(-1, 8, 32) | (high.reshape(-1, 8, 32) << 4)
        codes = (codes.to(torch.int8) - 32).reshape(-1, 16, 16)
        return (scale.reshape(-1, 16, 1) * codes).reshape(self.n, self.k)

    def dense(self) -> Tensor:
        n, k = self.grid()
        return q6_k(Blocks(self.data, 210), n, k)


# ------------------------------------------------------------------------------------------
# transformers

# ggml's numbers, the bytes of a block, and where and between which bounds its fp16 scales are
TYPES: dict[str, tuple[int, int, tuple[tuple[int, float, float], ...]]] = {
    "Q8_0": (8, 34, ((0, 0.0003, 0.002),)),
    "Q4_K": (12, 144, ((0, 2e-4, 8e-4), (2, 2e-3, 4e-3))),
    "Q5_K": (13, 176, ((0, 1e-4, 4e-4), (2, 2e-3, 4e-3))),
    "Q6_K": (14, 210, ((208, 2e-5, 8e-5),)),
}


def random_blocks(kind: str, n: int, k: int) -> Tensor:
    number, size, halves = TYPES[kind]
    blocks = octets(n, k // (32 if number == 8 else 256), size)
    for at, low, high in halves:
        put_half(blocks, at, low, high)
    return blocks


def gguf(kind: str, dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    from transformers.integrations.gguf import kernels, utils

    # Its kernels, which it would look for on the network, run on no CPU.
    kernels._gguf_kernel, utils.MAX_GEMV_ROWS = False, 0
    layer = utils.GgufLinear(k, n, TYPES[kind][0], bias)
    layer.weight.copy_(random_blocks(kind, n, k).flatten(1))
    if bias:
        layer.bias = nn.Parameter(torch.randn(n).to(dtype), requires_grad=False)
    return layer


def gguf_dense(kind: str, layer: Any) -> Tensor:
    n, k = torch.arange(layer.out_features)[:, None], torch.arange(layer.in_features)[None, :]
    return DENSE[kind](Blocks(layer.weight, TYPES[kind][1]), n, k)


def q8_0(blocks: Blocks, n: Tensor, k: Tensor) -> Tensor:
    block = k // 32
    return signed(blocks.byte(n, block, 2 + k % 32), 8) * blocks.half(n, block, 0)


def k_scale(blocks: Blocks, n: Tensor, block: Tensor, group: Tensor, first: int) -> Tensor:
    """6 bits: in a byte for the first four groups, in two for the others. ``first``: byte 4 for
    the scale, 8 for the minimum."""
    low = blocks.byte(n, block, first + group % 4)
    both = blocks.byte(n, block, 12 + group % 4)
    split = field(both, 0 if first == 4 else 4, 4) | field(low, 6, 2) << 4
    return torch.where(group < 4, field(low, 0, 6), split)


def q4_k(blocks: Blocks, n: Tensor, k: Tensor, *, high: int = 0) -> Tensor:
    """``high``: bytes with a fifth bit, in front of those with the nibbles."""
    block, group, at = k // 256, k // 32 % 8, k % 32
    code = field(blocks.byte(n, block, 16 + high + group // 2 * 32 + at), 4 * (group % 2), 4)
    if high:
        code = code | field(blocks.byte(n, block, 16 + at), group, 1) << 4
    scale = blocks.half(n, block, 0) * k_scale(blocks, n, block, group, 4)
    return code * scale - blocks.half(n, block, 2) * k_scale(blocks, n, block, group, 8)


def q6_k(blocks: Blocks, n: Tensor, k: Tensor) -> Tensor:
    """Two halves of four quarters of 32 values, and a scale for 16."""
    block, half, quarter, at = k // 256, k // 128 % 2, k // 32 % 4, k % 32
    low = blocks.byte(n, block, 64 * half + 32 * (quarter % 2) + at)
    high = blocks.byte(n, block, 128 + 32 * half + at)
    code = (field(low, 4 * (quarter // 2), 4) | field(high, 2 * quarter, 2) << 4) - 32
    scale = signed(blocks.byte(n, block, 192 + k % 256 // 16), 8)
    return code * scale * blocks.half(n, block, 208)


DENSE: Any = {
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": functools.partial(q4_k, high=32),
    "Q6_K": q6_k,
}

# ------------------------------------------------------------------------------------------


def _gguf(kind: str, bits: int, **fields: Any) -> Producer:
    usual: dict[str, Any] = {"group_size": 32, "signed": False, "bias": "add"}
    return Producer(f"gguf_{kind.lower()}", functools.partial(gguf, kind), bits,
                    functools.partial(gguf_dense, kind), needs="transformers",
                    **usual | fields)  # fmt: skip


GGUF = [
    Producer("gguf_q4_0_split", Q40, bits=4, signed=False, group_size=32, zero="const"),
    Producer("gguf_q4_k_split", Q4K, bits=4, signed=False, group_size=32, zero="folded"),
    Producer("gguf_q6_k_split", Q6K, bits=6, signed=False, group_size=16, zero="const"),
    _gguf("Q8_0", 8, signed=True),
    _gguf("Q4_K", 4, zero="folded"),
    _gguf("Q5_K", 5, zero="folded"),
    _gguf("Q6_K", 6, zero="const", group_size=16),
]
