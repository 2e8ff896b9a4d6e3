"""Hand-written weight-only layers with one byte for each element: int8 and FP8."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.support.producers.base import (
    PackedLinear,
    Producer,
    Tensor,
    f8s,
    f32,
    int8s,
    octets,
    scales,
)


class Woq(PackedLinear):
    """gpt-fast's: a per-channel scale after the product."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=int8s(n, k), scale=scales(n, bits=8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(nn.functional.linear(x, self.data.to(x.dtype)) * self.scale)

    def dense(self) -> Tensor:
        return self.data.double() * self.scale.double().reshape(-1, 1)


class WoqMulSum(Woq):
    """Inductor's decomposition of a product with M = 1 under coordinate descent tuning."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.data.to(x.dtype).t().float()
        y = (x.float().unsqueeze(2) * weight.unsqueeze(0)).sum(1).to(x.dtype)
        return self.add_bias(y * self.scale)


class WoqFloatResult(Woq):
    """The scale in fp32, on the product in fp32."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        super().store(k, n, f32)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.data.t().to(x.dtype)).float() * self.scale
        return self.add_bias(y.to(x.dtype))


class Channel(Woq):
    """The weight dequantized in fp32 and rounded once."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=int8s(n, k), scale=scales(n, 1, bits=8, dtype=f32))

    def weight(self) -> Tensor:
        return (self.data.float() * self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return PackedLinear.forward(self, x)


class OneScale(Channel):
    """A scale of no dimensions."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=int8s(n, k), scale=scales(bits=8, dtype=dtype))

    def weight(self) -> Tensor:
        return self.data.to(self.dtype) * self.scale


class NumberScale(OneScale):
    """A literal scale."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=int8s(n, k))

    def weight(self) -> Tensor:
        return self.data.to(self.dtype) * 0.0009765625

    def dense(self) -> Tensor:
        return self.data.double() * 0.0009765625


class Reciprocal(Channel):
    """Stores 1 / scale."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=int8s(n, k), inverse=(1 / scales(n, 1, bits=8, dtype=f32)).to(dtype))

    def weight(self) -> Tensor:
        return self.data.to(self.dtype) / self.inverse

    def dense(self) -> Tensor:
        return self.data.double() / self.inverse.double()


class TwoFactors(Channel):
    """Stores the absmax; a literal divides it by 127."""

    def weight(self) -> Tensor:
        return self.data.to(self.dtype) * self.scale.to(self.dtype) * (1 / 127)

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=int8s(n, k), scale=scales(n, 1, bits=1, dtype=f32))

    def dense(self) -> Tensor:
        return super().dense() / 127


class StoredByK(Channel):
    """The weight is stored as [K, N]."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=int8s(k, n), scale=scales(n, bits=8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(x @ (self.data.to(x.dtype) * self.scale))

    def dense(self) -> Tensor:
        return self.data.t().double() * self.scale.double().reshape(-1, 1)


class Offset128(Channel):
    """Unsigned bytes around 128."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=octets(n, k), scale=scales(n, 1, bits=8, dtype=dtype))

    def weight(self) -> Tensor:
        return (self.data.to(self.dtype) - 128) * self.scale

    def dense(self) -> Tensor:
        return (self.data.double() - 128) * self.scale.double()


class GroupsInt16(Channel):
    """An integer zero point for each group, subtracted in int16 so that nothing wraps."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        groups = k // self.group
        zero = torch.randint(-20, 20, (n, groups, 1)).to(torch.int8)
        self.keep(data=int8s(n, k), zero=zero, scale=scales(n, groups, 1, bits=8, dtype=dtype))

    def weight(self) -> Tensor:
        codes = self.data.unflatten(1, (-1, self.group)).to(torch.int16)
        return ((codes - self.zero).to(self.dtype) * self.scale).flatten(1)

    def dense(self) -> Tensor:
        n, k = self.grid()
        group = k // self.group
        zero, scale = self.zero[:, :, 0], self.scale[:, :, 0]
        return (self.data.long() - zero[n, group].long()) * scale[n, group].double()


class Float8(Channel):
    """FP8 with a per-channel scale, dequantized in the activation's dtype."""

    element = torch.float8_e4m3fn

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        data = f8s(n, k, dtype=self.element)
        self.keep(data=data, scale=scales(n, 1, bits=8, dtype=dtype))

    def weight(self) -> Tensor:
        return self.data.to(self.dtype) * self.scale


class Float8E5(Float8):
    element = torch.float8_e5m2


class Block(PackedLinear):
    """Block FP8: one scale for 128 x 128, by a 4-D view."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(data=f8s(n, k), scale=scales(n // 128, k // 128, bits=8, dtype=f32))

    def weight(self) -> Tensor:
        rows, columns = self.scale.shape
        blocks = self.data.to(f32).view(rows, 128, columns, 128)
        scaled = blocks * self.scale[:, None, :, None]
        return scaled.to(self.dtype).view(self.n, self.k)

    def dense(self) -> Tensor:
        n, k = self.grid()
        return self.data.double() * self.scale.double()[n // 128, k // 128]


class BlockRepeated(Block):
    """Block FP8 with a scale repeated to the weight's size."""

    def weight(self) -> Tensor:
        scale = self.scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        return (self.data.to(f32) * scale).to(self.dtype)


class Pt2e(PackedLinear):
    """PT2E's weight: the quantized_decomposed op stays in the graph."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers the ops

        self.keep(data=int8s(n, k), scale=scales(n, bits=8, dtype=f32))
        self.keep(zero=torch.randint(-20, 20, (n,)))

    def weight(self) -> Tensor:
        return torch.ops.quantized_decomposed.dequantize_per_channel(
            self.data, self.scale, self.zero, 0, -127, 127, torch.int8, out_dtype=self.dtype
        )

    def dense(self) -> Tensor:
        return (self.data.long() - self.zero[:, None]) * self.scale.double()[:, None]


class Pt2eTensor(Pt2e):
    """The same per tensor: two literals in the graph."""

    def weight(self) -> Tensor:
        return torch.ops.quantized_decomposed.dequantize_per_tensor(
            self.data, 0.0009, 3, -128, 127, torch.int8, out_dtype=self.dtype
        )

    def dense(self) -> Tensor:
        return (self.data.double() - 3) * 0.0009


_int8: Any = functools.partial(Producer, bits=8)

BYTES = [
    _int8("gptfast_woq_int8", Woq, bias="add", scaled="result", given=True),
    _int8("gptfast_woq_int8_mul_sum", WoqMulSum, bias="add", scaled="result", given=True,
          anchors=("aten.sum",), max_rows=1),
    _int8("int8_result_in_f32", WoqFloatResult, bias="add", scaled="result"),
    _int8("int8_channel_in_f32", Channel),
    _int8("int8_tensor", OneScale, group_n=None),
    _int8("int8_number", NumberScale, group_n=None),
    _int8("int8_reciprocal", Reciprocal),
    _int8("int8_two_factors", TwoFactors),
    _int8("int8_stored_by_k", StoredByK, bias="add"),
    _int8("uint8_offset_128", Offset128, signed=False, zero="const"),
    _int8("int8_groups_int16", GroupsInt16, group_size=64, zero="int"),
    _int8("pt2e_wo_channel", Pt2e, zero="int"),
    _int8("pt2e_wo_tensor", Pt2eTensor, zero="const", group_n=None),
    _int8("fp8_channel", Float8, element="e4m3"),
    _int8("fp8_channel_e5m2", Float8E5, element="e5m2"),
    _int8("fp8_block_wo_dequant_view", Block, element="e4m3", group_size=128, group_n=128,
          given=True),
    _int8("fp8_block_repeated", BlockRepeated, element="e4m3", group_size=128, group_n=128),
]  # fmt: skip
