"""``weight_only_small_m``: x [M, K] @ W [K, N] for packed weights, in Triton.

Chosen for 16-bit x, M <= 32 (any M up to there, also symbolic) and 1 to 8-bit values packed along K
or N, from sm_80 on, if the Gluon kernels do not take the GEMM.

swap_ab: W^T is the first operand of the matrix instruction, so that N fills its M and a tile may
have 8 rows of x. Each thread unpacks its packed weights in registers into the order that the
instruction wants; x, which is small, is permuted to match. Ops that are constant within a
quantization group are applied to the group's sum. K is split until there are 8 CTAs per SM (4 above
M = 16); the lowering adds the partials.
"""

from __future__ import annotations

import dataclasses

from inductor_quant.kernels.codegen.packed_tile import contiguous_axis, tile_order
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, SMALL_M, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.rules import WIDE_N, bad_blocks, no_kernel
from inductor_quant.kernels.weight_only.small_m.codegen import SmallMCodegen
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

MIN_BLOCK_M = 8  # the N of one matrix instruction
# Per thread: with more, nothing is left for the unpacked weights.
MAX_ACCUMULATORS = 64
# Values of W that a thread unpacks at once; 256 spill there (Triton 3.7), elsewhere they do not.
BLACKWELL, MAX_VALUES_BLACKWELL = 100, 128
# By the axis of packing and block_m: (block_n, warps, stages), best guess first. A thread reads two
# packed words along N at once, so one warp is enough there.
_BLOCKS: dict[str, dict[int, tuple[tuple[int, int, int], ...]]] = {
    "k": {
        8: ((128, 2, 3), (256, 2, 3), (64, 1, 3), (128, 1, 3), (256, 4, 3), (64, 2, 3)),
        16: ((128, 2, 3), (256, 2, 3), (64, 1, 3), (128, 1, 3), (64, 2, 3)),
        32: ((128, 2, 3), (64, 2, 3), (32, 1, 3)),
    },
    "n": {
        8: ((128, 1, 3), (256, 2, 3), (256, 4, 3), (256, 1, 3), (64, 1, 3)),
        16: ((128, 1, 3), (256, 2, 3), (128, 2, 3), (64, 1, 3)),
        32: ((128, 2, 3), (64, 1, 3)),
    },
}
# At block_m = 16 and large N the largest tile comes first and K is split in two: more splits make
# the GEMM faster, but cost more to add up than they save.
WIDE_BLOCK = (256, 2, 3)
MAX_SPLIT, MAX_SPLIT_WIDE = 8, 2
MIN_K_ITERS = 4


class WeightOnlySmallM(rules.WeightOnlyKernel):
    name = "weight_only_small_m"
    template = "weight_only/small_m/template"
    is_horizontal = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if problem.m > SMALL_M:
            return no_kernel(f"M = {problem.m} is above {SMALL_M}")
        return rules.packed_rejection(spec, problem, device)

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> SmallMCodegen:
        weight, layout = rules.packed_weight_of(problem)
        return SmallMCodegen(rules.tile_of(spec, weight, config), layout)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        weight, layout = rules.packed_weight_of(problem)
        order = tile_order(
            layout,
            block_k=config.block_k,
            block_n=config.block_n,
            warps=config.num_warps,
            contiguous=contiguous_axis(weight, layout),
        )
        if order is None or config.block_m < MIN_BLOCK_M:
            return bad_blocks(f"{config} is too small to give each thread packed weights")
        refused = (
            rules.block_rejection(spec, weight, problem, config)
            or rules.reject_if_too_many_accumulators(config, MAX_ACCUMULATORS)
            or rules.horizontal_rejection(problem, config)
        )
        if refused is None and device.arch >= BLACKWELL:
            refused = rules.reject_if_too_many_unpacked(config, MAX_VALUES_BLACKWELL)
        if refused is not None:
            return refused
        stage = rules.stage_bytes(config, layout) + 8 * config.block_n  # scales and zero points
        # swap_ab: a tile may have 8 rows of x.
        checked = dataclasses.replace(config, block_m=max(16, config.block_m))
        shared_bytes = max(1, config.num_stages - 1) * stage
        return tile_rejection(checked, device, element_bytes=2, shared_bytes=shared_bytes)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        weight, layout = rules.packed_weight_of(problem)
        blocks = _BLOCKS[layout.axis]
        # A symbolic M may be large in other calls: not the smallest tile.
        m = problem.m if problem.m_is_bounded else max(problem.m, DECODE_M)
        block_m = next(rows for rows in blocks if m <= rows)
        group = rules.group_size_of(spec, weight)
        listed = list(blocks[block_m])
        is_wide = layout.axis == "k" and block_m == 16 and problem.n >= WIDE_N
        if is_wide:
            listed.sort(key=lambda block: block != WIDE_BLOCK)
        found = []
        for block_n, warps, stages in listed:
            for block_k in (128, 64, 32):
                config = split_k.with_split_k(
                    problem,
                    GemmConfig(block_m, block_n, block_k, warps, stages),
                    max_ctas=(8 if problem.m <= DECODE_M else 4) * device.num_sms,
                    max_split=MAX_SPLIT_WIDE if is_wide else MAX_SPLIT,
                    min_k_iters=MIN_K_ITERS,
                )
                if block_k <= group and not self.config_rejection(spec, problem, config, device):
                    found.append(config)
                    break
        return split_k.same_split(found)


WEIGHT_ONLY_SMALL_M = WeightOnlySmallM()
