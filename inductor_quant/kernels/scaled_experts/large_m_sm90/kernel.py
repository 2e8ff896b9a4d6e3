"""``scaled_experts_large_m_sm90``, ``scaled_experts_int8_large_m_sm90``: 8-bit rows times the 8-bit
weight of their expert, for many rows an expert on Hopper, in Gluon.

The template of ``w8a8_large_m_sm90`` and its siblings, with ``experts/walk.jinja`` in front: one
warp loads by TMA, two warpgroups multiply 64 rows each of a tile of 128 rows, one CTA an SM takes
tile after tile. TMA reads 128 rows wherever an expert's begin; what follows its last row is
multiplied and not stored. A CTA finds its tiles along the offsets, on the device.

Chosen on sm_90 for sorted rows with a mean of more than MIN_MEAN_ROWS an expert, operands that TMA
can read (a stack is one matrix of E x N columns), a result of 16 bits, and tiles for most SMs.
"""

from __future__ import annotations

from typing import Any

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.experts.rules import (
    NO_ZERO_POINTS,
    TilesOfExperts,
    expected_tiles,
    groups_of,
    mean_rows,
    reject_if_gathered,
    walking_grid,
)
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import unlisted_rejection
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel, is_block_scaled, reject_unless_128
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

# With fewer, half of the tile's 128 rows are another expert's.
MIN_MEAN_ROWS = 64
MIN_FILL = 0.6  # of the SMs, that have a tile


class LargeM(TilesOfExperts, large_m_sm90.WarpSpecialized):
    family = "scaled_experts"

    grid = staticmethod(walking_grid)

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

        def time(config: GemmConfig) -> float:
            rounds = max(1.0, expected_tiles(problem, config) / device.num_sms)
            return (rounds + 0.5) * config.block_n * self._element_cost(spec)[config.block_n]

        return sorted(self._listed(spec), key=time)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        return unlisted_rejection(config, self._listed(spec)) or large_m_sm90.reject_if_it_spills(
            spec, problem, config
        )

    def _filled(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> float:
        best = self.configs(spec, problem, device)[0]
        return expected_tiles(problem, best) / device.num_sms

    def _listed(self, spec: QuantGemmSpec) -> tuple[GemmConfig, ...]:
        return large_m_sm90.BLOCK_CONFIGS if is_block_scaled(spec) else large_m_sm90.CONFIGS

    def _element_cost(self, spec: QuantGemmSpec) -> Any:
        if is_block_scaled(spec):
            return large_m_sm90.BLOCK_ELEMENT_COST
        return large_m_sm90.ELEMENT_COST


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
