"""Tile configurations of a GEMM kernel, and ``tile_rejection``, the one check of their limits.

Tables, rules, configurations pinned by users and tests all go through it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from inductor_quant.errors import OptionError
from inductor_quant.kernels.problem import INTERPRETER_ARCH, Device
from inductor_quant.spec.decisions import Rejection, RejectionCode

# Accumulator registers (32 bit) per thread, of at most 255. wgmma (sm_90) reads its operands from
# shared memory; elsewhere the operands need registers too, and half as many accumulators fit.
MAX_ACCUMULATORS_WGMMA = 128
MAX_ACCUMULATORS = 64
MAX_WARPS = 32  # 1024 threads
# Bytes that Triton needs beside the stages, for barriers and scratch.
RESERVED_SHARED_MEMORY = 1024


@dataclasses.dataclass(frozen=True, order=True)
class GemmConfig:
    """One way to tile ``[M, K] x [K, N]``. Block sizes and ``num_warps`` are powers of two, but for
    the 96 rows of some tiles of experts.

    ``group_m`` M tiles are walked together, so that they share blocks of N in L2. ``split_k`` CTAs
    share an output tile, each with a slice of K. ``str`` and ``parse_config`` round-trip.
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
    """Inverse of ``str``. Raises OptionError for any other text."""
    found = _TEXT.fullmatch(text)
    if found is None:
        example = GemmConfig(128, 128, 64, num_warps=4, num_stages=3)
        raise OptionError(f"{text!r} is no configuration; one reads {str(example)!r}")
    return GemmConfig(*(int(number) for number in found.groups() if number is not None))


def shared_memory(config: GemmConfig, element_bytes: int) -> int:
    """Bytes of the pipelined tiles of both operands: an upper bound of what Triton allocates.

    Exact for wgmma. For mma.sync Triton may keep an operand in registers and needs less.
    """
    tile = (config.block_m + config.block_n) * config.block_k
    return config.num_stages * tile * element_bytes


def shortened(config: GemmConfig, block_k: int) -> GemmConfig:
    """``config`` with at most ``block_k`` along K, and as many bytes in flight."""
    if config.block_k <= block_k:
        return config
    stages = min(config.num_stages * config.block_k // block_k, 8)
    return dataclasses.replace(config, block_k=block_k, num_stages=stages)


def reject_if_split(config: GemmConfig) -> Rejection | None:
    """For kernels in which every CTA has all of K."""
    if config.split_k == 1:
        return None
    return Rejection(RejectionCode.BLOCK_SHAPE, f"{config}: this kernel does not split K")


def tile_rejection(
    config: GemmConfig,
    device: Device,
    *,
    element_bytes: int,
    shared_bytes: int | None = None,
    sums: int = 1,
    powers: Sequence[str] = ("block_m", "block_n", "block_k", "num_warps"),
) -> Rejection | None:
    """Why ``config`` cannot run on ``device``; None: it can.

    ``element_bytes``: size of the elements that the matrix unit multiplies. ``shared_bytes``: what
    the kernel keeps in shared memory, by default ``shared_memory``. ``sums``: accumulators per
    output element, 2 if the matrix unit's accumulator is added to a second one. ``powers``: names
    of what has to be a power of two.
    """
    for name in powers:
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            detail = f"{name}={value} of {config} is not a power of two"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
    # One matrix instruction takes 16 rows of M, 8 of N (Triton: 16) and 32 bytes along K.
    min_k = 32 // element_bytes
    detail = ""
    if config.block_m < 16 or config.block_n < 16 or config.block_k < min_k:
        detail = f"{config} is below the smallest tile, 16x16x{min_k}"
    elif config.num_stages < 1 or config.group_m < 1:
        detail = f"{config}: num_stages and group_m must be at least 1"
    elif config.num_warps > MAX_WARPS:
        detail = f"{config}: a CTA has at most {MAX_WARPS} warps"
    if detail:
        return Rejection(RejectionCode.BLOCK_SHAPE, detail)
    accumulators = sums * config.block_m * config.block_n // (32 * config.num_warps)
    most = MAX_ACCUMULATORS_WGMMA if device.arch in (INTERPRETER_ARCH, 90) else MAX_ACCUMULATORS
    if accumulators > most:
        return Rejection(
            RejectionCode.REGISTERS,
            f"{config} needs {accumulators} accumulator registers per thread; "
            f"{most} is the most that does not spill",
        )
    if shared_bytes is None:
        shared_bytes = shared_memory(config, element_bytes)
    needed = shared_bytes + RESERVED_SHARED_MEMORY
    if needed > device.shared_memory:
        detail = f"{config} needs {needed} bytes of shared memory, a CTA has {device.shared_memory}"
        return Rejection(RejectionCode.SHARED_MEMORY, detail)
    return None
