"""``w8a8_group_large_m_sm90``: int8 A [M, K] @ B [K, N], scales of groups along K, for many rows on
Hopper, in Gluon.

out = alpha * a_scale[m] * (sum over groups of b_scale[g, n] * (the group's int32 sum)) + bias

Chosen on sm_90 for groups of a multiple of 128, from MIN_M rows on, with operands that TMA can
read, N a multiple of 8, a result of 16 bits, and tiles that keep enough SMs busy: int8 weights in
groups, and many rows of ``w4a8``, whose int4 weight is written once as int8.

One warp loads by TMA, two warpgroups multiply 64 columns each of a tile of 128 columns and 256
rows, transposed. One CTA an SM takes tile after tile.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import (
    alignment_rejection,
    count_tiles,
    unlisted_rejection,
)
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel
from inductor_quant.kernels.shared.grids import persistent_grid
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

ARCH = 90  # the only one with wgmma
STEP = 128  # along K, of one product
MIN_M = 256
MIN_FILL = 0.6  # of the SMs' time, in the rounds of tiles
ALIGNED_N = 8  # 16 bytes of a result in 16 bits


def tile(block_m: int, stages: int) -> GemmConfig:
    # GROUP_M counts tiles of columns, the rows of wgmma.
    return GemmConfig(block_m, 128, STEP, num_warps=4, num_stages=stages, group_m=16)


CONFIGS = (tile(256, 4), tile(128, 6))  # as many stages as fit shared memory
# By BLOCK_M: time per output element, relative to the taller tile.
ELEMENT_COST = {256: 1.0, 128: 1.15}


class W8A8GroupLargeM(Int8Kernel):
    name = "w8a8_group_large_m_sm90"
    template = "scaled_mm/group_large_m_sm90/template"
    is_gluon = True
    grid = staticmethod(persistent_grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device) or alignment_rejection(problem):
            return found
        scale = spec.a.scale
        if device.arch != ARCH:
            detail = f"written for sm_{ARCH}, this is sm_{device.arch}"
        elif not spec.group_size or spec.group_size % STEP:
            detail = f"no groups of a multiple of {STEP} along K"
        elif scale is not None and scale.block[1] > 0:
            detail = "scales of A vary along K"
        elif not problem.k_is_static:
            detail = "K is symbolic"
        elif not problem.is_stored_narrow:
            detail = "an fp32 result takes twice as long to store"
        elif problem.n % ALIGNED_N:
            detail = f"N = {problem.n}: elements would be stored one by one"
        elif problem.members:
            detail = "several weights"
        elif problem.m < MIN_M:
            detail = f"M = {problem.m} is small"
        elif self._filled(problem, device) < MIN_FILL:
            detail = f"{self._filled(problem, device):.0%} of the chip is used"
        else:
            return None
        return Rejection(RejectionCode.NO_KERNEL, detail)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return super().constants(spec, problem, config, device) | {
            "STAGES": config.num_stages,
            "NUM_CTAS": device.num_sms,
            "K_BLOCKS": math.ceil(problem.k / STEP),
            "FAST_MATH_EPILOGUE": problem.is_stored_narrow,
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        return unlisted_rejection(config, CONFIGS)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Least predicted time first."""
        return sorted(CONFIGS, key=lambda config: _time(config, problem, device))

    def _filled(self, problem: Problem, device: Device) -> float:
        best = min(CONFIGS, key=lambda config: _time(config, problem, device))
        return problem.m * problem.n / _computed(best, problem, device)


def _time(config: GemmConfig, problem: Problem, device: Device) -> float:
    return _computed(config, problem, device) * ELEMENT_COST[config.block_m]


def _computed(config: GemmConfig, problem: Problem, device: Device) -> int:
    """Output elements that the chip computes, idle SMs of the last round of tiles included."""
    tiles = count_tiles(problem, config.block_m, config.block_n)
    rounds = math.ceil(tiles / device.num_sms)
    return rounds * device.num_sms * config.block_m * config.block_n


W8A8_GROUP_LARGE_M_SM90 = W8A8GroupLargeM()
