"""``torch.ops.inductor_quant.erf``: the error function where its sum with 1 is quantized."""

from __future__ import annotations

import torch

from inductor_quant.ops.registration import define

SCHEMA = "erf(Tensor x) -> Tensor"


def reference(x: torch.Tensor) -> torch.Tensor:
    """``torch.erf(x)``, fp32, any shape; a kernel may be off by 1e-6, absolutely.

    A separate op tells the lowering that only a sum with 1 reads the value, which is quantized to 8
    bits in the end, see ``lowering/fusion/erf.py``.
    """
    return torch.erf(x)


op = define(SCHEMA, reference)
