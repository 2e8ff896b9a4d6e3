"""``weight_only_wgmma_sm90``: x [M, K] @ W [K, N] for every weight format, in Gluon with TMA.

Chosen on sm_90 for 16-bit x whose rows are aligned, M from 17 on, if the packed words of a tile are
a box of a matrix (``box``).

swap_ab, with wgmma, warp-specialised and persistent as ``weight_only_large_m_sm90``, but the
statements that read and dequantize W follow from the digits of the format. W goes from shared
memory to the registers of wgmma's first operand and is never written. K may be split; the lowering
adds the partials.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.kernels.codegen.packed_layout import BASES
from inductor_quant.kernels.codegen.tile_digits import TilePlan, tile_digits
from inductor_quant.kernels.codegen.words import as_words
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import format_rejection, n_order, plan_of
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.kernels.weight_only.wgmma_sm90.box import WordBox, word_box
from inductor_quant.kernels.weight_only.wgmma_sm90.codegen import WgmmaSm90Codegen
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

WARPGROUP = 4
MAX_ACCUMULATORS = 128  # per thread
UNROLLED = (4, 2)  # K iterations in the loop's body
BARRIERS = 1024  # bytes of shared memory beside the stages
# By largest M: (block_m, block_n, block_k, warps, stages) and measured cycles per K iteration.
_BLOCKS = {
    32: (((32, 128, 64, 8, 8), 460),),
    64: (((64, 128, 64, 8, 8), 560),),
    128: (((128, 128, 64, 8, 6), 670),),
    math.inf: (((256, 128, 64, 8, 4), 1120), ((256, 64, 64, 4, 4), 640)),
}
SPLITS = (1, 2, 4)
MIN_K_ITERS = 8  # of a split
PARTIALS_PER_CYCLE = 150  # stored here and added by the lowering's kernel
TILE_CYCLES = 1500  # of a tile, beside its K iterations


def unrolled(problem: Problem, config: GemmConfig) -> int:
    """K iterations in the loop's body; 0: K is no multiple."""
    k = problem.k // config.split_k
    return next((n for n in UNROLLED if k % (n * config.block_k) == 0), 0)


class WeightOnlyWgmmaSm90(rules.WeightOnlyKernel):
    name = "weight_only_wgmma_sm90"
    template = "weight_only/wgmma_sm90/template"
    grid = staticmethod(split_k.persistent_grid)
    is_gluon = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in rules.WGMMA_ARCHS:
            return no_kernel(f"written for sm_90, this is sm_{device.arch}")
        refused = rules.rejection(spec, problem, device) or rules.reject_if_unaligned_rows(problem)
        if refused is not None:
            return refused
        if spec.a.dtype not in BASES:
            return no_kernel(f"x of {spec} does not have 16 bits")
        if problem.m <= DECODE_M:
            return no_kernel(f"M = {problem.m} is not above {DECODE_M}")
        if not problem.has_weight_descriptors:
            return no_kernel("x or the packed weights have no TMA descriptor")
        return format_rejection(rules.weight_of(problem))

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig
    ) -> WgmmaSm90Codegen:
        found = _plan(problem, config)
        assert found is not None
        view = as_words(rules.weight_of(problem))
        tile = rules.tile_of(spec, view.weight, config)
        return WgmmaSm90Codegen(tile, view, found[0], n_order(view.weight.format))

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        return {"UNROLLED": unrolled(problem, config), "NUM_CTAS": device.num_sms}

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if not unrolled(problem, config) or problem.k % (config.split_k * config.block_k):
            return bad_blocks(f"{config} does not divide K={problem.k}")
        refused = split_k.reject_if_symbolic(problem, config)
        if refused is not None:
            return refused
        is_tile = config.num_warps in (WARPGROUP, 2 * WARPGROUP) and config.block_m <= 256
        if not is_tile or config.block_n % (16 * config.num_warps) or config.block_k % 64:
            return bad_blocks(f"{config} is no tile of wgmma")
        found = _plan(problem, config)
        if found is None or config.num_stages < 3:
            return bad_blocks(f"{config} does not suit the digits of {problem.weight}")
        words = found[1].rows * found[1].columns
        view = as_words(rules.weight_of(problem)).weight
        packed = words * view.tensors[view.format.code.source].dtype.itemsize
        stage = 2 * config.block_m * config.block_k + packed
        return rules.reject_if_too_many_accumulators(config, MAX_ACCUMULATORS) or tile_rejection(
            config, device, element_bytes=2, shared_bytes=config.num_stages * stage + BARRIERS
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        found: list[tuple[float, GemmConfig]] = []
        blocks = next(blocks for most, blocks in _BLOCKS.items() if problem.m <= most)
        for (block_m, block_n, block_k, warps, stages), cycles in blocks:
            for split in SPLITS:
                config = GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
                if split > 1 and problem.k < split * block_k * MIN_K_ITERS:
                    continue
                if self.config_rejection(spec, problem, config, device) is not None:
                    continue
                tiles = math.ceil(problem.m / block_m) * math.ceil(problem.n / block_n) * split
                k_iters = problem.k // (split * block_k)
                partials = split * problem.m * problem.n if split > 1 else 0
                rounds = math.ceil(tiles / device.num_sms)
                cost = rounds * (k_iters * cycles + TILE_CYCLES) + partials / PARTIALS_PER_CYCLE
                found.append((cost, config))
        found.sort(key=lambda item: item[0])
        return split_k.same_split([config for _, config in found])


def _plan(problem: Problem, config: GemmConfig) -> tuple[TilePlan, WordBox] | None:
    """How a tile is assigned to threads, and the box of its words."""
    weight = rules.weight_of(problem)
    plan = plan_of(weight, config, for_mma=True, natural=True)
    if plan is None:
        return None
    view = as_words(weight).weight
    n = tile_digits(view.format, "n", config.block_n, n_order(view.format)) or ()
    k = tile_digits(view.format, "k", config.block_k) or ()
    box = word_box(view, plan, (*n, *k))
    return (plan, box) if box is not None else None


WEIGHT_ONLY_WGMMA_SM90 = WeightOnlyWgmmaSm90()
