"""From canonical ops to kernels. Importing this package registers templates and lowerings, once."""

from inductor_quant.lowering import (  # noqa: F401
    block_sparse,
    experts,
    fp8,
    group_reduce,
    horizontal,
    quantized_linear,
    row_quant,
    scaled_experts,
    w4a8,
    w8a8,
    weight_only,
)
