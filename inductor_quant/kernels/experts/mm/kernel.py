"""``experts_mm``: each row of x times the weight of its expert, for every weight format, in Triton.

The template of ``weight_only_mm``, with ``experts/rows.jinja`` in front: each CTA computes up to
BLOCK_M rows of one expert times BLOCK_N columns. It finds expert and rows itself, from the offsets
or the ids on the device, so no call waits for the host, and one compilation serves any number of
rows. The grid is that of the worst case; the CTAs without rows end at once.
"""

from __future__ import annotations

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.experts.rules import ExpertsKernel, mean_rows
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.weight_only.mm.kernel import WeightOnlyMM
from inductor_quant.spec.gemm import QuantGemmSpec

# (largest mean of rows an expert, configurations)
CONFIGS: tuple[tuple[float, tuple[GemmConfig, ...]], ...] = (
    (
        16,
        (
            GemmConfig(16, 32, 128, num_warps=4, num_stages=4),
            GemmConfig(16, 64, 64, num_warps=4, num_stages=5),
            GemmConfig(16, 32, 32, num_warps=2, num_stages=4),
        ),
    ),
    (
        float("inf"),
        (
            GemmConfig(64, 64, 64, num_warps=4, num_stages=3),
            GemmConfig(64, 128, 64, num_warps=8, num_stages=3),
            GemmConfig(32, 64, 64, num_warps=4, num_stages=4),
            GemmConfig(32, 32, 32, num_warps=4, num_stages=2),
        ),
    ),
)


class ExpertsMM(ExpertsKernel, WeightOnlyMM):
    name = "experts_mm"

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        entries = next(entries for most, entries in CONFIGS if mean_rows(problem) <= most)
        return self.fitted(entries, spec, problem, device)


EXPERTS_MM = ExpertsMM()
