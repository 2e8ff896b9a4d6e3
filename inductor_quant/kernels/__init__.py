"""Kernels as data: Triton templates, when they apply, and which configurations to use.

Knows nothing of producers or FX. A kernel is a ``Kernel`` record in ``KERNELS``.
"""

from inductor_quant.kernels.few_bytes import (
    FP8_BLOCK_FEW_GLUON,
    W8A8_FEW_GLUON,
    W8A8_FEW_QUANTIZING,
)
from inductor_quant.kernels.few_rows import WEIGHT_ONLY_FEW_ROWS
from inductor_quant.kernels.few_rows_gluon import WEIGHT_ONLY_FEW_ROWS_GLUON
from inductor_quant.kernels.few_rows_wgmma import WEIGHT_ONLY_FEW_ROWS_WGMMA
from inductor_quant.kernels.fp8 import (
    FP8_BLOCK_MM,
    FP8_BLOCK_PERSISTENT,
    FP8_MM,
    FP8_PERSISTENT,
)
from inductor_quant.kernels.fp8_few import FP8_BLOCK_FEW
from inductor_quant.kernels.fp8_gluon import FP8_BLOCK_GLUON, FP8_GLUON
from inductor_quant.kernels.fp8_pairs import FP8_BLOCK_PAIRS
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.many_rows import WEIGHT_ONLY_WORDS
from inductor_quant.kernels.many_rows_gluon import WEIGHT_ONLY_WORDS_GLUON
from inductor_quant.kernels.many_rows_tma import WEIGHT_ONLY_WORDS_TMA
from inductor_quant.kernels.w8a8 import W8A8_MM, W8A8_PERSISTENT
from inductor_quant.kernels.w8a8_gluon import W8A8_GLUON
from inductor_quant.kernels.weight_bytes import WEIGHT_ONLY_BYTES
from inductor_quant.kernels.weight_only import WEIGHT_ONLY_DEQUANTIZE, WEIGHT_ONLY_MM

# Within a family in order of preference: a later one is for what the earlier do not support.
KERNELS: tuple[Kernel, ...] = (
    W8A8_FEW_QUANTIZING,
    W8A8_FEW_GLUON,
    W8A8_GLUON,
    W8A8_PERSISTENT,
    W8A8_MM,
    WEIGHT_ONLY_FEW_ROWS_WGMMA,
    WEIGHT_ONLY_WORDS_TMA,
    WEIGHT_ONLY_WORDS_GLUON,
    WEIGHT_ONLY_FEW_ROWS_GLUON,
    WEIGHT_ONLY_FEW_ROWS,
    WEIGHT_ONLY_WORDS,
    WEIGHT_ONLY_BYTES,
    WEIGHT_ONLY_MM,
    WEIGHT_ONLY_DEQUANTIZE,
    FP8_GLUON,
    FP8_PERSISTENT,
    FP8_MM,
    FP8_BLOCK_FEW_GLUON,
    FP8_BLOCK_PAIRS,
    FP8_BLOCK_FEW,
    FP8_BLOCK_GLUON,
    FP8_BLOCK_PERSISTENT,
    FP8_BLOCK_MM,
)

__all__ = ["KERNELS", "Kernel"]
