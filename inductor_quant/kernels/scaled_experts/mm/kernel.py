"""``scaled_experts_mm``, ``scaled_experts_int8_mm``: 8-bit rows times the 8-bit weight of their
expert, in Triton.

The templates of ``fp8_mm`` and ``w8a8_mm``, with ``experts/rows.jinja`` in front: a CTA computes up
to BLOCK_M rows of one expert times BLOCK_N columns. GROUP_M of its tiles of rows are neighbours, so
that an expert's rows and columns stay in L2.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.kernels.config import GemmConfig, shortened
from inductor_quant.kernels.experts.rules import NO_ZERO_POINTS, TilesOfExperts, mean_rows
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import WGMMA_ARCHS, ScaledMm
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel, max_block_k, promotes
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel
from inductor_quant.spec.gemm import QuantGemmSpec

# Mean of rows an expert, above which tiles have 128 rows.
TALL_ABOVE = 128
# (largest mean of rows an expert, configurations)
CONFIGS: tuple[tuple[float, tuple[GemmConfig, ...]], ...] = (
    (
        12,
        (
            GemmConfig(16, 128, 128, num_warps=4, num_stages=6),
            GemmConfig(16, 128, 128, num_warps=4, num_stages=4),
            GemmConfig(16, 64, 64, num_warps=4, num_stages=3),
        ),
    ),
    (
        20,
        (
            GemmConfig(32, 128, 128, num_warps=4, num_stages=4),
            GemmConfig(32, 64, 64, num_warps=4, num_stages=3),
        ),
    ),
    (
        TALL_ABOVE,
        (
            GemmConfig(64, 128, 128, num_warps=4, num_stages=4),
            GemmConfig(64, 64, 64, num_warps=4, num_stages=3),
        ),
    ),
    (
        math.inf,
        (
            GemmConfig(128, 128, 128, num_warps=8, num_stages=3),
            GemmConfig(64, 128, 128, num_warps=8, num_stages=3),
            GemmConfig(64, 128, 64, num_warps=8, num_stages=3),
            GemmConfig(64, 64, 64, num_warps=4, num_stages=3),
        ),
    ),
)


class ScaledExperts(TilesOfExperts, ScaledMm):
    family = "scaled_experts"

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        longest = max_block_k(spec) if spec.b.scale and spec.b.scale.block[0] > 0 else 128
        mean = mean_rows(problem)
        if spec.a.dtype != torch.int8 and promotes(spec, device) and device.arch in WGMMA_ARCHS:
            mean = min(mean, TALL_ABOVE)  # two CTAs an SM: one multiplies, the other adds
        entries = next(entries for most, entries in CONFIGS if mean <= most)
        return [shortened(config, longest) for config in entries]


class ScaledExpertsMm(ScaledExperts, Fp8Kernel):
    name = "scaled_experts_mm"
    template = "scaled_mm/mm/fp8"


class ScaledExpertsInt8Mm(ScaledExperts, Int8Kernel):
    name = "scaled_experts_int8_mm"
    template = "scaled_mm/mm/int8"

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return super().constants(spec, problem, config, device) | NO_ZERO_POINTS


SCALED_EXPERTS_MM = ScaledExpertsMm()
SCALED_EXPERTS_INT8_MM = ScaledExpertsInt8Mm()
