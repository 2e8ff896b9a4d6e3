"""The canonical ops ``torch.ops.inductor_quant.*``, where recognisers and kernels meet.

Importing this package registers each with schema, eager reference and fake, so that it also runs
without Inductor: eager, ``aot_eager``, any device.
"""

from inductor_quant.ops import (
    experts,
    fp8,
    fp8_block,
    group_reduce,
    horizontal,
    quantize,
    row_reduce,
    verify,
    w8a8,
    w8a8_linear,
    weight_only,
)

__all__ = [
    "experts",
    "fp8",
    "fp8_block",
    "group_reduce",
    "horizontal",
    "quantize",
    "row_reduce",
    "verify",
    "w8a8",
    "w8a8_linear",
    "weight_only",
]
