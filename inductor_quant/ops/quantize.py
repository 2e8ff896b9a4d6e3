"""``torch.ops.inductor_quant.round_to_int8``: rounds a scaled activation to int8."""

from __future__ import annotations

import torch

from inductor_quant.ops.registration import define

SCHEMA = "round_to_int8(Tensor x, Tensor? scale=None, int low=-128, int high=127) -> Tensor"


def reference(
    x: torch.Tensor, scale: torch.Tensor | None = None, low: int = -128, high: int = 127
) -> torch.Tensor:
    """``x / scale`` rounded to the nearest integer, ties to even, clamped to [low, high], as int8;
    NaN gives 0.

    x: fp32, bf16 or fp16, any shape. scale: fp32, one value per row, broadcast to x; None: 1.
    -128 <= low <= high <= 127.
    """
    quotient = x.float() if scale is None else x.float() / scale
    return quotient.round().clamp(low, high).nan_to_num(0.0).to(torch.int8)


op = define(SCHEMA, reference)
