"""Layers whose weight is stored in e2m1, two codes a byte."""

from __future__ import annotations

import torch

from inductor_quant.prepare.plain import PlainLinear
from inductor_quant.spec.weight_format import E2M1


class E2M1Linear(PlainLinear):
    e2m1: torch.Tensor

    def hold_e2m1(self, dtype: torch.dtype, device: torch.device) -> None:
        self.table("e2m1", torch.tensor(E2M1, dtype=dtype, device=device))

    def of_codes(self, packed: torch.Tensor) -> torch.Tensor:
        """[N, K] of ``packed`` [N, K / 2], int8 or uint8; even k in the low nibble. A literal while
        compiling: its values are then known, and kernels compute them."""
        codes = torch.stack([packed & 15, (packed >> 4) & 15], -1).flatten(1)
        table = self.e2m1
        if torch.compiler.is_compiling():
            table = torch.tensor(E2M1, dtype=table.dtype, device=packed.device)
        return table[codes.int()]
