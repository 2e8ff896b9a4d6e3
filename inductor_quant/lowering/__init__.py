"""From canonical ops to kernels. Importing this package registers templates and lowerings, once."""

from inductor_quant.lowering import (  # noqa: F401
    experts,
    fp8,
    group_reduce,
    horizontal,
    row_quant,
    w8a8,
    w8a8_linear,
    weight_only,
)
