"""From canonical ops to kernels. Importing this package registers templates and lowerings, once."""

from inductor_quant.lowering import (
    fp8,
    group_reduce,
    horizontal,
    quantize,
    row_reduce,
    w8a8,
    w8a8_linear,
    weight_only,
)

__all__ = [
    "fp8",
    "group_reduce",
    "horizontal",
    "quantize",
    "row_reduce",
    "w8a8",
    "w8a8_linear",
    "weight_only",
]
