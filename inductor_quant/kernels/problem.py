"""What kernels know of one GEMM: its sizes, its packed weight and the device."""

from __future__ import annotations

import dataclasses

import torch

from inductor_quant.spec.gate import Gate
from inductor_quant.spec.weight_format import WeightFormat

INTERPRETER_ARCH = 0  # Triton's interpreter; it gets the limits of sm_90, to choose as a GPU does
# The largest M of the regimes that kernels are named after: decode, small_m, medium_m; large_m is
# above. A kernel with another bound gives it a constant of its own, with the reason.
DECODE_M, SMALL_M, MEDIUM_M = 16, 32, 256


@dataclasses.dataclass(frozen=True)
class Device:
    """What the choice of a kernel and a configuration needs to know of a GPU.

    ``arch`` is 10 * major + minor of the compute capability, or INTERPRETER_ARCH;
    ``shared_memory`` is the most that one CTA can have, in bytes.
    """

    arch: int
    num_sms: int
    shared_memory: int


@dataclasses.dataclass(frozen=True)
class WeightTensor:
    """Dtype, sizes and strides of one tensor of a packed weight. None: symbolic.

    Without ``stride`` the tensor is contiguous. ``is_aligned``: its address is a multiple of 16
    bytes. Strides and alignment decide which kernel is fast, never which result is right.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...] | None = None
    is_aligned: bool = True

    @property
    def strides(self) -> tuple[int | None, ...]:
        """In elements; None: symbolic."""
        if self.stride is not None:
            return self.stride
        strides: list[int | None] = [1]
        for size in reversed(self.shape[1:]):
            last = strides[0]
            strides.insert(0, None if last is None or size is None else last * size)
        return tuple(strides[: len(self.shape)])


@dataclasses.dataclass(frozen=True)
class Weight:
    """A packed weight: its format, and the tensors that the format's fields index."""

    format: WeightFormat
    tensors: tuple[WeightTensor, ...]


@dataclasses.dataclass(frozen=True)
class Groups:
    """Each row belongs to one of ``experts`` weights; with ``is_sorted`` the rows of each are
    neighbours. ``repeats`` of them share a row of x; with ``has_rows`` a tensor says which.
    ``gate``: of pairs of neighbouring columns, one column is stored; with ``has_bias`` a row of a
    tensor is added before, as another tensor says."""

    experts: int
    is_sorted: bool
    repeats: int = 1
    has_rows: bool = False
    gate: Gate | None = None
    has_bias: bool = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """One GEMM ``[M, K] x [K, N]``. A symbolic size has its value in the call being compiled, or,
    if the graph is compiled for a range of sizes, its largest."""

    m: int
    n: int
    k: int
    # If K is symbolic, no configuration may assume that it is a multiple of BLOCK_K.
    k_is_static: bool = True
    m_is_static: bool = True
    # No call has more rows than ``m``; one with fewer rows may come if M is symbolic. If it is not
    # bounded, other calls may have a far larger M.
    m_is_bounded: bool = True
    # Takes the place of b [K, N].
    weight: Weight | None = None
    # Then ``weight`` is a stack.
    groups: Groups | None = None
    # Both operands (the activation alone where there is ``weight``) are contiguous along K, and
    # their rows begin at multiples of 16 bytes, whatever the symbolic sizes: TMA requires it.
    has_aligned_rows: bool = False
    # x and the quantized values of ``weight`` are matrices that TMA descriptors can describe.
    has_weight_descriptors: bool = False
    # The result is stored in 2 bytes an element or fewer, by the epilogue if not by the GEMM.
    is_stored_narrow: bool = True
    # A tile must have a row beyond M, which the kernel uses to sum the columns of b.
    needs_spare_row: bool = False
    # Element size of the activation, if the kernel quantizes it; else 0.
    quantized_bytes: int = 0
    # Up to this M kernels of another family read the packed ``weight``, with x in 16 bits.
    rows_in_16_bits: int = 0
    # GEMMs of one activation in one horizontal launch; ``n`` is the sum of theirs.
    members: tuple[Problem, ...] = ()
    # Kernels that the horizontal launch adds because what follows each GEMM can no longer be fused
    # into it, unless K is split: then the kernel that adds the partials takes the fusions.
    lost_fusions: int = 0

    @property
    def is_gated(self) -> bool:
        """Whether a gate joins columns."""
        return self.groups is not None and self.groups.gate is not None

    @property
    def is_gathered(self) -> bool:
        """Whether row s of the product may be of another row of x than s."""
        return self.groups is not None and (self.groups.has_rows or self.groups.repeats > 1)

    def rows_outside(self, least: int, most: int) -> str:
        """Why M is not within ``least`` to ``most`` in every call; "": it is."""
        if not self.m_is_bounded:
            return "M has no bound"
        if self.m > most:
            return f"M = {self.m} is above {most}"
        return f"M = {self.m} is below {least}" if self.m < least else ""

    def has_masked_rows(self, block_m: int) -> bool:
        """Whether every call, or every call but that of the largest M, fills a part of one tile."""
        is_range = self.m_is_bounded and not self.m_is_static
        return self.m < block_m or (is_range and self.m == block_m)

    def is_even_k(self, block_k: int) -> bool:
        return self.k_is_static and self.k % block_k == 0
