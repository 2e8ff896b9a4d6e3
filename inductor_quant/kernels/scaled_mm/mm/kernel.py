"""The general kernels of ``w8a8``, ``fp8`` and ``fp8_block``: one CTA per output tile.

out = scale * (A @ B) + bias, for any M, N, K, strides and scales that the family supports, from
sm_80 on. They are chosen if no specialized kernel applies.

Loads are plain pointers, masked where K or M ends within a block; Triton pipelines them. The tiles
come from one table, measured on sm_90: its cost model accounts for the shape and the number of SMs,
``config_rejection`` for the registers and shared memory of the device. FP8 takes the table of int8,
whose operands have the same size and rate.

``w8a8_swap_ab`` is the variant for few tiles of few rows on sm_90: a tile is computed as its
transpose, so that it may have 16 or 32 rows. ``fp8_split_k`` and ``fp8_block_split_k`` are variants
for small M on sm_90, where whole tiles leave SMs idle: up to 8 CTAs share a tile, each with a part
of K, and the lowering adds their fp32 partials. With M below 64 the tile is computed as its
transpose (swap_ab). ``fp8_split_k`` has a table of its own, and mostly needs no split: its tiles
are small, its pipelines deep.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from inductor_quant.kernels.config import GemmConfig, shortened
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import (
    WGMMA_ARCHS,
    count_tiles,
    unlisted_rejection,
)
from inductor_quant.kernels.scaled_mm.fp8 import (
    Fp8Kernel,
    accumulators,
    fp8_tile_rejection,
    is_block_scaled,
    max_block_k,
)
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel, reject_if_only_mm
from inductor_quant.kernels.shared.grids import tile_grid
from inductor_quant.kernels.shared.split_k import reject_if_unbounded, same_split
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

# The fewest bytes that an asynchronous copy to shared memory moves.
ASYNC_BYTES = 4
# For loaded bytes and sums, of 255: with more, tiles of 64 x 64 x 128 with 4 warps spill 500 bytes.
MAX_UNALIGNED_REGISTERS = 90
# Sums of a thread beside operands in registers (mma.sync): with 64 of them, tiles of 64 x 64 x 128
# with scales of groups spill 168 bytes on sm_89 and 4 on sm_86 (ptxas of Triton 3.6), with 32 none.
MMA_SYNC_ARCHS = (80, 86, 89, 120)
MAX_SUMS_MMA_SYNC = 32
# Of w8a8_swap_ab: of the time of w8a8_mm, both predicted, by tables of different sweeps.
MAX_TIME = 0.92
MAX_SWAPPED_ROWS = 128


def table_configs(problem: Problem, device: Device, *, max_block_k: int) -> list[GemmConfig]:
    """The measured tiles, best first; their steps are cut to ``max_block_k`` (0: not)."""
    ranked = cost_model.load("w8a8_mm", 90).rank(problem, device, element_bytes=1)
    if loads_bytes(problem):
        # they take the time: as few as possible on the busiest SM
        ranked.sort(
            key=lambda config: (
                math.ceil(count_tiles(problem, config.block_m, config.block_n) / device.num_sms)
                * (config.block_m + config.block_n)
            )
        )
    if max_block_k:
        ranked = list(dict.fromkeys(shortened(config, max_block_k) for config in ranked))
    return ranked


def loads_bytes(problem: Problem) -> bool:
    """Whether rows of K begin at any byte, so that each byte is loaded into a register."""
    return problem.k_is_static and problem.k % ASYNC_BYTES != 0


def unaligned_rejection(problem: Problem, config: GemmConfig, sums: int) -> Rejection | None:
    if not loads_bytes(problem):
        return None
    threads = 32 * config.num_warps
    tiles = (config.block_m + config.block_n) * config.block_k
    registers = (tiles + sums * config.block_m * config.block_n) // threads
    if registers <= MAX_UNALIGNED_REGISTERS:
        return None
    detail = f"{config} loads K = {problem.k} in single bytes, {registers} registers per thread"
    return Rejection(RejectionCode.REGISTERS, detail)


class W8A8Mm(Int8Kernel):
    name = "w8a8_mm"
    template = "scaled_mm/mm/int8"
    is_horizontal = True

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        found = super().config_rejection(spec, problem, config, device)
        return found or unaligned_rejection(problem, config, sums=1)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        group = spec.group_size
        return table_configs(problem, device, max_block_k=group & -group)


class W8A8SwapAb(Int8Kernel):
    """Few tiles: those of ``fp8_split_k``, whose operands have the same size and rate, without a
    split of K."""

    name = "w8a8_swap_ab"
    template = "scaled_mm/mm/int8"
    is_horizontal = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device) or reject_if_only_mm(spec, problem):
            return found
        if device.arch not in WGMMA_ARCHS:
            detail = f"its tiles are those of sm_90, this is sm_{device.arch}"
            return Rejection(RejectionCode.NO_KERNEL, detail)
        if outside := problem.rows_outside(0, MAX_M):
            return Rejection(RejectionCode.NO_KERNEL, outside)
        return None

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return super().constants(spec, problem, config, device) | {"SWAP_AB": True}

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """None unless it is clearly faster than w8a8_mm by the models of both tables. That of
        w8a8_mm predicts too much for its tiles of 16 rows, and beyond MAX_SWAPPED_ROWS."""
        others = cost_model.load("w8a8_mm", 90)
        best = others.rank(problem, device, element_bytes=1)[0]
        is_known = others.neighbour(problem) is not None or best.block_m == 16
        if is_known or loads_bytes(problem) or problem.m > MAX_SWAPPED_ROWS:
            return []
        table = cost_model.load("fp8_split_k", 90)
        own = [
            config
            for config in table.rank(problem, device, element_bytes=1)
            if config in SWAPPED and is_covered(config, problem, device)
        ]
        limit = MAX_TIME * others.predict(best, problem, device)
        return own if own and table.predict(own[0], problem, device) <= limit else []

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        found = unlisted_rejection(config, SWAPPED)
        return found or super().config_rejection(spec, problem, config, device)


class Fp8Mm(Fp8Kernel):
    name = "fp8_mm"
    template = "scaled_mm/mm/fp8"

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        found = super().config_rejection(spec, problem, config, device)
        return found or unaligned_rejection(problem, config, accumulators(spec, device))

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        longest = max_block_k(spec) if is_block_scaled(spec) else 0
        found = table_configs(problem, device, max_block_k=longest)
        if is_block_scaled(spec) and device.arch in MMA_SYNC_ARCHS:
            sums = accumulators(spec, device)
            legal = (c for c in found if self.config_rejection(spec, problem, c, device) is None)
            found = list(dict.fromkeys(_with_warps_for(config, sums) for config in legal))
        return found


def _with_warps_for(config: GemmConfig, sums: int) -> GemmConfig:
    """With mma.sync operands are in the registers that hold the sums: eight warps if fewer
    have too many."""
    each = sums * config.block_m * config.block_n / (32 * config.num_warps)
    more = max(config.num_warps, 8) if each > MAX_SUMS_MMA_SYNC else config.num_warps
    return dataclasses.replace(config, num_warps=more)


class Fp8BlockMm(Fp8Mm):
    name = "fp8_block_mm"
    family = "fp8_block"


# ------------------------------------------------------------------------------------------
# split K

MAX_M = 256  # of blocks: if tiles of 128 x 128 occupy half of the SMs or fewer
SMALL_M = 64  # of blocks: any N up to this M
MAX_SPLIT_K = 8
# K steps that each part must keep: while SMs are idle, and once all have a CTA. The sum of the
# partials is one more kernel.
MIN_STEPS = 6
MIN_STEPS_FULL = 12
# K steps per part that pay for three parts, and three CTAs an SM, instead of two.
MIN_STEPS_THREE = 40
BLOCK_N = 64


class SplitK(Fp8Kernel):
    template = "scaled_mm/mm/fp8"

    @staticmethod
    def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
        """One CTA for each tile of the output and each part of K."""
        tiles, _, _ = tile_grid(*sizes, cdiv=cdiv)
        return (tiles, sizes[-1]["SPLIT_K"], 1)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        if device.arch not in WGMMA_ARCHS:
            detail = f"its tiles are those of sm_90, this is sm_{device.arch}"
            return Rejection(RejectionCode.NO_KERNEL, detail)
        if not self.is_small(problem, device):
            return Rejection(RejectionCode.NO_KERNEL, f"M = {problem.m} is not small")
        return None

    def is_small(self, problem: Problem, device: Device) -> bool:
        return problem.m_is_bounded and problem.m <= MAX_M

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        return (
            reject_if_unbounded(problem, config)
            or fp8_tile_rejection(spec, config, device)
            or unaligned_rejection(problem, config, accumulators(spec, device))
        )


class Fp8SplitK(SplitK):
    name = "fp8_split_k"

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        found = super().constants(spec, problem, config, device)
        return found | {"SWAP_AB": is_swapped(config)}

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        table = cost_model.load("fp8_split_k" if spec.fast_accum else "fp8_split_k_precise", 90)
        ranked = table.rank(problem, device, element_bytes=1)
        return same_split([config for config in ranked if is_covered(config, problem, device)])


def is_swapped(config: GemmConfig) -> bool:
    """Whether the tile is computed as its transpose: wgmma takes 64 rows and 8 to 256 columns, so a
    small M fits the columns, 64 fits the rows."""
    return config.block_n == 64 or config.block_m < 64 < config.block_n


def is_covered(config: GemmConfig, problem: Problem, device: Device) -> bool:
    """Whether the measurements of the tables of ``fp8_split_k`` cover ``config`` at these sizes: no
    more than half of a tile is empty, and K is split only if that occupies idle SMs. Smaller tiles
    were not measured; while each has an SM of its own, a CTA does what it does for a small M."""
    rows = min(max(16, 1 << (problem.m - 1).bit_length()), 128)
    tiles = count_tiles(problem, config.block_m, config.block_n)
    if config.split_k == 1 and tiles <= device.num_sms and 2 * config.block_m < rows:
        return True
    is_split_well = (
        4 * tiles <= 3 * device.num_sms
        and tiles * config.split_k <= 2.2 * device.num_sms
        and problem.k >= 4 * config.split_k * config.block_k
    )
    return rows <= 2 * config.block_m <= 2 * rows and (config.split_k == 1 or is_split_well)


class Fp8BlockSplitK(SplitK):
    name = "fp8_block_split_k"
    family = "fp8_block"

    def is_small(self, problem: Problem, device: Device) -> bool:
        """Up to SMALL_M, and above only if whole tiles leave half of the SMs idle."""
        is_half_idle = 2 * count_tiles(problem, 128, 128) <= device.num_sms
        return problem.m <= SMALL_M or (super().is_small(problem, device) and is_half_idle)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Best guess first; all with one ``split_k``, which is the shape of the output."""
        block_m = next(block for block in (16, 32, 64, 128) if problem.m <= block or block == 128)
        block_k = max_block_k(spec)
        tiles = count_tiles(problem, block_m, BLOCK_N)
        split = _split_k(problem, block_m, tiles, math.ceil(problem.k / block_k), device)
        # Six stages while they cost no CTA its place on an SM. At BLOCK_M = 128 two CTAs fit with
        # four stages, one with six: better if there is one per SM at most.
        roomy = {16: 2.0, 32: 2.0, 64: 1.25, 128: 1.0}[block_m] * device.num_sms
        first = 6 if tiles * split <= roomy else 4
        stages = sorted((3, 4, 6), key=lambda count: abs(count - first))
        offered = [(BLOCK_N, 4, count) for count in stages] + [(128, 4, 4), (128, 8, 4)]
        return [
            GemmConfig(block_m, block_n, block_k, warps, count, split_k=split)
            for block_n, warps, count in [*offered, (128, 8, 3)]
        ]


def _split_k(problem: Problem, block_m: int, tiles: int, steps: int, device: Device) -> int:
    """Double the parts up to two CTAs an SM, as long as each part keeps enough K steps."""
    if not problem.m_is_bounded:
        return 1
    split = 1
    while 2 * split <= MAX_SPLIT_K and 2 * split * tiles <= 2 * device.num_sms:
        is_full = 4 * split * tiles >= 3 * device.num_sms
        if steps < 2 * split * (MIN_STEPS_FULL if is_full else MIN_STEPS):
            break
        split *= 2
    is_long = steps >= 3 * MIN_STEPS_THREE and tiles <= device.num_sms
    return 3 if split == 2 and block_m <= SMALL_M and is_long else split


# Without a split of K: of all tiles that ``w8a8_swap_ab`` takes.
SWAPPED = tuple(
    each.config
    for each in cost_model.load("fp8_split_k", 90).configs
    if each.config.split_k == 1 and is_swapped(each.config)
)

W8A8_MM = W8A8Mm()
W8A8_SWAP_AB = W8A8SwapAb()
FP8_MM = Fp8Mm()
FP8_BLOCK_MM = Fp8BlockMm()
FP8_SPLIT_K = Fp8SplitK()
FP8_BLOCK_SPLIT_K = Fp8BlockSplitK()
