"""``weight_only_medium_m_sm90``: x [M, K] @ W [K, N] for int4 packed along K, in Gluon.

Chosen on sm_90 for M from 17 to 128 and 193 to 256 (between, its tiles would have too many idle
rows), eight int4 values in order along K per int32 (GPTQ), packed weights contiguous along N, x
contiguous along K with rows at multiples of 16 bytes, and scales of x's dtype, if
``weight_only_large_m_sm90`` does not take the GEMM.

swap_ab, with wgmma. In Triton a dequantized tile passes through shared memory on its way to wgmma,
and nothing is multiplied meanwhile. Here all warps copy x and packed weights to shared memory
(cp.async), and dequantize from there straight to the registers of wgmma's first operand. With
IS_ASYNC the next block of K is dequantized while one is multiplied. K is split up to 3 CTAs per SM
(1 above M = 128); the lowering adds the partials.
"""

from __future__ import annotations

from typing import Any, ClassVar

from inductor_quant.kernels.codegen.gluon_columns import supports_ops
from inductor_quant.kernels.codegen.packed_tile import contiguous_axis
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, MEDIUM_M, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.medium_m_sm90.codegen import MediumMSm90Codegen
from inductor_quant.kernels.weight_only.rules import WIDE_N, bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

MIN_M = DECODE_M + 1
UNROLLED = 2  # K iterations in the loop's body
SHARED_K_ITERS = 2  # K iterations that share the scales of one group, at most
WARPGROUP = 4
MAX_ACCUMULATORS = 128  # per thread
# By largest M: (block_m, block_n, block_k, warps, stages) for N >= WIDE_N and for smaller N, best
# guess first.
_BLOCKS = {
    32: (
        ((32, 128, 64, 4, 4), (32, 64, 128, 4, 4), (32, 128, 128, 4, 4)),
        ((32, 64, 128, 4, 4), (32, 64, 64, 4, 4)),
    ),
    64: (
        ((64, 128, 64, 4, 8), (64, 128, 64, 4, 6), (64, 128, 128, 8, 4), (64, 64, 64, 4, 4)),
        ((64, 64, 64, 4, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4)),
    ),
    128: (
        ((128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (128, 64, 128, 4, 4)),
        ((128, 64, 64, 4, 4), (128, 64, 128, 4, 4), (128, 128, 64, 8, 3)),
    ),
    256: (
        ((256, 128, 64, 8, 4), (256, 64, 64, 4, 4), (128, 128, 64, 8, 3)),
        ((256, 128, 64, 8, 4), (256, 64, 64, 4, 4), (128, 64, 64, 4, 4)),
    ),
}
MIN_K_ITERS = 8
MAX_SPLIT = 4


def is_async(config: GemmConfig) -> bool:
    """Whether a block is dequantized while another is multiplied. Two CTAs per SM of two warpgroups
    each overlap by themselves: there it only costs registers and a stage."""
    return config.num_warps == WARPGROUP or config.block_m > 128


class WeightOnlyMediumMSm90(rules.WeightOnlyKernel):
    name = "weight_only_medium_m_sm90"
    template = "weight_only/medium_m_sm90/template"
    is_gluon = True
    by_tma: ClassVar[bool] = False

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if not MIN_M <= problem.m <= MEDIUM_M:
            return no_kernel(f"M = {problem.m} is not {MIN_M} to {MEDIUM_M}")
        return self.operand_rejection(spec, problem, device)

    def operand_rejection(
        self, spec: QuantGemmSpec, problem: Problem, device: Device
    ) -> Rejection | None:
        """Rejects weights and layouts that ``codegen`` has no statements for."""
        if device.arch not in rules.WGMMA_ARCHS:
            return no_kernel(f"written for sm_90, this is sm_{device.arch}")
        refused = rules.arithmetic_rejection(spec, problem, device)
        if refused is not None:
            return refused
        weight, layout = rules.packed_weight_of(problem)
        if not rules.is_int4_along_k(layout) or contiguous_axis(weight, layout) != "n":
            return no_kernel(
                "an int32 does not hold eight values of 4 bits in order along K, or packed weights "
                "are not contiguous along N"
            )
        loop_ops, column_ops = rules.dequant_ops_of(spec, weight)
        if not supports_ops((*loop_ops, *column_ops)):
            return no_kernel("scales or zero points are not plain fields")
        return rules.reject_if_unaligned_rows(problem)

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig
    ) -> MediumMSm90Codegen:
        weight, layout = rules.packed_weight_of(problem)
        shares = rules.group_size_of(spec, weight) % (SHARED_K_ITERS * config.block_k) == 0
        return MediumMSm90Codegen(
            rules.tile_of(spec, weight, config),
            layout,
            shared_iters=SHARED_K_ITERS if shares else 1,
            by_tma=self.by_tma,
        )

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        return {"IS_ASYNC": is_async(config)}

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        weight, layout = rules.packed_weight_of(problem)
        refused = rules.block_rejection(spec, weight, problem, config, unrolled=UNROLLED)
        if refused is not None:
            return refused
        # With four warpgroups a thread has 128 registers: too few for its accumulators.
        is_tile = config.num_warps in (WARPGROUP, 2 * WARPGROUP)
        is_tile = is_tile and config.block_n % (16 * config.num_warps) == 0
        if not is_tile or config.block_k not in (64, 128) or config.block_m > 256:
            return bad_blocks(f"{config} is no tile of wgmma")
        # The first stages are filled without checking against K.
        if not 3 <= config.num_stages <= problem.k // (config.split_k * config.block_k):
            return bad_blocks(f"{config} has too few stages, or more than blocks of K")
        return rules.reject_if_too_many_accumulators(config, MAX_ACCUMULATORS) or tile_rejection(
            config,
            device,
            element_bytes=2,
            shared_bytes=config.num_stages * rules.stage_bytes(config, layout),
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        if rules.has_idle_rows(problem):
            return []
        wide, narrow = next(blocks for most, blocks in _BLOCKS.items() if problem.m <= most)
        found = []
        for block in wide if problem.n >= WIDE_N else narrow:
            config = split_k.with_split_k(
                problem,
                GemmConfig(*block),
                max_ctas=(3 if problem.m <= 128 else 1) * device.num_sms,
                max_split=MAX_SPLIT,
                min_k_iters=MIN_K_ITERS,
            )
            if self.config_rejection(spec, problem, config, device) is None:
                found.append(config)
        return split_k.same_split(found)


WEIGHT_ONLY_MEDIUM_M_SM90 = WeightOnlyMediumMSm90()
