"""What a quantized GEMM is: element types, scales and granularity, without shapes or devices.

Frozen and hashable: the key of configuration tables, of the choice of a kernel and of report lines.
"""

from __future__ import annotations

import dataclasses

import torch

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_GRANULARITY = {(-1, -1): "tensor", (1, -1): "token", (-1, 1): "channel"}


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16``, ``i8``, ...: the short name used in specs, reports and tables."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


@dataclasses.dataclass(frozen=True)
class ScaleSpec:
    """One level of scales.

    ``block`` = (rows, columns) of the operand that one value covers, -1 for the whole dimension:
    (-1, -1) per tensor, (1, -1) per token, (-1, 1) per channel, (1, 128) per group along K,
    (128, 128) per block.
    """

    dtype: torch.dtype
    block: tuple[int, int]

    def __str__(self) -> str:
        block = _GRANULARITY.get(self.block) or "x".join(map(str, self.block))
        return f"{block}:{dtype_name(self.dtype)}"


@dataclasses.dataclass(frozen=True)
class OperandSpec:
    """One operand: its element type, and how a real value is recovered from it (``None``: it is
    real).
    """

    dtype: torch.dtype
    scale: ScaleSpec | None = None

    def __str__(self) -> str:
        return dtype_name(self.dtype) + (f"/{self.scale}" if self.scale else "")


@dataclasses.dataclass(frozen=True)
class QuantGemmSpec:
    """``out = dequantize(a) @ dequantize(b) + bias``, products accumulated in ``acc_dtype``."""

    a: OperandSpec
    b: OperandSpec
    out_dtype: torch.dtype
    acc_dtype: torch.dtype
    bias: bool = False

    def __str__(self) -> str:
        bias = "+bias" if self.bias else ""
        return f"(a={self.a}, b={self.b}, out={dtype_name(self.out_dtype)}{bias})"
