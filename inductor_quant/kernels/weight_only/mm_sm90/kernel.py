"""``weight_only_mm_sm90``: x [M, K] @ W [K, N] for every weight format, in Gluon with TMA.

Chosen on sm_90 for 16-bit x whose rows are aligned and M from 17 on, if the packed words of a tile
are a box of a matrix (``box``), while W written once and a product of the library take longer.

swap_ab, with wgmma, warp-specialised and persistent as ``weight_only_large_m_sm90``, but the
statements that read and dequantize W follow from the digits of the format. W goes from shared
memory to the registers of wgmma's first operand and is never written. K may be split; the lowering
adds the partials.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.kernels.codegen.tile_digits import TilePlan, tile_digits
from inductor_quant.kernels.codegen.words import as_words
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, MEDIUM_M, Device, Problem, Weight
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import (
    n_order,
    operand_rejection,
    plan_of,
    varying,
)
from inductor_quant.kernels.weight_only.mm_sm90.box import WordBox, word_box
from inductor_quant.kernels.weight_only.mm_sm90.codegen import MMSm90Codegen
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

WARPGROUP = 4
MAX_ACCUMULATORS = 128  # per thread
UNROLLED = (4, 2)  # K iterations in the loop's body
BARRIERS = 1024  # bytes of shared memory beside the stages
REGISTERS, THREADS = 65536, 256  # of an SM; of a CTA with one warpgroup of consumers
# (block_m, block_n, block_k, warps, stages); cycles of a K iteration of a CTA alone on its SM, and
# of two that share it (0: they do not), if W is dequantized in 16 bits; the same in fp32. README.md
# says what was measured.
_BLOCKS = (
    ((32, 64, 64, 4, 8), (314, 492), (440, 750)),
    ((32, 64, 128, 4, 4), (578, 824), (760, 1250)),
    ((32, 128, 64, 4, 8), (470, 671), (800, 1350)),
    ((64, 64, 64, 4, 8), (321, 606), (510, 900)),
    ((64, 64, 128, 4, 4), (603, 1119), (760, 1500)),
    ((64, 128, 64, 4, 8), (564, 867), (850, 1500)),
    ((64, 128, 64, 8, 8), (512, 0), (752, 0)),
    ((128, 64, 64, 4, 5), (502, 883), (577, 1108)),
    ((128, 128, 64, 8, 6), (750, 0), (1100, 0)),
    ((256, 64, 64, 4, 4), (1000, 0), (1100, 0)),
    ((256, 128, 64, 8, 4), (1300, 0), (1550, 0)),
)
MAX_VARYING = 4096  # values of a tile if each has a scale of its own
LOOKED_UP = 1.15  # times as many cycles if values come from a table
SPLITS = (1, 2, 4)
MIN_K_ITERS = 8  # of a split
PARTIALS_PER_CYCLE = 150  # stored here and added by the lowering's kernel
TILE_CYCLES, SPLIT_CYCLES = 800, 2500  # of a tile, and of partials, beside what grows with them
# Up to this M other kernels are the alternative. Above, W written once and a library's product:
# bytes and multiply-adds per cycle of the GPU, and cycles of a launch. MARGIN: it must be so much
# slower by this model.
COMPETING_M, MARGIN = MEDIUM_M // 2, 0.93
BYTES_PER_CYCLE, MADS_PER_CYCLE, LAUNCH_CYCLES = 2200, 205_000, 3500


def unrolled(problem: Problem, config: GemmConfig) -> int:
    """K iterations in the loop's body; 0: K is no multiple."""
    k = problem.k // config.split_k
    return next((n for n in UNROLLED if k % (n * config.block_k) == 0), 0)


class WeightOnlyMMSm90(rules.WeightOnlyKernel):
    name = "weight_only_mm_sm90"
    template = "weight_only/mm_sm90/template"
    grid = staticmethod(split_k.persistent_grid)
    is_gluon = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in rules.WGMMA_ARCHS:
            return no_kernel(f"written for sm_90, this is sm_{device.arch}")
        if problem.m <= DECODE_M and problem.m_is_bounded:
            return no_kernel(f"M = {problem.m} is not above {DECODE_M}")
        if not problem.has_weight_descriptors:
            return no_kernel("x or the packed weights have no TMA descriptor")
        refused = operand_rejection(spec, problem, device)
        if refused is not None:
            return refused
        if varying(rules.weight_of(problem).format) and problem.m > COMPETING_M:
            return no_kernel("a scale for each weight of a tile is loaded")
        return None

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> MMSm90Codegen:
        found = boxed(rules.weight_of(problem), config)
        assert found is not None
        view = as_words(rules.weight_of(problem))
        tile = rules.tile_of(spec, view.weight, config)
        return MMSm90Codegen(tile, view, found[0], n_order(view.weight.format))

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        ctas_per_sm = _ctas_per_sm(config)
        return {
            "UNROLLED": unrolled(problem, config),
            "NUM_CTAS": ctas_per_sm * device.num_sms,
            "MAX_REGISTERS": REGISTERS // (ctas_per_sm * THREADS) if ctas_per_sm > 1 else 0,
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if not unrolled(problem, config) or problem.k % (config.split_k * config.block_k):
            return bad_blocks(f"{config} does not divide K={problem.k}")
        refused = split_k.reject_if_unbounded(problem, config)
        if refused is not None:
            return refused
        is_tile = config.num_warps in (WARPGROUP, 2 * WARPGROUP) and config.block_m <= 256
        if not is_tile or config.block_n % (16 * config.num_warps) or config.block_k % 64:
            return bad_blocks(f"{config} is no tile of wgmma")
        found = boxed(rules.weight_of(problem), config)
        if found is None or config.num_stages < 3:
            return bad_blocks(f"{config} does not suit the digits of {problem.weight}")
        words = found[1].rows * found[1].columns
        view = as_words(rules.weight_of(problem)).weight
        packed = words * view.tensors[view.format.code.source].dtype.itemsize
        stage = 2 * config.block_m * config.block_k + packed
        return rules.reject_if_too_many_accumulators(config, MAX_ACCUMULATORS) or tile_rejection(
            config,
            device,
            element_bytes=2,
            shared_bytes=_ctas_per_sm(config) * (config.num_stages * stage + BARRIERS),
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        legal: list[tuple[GemmConfig, list[tuple[int, int]]]] = []
        is_varying = bool(varying(rules.weight_of(problem).format))
        for block, *cycles in _BLOCKS:
            for split in SPLITS:
                config = GemmConfig(*block, split_k=split)
                if split > 1 and problem.k < split * config.block_k * MIN_K_ITERS:
                    continue
                if problem.m <= config.block_m // 2 and config.block_m > _BLOCKS[0][0][0]:
                    continue
                if is_varying and config.block_n * config.block_k > MAX_VARYING:
                    continue
                if self.config_rejection(spec, problem, config, device) is None:
                    legal.append((config, cycles))
        if not legal:
            return []
        kind = 0 if self.codegen(spec, problem, legal[0][0]).is_in_16_bits() else 1
        costs = {config: _cost(problem, config, each[kind], device) for config, each in legal}
        most = MARGIN * _cost_of_library(problem) if problem.m > COMPETING_M else math.inf
        order = sorted(costs, key=costs.__getitem__)
        return split_k.same_split([config for config in order if costs[config] < most])


def _ctas_per_sm(config: GemmConfig) -> int:
    return 2 if config.num_warps == WARPGROUP and config.block_m <= 128 else 1


def _cost(problem: Problem, config: GemmConfig, cycles: tuple[int, int], device: Device) -> float:
    """Cycles of the GEMM."""
    format = rules.weight_of(problem).format
    split = config.split_k
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n) * split
    partials = SPLIT_CYCLES + split * problem.m * problem.n / PARTIALS_PER_CYCLE
    k_iters = problem.k // (split * config.block_k)
    factor = LOOKED_UP if format.element != format.code else 1
    alone, paired = (k_iters * each * factor + TILE_CYCLES for each in cycles)
    pairs, rest = divmod(math.ceil(tiles / device.num_sms), _ctas_per_sm(config))
    loop = pairs * (paired if _ctas_per_sm(config) > 1 else alone) + rest * alone
    return loop + (partials if split > 1 else 0)


def _cost_of_library(problem: Problem) -> float:
    """Cycles of W written once and a product of the library."""
    size = problem.n * problem.k
    packed = (rules.weight_of(problem).format.code.width or 8) / 8
    written = size * (packed + 2) / BYTES_PER_CYCLE + LAUNCH_CYCLES
    return written + max(size * 2 / BYTES_PER_CYCLE, size * problem.m / MADS_PER_CYCLE)


def boxed(weight: Weight, config: GemmConfig) -> tuple[TilePlan, WordBox] | None:
    """How a tile is assigned to threads, and the box of its words."""
    plan = plan_of(weight, config)
    if plan is None:
        return None
    view = as_words(weight).weight
    n = tile_digits(view.format, "n", config.block_n, n_order(view.format)) or ()
    k = tile_digits(view.format, "k", config.block_k) or ()
    box = word_box(view, plan, (*n, *k))
    return (plan, box) if box is not None else None


WEIGHT_ONLY_MM_SM90 = WeightOnlyMMSm90()
