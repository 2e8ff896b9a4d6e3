"""From canonical ops to kernels. Importing this package registers templates and lowerings, once."""

from inductor_quant.lowering import (  # noqa: F401
    block_sparse,
    experts,
    fp8,
    scaled_experts,
    w4a8,
    w8a8,
    weight_only,
)
from inductor_quant.lowering.fusion import (  # noqa: F401
    erf,
    expert_routing,
    group_reduce,
    horizontal,
    quantized_linear,
    row_quant,
)
