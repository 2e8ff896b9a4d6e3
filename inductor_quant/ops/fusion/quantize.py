"""``torch.ops.inductor_quant.quantize``: an activation in int8 or e4m3."""

from __future__ import annotations

import torch

from inductor_quant.ops.registration import define

SCHEMA = (
    "quantize(Tensor x, Tensor? scale=None, int low=-128, int high=127, *, ScalarType dtype) "
    "-> Tensor"
)


def reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    low: int = -128,
    high: int = 127,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x / scale`` rounded to ``dtype``, ties to even.

    x: fp32, bf16 or fp16, any shape. scale: one value per row, broadcast to x; None: 1.
    dtype int8: clamped to [low, high], -128 <= low <= high <= 127; NaN gives 0. scale is fp32.
    dtype float8_e4m3fn: saturates at -448 and 448; NaN stays. The quotient is rounded to the dtype
    that x and scale, any float, promote to.
    """
    if dtype == torch.int8:
        quotient = x.float() if scale is None else x.float() / scale
        return quotient.round().clamp(low, high).nan_to_num(0.0).to(torch.int8)
    if scale is not None:
        kind = torch.promote_types(x.dtype, scale.dtype)
        x = x.to(kind) / scale.to(kind)
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype)


op = define(SCHEMA, reference)
