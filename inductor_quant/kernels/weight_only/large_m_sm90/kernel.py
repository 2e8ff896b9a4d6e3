"""``weight_only_large_m_sm90``: x [M, K] @ W [K, N] for int4 packed along K, in Gluon with TMA.

Chosen on sm_90 for M from 17 on and the weights of ``weight_only_medium_m_sm90``, if TMA
descriptors can describe x and the packed weights. Up to M = 128 only where it is faster than that
kernel: when nearly every SM gets one long tile, or for M > 64 and N >= WIDE_N. Not for M from 129
to 192 and 257 to 448 (``rules.has_idle_rows``), nor above 256 if the last of several rounds leaves
SMs idle, where ``weight_only_mm_sm90`` divides its tiles.

swap_ab, with wgmma, as there, but warp-specialized and persistent: producer warps load x and packed
weights by TMA, and the consumer warpgroups take turns at dequantizing and multiplying. No warp
waits for the copies of another, and a CTA loads its next tile while it stores one. W is never
written, so there is no M above which dequantizing it once for cuBLAS is faster. K may be split in 2
or 4; the lowering adds the partials.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import MEDIUM_M, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.medium_m_sm90.codegen import (
    MediumMSm90Codegen,
    warp_k_slices,
)
from inductor_quant.kernels.weight_only.medium_m_sm90.kernel import (
    MAX_ACCUMULATORS,
    MIN_M,
    UNROLLED,
    WARPGROUP,
    WeightOnlyMediumMSm90,
)
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.row_boxes import RowBoxes
from inductor_quant.kernels.weight_only.rules import WIDE_N, bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

COMPETING_M = 128  # up to here weight_only_medium_m_sm90 has two CTAs per SM, and is often faster
MAX_ACCUMULATORS_OF_FOUR = 32  # with four warpgroups a thread has 112 registers
TURN = 256  # k per turn of the loop: longer than it takes to load scales and zero points
# Shared memory beside the stages, in bytes: barriers, and what Triton needs to exchange sums.
BARRIERS, EXCHANGE = 1024, 8192
WORD = 4  # bytes
# By largest M: (block_m, block_n, block_k, warps, stages) and measured cycles per K iteration.
# Tiles of fewer rows take nearly as long: 64 rows leave no time to dequantize the next block. With
# block_n = 64 and 8 warps, half of the warps have half of each block of K.
_BLOCKS = {
    32: (((32, 128, 64, 8, 8), 460),),
    64: (((64, 128, 64, 8, 8), 560),),
    COMPETING_M: (((128, 128, 128, 8, 4), 1250), ((128, 128, 64, 8, 8), 670)),
    math.inf: (
        ((256, 128, 64, 8, 4), 1120),
        ((256, 64, 64, 4, 5), 640),
        ((128, 64, 128, 8, 5), 800),
    ),
}
SPLITS = (1, 2, 4)
MIN_K_ITERS = 8  # of a split
PARTIALS_PER_CYCLE = 150  # stored here and added by the lowering's kernel
TILE_CYCLES = 1500  # of a tile, beside its K iterations
# Of more rounds than ROUNDS that are not filled to this share, weight_only_mm_sm90 divides the last
# ones evenly among all CTAs (README.md).
ROUNDS, FILLED = 3, 0.92
# The share of SMs that must have a tile, and the length of its K, to beat medium_m_sm90.
MIN_FILL, MIN_K = 0.8, 3072


def unrolled(problem: Problem, config: GemmConfig) -> int:
    """K iterations in the loop's body: one turn, if possible through all stages."""
    turn = max(UNROLLED, TURN // config.block_k)
    most = config.num_stages if config.num_stages % turn == 0 else turn
    k = problem.k // config.split_k
    return next((n for n in (most, turn) if k % (n * config.block_k) == 0), UNROLLED)


class WeightOnlyLargeMSm90(WeightOnlyMediumMSm90):
    name = "weight_only_large_m_sm90"
    template = "weight_only/large_m_sm90/template"
    grid = staticmethod(split_k.persistent_grid)
    by_tma = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if problem.m < MIN_M:
            return no_kernel(f"M = {problem.m} is below {MIN_M}")
        refused = self.operand_rejection(spec, problem, device)
        if refused is not None:
            return refused
        weight, layout = rules.packed_weight_of(problem)
        pitch = weight.tensors[weight.format.code.source].strides[0]
        is_aligned = pitch is not None and pitch * WORD % rules.ALIGNMENT == 0
        if not (problem.has_weight_descriptors and is_aligned) or layout.strides != (
            (1, 0, 0),
            (0, 1, 0),
        ):
            return no_kernel(
                "x or the packed weights are no matrix with rows at multiples of 16 bytes"
            )
        return None

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig
    ) -> MediumMSm90Codegen:
        codegen = super().codegen(spec, problem, config)
        codegen.row_boxes = RowBoxes.of(problem, config.block_m)
        return codegen

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        return {"UNROLLED": unrolled(problem, config), "NUM_CTAS": device.num_sms}

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        weight, layout = rules.packed_weight_of(problem)
        refused = rules.block_rejection(spec, weight, problem, config, unrolled=UNROLLED)
        if refused is not None:
            return refused
        warpgroups = config.num_warps / WARPGROUP
        k_slices = warp_k_slices(config)  # of a block, each for warps of its own
        is_tile = warpgroups in (1, 2, 4) and config.block_n % 64 == 0 and k_slices in (1, 2)
        is_tile = is_tile and config.block_k % (64 * k_slices) == 0
        if not is_tile or config.block_k not in (64, 128) or config.block_m > 256:
            return bad_blocks(f"{config} is no tile of wgmma")
        if config.num_stages < 3:
            return bad_blocks(f"{config} has too few stages")
        most = (MAX_ACCUMULATORS_OF_FOUR if warpgroups == 4 else MAX_ACCUMULATORS) // k_slices
        shared = config.num_stages * rules.stage_bytes(config, layout) + BARRIERS
        return rules.reject_if_too_many_accumulators(config, most) or tile_rejection(
            config,
            device,
            element_bytes=2,
            shared_bytes=shared + (EXCHANGE if k_slices > 1 else 0),
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        found: list[tuple[float, GemmConfig]] = []
        if rules.has_idle_rows(problem):
            return []
        blocks = next(blocks for most, blocks in _BLOCKS.items() if problem.m <= most)
        for (block_m, block_n, block_k, warps, stages), cycles in blocks:
            for split in SPLITS:
                config = GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
                tiles = split * math.ceil(problem.m / block_m) * problem.n // block_n
                if split > 1 and problem.k < split * block_k * MIN_K_ITERS:
                    continue
                if problem.m <= COMPETING_M and not _is_faster(problem, split, tiles, device):
                    continue
                if self.config_rejection(spec, problem, config, device) is not None:
                    continue
                k_iters = problem.k // (split * block_k)
                partials = split * problem.m * problem.n if split > 1 else 0
                rounds = math.ceil(tiles / device.num_sms)
                cost = rounds * (k_iters * cycles + TILE_CYCLES) + partials / PARTIALS_PER_CYCLE
                found.append((cost, config))
        found.sort(key=lambda item: item[0])
        if found and _are_rounds_uneven(problem, found[0][1], device):
            other = WEIGHT_ONLY_MM_SM90
            is_taken = other.rejection(spec, problem, device) is None
            configs = other.configs(spec, problem, device) if is_taken else []
            if configs and other.scratch(spec, problem, configs[0], device):
                return []
        return split_k.same_split([config for _, config in found])


def _are_rounds_uneven(problem: Problem, config: GemmConfig, device: Device) -> bool:
    tiles = math.ceil(problem.m / config.block_m) * problem.n / config.block_n
    rounds = config.split_k * tiles / device.num_sms
    # Up to MEDIUM_M rows weight_only_medium_m_sm90 is next.
    is_large = problem.m_is_bounded and problem.m > MEDIUM_M
    return is_large and rounds > ROUNDS and rounds / math.ceil(rounds) <= FILLED


def _is_faster(problem: Problem, split: int, tiles: int, device: Device) -> bool:
    """Than ``weight_only_medium_m_sm90``, up to COMPETING_M."""
    is_one_round = MIN_FILL * device.num_sms <= tiles <= device.num_sms
    is_long = problem.k >= MIN_K * split
    return (is_one_round and is_long) or (problem.m > 64 and problem.n >= WIDE_N)


WEIGHT_ONLY_LARGE_M_SM90 = WeightOnlyLargeMSm90()
