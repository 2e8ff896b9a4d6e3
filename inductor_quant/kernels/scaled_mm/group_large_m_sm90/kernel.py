"""Kernels of ``w8a8`` and ``fp8`` for A [M, K] @ B [K, N] with scales of groups along K, for many
rows on Hopper, in Gluon.

out = alpha * a_scale[m] * (sum over groups of b_scale[g, n] * (the group's sum)) + bias

Chosen on sm_90 for groups of a multiple of 128, from MIN_M rows on, with operands that TMA can
read, N a multiple of 8, a result of 16 bits, and tiles that keep enough SMs busy: weights of 8 bits
in groups, and many rows of ``w4a8``, whose int4 weight is written once in the type of A.

One warp loads by TMA, two warpgroups multiply 64 columns each of a tile of 128 columns and 256
rows, transposed. One CTA an SM takes tile after tile.
"""

from __future__ import annotations

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel
from inductor_quant.kernels.scaled_mm.large_m_sm90.kernel import (
    ALIGNED_N,
    BLOCK_K,
    WarpSpecialized,
    computed_elements,
)
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

MIN_M = 256
MIN_FILL = 0.6  # of the SMs' time, in the rounds of tiles


def tile(block_m: int, stages: int) -> GemmConfig:
    # GROUP_M counts tiles of columns, the rows of wgmma.
    return GemmConfig(block_m, 128, BLOCK_K, num_warps=4, num_stages=stages, group_m=16)


CONFIGS = (tile(256, 4), tile(128, 6))  # as many stages as fit shared memory
# By BLOCK_M: time per output element, relative to the taller tile.
ELEMENT_COST = {256: 1.0, 128: 1.15}


class GroupLargeM(WarpSpecialized):
    template = "scaled_mm/group_large_m_sm90/template"
    listed = CONFIGS

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        scale = spec.a.scale
        if not spec.group_size or spec.group_size % BLOCK_K:
            detail = f"no groups of a multiple of {BLOCK_K} along K"
        elif scale is not None and scale.block[1] > 0:
            detail = "scales of A vary along K"
        elif problem.n % ALIGNED_N:
            detail = f"N = {problem.n}: elements would be stored one by one"
        elif problem.members:
            detail = "several weights"
        elif problem.m < MIN_M:
            detail = f"M = {problem.m} is small"
        elif (filled := self._filled(problem, device)) < MIN_FILL:
            detail = f"{filled:.0%} of the chip is used"
        else:
            return None
        return Rejection(RejectionCode.NO_KERNEL, detail)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Least predicted time first."""
        return sorted(CONFIGS, key=lambda config: _time(config, problem, device))

    def _filled(self, problem: Problem, device: Device) -> float:
        best = min(CONFIGS, key=lambda config: _time(config, problem, device))
        return problem.m * problem.n / computed_elements(best, problem, device)


def _time(config: GemmConfig, problem: Problem, device: Device) -> float:
    return computed_elements(config, problem, device) * ELEMENT_COST[config.block_m]


class W8A8GroupLargeM(GroupLargeM, Int8Kernel):
    name = "w8a8_group_large_m_sm90"


class Fp8GroupLargeM(GroupLargeM, Fp8Kernel):
    name = "fp8_group_large_m_sm90"
    has_groups = True


W8A8_GROUP_LARGE_M_SM90 = W8A8GroupLargeM()
FP8_GROUP_LARGE_M_SM90 = Fp8GroupLargeM()
