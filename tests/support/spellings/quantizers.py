"""Linear layers as quantizers write them, in plain torch: int8 weights, dynamic activations."""

from __future__ import annotations

import torch
from torch import nn

bf16, f32 = torch.bfloat16, torch.float32


class Int8Linear(nn.Module):
    """Base: ``weight`` int8 [out, in], ``scale`` f32 [out, 1] with no two values equal."""

    def __init__(self, k: int, n: int, *, bias: bool = True, dtype: torch.dtype = bf16) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scale = torch.rand(n, 1) * 0.01 + 0.001
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.randn(n).to(dtype) if bias else None)


class TorchaoLinear(Int8Linear):
    """torchao 0.18, Int8DynamicActivationInt8WeightConfig (symmetric), as its CUDA graph has it:
    a bf16 scale, and a cast to bf16 between the two scales."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = torch.minimum(x.amin(-1, keepdim=True), x.new_zeros(()))
        high = torch.maximum(x.amax(-1, keepdim=True), x.new_zeros(()))
        scale = (torch.maximum(-low, high) / 127.5).float().clamp_min(1.1920928955078125e-07)
        scale = scale.to(x.dtype).float()
        q = (x * (1.0 / scale)).round().clamp(-128, 127).to(torch.int8)
        q, rows = q.reshape(-1, x.shape[-1]), scale.reshape(-1, 1)
        acc = torch._int_mm(q, self.weight.t())
        y = (acc * rows.expand(acc.shape)).to(x.dtype) * self.scale.reshape(-1)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class GptFastLinear(Int8Linear):
    """gpt-fast's W8A8: everything in f32, the weight transposed beforehand, 2-D."""

    def __init__(self, k: int, n: int, **kwargs: object) -> None:
        super().__init__(k, n, **kwargs)  # type: ignore[arg-type]
        self.weight = self.weight.t().contiguous()
        self.scale = self.scale.reshape(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127.0
        q = (x.float() / scale).round().clamp(-127, 127).to(torch.int8)
        y = torch._int_mm(q, self.weight).float() * scale * self.scale
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class TenLines(Int8Linear):
    """A user's own ten lines: the product of the scales, applied to the 3-D result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).float() / 127
        q = torch.round(x / scale).to(torch.int8)
        acc = torch._int_mm(q.flatten(0, -2), self.weight.T).unflatten(0, x.shape[:-1])
        y = acc * (scale * self.scale.T[0])
        return (y if self.bias is None else y + self.bias).to(x.dtype)


QUANTIZERS = (TorchaoLinear, GptFastLinear, TenLines)
