"""Kernels of ``w8a8``, ``fp8`` and ``fp8_block`` for large GEMMs on Hopper, in Gluon.

out = scale * (A @ B) + bias, chosen on sm_90 from M = 256 on, with operands that TMA can read, a
result of 16 bits, 6e9 products or more (``w8a8``, ``fp8``), K of 4096 or more (``w8a8``; 896 with
1e10 to 4e10 products; ``fp8`` 1536), and tiles that keep 60 % of the SMs busy. ``fp8`` takes it
from M = 193 to 256 too, where its tiles keep a third more SMs busy than those of ``fp8_split_k``.

Warp specialization: one warp loads the operands by TMA, two warpgroups multiply 64 rows each of a
tile of 128 rows. One CTA an SM takes tile after tile. Where partial sums are scaled (``fp8_block``)
or promoted to fp32 (``fp8``), one warpgroup adds while the other multiplies; Triton's ``tl.dot``
would let the matrix unit wait for each addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from inductor_quant.kernels.codegen.dialect import HOISTS_MORE
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import (
    ScaledMm,
    alignment_rejection,
    count_tiles,
    unlisted_rejection,
)
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel, is_block_scaled, reject_unless_128
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel, reject_if_only_mm
from inductor_quant.kernels.shared import horizontal
from inductor_quant.kernels.shared.grids import persistent_grid
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

ARCH = 90  # the only one with wgmma
BLOCK_K = 128  # one row of the 128-byte swizzle
MIN_M = 256  # below, reading the weight takes the time
MIN_PRODUCTS = 6 * 10**9  # multiply-adds; smaller GEMMs end before TMA pays off
MIN_FILL = 0.6  # of the SMs' time, in the rounds of tiles of the best configuration
# Of K, for int8: with fewer, stores weigh, which two CTAs of w8a8_persistent on an SM overlap,
# unless its tiles come in a few rounds.
MIN_K_STEPS, MIN_K_STEPS_SHORT, PRODUCTS_SHORT = 32, 7, (10 * 10**9, 40 * 10**9)
ALIGNED_N = 8  # columns that a thread stores together: 16 bytes of a result in 16 bits
# For fp8 with fast accumulation. With the second accumulator the other kernels wait for it.
MIN_K_STEPS_FLOAT = 12
# Up to SPLIT_ROWS fp8_split_k is chosen, unless tiles of 96 or 192 columns fit the SMs better: from
# this M, these products and this gain in busy SMs on.
SPLIT_ROWS = 256
MIN_M_FLOAT, MIN_PRODUCTS_FLOAT, MIN_GAIN = 193, 9 * 10**9, 1.3
# By BLOCK_N: as many as fit the 227 KB of shared memory beside the barriers.
STAGES = {64: 8, 96: 7, 128: 6, 192: 5, 256: 4}


def tile(block_n: int, group_m: int) -> GemmConfig:
    return GemmConfig(
        128, block_n, BLOCK_K, num_warps=4, num_stages=STAGES[block_n], group_m=group_m
    )


# Widest first: of tiles with equal cost it is the fastest.
CONFIGS = (
    *(tile(block_n, group_m=8) for block_n in (256, 192, 128, 96, 64)),
    *(tile(block_n, group_m=16) for block_n in (256, 128)),
)
BLOCK_CONFIGS = (
    *(tile(block_n, group_m) for block_n in (256, 192) for group_m in (16, 8)),
    tile(128, group_m=8),
)
# By BLOCK_N: time per output element, relative to the widest tile.
ELEMENT_COST = {256: 1.0, 192: 1.0, 128: 1.0, 96: 1.2, 64: 1.6}
BLOCK_ELEMENT_COST = {256: 1.0, 192: 1.05, 128: 1.3}


class WarpSpecialized(ScaledMm):
    """The template, and what it asks for."""

    template = "scaled_mm/large_m_sm90/template"
    is_gluon = True
    listed: ClassVar[tuple[GemmConfig, ...]] = CONFIGS
    element_cost: ClassVar[Mapping[int, float]] = ELEMENT_COST

    grid = staticmethod(persistent_grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device) or alignment_rejection(problem):
            return found
        if device.arch != ARCH:
            detail = f"written for sm_{ARCH}, this is sm_{device.arch}"
        elif not problem.k_is_static:
            detail = "K is symbolic"
        elif not problem.is_stored_narrow:
            detail = "an fp32 result takes twice as long to store"
        else:
            return None
        return Rejection(RejectionCode.NO_KERNEL, detail)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return super().constants(spec, problem, config, device) | {
            "STAGES": config.num_stages,
            "NUM_CTAS": device.num_sms,
            "K_BLOCKS": math.ceil(problem.k / BLOCK_K),
            "FAST_MATH_EPILOGUE": problem.is_stored_narrow,
            "HOISTS_MORE": HOISTS_MORE,
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        return (
            unlisted_rejection(config, self.listed)
            or horizontal.config_rejection(problem, config)
            or reject_if_it_spills(spec, problem, config)
        )


def reject_if_it_spills(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig
) -> Rejection | None:
    # elements are stored one by one
    if problem.n % 2 == 0 or config.block_n != 192 or not is_block_scaled(spec):
        return None
    detail = f"{config} spills 300 bytes where N = {problem.n} is odd"
    return Rejection(RejectionCode.REGISTERS, detail)


class LargeM(WarpSpecialized):
    min_m: ClassVar[int] = MIN_M

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        products = problem.m * problem.n * problem.k
        if problem.m < self.min_m:
            detail = f"M = {problem.m} is small"
        elif products < MIN_PRODUCTS and not is_block_scaled(spec):
            detail = f"{products} products are few"
        elif (filled := self.filled(spec, problem, device)) < MIN_FILL:
            detail = f"{filled:.0%} of the chip is used"
        else:
            return None
        return Rejection(RejectionCode.NO_KERNEL, detail)

    def filled(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> float:
        """Share of the chip's time that computes output elements, with the best configuration."""
        ranked = self.configs(spec, problem, device)
        legal = (each for each in ranked if horizontal.config_rejection(problem, each) is None)
        return _filled(next(legal, ranked[0]), problem, device)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Least predicted time first."""
        return sorted(
            self.listed,
            key=lambda config: (
                computed_elements(config, problem, device) * self.element_cost[config.block_n]
            ),
        )


class W8A8LargeM(LargeM, Int8Kernel):
    name = "w8a8_large_m_sm90"
    is_horizontal = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device) or reject_if_only_mm(spec, problem):
            return found
        fewest, most = PRODUCTS_SHORT
        is_short = problem.k < MIN_K_STEPS * BLOCK_K
        has_few_rounds = fewest <= problem.m * problem.n * problem.k <= most
        is_timed = problem.k >= MIN_K_STEPS_SHORT * BLOCK_K and problem.n % ALIGNED_N == 0
        if is_short and not (has_few_rounds and is_timed):
            return Rejection(RejectionCode.NO_KERNEL, f"K = {problem.k} is short")
        return None


class Fp8LargeM(LargeM, Fp8Kernel):
    name = "fp8_large_m_sm90"
    min_m = MIN_M_FLOAT

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        if spec.fast_accum and problem.k < MIN_K_STEPS_FLOAT * BLOCK_K:
            return Rejection(RejectionCode.NO_KERNEL, f"K = {problem.k} is short")
        is_split = problem.m <= SPLIT_ROWS and (problem.m_is_bounded or problem.m < MIN_M)
        if is_split and not self.fits_better(spec, problem, device):
            return Rejection(RejectionCode.NO_KERNEL, f"M = {problem.m} is for fp8_split_k")
        return None

    def fits_better(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
        """Whether its tiles keep clearly more SMs busy than tiles of 128 and 256 columns, of which
        there are too many to split K."""
        others = max(_filled(tile(block_n, group_m=8), problem, device) for block_n in (128, 256))
        return (
            spec.fast_accum
            and problem.m_is_bounded
            and 4 * count_tiles(problem, 128, 128) > 3 * device.num_sms
            and problem.m * problem.n * problem.k >= MIN_PRODUCTS_FLOAT
            and self.filled(spec, problem, device) >= MIN_GAIN * others
        )


class Fp8BlockLargeM(LargeM, Fp8Kernel):
    name = "fp8_block_large_m_sm90"
    family = "fp8_block"
    listed = BLOCK_CONFIGS
    element_cost = BLOCK_ELEMENT_COST

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        return reject_unless_128(spec) or super().rejection(spec, problem, device)


def _filled(config: GemmConfig, problem: Problem, device: Device) -> float:
    return problem.m * problem.n / computed_elements(config, problem, device)


def computed_elements(config: GemmConfig, problem: Problem, device: Device) -> int:
    """Output elements that the chip computes, idle SMs of the last round of tiles included."""
    tiles = count_tiles(problem, config.block_m, config.block_n)
    rounds = math.ceil(tiles / device.num_sms)
    return rounds * device.num_sms * config.block_m * config.block_n


W8A8_LARGE_M_SM90 = W8A8LargeM()
FP8_LARGE_M_SM90 = Fp8LargeM()
FP8_BLOCK_LARGE_M_SM90 = Fp8BlockLargeM()
