"""The kernels: templates, when they apply, and which configurations to use.

This package knows nothing of producers or FX graphs. ``README.md`` has the dispatch table.
"""

from inductor_quant.kernels.block_sparse.direct.kernel import BLOCK_SPARSE_DIRECT
from inductor_quant.kernels.block_sparse.mm.kernel import BLOCK_SPARSE_MM, BLOCK_SPARSE_MM_TMA
from inductor_quant.kernels.experts.direct.kernel import EXPERTS_DIRECT
from inductor_quant.kernels.experts.mm.kernel import EXPERTS_MM
from inductor_quant.kernels.experts.mm_sm90.kernel import EXPERTS_MM_SM90
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.scaled_experts.large_m_sm90.kernel import (
    SCALED_EXPERTS_INT8_LARGE_M_SM90,
    SCALED_EXPERTS_LARGE_M_SM90,
)
from inductor_quant.kernels.scaled_experts.mm.kernel import (
    SCALED_EXPERTS_INT8_MM,
    SCALED_EXPERTS_MM,
)
from inductor_quant.kernels.scaled_mm.decode.kernel import (
    FP8_BLOCK_DECODE,
    FP8_DECODE,
    FP8_DECODE_QUANTIZE,
    W8A8_DECODE,
    W8A8_DECODE_QUANTIZE,
)
from inductor_quant.kernels.scaled_mm.group_large_m_sm90.kernel import (
    FP8_GROUP_LARGE_M_SM90,
    W8A8_GROUP_LARGE_M_SM90,
)
from inductor_quant.kernels.scaled_mm.large_m_sm90.kernel import (
    FP8_BLOCK_LARGE_M_SM90,
    FP8_LARGE_M_SM90,
    W8A8_LARGE_M_SM90,
)
from inductor_quant.kernels.scaled_mm.mm.kernel import (
    FP8_BLOCK_MM,
    FP8_BLOCK_SPLIT_K,
    FP8_MM,
    FP8_SPLIT_K,
    W8A8_MM,
    W8A8_SWAP_AB,
)
from inductor_quant.kernels.scaled_mm.persistent.kernel import (
    FP8_BLOCK_PERSISTENT,
    FP8_PERSISTENT,
    W8A8_PERSISTENT,
)
from inductor_quant.kernels.scaled_mm.two_block_sm90.kernel import FP8_BLOCK_TWO_BLOCK_SM90
from inductor_quant.kernels.w4a8.direct.kernel import W4A8_DIRECT
from inductor_quant.kernels.w4a8.mm.kernel import W4A8_MM
from inductor_quant.kernels.w4a8.mm_sm90.kernel import W4A8_MM_SM90
from inductor_quant.kernels.weight_only.bytes.kernel import WEIGHT_ONLY_BYTES
from inductor_quant.kernels.weight_only.decode.kernel import WEIGHT_ONLY_DECODE
from inductor_quant.kernels.weight_only.dequantize.kernel import WEIGHT_ONLY_DEQUANTIZE
from inductor_quant.kernels.weight_only.direct.kernel import WEIGHT_ONLY_DIRECT
from inductor_quant.kernels.weight_only.medium_m.kernel import WEIGHT_ONLY_MEDIUM_M
from inductor_quant.kernels.weight_only.mm.kernel import WEIGHT_ONLY_MM
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.small_m.kernel import WEIGHT_ONLY_SMALL_M
from inductor_quant.kernels.weight_only.small_m_sm90.kernel import WEIGHT_ONLY_SMALL_M_SM90

# Within a family in order of preference: a kernel is for what those before it reject.
KERNELS: tuple[Kernel, ...] = (
    W8A8_DECODE_QUANTIZE,
    W8A8_DECODE,
    W8A8_LARGE_M_SM90,
    W8A8_GROUP_LARGE_M_SM90,
    W8A8_PERSISTENT,
    W8A8_SWAP_AB,
    W8A8_MM,
    W4A8_DIRECT,
    W4A8_MM_SM90,
    W4A8_MM,
    WEIGHT_ONLY_SMALL_M_SM90,
    WEIGHT_ONLY_DECODE,
    WEIGHT_ONLY_DIRECT,
    WEIGHT_ONLY_MM_SM90,
    WEIGHT_ONLY_SMALL_M,
    WEIGHT_ONLY_MEDIUM_M,
    WEIGHT_ONLY_BYTES,
    WEIGHT_ONLY_MM,
    WEIGHT_ONLY_DEQUANTIZE,
    FP8_DECODE_QUANTIZE,
    FP8_DECODE,
    FP8_LARGE_M_SM90,
    FP8_GROUP_LARGE_M_SM90,
    FP8_SPLIT_K,
    FP8_PERSISTENT,
    FP8_MM,
    FP8_BLOCK_DECODE,
    FP8_BLOCK_TWO_BLOCK_SM90,
    FP8_BLOCK_SPLIT_K,
    FP8_BLOCK_LARGE_M_SM90,
    FP8_BLOCK_PERSISTENT,
    FP8_BLOCK_MM,
    BLOCK_SPARSE_DIRECT,
    BLOCK_SPARSE_MM_TMA,
    BLOCK_SPARSE_MM,
    EXPERTS_MM_SM90,
    EXPERTS_DIRECT,
    EXPERTS_MM,
    SCALED_EXPERTS_LARGE_M_SM90,
    SCALED_EXPERTS_MM,
    SCALED_EXPERTS_INT8_LARGE_M_SM90,
    SCALED_EXPERTS_INT8_MM,
)

__all__ = ["KERNELS", "Kernel"]
