"""Rules of the ``w8a8`` kernels: int8 x int8 with exact int32 sums; scales and bias at the end."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.kernels.config import GemmConfig, reject_if_split, tile_rejection
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import ScaledMm
from inductor_quant.kernels.shared import horizontal
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

MIN_ARCH = 80
MIN_GROUP = 32  # elements along K of one matrix instruction
# Accumulators a thread up to which registers are left for scales, zero points and bias, so that
# their latency overlaps with the main loop.
MAX_ACCUMULATORS_EARLY_LOADS = 32


class Int8Kernel(ScaledMm):
    family = "w8a8"
    dtypes = (torch.int8,)
    mma_type = "int8"
    min_arch = MIN_ARCH

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        if spec.group_size % MIN_GROUP:
            detail = f"{spec}: groups must be multiples of {MIN_GROUP} along K"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        return horizontal.reject_if_no_gain(problem)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        accumulators = config.block_m * config.block_n // (32 * config.num_warps)
        return super().constants(spec, problem, config, device) | {
            "HAS_A_ZERO_POINT": spec.a.zero in ("int", "float"),
            "HAS_B_ZERO_POINT": spec.b.zero in ("int", "float"),
            "SUM_B": problem.needs_spare_row,
            "LOADS_EARLY": accumulators <= MAX_ACCUMULATORS_EARLY_LOADS,
            "IS_INTEGER": True,
            "SWAP_AB": False,
            "BLOCK_SCALED": False,
            "PROMOTE": 0,
            **horizontal.constants(problem, config, shared=("A", "A_SCALE")),
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if problem.needs_spare_row and config.block_m <= problem.m:
            detail = f"{config} has no row beyond M = {problem.m}"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        group = spec.group_size
        if group % config.block_k:
            detail = f"{config}: BLOCK_K must divide the group size {group}"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        return (
            reject_if_split(config)
            or horizontal.config_rejection(problem, config)
            or tile_rejection(config, device, element_bytes=1, sums=2 if group else 1)
        )


def reject_if_only_mm(spec: QuantGemmSpec, problem: Problem) -> Rejection | None:
    """``w8a8_mm`` alone scales groups along K, and sums B in a spare row of its tile."""
    if problem.needs_spare_row:
        return Rejection(RejectionCode.NO_KERNEL, "no row of the tile is spare for the sums of B")
    if spec.group_size:
        return Rejection(RejectionCode.NO_KERNEL, "scales vary along K")
    return None
