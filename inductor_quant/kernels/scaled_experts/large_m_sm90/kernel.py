"""``scaled_experts_large_m_sm90``, ``scaled_experts_int8_large_m_sm90``: 8-bit rows times the 8-bit
weight of their expert, for many rows an expert on Hopper, in Gluon.

The template of ``w8a8_large_m_sm90`` and its siblings, with ``experts/tiles.jinja`` in front: one
warp loads by TMA, two warpgroups multiply 64 rows each of a tile of 128 rows, one CTA an SM takes
tile after tile. Tiles of 192 rows have three warpgroups. TMA reads 128 rows wherever an expert's
begin; what follows its last row is multiplied and not stored. A CTA finds its tiles by the
offsets, on the device.

Chosen on sm_90 for sorted rows with a mean of more than MIN_MEAN_ROWS an expert, operands that TMA
can read (a stack is one matrix of E x N columns), a result of 16 bits, and tiles for most SMs.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.experts.rules import (
    NO_ZERO_POINTS,
    TilesOfExperts,
    expected_tiles,
    groups_of,
    mean_rows,
    reject_if_gathered,
    staying_grid,
)
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import unlisted_rejection
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel, is_block_scaled, reject_unless_128
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

# With fewer, most experts' rows are one tile of 64 rows of ``scaled_experts_mm``.
MIN_MEAN_ROWS = 48
MIN_FILL = 0.6  # of the SMs, that have a tile
# By three warpgroups, for experts with a few rows more than 128, for which a second tile of 128
# rows reads the weight again. Its time, of that of 128 x 128.
TALL, TALL_COST = GemmConfig(192, 128, 128, num_warps=4, num_stages=5, group_m=8), 1.1
# By BLOCK_N, as ``large_m_sm90`` has them: that CTAs run out of tiles together weighs more here.
ELEMENT_COST = {**large_m_sm90.ELEMENT_COST, 192: 1.05}
# For scales of blocks and more rows than TALL is for.
BLOCK_ELEMENT_COST = {256: 1.0, 192: 1.05, 128: 1.04}
# Whose tiles fit in shared memory beside the stages (``memory_of_experts``).
MOST_EXPERTS, MOST_EXPERTS_TALL = 1024, 256


class LargeM(TilesOfExperts, large_m_sm90.WarpSpecialized):
    family = "scaled_experts"

    grid = staticmethod(staying_grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        found = super().rejection(spec, problem, device) or reject_if_gathered(problem)
        if found is not None:
            return found
        if is_block_scaled(spec) and (found := reject_unless_128(spec)):
            return found
        if not groups_of(problem).is_sorted:
            detail = "rows are not sorted by expert"
        elif (mean := mean_rows(problem)) <= MIN_MEAN_ROWS:
            detail = f"{mean:.0f} rows an expert are few"
        elif (filled := self._filled(spec, problem, device)) < MIN_FILL:
            detail = f"{filled:.0%} of the SMs have a tile"
        else:
            return None
        return Rejection(RejectionCode.NO_KERNEL, detail)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Least predicted time first: of the tiles of an SM, and half of one, because not all have
        as many."""

        is_tall = mean_rows(problem) <= TALL.block_m
        has_many = is_block_scaled(spec) and not is_tall
        element_cost = BLOCK_ELEMENT_COST if has_many else ELEMENT_COST

        def time(config: GemmConfig) -> float:
            rounds = max(1.0, random_tiles(problem, config) / device.num_sms)
            width = config.block_n
            cost = TALL_COST if config == TALL else width / 128 * element_cost[width]
            return (rounds + 0.5) * cost

        offered = (c for c in self._listed(spec) if c != TALL or is_tall)
        return sorted((c for c in offered if not _is_crowded(problem, c)), key=time)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if _is_crowded(problem, config):
            detail = f"{config}: no room for where the tiles of so many experts end"
            return Rejection(RejectionCode.SHARED_MEMORY, detail)
        return unlisted_rejection(config, self._listed(spec)) or large_m_sm90.reject_if_it_spills(
            spec, problem, config
        )

    def _filled(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> float:
        configs = self.configs(spec, problem, device)
        return random_tiles(problem, configs[0]) / device.num_sms if configs else 0.0

    def _listed(self, spec: QuantGemmSpec) -> tuple[GemmConfig, ...]:
        is_blocked = is_block_scaled(spec)
        return (*(large_m_sm90.BLOCK_CONFIGS if is_blocked else large_m_sm90.CONFIGS), TALL)


def _is_crowded(problem: Problem, config: GemmConfig) -> bool:
    most = MOST_EXPERTS_TALL if config == TALL else MOST_EXPERTS
    return groups_of(problem).experts > most


def random_tiles(problem: Problem, config: GemmConfig) -> float:
    """Tiles in the mean of a random routing."""
    experts = groups_of(problem).experts
    large, small = expected_tiles(problem.m / experts, config.block_m)
    return experts * (large + small) * math.ceil(problem.n / config.block_n)


class ScaledExpertsLargeM(LargeM, Fp8Kernel):
    name = "scaled_experts_large_m_sm90"


class ScaledExpertsInt8LargeM(LargeM, Int8Kernel):
    name = "scaled_experts_int8_large_m_sm90"

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return super().constants(spec, problem, config, device) | NO_ZERO_POINTS


SCALED_EXPERTS_LARGE_M_SM90 = ScaledExpertsLargeM()
SCALED_EXPERTS_INT8_LARGE_M_SM90 = ScaledExpertsInt8LargeM()
