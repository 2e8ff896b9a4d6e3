"""``weight_only_medium_m``: x [M, K] @ W [K, N] for packed weights, in Triton.

Chosen for M <= 128, 16-bit x, scales of x's dtype and small integers as zero points, if
``weight_only_mm_sm90`` does not take the GEMM and M is too large for the kernels before it;
from sm_80 on.

A tile of W is dequantized in packed 16-bit arithmetic: ``q - zero_point`` is a small integer, exact
in 16 bits, and its product with the scale is rounded once, as in fp32. The tile passes through
shared memory to become the first operand of the matrix instruction (swap_ab); x is the second and
is read from shared memory in its natural order. K is split while there are fewer than 2 CTAs per
SM; the lowering adds the partials.
"""

from __future__ import annotations

from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.medium_m.codegen import MediumMCodegen
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

# Dequantized elements of W that a thread holds at once.
MAX_TILE_REGISTERS = 128
# Above this M it is faster to dequantize W once. Nor may a tile have more rows: results of 256 rows
# were wrong on an H200 (Triton 3.6).
MAX_M = 128
# By largest M: (block_m, block_n, block_k, warps), best guess first.
_BLOCKS = {
    64: ((64, 128, 128, 8), (64, 64, 128, 4), (64, 128, 128, 4), (64, 64, 64, 4)),
    MAX_M: ((128, 64, 128, 4), (128, 128, 64, 8), (128, 128, 128, 8), (64, 64, 128, 4)),
}
STAGES = 3
MIN_K_ITERS = 4
MAX_SPLIT = 8


class WeightOnlyMediumM(rules.WeightOnlyKernel):
    name = "weight_only_medium_m"
    template = "weight_only/medium_m/template"

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        refused = rules.arithmetic_rejection(spec, problem, device)
        if refused is not None:
            return refused
        if problem.m > MAX_M:
            return no_kernel(f"M = {problem.m} is above {MAX_M}: dequantize W once")
        return None

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> MediumMCodegen:
        weight, layout = rules.packed_weight_of(problem)
        return MediumMCodegen(rules.tile_of(spec, weight, config), layout)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        weight, layout = rules.packed_weight_of(problem)
        length = config.block_k if layout.axis == "k" else config.block_n
        if config.block_m > MAX_M:
            return bad_blocks(f"{config} has more than {MAX_M} rows")
        if length < 2 * layout.count:
            return bad_blocks(f"{config} is shorter than two packed words")
        stage = rules.stage_bytes(config, layout) + 8 * config.block_n  # scales and zero points
        exchanged = config.block_n * config.block_k * 2  # the dequantized tile, between threads
        return (
            rules.block_rejection(spec, weight, problem, config)
            or rules.reject_if_too_many_unpacked(config, MAX_TILE_REGISTERS)
            or tile_rejection(
                config,
                device,
                element_bytes=2,
                shared_bytes=config.num_stages * stage + exchanged,
            )
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        found = []
        for block in next(blocks for most, blocks in _BLOCKS.items() if problem.m <= most):
            config = split_k.with_split_k(
                problem,
                GemmConfig(*block, num_stages=STAGES),
                max_ctas=2 * device.num_sms - 1,  # at 2 per SM they wait for each other
                max_split=MAX_SPLIT,
                min_k_iters=MIN_K_ITERS,
            )
            if self.config_rejection(spec, problem, config, device) is None:
                found.append(config)
        return split_k.same_split(found)


WEIGHT_ONLY_MEDIUM_M = WeightOnlyMediumM()
