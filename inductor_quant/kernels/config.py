"""Tile configurations of a GEMM kernel, and the one function that says which are legal.

Tables, rules, user pins and tests all ask ``legal``.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.errors import OptionError
from inductor_quant.weight_format import WeightFormat

# Accumulator registers (32 bit) a thread, of the 255 that one can have. wgmma (sm_90) reads its
# operands from shared memory: at 128 nothing of the sweep spills, at 256 all does. Elsewhere they
# pass through registers too: at 128, 128x128x64 with 4 warps spills on sm_80, 89 and 100 (Triton
# 3.9; 716, 716 and 80 bytes).
MAX_ACCUMULATORS_WGMMA = 128
MAX_ACCUMULATORS = 64
MAX_WARPS = 32  # 1024 threads
INTERPRETER_ARCH = 0  # has no limits; those of sm_90 make it choose what a GPU would
# Triton keeps barriers and scratch beside the stages.
RESERVED_SHARED_MEMORY = 1024


@dataclasses.dataclass(frozen=True, order=True)
class GemmConfig:
    """One way to tile ``[M, K] x [K, N]``; all but ``group_m`` must be powers of two or small
    counts.

    ``group_m`` is the number of row tiles that are walked together so that they share columns in
    L2; ``split_k`` is how many programs share a tile, each with a part of K.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    split_k: int = 1

    def __str__(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}"
            f"_w{self.num_warps}_s{self.num_stages}_g{self.group_m}"
        ) + (f"_k{self.split_k}" if self.split_k > 1 else "")


_TEXT = re.compile(r"(\d+)x(\d+)x(\d+)_w(\d+)_s(\d+)_g(\d+)(?:_k([1-9]\d*))?")


def parse_config(text: str) -> GemmConfig:
    """The configuration that ``str`` gave. Raises OptionError for other text."""
    found = _TEXT.fullmatch(text)
    if found is None:
        example = GemmConfig(128, 128, 64, num_warps=4, num_stages=3)
        raise OptionError(f"{text!r} is no configuration; one reads {str(example)!r}")
    return GemmConfig(*(int(number) for number in found.groups() if number is not None))


@dataclasses.dataclass(frozen=True)
class Device:
    """What a choice of configuration needs to know of a device.

    ``arch`` is 10 * major + minor of the compute capability, or INTERPRETER_ARCH;
    ``shared_memory`` is in bytes, the most that one block can have.
    """

    arch: int
    num_sms: int
    shared_memory: int


@dataclasses.dataclass(frozen=True)
class WeightTensor:
    """Type, sizes and strides of one tensor of a packed weight; None: a size is symbolic.

    No strides: those of a contiguous tensor. ``is_aligned``: it begins at a multiple of 16 bytes.
    They say what is fast, and what can be copied at once, never what is right.
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
    """A packed weight: how it lies in memory, and the tensors that its fields count."""

    format: WeightFormat
    tensors: tuple[WeightTensor, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of one GEMM; where a size is symbolic, the value it had in the call being compiled.

    ``weight``, if given, is what stands in the place of b [K, N].
    """

    m: int
    n: int
    k: int
    # False where K is symbolic: then no configuration may assume that it is a multiple of BLOCK_K.
    k_is_static: bool = True
    # False where M is symbolic: m is that of the call being compiled, another may be far larger.
    m_is_static: bool = True
    weight: Weight | None = None
    # Both operands lie contiguous along K, and their rows begin at multiples of 16 bytes, whatever
    # the symbolic sizes are: what a tensor descriptor needs.
    has_aligned_rows: bool = False
    # x and the words of ``weight`` are matrices, contiguous along their last axis, of which tensor
    # descriptors can be made.
    has_described_words: bool = False
    # The result is stored in two bytes an element or fewer, by the epilogue if not by the GEMM.
    is_stored_narrow: bool = True
    # A tile has to have a row beyond the last one, which is used for the sums of the columns of b.
    needs_spare_row: bool = False
    # Bytes of an element of the activation, where the kernel quantizes it; 0: somebody else does.
    quantized_bytes: int = 0
    # GEMMs of one activation in one launch, each as if it were alone; ``n`` counts their columns.
    members: tuple[Problem, ...] = ()
    # Kernels more for what is fused into those of GEMMs alone, where no parts of K are added up.
    lost_fusions: int = 0

    def is_even_k(self, config: GemmConfig) -> bool:
        return self.k_is_static and self.k % config.block_k == 0


def shared_memory(config: GemmConfig, element_bytes: int) -> int:
    """Bytes that the pipelined tiles of both operands take: an upper bound of what Triton
    allocates.

    Equal to it for every wgmma configuration of the sweep; for mma.sync ones Triton may keep an
    operand in registers and needs less.
    """
    tile = (config.block_m + config.block_n) * config.block_k
    return config.num_stages * tile * element_bytes


def shortened(config: GemmConfig, step: int) -> GemmConfig:
    """With steps of at most ``step`` along K, and as many bytes in flight."""
    if config.block_k <= step:
        return config
    return GemmConfig(
        config.block_m,
        config.block_n,
        step,
        num_warps=config.num_warps,
        num_stages=min(config.num_stages * config.block_k // step, 8),
        group_m=config.group_m,
    )


def refuse_split(config: GemmConfig) -> Rejection | None:
    """For kernels whose programs have all of K."""
    if config.split_k == 1:
        return None
    return Rejection(RejectionCode.BLOCK_SHAPE, f"{config}: this kernel does not split K")


def legal(
    config: GemmConfig,
    device: Device,
    *,
    element_bytes: int,
    shared_bytes: int | None = None,
    sums: int = 1,
) -> Rejection | None:
    """None where ``config`` can run on ``device``, else why not.

    ``element_bytes`` is the size of what the matrix unit multiplies. ``shared_bytes`` is what the
    kernel keeps in shared memory; None: tiles of both operands, see ``shared_memory``. ``sums`` is
    the number of accumulators of an element: 2 where the matrix unit's is added to another.
    """
    for name in ("block_m", "block_n", "block_k", "num_warps"):
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return Rejection(
                RejectionCode.BLOCK_SHAPE, f"{name}={value} of {config} is not a power of two"
            )
    # The matrix units take 16 rows, 8 columns (Triton: 16), and 32 bytes along K at once.
    min_k = 32 // element_bytes
    if config.block_m < 16 or config.block_n < 16 or config.block_k < min_k:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config} is below the smallest tile, 16x16x{min_k}"
        )
    if config.num_stages < 1 or config.group_m < 1:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config}: num_stages and group_m must be at least 1"
        )
    if config.num_warps > MAX_WARPS:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config}: a block has at most {MAX_WARPS} warps"
        )
    accumulators = sums * config.block_m * config.block_n // (32 * config.num_warps)
    most = MAX_ACCUMULATORS_WGMMA if device.arch in (INTERPRETER_ARCH, 90) else MAX_ACCUMULATORS
    if accumulators > most:
        return Rejection(
            RejectionCode.REGISTERS,
            f"{config} needs {accumulators} accumulator registers a thread; "
            f"{most} is the most that does not spill",
        )
    if shared_bytes is None:
        shared_bytes = shared_memory(config, element_bytes)
    needed = shared_bytes + RESERVED_SHARED_MEMORY
    if needed > device.shared_memory:
        return Rejection(
            RejectionCode.SHARED_MEMORY,
            f"{config} needs {needed} bytes of shared memory, a block has {device.shared_memory}",
        )
    return None
