"""``experts_direct``: each row of x times the weight of its expert, for few rows each, in Gluon.

The template of ``weight_only_direct``, with ``experts/rows.jinja`` in front: a CTA computes up to
16 rows of one expert times BLOCK_N columns. Chosen for 16-bit x whose rows are aligned and integers
or a table of 16, up to a mean of rows an expert, if ``experts_mm_sm90`` does not take them; of rows
that are not sorted whatever their number.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from inductor_quant.kernels.config import GemmConfig, reject_if_split
from inductor_quant.kernels.experts.rules import ExpertsKernel, groups_of, mean_rows
from inductor_quant.kernels.problem import Device, Problem, Weight
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import (
    are_words_of_columns,
    has_zeros,
    operand_rejection,
    packed_zeros,
    pair_of,
)
from inductor_quant.kernels.weight_only.direct import cost
from inductor_quant.kernels.weight_only.direct.codegen import MAX_WARPS, DirectCodegen
from inductor_quant.kernels.weight_only.direct.kernel import (
    ARCHS,
    FLOAT8,
    WeightOnlyDirect,
    cheapest_of_each,
    has_few_rows,
)
from inductor_quant.kernels.weight_only.direct.operands import ROWS, scales_sums
from inductor_quant.kernels.weight_only.rules import no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

# In the mean of rows an expert (as in spec/row_ranges.py): up to here, by the width of a value.
MAX_MEAN, MAX_MEAN_WIDE = 32, 8
# Up to here in tiles of 8 rows; the second one if those of 16 take longer with so few, or were not
# timed (``_has_slow_16``).
MAX_MEAN_8, MAX_MEAN_8_SLOW_16 = 1, 5
# (columns, k) of a warp's tile, best first: up to 4 bits, and above.
TILES = (
    ((32, 128), (64, 64), (128, 32), (32, 64), (64, 32)),
    ((32, 64), (16, 128), (64, 32), (64, 64), (128, 16), (128, 32)),
)
WARPS = (4, 2, 8)  # best first, if they waste no more than this share of K
MAX_WASTE = 0.1
# Of rows in any order whose CTAs run in so many rounds, what is idle in the last one counts: tiles
# are chosen by their cost.
MAX_ROUNDS = 2
ROWS_APART = cost.FewRows(
    launch=2380,
    split=1875,
    partials=0.85,
    bytes_per_cycle=2660,
    value=0.0078,
    product=0.075,
    wait=272,
    wait_value=6.4,
    warp=53,
    sums=250,
    wide=1.25,
    looked_up=2.3,
)
# Of W that a thread dequantizes at once, where it has many stored zero points: with more it spills.
MAX_VALUES_ZEROS = 64


class ExpertsDirect(ExpertsKernel, WeightOnlyDirect):
    name = "experts_direct"

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        weight = rules.weight_of(problem)
        code = weight.format.code
        is_wide = not 0 < code.width <= 4
        if code.float8 or weight.tensors[code.source].dtype in FLOAT8:
            return no_kernel("experts_mm is faster")
        if mean_rows(problem) > (MAX_MEAN_WIDE if is_wide else MAX_MEAN):
            return no_kernel(f"M = {problem.m}: too many rows an expert")
        if device.arch not in ARCHS:
            return no_kernel(f"never run on sm_{device.arch}")
        return operand_rejection(spec, problem, device)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        tile = dataclasses.replace(problem, m=1)  # there are as many tiles as it takes
        weight = rules.weight_of(problem)
        if problem.is_gated and pair_of(weight, config, in_order=True) is None:
            return rules.bad_blocks(f"{config}: a tile has one column of each pair")
        return reject_if_split(config) or super().config_rejection(spec, tile, config, device)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        found = super().constants(spec, problem, config, device)
        few = self._of_few_rows(spec, problem, config, found["CODEGEN"])
        return found if few is None else found | {"FEW": few}

    def _of_few_rows(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, whole: DirectCodegen
    ) -> DirectCodegen | None:
        """What a CTA does that has no more than half a tile's rows, if a tile of these has its
        sums in the order of ``whole``. Not of a table that is looked up: two loops with its planes
        spill (RULES.md), and were not timed."""
        is_of_16 = config.block_m == ROWS[1] and has_few_rows(problem, config)
        is_sorted = groups_of(problem).is_sorted
        if not (is_of_16 and is_sorted) or _is_looked_up(rules.weight_of(problem)):
            return None
        few = self.codegen(spec, problem, dataclasses.replace(config, block_m=ROWS[0]))
        is_alike = few.mma_rows == whole.mma_rows and few.are_divided == whole.are_divided
        return few if is_alike else None

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        weight = rules.weight_of(problem)
        most = MAX_MEAN_8_SLOW_16 if _has_slow_16(weight) else MAX_MEAN_8
        block_m = ROWS[0] if mean_rows(problem) <= most else ROWS[1]

        def rank(tile: tuple[int, int]) -> tuple[bool, int]:
            is_scaling = scales_sums(spec, weight, GemmConfig(block_m, *tile, 1, 1))
            return not is_scaling, tile[0] * is_scaling  # 8 x 64 spills if rows are not sorted

        found = []
        for block_n, slice_k in sorted(_tiles(weight), key=rank):
            slices = problem.k // slice_k
            for warps in WARPS:
                config = GemmConfig(block_m, block_n, slice_k * warps, warps, 1)
                waste = -slices % warps
                if waste <= MAX_WASTE * slices and not self.config_rejection(
                    spec, problem, config, device
                ):
                    found.append(config)
                    break
        has_few = bool(found) and _rounds(problem, found[0], device) <= MAX_ROUNDS
        if has_few and not scales_sums(spec, weight, found[0]):
            return self._of_few_tiles(spec, problem, device)
        return found

    def _of_few_tiles(
        self, spec: QuantGemmSpec, problem: Problem, device: Device
    ) -> list[GemmConfig]:
        """Least predicted time first: that of one row and of the weights of all beside each
        other."""
        beside = dataclasses.replace(problem, m=1, n=problem.n * problem.m)

        def cost_of(config: GemmConfig) -> float:
            return cost.of_few_rows(beside, config, device, costs=ROWS_APART)

        found = cheapest_of_each(
            beside,
            _tiles(rules.weight_of(problem)),
            cost_of,
            lambda config: self.config_rejection(spec, problem, config, device) is not None,
            max(WARPS),
        )
        return sorted(found, key=cost_of)

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> DirectCodegen:
        found = super().codegen(spec, problem, config)
        # With the zero points x would spill if it were loaded ahead. The rows of a tile are one
        # row, whose few lines are in a cache.
        zeros = packed_zeros(rules.weight_of(problem).format)
        if zeros is not None and not groups_of(problem).is_sorted:
            found.loads_x_early = False
        return found


def _is_looked_up(weight: Weight) -> bool:
    """Whether values are those of a table, and not computed."""
    element = weight.format.element
    return element != weight.format.code and not element.entries


def _has_slow_16(weight: Weight) -> bool:
    """Whether a CTA that has no more than 8 of 16 rows is not as fast as one with a tile of 8, or
    was not timed: it has no loop for them, or zero points are no bits of words."""
    format = weight.format
    return _is_looked_up(weight) or (has_zeros(format) and packed_zeros(format) is None)


def _rounds(problem: Problem, config: GemmConfig, device: Device) -> float:
    """In how many rounds the CTAs of rows in any order run."""
    if groups_of(problem).is_sorted or not problem.m_is_bounded:
        return math.inf
    ctas = problem.m * math.ceil(problem.n / config.block_n)
    return ctas / (device.num_sms * (MAX_WARPS // config.num_warps))


def _tiles(weight: Weight) -> list[tuple[int, int]]:
    """(columns, k) of a warp's tile, best first."""
    format = weight.format
    tiles = list(TILES[0 if 0 < format.code.width <= 4 else 1])
    if format.element.entries:  # computed: with fewer registers more warps run
        tiles.sort(key=lambda tile: tile[0])
    zeros = packed_zeros(format)
    if zeros is None:
        return tiles
    is_along_n = are_words_of_columns(weight)
    has_groups = 0 < format.block(zeros)[0] < tiles[0][1]  # several in a tile
    if is_along_n or has_groups:
        tiles = [(n, k) for n, k in tiles if n * k <= MAX_VALUES_ZEROS * 32]
    if is_along_n:  # whole words
        tiles.sort(key=lambda tile: tile[0] != 64)
    return tiles


EXPERTS_DIRECT = ExpertsDirect()
