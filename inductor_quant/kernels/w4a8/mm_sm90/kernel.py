"""``w4a8_mm_sm90``: int8 or e4m3 A [M, K] @ int4 W [K, N] in Gluon with TMA.

Chosen on sm_90 for A whose rows are aligned and M from 17 to 1024 (with groups from 33 to 1536, and
to any where K is below 4096; of a weight that is scaled to int8 to 256; for A in e4m3 from 33 to
256), if ``w4a8_direct`` does not take it and the packed words of a tile are a box of a matrix.

``weight_only_mm_sm90`` with operands of 8 bits: W goes from shared memory to the registers of the
first operand of wgmma, four nibbles unpacked at once, while the product before runs. With groups
along K, and of e4m3, that is then scaled and added in fp32, before the next one starts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import DECODE_M, MEDIUM_M, SMALL_M, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.kernels.w4a8.mm_sm90.codegen import W4A8MMSm90Codegen
from inductor_quant.kernels.weight_only.digit_tiles import n_order
from inductor_quant.kernels.weight_only.mm_sm90.kernel import (
    SIGNAL,
    constants_of,
    grid,
    tile_misfit,
)
from inductor_quant.kernels.weight_only.mm_sm90.loop import (
    BARRIERS,
    UNROLLED,
    WARPGROUP,
    boxed,
    stage_bytes,
    turns_of,
)
from inductor_quant.kernels.weight_only.row_boxes import RowBoxes
from inductor_quant.kernels.weight_only.rules import WGMMA_ARCHS, bad_blocks, no_kernel
from inductor_quant.ops.w4a8 import INT8
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

Block = tuple[int, int, int, int, int]
# (block_m, block_n, block_k, warps, stages); cycles of a K iteration of a CTA alone on its SM, and
# of two that share it (0: they do not); the same with groups. README.md says what was measured.
_BLOCKS: tuple[tuple[Block, tuple[int, int], tuple[int, int]], ...] = (
    ((64, 64, 128, 4, 6), (520, 680), (545, 965)),
    ((128, 64, 128, 4, 4), (650, 880), (695, 1130)),
    ((128, 128, 128, 8, 5), (860, 0), (1100, 0)),
)
SPLITS = (1, 2, 4)
MIN_K_ITERS = 8  # of a split
# Of tiles that CTAs share, and by how much this must be faster by the model.
SHARED_CYCLES, MARGIN = 9000, 0.9
TILE_CYCLES, SPLIT_CYCLES = 800, 4200  # of a tile, and of partials, beside what grows with them
PARTIALS_PER_CYCLE, PARTIALS_OF_PEERS_PER_CYCLE = 150, 15  # of all CTAs; of one
HALF_AN_SM = 113 << 10  # bytes of stages
PAIRED = 128  # accumulators of a thread up to which two CTAs share an SM's registers
MAX_BLOCK_M = 128  # wgmma of int8 in Triton 3.6 takes no more
# Beyond MAX_M writing the int8 weight once is faster; with groups no kernel takes one. Beyond
# SCALED_M it is faster already if making an int8 takes more instructions, and for e4m3 a kernel of
# weight_only is.
MAX_M, SCALED_M = 1024, MEDIUM_M
# Two CTAs that share an SM take so many times as long for other M than multiples of 256, as most of
# a range are.
UNEVEN, EVEN_M = 1.4, 256


class W4A8MMSm90(rules.W4A8Kernel):
    name = "w4a8_mm_sm90"
    template = "w4a8/mm_sm90/template"
    grid = staticmethod(grid)
    is_gluon = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in WGMMA_ARCHS:
            return no_kernel(f"written for sm_90, this is sm_{device.arch}")
        least = SMALL_M + 1 if rules.is_promoted(spec) else DECODE_M + 1
        most = problem.m if spec.group_size else MAX_M
        if spec.a.dtype != INT8 or (problem.weight and problem.weight.format.to_int8):
            most = SCALED_M
        if detail := problem.rows_outside(least, most):
            return no_kernel(detail)
        if not problem.has_weight_descriptors:
            return no_kernel("A or the packed weights have no TMA descriptor")
        return rules.quad_rejection(spec, problem, device)

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig
    ) -> W4A8MMSm90Codegen:
        weight = rules.weight_of(problem)
        plan = rules.quad_plan(weight, config)
        assert plan is not None
        view = as_words(weight)
        tile = rules.tile_of(spec, view.weight, config)
        codegen = W4A8MMSm90Codegen(tile, view, plan, n_order(view.weight.format))
        codegen.load_in(RowBoxes.of(problem, config.block_m))
        return codegen

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        shared = _ctas_per_sm(spec, config), _unrolls(spec, config)
        own = constants_of(problem, config, device, *shared)
        shares = self.scratch(spec, problem, config, device) > 0
        own |= {"SHARES_TILES": shares, "COPIED": 0, "CONSUMERS": 1}
        return super().constants(spec, problem, config, device) | own

    def scratch(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> int:
        costs = _Costs(spec, problem, device)
        if not costs.listed(config) or costs.shared(config) >= costs.whole(config):
            return 0
        ctas = _ctas_per_sm(spec, config) * device.num_sms
        return ctas * (config.block_m * config.block_n + config.num_warps * SIGNAL // 4)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if rules.has_inexact_partials(spec, problem, config):
            return bad_blocks(f"{config}: fp32 does not hold the integer sums of its parts")
        if config.block_m > MAX_BLOCK_M:
            return bad_blocks(f"{config}: more than {MAX_BLOCK_M} rows")
        weight = rules.weight_of(problem)
        plan = rules.quad_plan(weight, config)
        found = boxed(weight, config, plan) if plan is not None else None
        of_stage = stage_bytes(weight, config, found[1], x_bytes=1) if found else 0
        return tile_misfit(
            *(problem, config, device, found),
            memory=_ctas_per_sm(spec, config) * (config.num_stages * of_stage + BARRIERS),
            sums=_sums(spec),
            offered=_unrolls(spec, config),
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        costs = _Costs(spec, problem, device)
        cost: dict[GemmConfig, float] = {}
        for block, split in itertools.product((block for block, *_ in _BLOCKS), SPLITS):
            config = GemmConfig(*block, split_k=split)
            if not costs.listed(config) or (split > 1 and not costs.may_split(config)):
                continue
            if problem.m <= config.block_m // 2 and config.block_m > _BLOCKS[0][0][0]:
                continue
            if self.config_rejection(spec, problem, config, device) is None:
                cost[config] = min(costs.whole(config), costs.shared(config))
        return split_k.same_split(sorted(cost, key=cost.__getitem__))


def _sums(spec: QuantGemmSpec) -> int:
    """Accumulators for each output."""
    return 2 if rules.is_promoted(spec) else 1


def _accumulators(spec: QuantGemmSpec, config: GemmConfig) -> int:
    """Of a thread."""
    return _sums(spec) * config.block_m * config.block_n // (32 * config.num_warps)


def _ctas_per_sm(spec: QuantGemmSpec, config: GemmConfig) -> int:
    """Two if registers and shared memory allow."""
    stage = config.block_k * (config.block_m + config.block_n // 2)
    is_small = _accumulators(spec, config) <= PAIRED and stage * config.num_stages <= HALF_AN_SM
    return 2 if config.num_warps == WARPGROUP and is_small else 1


def _unrolls(spec: QuantGemmSpec, config: GemmConfig) -> tuple[int, ...]:
    """K iterations in the loop's body. The scales of each take registers, if sums are promoted."""
    is_full = _accumulators(spec, config) > PAIRED // 2
    return UNROLLED[-1:] if rules.is_promoted(spec) and is_full else UNROLLED


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Cycles of the GEMM."""

    spec: QuantGemmSpec
    problem: Problem
    device: Device

    def listed(self, config: GemmConfig) -> tuple[float, ...]:
        """Those of ``_BLOCKS``; (): such a tile was not timed."""
        found = {GemmConfig(*block): each[rules.is_promoted(self.spec)] for block, *each in _BLOCKS}
        alone, paired = found.get(dataclasses.replace(config, split_k=1)) or (0, 0)
        m, is_static = self.problem.m, self.problem.m_is_static
        is_uneven = m > config.block_m and (m % EVEN_M or not is_static)
        return (alone, paired * (UNEVEN if is_uneven else 1)) if alone else ()

    def _tiles(self, config: GemmConfig) -> int:
        rows = math.ceil(self.problem.m / config.block_m)
        return rows * math.ceil(self.problem.n / config.block_n) * config.split_k

    def may_split(self, config: GemmConfig) -> bool:
        """Whether SMs without a tile get one, and K iterations enough."""
        k_iters = self.problem.k // (config.split_k * config.block_k)
        return k_iters >= MIN_K_ITERS and self._tiles(config) <= self.device.num_sms

    def whole(self, config: GemmConfig) -> float:
        """If a CTA computes whole tiles, or slices of K."""
        split, ctas = config.split_k, _ctas_per_sm(self.spec, config)
        turn, turns = turns_of(self.problem, config, _unrolls(self.spec, config))
        k_iters = turn * math.ceil(turns / split)
        alone, paired = (k_iters * each + TILE_CYCLES for each in self.listed(config))
        pairs, rest = divmod(math.ceil(self._tiles(config) / self.device.num_sms), ctas)
        loop = pairs * (paired if ctas > 1 else alone) + rest * alone
        partials = SPLIT_CYCLES + split * self.problem.m * self.problem.n / PARTIALS_PER_CYCLE
        return loop + (partials if split > 1 else 0)

    def shared(self, config: GemmConfig) -> float:
        """If all CTAs have the same number of K iterations, of tiles that they share."""
        most = _ctas_per_sm(self.spec, config)
        ctas = most * self.device.num_sms
        turn, of_a_tile = turns_of(self.problem, config, _unrolls(self.spec, config))
        turns = self._tiles(config) * of_a_tile
        if config.split_k > 1 or turns < 2 * ctas:
            return math.inf
        loop = turn * math.ceil(turns / ctas) * self.listed(config)[most - 1]
        peers = max(0.0, ctas / self._tiles(config) - 1)  # whose sums one CTA adds, one by one
        added = peers * config.block_m * config.block_n / PARTIALS_OF_PEERS_PER_CYCLE
        return (loop + added + TILE_CYCLES + SHARED_CYCLES) / MARGIN


W4A8_MM_SM90 = W4A8MMSm90()
