"""Kernels as data: Triton templates, when they apply, and which configurations to use.

Knows nothing of producers or FX. A kernel is a ``Kernel`` record in ``KERNELS``.
"""

from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.w8a8 import W8A8_MM
from inductor_quant.kernels.weight_only import WEIGHT_ONLY_MM

# Of a family, the first that supports a problem comes first among the choices.
KERNELS: tuple[Kernel, ...] = (W8A8_MM, WEIGHT_ONLY_MM)

__all__ = ["KERNELS", "Kernel"]
