"""``experts_mm_sm90``: each row of x times the weight of its expert, for many rows each, in Gluon.

The template of ``weight_only_mm_sm90``, with ``experts/tiles.jinja`` in front: a CTA takes tile
after tile, of up to BLOCK_M rows of one expert times BLOCK_N columns, and finds them by the
offsets, on the device. Chosen on sm_90 for sorted 16-bit rows that are aligned and packed weights
that are a box of a matrix, from a mean of rows an expert on.
"""

from __future__ import annotations

import dataclasses
import math

from inductor_quant.kernels.codegen.digits.order import Order
from inductor_quant.kernels.codegen.digits.tile import LINE
from inductor_quant.kernels.config import GemmConfig, reject_if_split
from inductor_quant.kernels.experts.direct.kernel import EXPERTS_DIRECT
from inductor_quant.kernels.experts.rules import (
    ExpertsKernel,
    expected_tiles,
    groups_of,
    mean_rows,
    reject_if_gathered,
    staying_grid,
)
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import has_zeros, words_in_parts
from inductor_quant.kernels.weight_only.lane_order import lane_order
from inductor_quant.kernels.weight_only.mm_sm90 import cost, loop
from inductor_quant.kernels.weight_only.mm_sm90 import kernel as mm_sm90
from inductor_quant.kernels.weight_only.mm_sm90.products import few_rows
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

# Tiles beside those of ``weight_only_mm_sm90``, and their cycles: rows of packed weights along K
# are longer and read faster (``_takes_long_rows``). RULES.md says what was measured.
BLOCKS: tuple[tuple[cost.Block, cost.Cycles, cost.Cycles | None], ...] = (
    ((32, 128, 128, 4, 6), (880, 1510), None),
    ((32, 128, 128, 4, 4), (910, 1570), None),
)
# If words of two K iterations are a box, and two CTAs have room for the stages.
DEEP_BLOCKS: tuple[tuple[cost.Block, cost.Cycles, cost.Cycles | None], ...] = (
    ((64, 128, 64, 4, 8), (610, 1005), (770, 1290)),
    ((64, 128, 64, 4, 6), (615, 1040), (780, 1320)),
)
# A product of 64 rows and one of 32 (``_takes_tall``).
TALL_BLOCKS: tuple[tuple[cost.Block, cost.Cycles, cost.Cycles | None], ...] = (
    ((96, 128, 64, 4, 6), (780, 1320), None),
    ((96, 128, 64, 4, 4), (790, 1340), None),
)
# Of the time of a tile that one takes whose first rows alone are multiplied; if values are looked
# up in a table.
FEW, FEW_LOOKED_UP = 0.8, 0.88
# Tiles of that kernel whose cycles are others here: those of 128 columns were fitted on products
# of experts, single layers' of the others were measured anew since.
OF_EXPERTS: tuple[tuple[cost.Block, cost.Cycles, cost.Cycles | None], ...] = (
    ((32, 64, 128, 4, 4), (645, 915), (645, 1050)),
    ((64, 64, 64, 4, 8), (390, 650), (415, 710)),
    ((64, 64, 128, 4, 4), (690, 1165), (690, 1320)),
    ((64, 128, 64, 8, 8), (585, 0), (710, 0)),
    ((64, 128, 128, 8, 4), (1120, 0), (1325, 0)),
    ((64, 256, 64, 8, 4), (1160, 0), None),
    ((128, 128, 128, 8, 4), (1370, 0), None),
    ((256, 64, 64, 4, 6), (660, 0), (695, 0)),
    ((256, 128, 64, 8, 4), (1230, 0), (1310, 0)),
)
# Up to here a tile of experts_direct has the rows of most experts; the second one if it computes
# the values of a table, while this kernel looks them up.
MIN_MEAN, MIN_MEAN_COMPUTED = 8, 12
# The choice takes least time in the sum of an even routing and one in which some experts have more
# rows than others (``expected_tiles``).
SPREADS = (0.0, 0.75)
# Times as many cycles, if values have more than 4 bits, of tiles with up to so many rows that read
# parts of lines of memory.
OF_PARTS, MOST_ROWS_OF_PARTS = 1.3, 64
MOSTLY_ONE = 1.3  # tiles of an expert, of evenly routed rows
TALLEST = 256  # rows of a tile, whose threads have no registers left
LEAST_IN_ORDER = 64  # rows of a tile, whose products leave fewer instructions time
MAX_WORDS = 2**31  # of all experts: positions of words are 32-bit


class ExpertsMMSm90(ExpertsKernel, mm_sm90.WeightOnlyMMSm90):
    name = "experts_mm_sm90"
    takes_lists = False
    grid = staticmethod(staying_grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        found = super().rejection(spec, problem, device) or reject_if_gathered(problem)
        if found is not None:
            return found
        if not groups_of(problem).is_sorted:
            return no_kernel("rows are not sorted by expert")
        mean = mean_rows(problem)
        if mean <= MIN_MEAN or (mean <= MIN_MEAN_COMPUTED and _computes(spec, problem, device)):
            return no_kernel(f"M = {problem.m}: few rows an expert")
        if mm_sm90.count_words(rules.weight_of(problem)) >= MAX_WORDS:
            return no_kernel("positions of packed weights need 64 bits")
        return None

    def shares_tiles(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> bool:
        return False  # how many tiles there are is not known here

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        refused = reject_if_split(config) or super().config_rejection(spec, problem, config, device)
        if refused is None and problem.is_gated and not mm_sm90.has_pairs(problem, config):
            return bad_blocks(f"{config}: the columns of a pair are of two threads")
        if refused is None and groups_of(problem).has_bias and config.block_m >= TALLEST:
            return bad_blocks(f"{config}: a gate with a bias spills")
        return refused

    def k_order(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> Order | None:
        return lane_order(rules.weight_of(problem)) if config.block_m >= LEAST_IN_ORDER else None

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """Least predicted time first."""
        offered = [GemmConfig(*block) for block, *_ in cost.BLOCKS]
        long = (GemmConfig(*block) for block, *_ in BLOCKS)
        offered += [config for config in long if _takes_long_rows(problem, config)]
        deep = (GemmConfig(*block) for block, *_ in DEEP_BLOCKS)
        offered += [config for config in deep if _takes_deep(problem, config, device)]
        tall = (GemmConfig(*block) for block, *_ in TALL_BLOCKS)
        offered += [config for config in tall if _takes_tall(problem, config, device)]
        legal = [
            config
            for config in offered
            if not loop.is_crowded(problem, config)
            and self.config_rejection(spec, problem, config, device) is None
        ]
        if not legal:
            return []
        costs = self._costs(spec, problem, legal[0], device)
        each = [_Costs(**vars(costs), spread=spread) for spread in SPREADS]
        return sorted(
            filter(each[0].listed, legal),
            key=lambda config: sum(costs.whole(config) for costs in each),
        )


def _computes(spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
    """Whether ``experts_direct`` computes the values of a table."""
    if EXPERTS_DIRECT.rejection(spec, problem, device) is not None:
        return False
    configs = EXPERTS_DIRECT.configs(spec, problem, device)[:1]
    return any(EXPERTS_DIRECT.codegen(spec, problem, each).computes_table for each in configs)


def _takes_long_rows(problem: Problem, config: GemmConfig) -> bool:
    """Whether rows are along K, a K iteration has one group, and values are from no table: with
    small groups of a table they took a third longer."""
    format = rules.weight_of(problem).format
    is_plain = format.element == format.code and loop.has_one_group(problem, config)
    return is_plain and loop.row_along_k(problem, config) > 0


def _takes_deep(problem: Problem, config: GemmConfig, device: Device) -> bool:
    weight, count = rules.weight_of(problem), loop.loaded_together(problem, config)
    found = loop.boxed(weight, config)
    view, in_parts = words_in_parts(weight, config.block_k)
    if count < 2 or found is None or in_parts:
        return False
    is_box = found[1].is_followed(view.weight.format, config.block_k, count)
    return is_box and loop.ctas_per_sm(problem, config, device) > 1


def _takes_tall(problem: Problem, config: GemmConfig, device: Device) -> bool:
    """Whether values have up to 4 bits, none is looked up, and a K iteration has one group and no
    zero point that is stored: others spill, and so does a gate with a bias."""
    if groups_of(problem).has_bias:
        return False
    format = rules.weight_of(problem).format
    is_plain = format.element == format.code and not has_zeros(format)
    has_few = _is_narrow(problem, config) and loop.has_one_group(problem, config)
    return is_plain and has_few and loop.ctas_per_sm(problem, config, device) > 1


def _is_narrow(problem: Problem, config: GemmConfig) -> bool:
    """Whether values have up to 4 bits."""
    view, _ = words_in_parts(rules.weight_of(problem), config.block_k)
    return view.weight.format.code.total_width <= 4


@dataclasses.dataclass(frozen=True)
class _Costs(cost.Costs):
    spread: float = 0.0  # as in ``expected_tiles``

    def blocks(self) -> tuple[tuple[cost.Block, cost.Cycles, cost.Cycles | None], ...]:
        return (*super().blocks(), *OF_EXPERTS, *BLOCKS, *DEEP_BLOCKS, *TALL_BLOCKS)

    def _cycles(self, config: GemmConfig) -> tuple[float, float]:
        alone, paired = super()._cycles(config)
        row = loop.row_along_k(self.problem, config) * loop.loaded_together(self.problem, config)
        is_part = 0 < row < LINE and config.block_m <= MOST_ROWS_OF_PARTS
        factor = OF_PARTS if is_part and not _is_narrow(self.problem, config) else 1
        return alone * factor, paired * factor

    def _hides(self, config: GemmConfig) -> bool:
        """Whether products hide what a table, or wider values, take: not those of a second tile
        with few rows, which experts hardly have."""
        mean = self.problem.m / groups_of(self.problem).experts
        tiles = sum(expected_tiles(mean, config.block_m))
        return config.block_m >= cost.HIDING_ROWS and tiles <= MOSTLY_ONE

    def tiles(self, config: GemmConfig) -> float:
        """Those with few rows are counted as less than one."""
        experts = groups_of(self.problem).experts
        few = few_rows(config.block_m) if loop.has_halves(self.problem, config) else 0
        large, small = expected_tiles(self.problem.m / experts, config.block_m, few, self.spread)
        format = rules.weight_of(self.problem).format
        share = FEW if format.element == format.code else FEW_LOOKED_UP
        return experts * (large + share * small) * math.ceil(self.problem.n / config.block_n)


EXPERTS_MM_SM90 = ExpertsMMSm90()
