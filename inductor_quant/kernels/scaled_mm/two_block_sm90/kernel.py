"""The ``fp8_block`` kernel for small M and a short K on Hopper, in Gluon.

out = (sum over blocks of 128 along K of a_scale * b_scale * (A @ B)) + bias, chosen on sm_90 for M
of 64 or 128 and K up to 3072, if its tiles occupy every SM with one to two CTAs and ``split_k``
would not split K.

A GEMM this short takes microseconds, most of them latency of barriers, memory and the matrix unit.
A K step of two scale blocks (256 elements) needs one barrier, and while the partial sum of one
block is scaled and added, the matrix unit multiplies the other. All steps are unrolled.
"""

from __future__ import annotations

from typing import Any

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import (
    alignment_rejection,
    count_tiles,
    unlisted_rejection,
)
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel, reject_unless_128
from inductor_quant.kernels.scaled_mm.mm.kernel import FP8_BLOCK_SPLIT_K
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

ARCH = 90  # the only one with wgmma
BLOCK_M = 64
MAX_M = 128  # the largest that was measured
BLOCK_K = 256  # two scale blocks
MAX_K_STEPS = 12  # all unrolled
CTAS_PER_SM = 2
CONFIGS = tuple(
    GemmConfig(BLOCK_M, block_n, BLOCK_K, num_warps=4, num_stages=3) for block_n in (64, 32)
)


class Fp8BlockTwoBlock(Fp8Kernel):
    name = "fp8_block_two_block_sm90"
    family = "fp8_block"
    template = "scaled_mm/two_block_sm90/template"
    is_gluon = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := (
            super().rejection(spec, problem, device)
            or reject_unless_128(spec)
            or alignment_rejection(problem)
        ):
            return found
        best = self.configs(spec, problem, device)[0]
        tiles = count_tiles(problem, best.block_m, best.block_n)
        if device.arch != ARCH:
            detail = f"written for sm_{ARCH}, this is sm_{device.arch}"
        elif not problem.is_even_k(BLOCK_K):
            detail = f"{BLOCK_K} does not divide K, or K is symbolic"
        elif not problem.m_is_static or problem.m > MAX_M or not _divides(best, problem):
            detail = f"{problem.m} x {problem.n} is not a few whole tiles of {best}"
        elif problem.k > MAX_K_STEPS * BLOCK_K or _splits_k(spec, problem, device):
            detail = f"K = {problem.k} is long"
        elif not device.num_sms < tiles <= CTAS_PER_SM * device.num_sms:
            detail = f"{tiles} tiles are not one to {CTAS_PER_SM} for each of {device.num_sms} SMs"
        else:
            return None
        return Rejection(RejectionCode.NO_KERNEL, detail)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return super().constants(spec, problem, config, device) | {
            "K_SIZE": problem.k,
            "FAST_MATH_EPILOGUE": problem.is_stored_narrow,
        }

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Narrow tiles first if wide ones would leave SMs with one CTA or none."""
        wide, narrow = CONFIGS
        tiles = count_tiles(problem, wide.block_m, wide.block_n)
        return [wide, narrow] if tiles > device.num_sms else [narrow, wide]

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if found := unlisted_rejection(config, CONFIGS):
            return found
        if not _divides(config, problem):
            detail = f"{config} does not divide M = {problem.m}, N = {problem.n}"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        return None


def _divides(config: GemmConfig, problem: Problem) -> bool:
    return problem.m % config.block_m == 0 and problem.n % config.block_n == 0


def _splits_k(spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
    return FP8_BLOCK_SPLIT_K.configs(spec, problem, device)[0].split_k > 1


FP8_BLOCK_TWO_BLOCK_SM90 = Fp8BlockTwoBlock()
