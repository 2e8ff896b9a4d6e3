"""Layers of int4 weights and int8 activations: QQQ, plain and as GPTQModel has it, and QServe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Tensor = torch.Tensor
GROUP = 128


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    s = x.abs().amax(-1, keepdim=True).float() / 127
    return (x.float() / s).round().clamp(-128, 127).to(torch.int8), s


class Layer(nn.Module):
    """``codes``: int4 [N, K], unsigned; ``scale``: fp32 [1, N]."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.n, self.k = n, k
        self.codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        self.register_buffer("scale", torch.rand(1, n) * 1e-3 + 1e-4)
        self.store()

    def store(self) -> None:
        self.register_buffer("qweight", self.codes[:, ::2] | self.codes[:, 1::2] << 4)

    def nibbles(self) -> Tensor:
        """Two in a byte, the low one first."""
        return torch.stack([self.qweight & 15, self.qweight >> 4], -1)

    def integers(self) -> Tensor:
        """The int8 weight, [K, N]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, s = quantized(x)
        return (torch._int_mm(q, self.integers()).float() * self.scale * s).to(x.dtype)


class QQQChannel(Layer):
    """Two's complement, in the high half of each int8: 16 times the weight."""

    def integers(self) -> Tensor:
        pairs = torch.stack([self.qweight << 4, self.qweight & 0xF0], -1)
        return pairs.view(self.n, self.k).view(torch.int8).t()


class QQQGroup(Layer):
    """Rounded to int8 by an fp16 scale of each group."""

    def store(self) -> None:
        super().store()
        scale = torch.rand(self.n, self.k // GROUP) * 20 + 1  # some products are clamped
        self.register_buffer("group_scale", scale.half())

    def integers(self) -> Tensor:
        q = self.nibbles().view(self.n, self.k // GROUP, GROUP).float() - 8
        w = q * self.group_scale.float()[..., None]
        return w.round().clamp(-128, 127).to(torch.int8).view(self.n, self.k).t()


class QQQGroupOfFloats(QQQGroup):
    """The integers are multiplied as floats."""

    def forward(self, x: Tensor) -> Tensor:
        q, s = quantized(x)
        return (torch.matmul(q.float(), self.integers().float()) * self.scale * s).to(x.dtype)


class QServe(Layer):
    """A zero point and a scale of each group, integers; the product wraps around in int8."""

    def store(self) -> None:
        super().store()
        shape = (self.n, self.k // GROUP)
        self.register_buffer("zero", torch.randint(0, 16, shape).to(torch.int8))
        self.register_buffer("group_scale", torch.randint(-128, 128, shape).to(torch.int8))

    def integers(self) -> Tensor:
        q = self.nibbles().view(self.n, self.k // GROUP, GROUP).to(torch.int8)
        w = (q - self.zero[..., None]) * self.group_scale[..., None]
        return w.view(self.n, self.k).t()


class QServeWide(QServe):
    """The same in int32, of which int8 keeps the low byte."""

    def integers(self) -> Tensor:
        q = self.nibbles().view(self.n, self.k // GROUP, GROUP).to(torch.int32)
        w = (q - self.zero[..., None]) * self.group_scale[..., None].int()
        return w.to(torch.int8).view(self.n, self.k).t()


class QServeBytes(QServe):
    """The same in uint8, whose bytes are read as int8."""

    def integers(self) -> Tensor:
        q = self.nibbles().view(self.n, self.k // GROUP, GROUP)
        zero, scale = (t[..., None].view(torch.uint8) for t in (self.zero, self.group_scale))
        return ((q - zero) * scale).view(torch.int8).view(self.n, self.k).t()


class QQQTorch(Layer):
    """QQQ's packed layout, unpacked as GPTQModel's ``QQQTorchLinear`` does on a GPU: words of eight
    codes in permuted tiles of 16 x 64, whose permutations are plain attributes."""

    is_grouped = False

    def store(self) -> None:
        codes, order = self.codes.t().long(), self.order()
        tiles = codes.reshape(self.k // 16, 16, self.n // 16, 16).permute(0, 2, 1, 3)
        rows = tiles.reshape(-1, 1024)[:, order].reshape(self.k // 16, self.n * 16)
        words = sum(rows[:, i::8] << 4 * i for i in range(8))
        words = torch.where(words >= 2**31, words - 2**32, words)
        self.register_buffer("qweight", words.int())
        self.places = torch.argsort(order)

    def order(self) -> Tensor:
        perm = []
        for i in range(32):
            one = [16 * (4 * (i % 4) + r) + i // 4 + 8 * b for b in (0, 1) for r in range(4)]
            perm += [place + 256 * j for j in range(4) for place in one]
        within = [0, 2, 4, 6, 1, 3, 5, 7] if self.is_grouped else [4, 0, 5, 1, 6, 2, 7, 3]
        return torch.tensor(perm).reshape(-1, 8)[:, within].reshape(-1)

    def unpacked(self) -> Tensor:
        words = self.qweight.to(torch.int64)
        words = torch.where(words < 0, words + (1 << 32), words)
        powers = torch.tensor([16**i for i in range(8)], device=words.device)
        high = torch.floor_divide(words.unsqueeze(-1), powers)
        codes = high - torch.floor_divide(high, 16) * 16
        codes = codes.reshape(-1, 1024)[:, self.places.to(device=codes.device)]
        codes = codes.reshape(self.k // 16, self.n // 16, 16, 16).permute(0, 2, 1, 3)
        return codes.reshape(self.k, self.n)

    def integers(self) -> Tensor:
        codes = self.unpacked()
        return (torch.where(codes >= 8, codes - 16, codes).float() * 16).to(torch.int8).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        q, s = quantized(x)
        return (torch.matmul(q.float(), self.integers().float()) * s * self.scale).to(x.dtype)


class QQQTorchGroup(QQQTorch):
    is_grouped = True

    def store(self) -> None:
        super().store()
        order = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
        scale = (torch.rand(self.k // GROUP, self.n) * 20 + 1).half()
        permuted = scale.reshape(-1, 64)[:, order].reshape(-1, self.n)
        self.register_buffer("group_scale", permuted.contiguous())
        self.scale_places = torch.argsort(order)

    def integers(self) -> Tensor:
        permuted = self.group_scale.reshape(-1, 64)
        scale = (
            permuted[:, self.scale_places.to(device=permuted.device)].reshape(-1, self.n).float()
        )
        group = torch.floor_divide(torch.arange(self.k, device=scale.device), GROUP)
        w = (self.unpacked().float() - 8.0) * scale[group]
        return w.round().clamp(-128, 127).to(torch.int8).contiguous()


LAYERS: dict[str, Callable[[int, int], Layer]] = {
    cls.__name__: cls
    for cls in (
        *(QQQChannel, QQQGroup, QQQGroupOfFloats, QServe, QServeWide, QServeBytes),
        *(QQQTorch, QQQTorchGroup),
    )
}
