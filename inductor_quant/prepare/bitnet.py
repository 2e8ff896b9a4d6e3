"""``BitLinear`` of transformers 5.17: ternary weights, activations of 8 bits by row. Its helpers
are compiled by themselves, which Dynamo cannot trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inductor_quant.prepare.plain import PlainLinear, Replacement

FIELDS = 4  # in a byte
QMIN, QMAX, LEAST = -128, 127, 1e-5


def plain(module: Any) -> Replacement | str:
    weight = module.weight
    if weight.dtype != torch.uint8 or len(weight) * FIELDS != module.out_features:
        return f"a weight of {weight.dtype} {list(weight.shape)}"
    if module.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computed in {module.dtype}"

    def reference(x: torch.Tensor) -> torch.Tensor:
        with torch.compiler.set_stance("force_eager"):
            y: torch.Tensor = module(x)
            return y

    return Replacement(BitLinear(module), reference, module.dtype)


class BitLinear(PlainLinear):
    """``(q @ (code - 1).T) / (weight_scale * s) + bias``, with q = round(x * s) in int8 and
    s = 127 / amax of a row.

    weight uint8 [N / 4, K], whose four fields of two bits are as many quarters of N; weight_scale
    one element.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, module: Any) -> None:
        super().__init__(module.out_features, module.in_features, module.bias)
        self.rms_norm, self.dtype = module.rms_norm, module.dtype
        self.hold(weight=module.weight, weight_scale=module.weight_scale)

    def dequantized(self) -> torch.Tensor:
        codes = torch.cat([(self.weight >> shift) & 3 for shift in range(0, 8, 2)])
        return codes.to(self.dtype) - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.rms_norm is None else self.rms_norm(x)
        scale = QMAX / x.abs().amax(-1, keepdim=True).clamp_min(LEAST)
        q = (x * scale).round().clamp(QMIN, QMAX).to(torch.int8)
        y = nn.functional.linear(q.to(self.dtype), self.dequantized())
        y = y / (self.weight_scale * scale)
        return y if self.bias is None else y + self.bias
