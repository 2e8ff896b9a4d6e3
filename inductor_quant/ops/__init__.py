"""The canonical ops ``torch.ops.inductor_quant.*``, where recognizers and kernels meet.

Importing this package registers each with schema, eager reference and fake, so that it also runs
without Inductor: eager, ``aot_eager``, any device.
"""

from inductor_quant.ops import (
    block_sparse,
    experts,
    fp8,
    fp8_block,
    scaled_experts,
    verify,
    w4a8,
    w8a8,
    weight_only,
)
from inductor_quant.ops.fusion import (
    erf,
    group_reduce,
    horizontal,
    quantize,
    quantized_linear,
    row_reduce,
)

__all__ = [
    "block_sparse",
    "erf",
    "experts",
    "fp8",
    "fp8_block",
    "group_reduce",
    "horizontal",
    "quantize",
    "quantized_linear",
    "row_reduce",
    "scaled_experts",
    "verify",
    "w4a8",
    "w8a8",
    "weight_only",
]
