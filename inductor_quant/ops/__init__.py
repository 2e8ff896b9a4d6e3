"""The canonical ops ``torch.ops.inductor_quant.*``: where recognisers and kernels meet.

Importing this package registers them: schema, eager reference and fake. Each is complete by itself:
eager, ``aot_eager`` and any device run it, without Inductor.
"""

from inductor_quant.ops import (
    fp8,
    fp8_block,
    group,
    group_reduce,
    quantize,
    row_reduce,
    verify,
    w8a8,
    w8a8_linear,
    weight_only,
)

__all__ = [
    "fp8",
    "fp8_block",
    "group",
    "group_reduce",
    "quantize",
    "row_reduce",
    "verify",
    "w8a8",
    "w8a8_linear",
    "weight_only",
]
