"""``FP8Linear`` of transformers 5.17: fine-grained FP8, computed by a kernel from the hub or by
DeepGEMM. The formulas are those of kernels-community/finegrained-fp8 (``tests/utils.py`` and, for
MX, ``mx_act_quant_inline`` there)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inductor_quant.prepare.e2m1 import E2M1Linear
from inductor_quant.prepare.plain import Replacement, any_dtype, repeated

MAX = 448.0
MIN_SCALE = 1e-12
MX = (1, 32)


def plain(module: Any) -> Replacement | str:
    weight, scale = module.weight, module.weight_scale_inv
    if weight.dtype not in (torch.float8_e4m3fn, torch.int8):
        return ""
    is_fp4 = weight.dtype == torch.int8
    block = MX if is_fp4 else module.block_size
    n, k = module.out_features, module.in_features
    if tuple(weight.shape) != (n, k // 2 if is_fp4 else k):
        return f"a weight of shape {list(weight.shape)}"
    if block is not None:
        shape = [-(-size // b) for size, b in zip((n, k), block, strict=True)]
        if list(scale.shape) != shape:
            return f"scales of shape {list(scale.shape)}, not {shape}"
        if k % block[1]:
            return f"K is no multiple of {block[1]}"
    elif scale.numel() != 1:
        return f"scales of shape {list(scale.shape)} without blocks"
    is_e8m0 = scale.dtype == torch.float8_e8m0fnu and module.activation_scale is None
    if block is not None and tuple(block) == MX and not is_e8m0:
        return "blocks of 1 x 32 are known with e8m0 scales of both sides"
    return Replacement(FP8Linear(module, block), module.forward, any_dtype(module, "bias"))


class FP8Linear(E2M1Linear):
    """``a * s_a @ (weight * weight_scale_inv).T + bias``: sums in fp32, one rounding, then bias.

    weight e4m3 [N, K], weight_scale_inv fp32 or e8m0 [ceil(N / 128), K / 128], or one element; a is
    x / s_a in e4m3, s_a = amax / 448 of 128 neighbours along K (of a row, for a weight of one
    scale), or ``activation_scale``.

    MX: weight e4m3, or e2m1 in int8 [N, K / 2] (even k in the low nibble), weight_scale_inv e8m0
    [N, K / 32]; s_a is the next power of two for 32 neighbours.
    """

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor
    activation_scale: torch.Tensor | None

    def __init__(self, module: Any, block: Any) -> None:
        super().__init__(module.out_features, module.in_features, module.bias)
        self.block_size = None if block is None else tuple(block)
        self.hold(weight=module.weight, weight_scale_inv=module.weight_scale_inv,
                  activation_scale=module.activation_scale)  # fmt: skip
        self.is_fp4 = module.weight.dtype == torch.int8
        if self.is_fp4:
            self.hold_e2m1(torch.float32, module.weight.device)

    def dequantized(self) -> torch.Tensor:
        """In fp32."""
        weight, scale = self.weight, self.weight_scale_inv.float()
        if self.is_fp4:
            weight = self.of_codes(weight)
        if self.block_size is None:
            return weight.float() * scale
        if self.block_size == MX:
            blocks = weight.float().view(*scale.shape, -1) * scale.unsqueeze(-1)
            return blocks.flatten(1)
        return weight.float() * repeated(
            scale, self.block_size, self.out_features, self.in_features
        )

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        scale = self.activation_scale
        if scale is not None:
            return statically_quantized(x, scale)
        width = self.in_features if self.block_size is None else self.block_size[1]
        return quantized_rows(x, width, is_mx=self.block_size == MX)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.activation(x.reshape(-1, self.in_features))  # one symbolic size, not several
        weight = self.dequantized()
        if self.is_fp4 and x.dtype == torch.bfloat16:  # which holds both sides' numbers exactly
            rows, weight = rows.to(x.dtype), weight.to(x.dtype)
        out = nn.functional.linear(rows, weight).to(x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


def statically_quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In fp32, rounded to e4m3 times ``scale``."""
    return (x.float() / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn).float() * scale


def quantized_rows(x: torch.Tensor, width: int, *, is_mx: bool = False) -> torch.Tensor:
    """In fp32, rounded to e4m3 times a scale for ``width`` neighbours: amax / 448; ``is_mx``: the
    next power of two."""
    x = x.float().reshape(*x.shape[:-1], x.shape[-1] // width, width)
    scale = x.abs().amax(-1, keepdim=True) / MAX
    scale = _next_power_of_two(scale) if is_mx else scale.clamp_min(MIN_SCALE)
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Of fp32 numbers of at least 0, by their bits, from 2^-126 on."""
    bits = scale.view(torch.int32)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
