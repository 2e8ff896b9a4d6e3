"""``FP8Linear`` of transformers 5.17: fine-grained FP8, computed by a kernel from the hub or by
DeepGEMM. The formulas are those of kernels-community/finegrained-fp8 (``tests/utils.py`` there)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inductor_quant.prepare.plain import PlainLinear, Replacement, any_dtype, repeated

MAX = 448.0
MIN_SCALE = 1e-12


def plain(module: Any) -> Replacement | str:
    weight, scale = module.weight, module.weight_scale_inv
    if weight.dtype == torch.int8:
        return "its weight is FP4, with MX scales of x"
    if weight.dtype != torch.float8_e4m3fn:
        return ""
    block = module.block_size
    if block is not None:
        shape = [-(-size // b) for size, b in zip(weight.shape, block, strict=True)]
        if list(scale.shape) != shape:
            return f"scales of shape {list(scale.shape)}, not {shape}"
        if module.in_features % block[1]:
            return f"K is no multiple of {block[1]}"
    elif scale.numel() != 1:
        return f"scales of shape {list(scale.shape)} without blocks"
    return Replacement(FP8Linear(module), module.forward, any_dtype(module, "bias"))


class FP8Linear(PlainLinear):
    """``a * s_a @ (weight * weight_scale_inv).T + bias``: sums in fp32, one rounding, then bias.

    weight e4m3 [N, K], weight_scale_inv fp32 or e8m0 [ceil(N / 128), K / 128], or one element; a is
    x / s_a in e4m3, s_a = amax / 448 of 128 neighbours along K (of a row, for a weight of one
    scale), or ``activation_scale``.
    """

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    activation_scale: torch.Tensor | None

    def __init__(self, module: Any) -> None:
        super().__init__(module.out_features, module.in_features, module.bias)
        self.block_size = module.block_size
        self.hold(weight=module.weight, weight_scale_inv=module.weight_scale_inv,
                  activation_scale=module.activation_scale)  # fmt: skip

    def dequantized(self) -> torch.Tensor:
        """In fp32."""
        weight, scale = self.weight.float(), self.weight_scale_inv.float()
        if self.block_size is None:
            return weight * scale
        return weight * repeated(scale, self.block_size, self.out_features, self.in_features)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        scale = self.activation_scale
        if scale is not None:
            return (x.float() / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn).float() * scale
        width = self.in_features if self.block_size is None else self.block_size[1]
        x = x.float().unflatten(-1, (-1, width))
        scale = (x.abs().amax(-1, keepdim=True) / MAX).clamp_min(MIN_SCALE)
        return ((x / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.activation(x.reshape(-1, self.in_features))  # one symbolic size, not several
        out = nn.functional.linear(rows, self.dequantized()).to(x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)
