"""What a tile of ``weight_only_mm_sm90`` costs."""

from __future__ import annotations

import dataclasses
import math

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import MEDIUM_M, Device, Problem, Weight
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import (
    are_words_of_columns,
    columns_in_a_row,
    has_lists,
    loads_scales,
    packed_zeros,
)
from inductor_quant.kernels.weight_only.mm_sm90.loop import (
    MAX_ACCUMULATORS,
    consumers,
    ctas_per_sm,
    exchanged_slices,
    rows_of,
    strips_of,
    turns_of,
    unrolls,
)
from inductor_quant.spec.weight_format import Field

Block = tuple[int, int, int, int, int]
Cycles = tuple[int, int]
# (block_m, block_n, block_k, warps, stages); cycles of a K iteration of a CTA alone on its SM, and
# of two that share it (0: they do not), if W is dequantized in 16 bits; in fp32. 1755 are a
# microsecond. README.md says what was measured.
BLOCKS: tuple[tuple[Block, Cycles, Cycles | None], ...] = (
    ((32, 64, 64, 4, 8), (350, 490), (400, 590)),
    ((32, 64, 128, 4, 4), (620, 880), (620, 1010)),
    ((32, 128, 64, 4, 8), (510, 870), (620, 1150)),
    ((64, 64, 64, 4, 8), (365, 600), (390, 660)),
    ((64, 64, 128, 4, 4), (620, 1035), (620, 1180)),
    ((64, 128, 64, 4, 4), (615, 1055), (780, 1345)),
    ((64, 128, 64, 8, 8), (570, 0), (690, 0)),
    ((64, 128, 128, 8, 4), (1060, 0), (1255, 0)),
    ((64, 256, 64, 8, 4), (1045, 0), None),
    ((128, 64, 64, 4, 4), (525, 770), (580, 860)),
    ((128, 128, 64, 8, 8), (700, 0), (835, 0)),
    ((128, 128, 128, 8, 4), (1320, 0), None),
    ((256, 64, 64, 4, 6), (640, 0), (675, 0)),
    ((256, 64, 64, 4, 4), (670, 0), (705, 0)),
    ((256, 128, 64, 8, 4), (1110, 0), (1180, 0)),
)
# With 256 of K, of single layers alone: half as many turns for as many words, whose rows are long.
# The tables of two CTAs leave three stages.
LONG_BLOCKS: tuple[tuple[Block, Cycles, Cycles | None], ...] = (
    ((16, 64, 256, 4, 4), (810, 1290), (1150, 1970)),
    ((32, 64, 256, 4, 4), (780, 1430), (1190, 2090)),
    ((32, 64, 256, 4, 3), (930, 1450), (1190, 2110)),
    ((64, 128, 256, 8, 4), (1790, 0), (2450, 0)),
)
MOST_M_LONG = 64  # with which they were timed
LEAST_GROUP = {"mul": 32, "div": 32, "add": 64, "sub": 64}  # of scales and of zero points
PACKED_ZEROS = 1.2  # times as many cycles there, if zero points are bits of words
# With two consumers, of single layers alone; cycles of a K iteration, which one of both has.
TWO_CONSUMERS: tuple[tuple[Block, Cycles, Cycles | None], ...] = (
    ((128, 64, 64, 8, 8), (370, 0), (445, 0)),
)
# If a tensor lists the group of each k, this too: a thread has four columns of each k, whose scales
# and zero points it loads at once. Cycles without what the lists take.
LISTED_BLOCKS: tuple[tuple[Block, Cycles, Cycles | None], ...] = (
    ((128, 128, 64, 4, 4), (790, 1300), None),
    ((16, 128, 128, 4, 4), (800, 1500), None),
)
# Times as many cycles if the values of a table are looked up one by one, and by pairs.
LOOKED_UP, LOOKED_UP_IN_PAIRS = 1.4, 1.12
WIDTH = 1.09  # and for each doubling of the bits of a value, from 4 on
HIDING_ROWS = 256  # of a tile, whose products hide both if those of other rows read W, too
VARYING = 2.0  # and if threads load a scale for each value of a tile
# If a tensor lists the group of each k, cycles of a CTA alone on its SM for 128 values: for each
# value, for each k of a thread, and for each value if scales are of another type than x.
LISTED, LISTED_K, LISTED_WIDE = 6.0, 22.0, 6.3
# The same if they are read from shared memory, and of a tile what it takes to copy them there.
COPIED, COPIED_K, ROWS_CYCLES, ROWS_PER_CYCLE = 1.4, 11.0, 150, 25
# So many above this M, where power limits the clock; and in tiles of 64 columns, which read all of
# x twice as often as those of 128.
LONG_M, SLOWED, SLOWED_NARROW = 4 * MEDIUM_M, 1.08, 1.1
OF_COLUMNS = 1.12  # above MEDIUM_M if the values of a word belong to several columns of W
# Runs of neighbours that the GPU stores, where a tile's columns are far apart, as those that share
# the scales of each k; with longer ones it stores as fast as in order.
RUNS_PER_CYCLE, SECTOR = 32, 16
PARTIALS_PER_CYCLE = 370  # stored here and added by the lowering's kernel
# Of partials in the order of tiles, whose neighbours that kernel reads far apart.
TILE_ORDER_CYCLES, TILE_ORDER_PER_CYCLE = 2400, 65
START_CYCLES = 3250  # of the launch
ADD_CYCLES = 1330  # of two consumers, which begin later, and add their sums
TILE_CYCLES, SUM_CYCLES = 1100, 0.06  # of a tile, and for each sum that is stored
SPLIT_CYCLES = 1300  # of partials, beside what grows with them
# Of a launch whose CTAs share tiles; the sums that they exchange in a cycle; by how much a K
# iteration takes longer in a square tile, and the more x it reads: CTAs that read the same x or W
# do so at different times.
SHARED_CYCLES, SUMS_PER_CYCLE, APART = 4300, 10.4, 0.06
# Of slices of K whose CTAs exchange sums, beside what grows with these; for each further strip.
EXCHANGE_CYCLES, STRIP_CYCLES = 2000, 400


def stores_tiles(problem: Problem, config: GemmConfig) -> bool:
    """Whether a tile's columns are so far apart that it is stored as a partial, in its order."""
    if problem.groups is not None or not problem.m_is_bounded:
        return False
    return _of_runs(problem, config) > _in_tile_order(problem, 1)


def _of_runs(problem: Problem, config: GemmConfig) -> float:
    run = columns_in_a_row(rules.weight_of(problem), config)
    return problem.m * problem.n / run / RUNS_PER_CYCLE if run < SECTOR else 0


def _of_partials(problem: Problem, count: int) -> float:
    return SPLIT_CYCLES + count * problem.m * problem.n / PARTIALS_PER_CYCLE


def _in_tile_order(problem: Problem, count: int) -> float:
    return TILE_ORDER_CYCLES + count * problem.m * problem.n / TILE_ORDER_PER_CYCLE


def blocks_for(weight: Weight) -> tuple[tuple[Block, Cycles, Cycles | None], ...]:
    if has_lists(weight.format):
        return (*BLOCKS, *LISTED_BLOCKS)
    return (*BLOCKS, *(LONG_BLOCKS if _takes_long_blocks(weight) else ()), *TWO_CONSUMERS)


def has_long_block(config: GemmConfig) -> bool:
    """Whether it has as much of K as ``LONG_BLOCKS``."""
    return config.block_k == LONG_BLOCKS[0][0][2]


def _takes_long_blocks(weight: Weight) -> bool:
    """Whether values have up to 4 bits, a word has those of one column, and a K iteration has few
    scales and zero points: others take longer than in shorter tiles."""
    format = weight.format
    if not 0 < format.code.total_width <= 4 or are_words_of_columns(weight):
        return False
    zeros = packed_zeros(format)
    least = [
        (op.operand, LEAST_GROUP[op.kind]) for op in format.dequant_ops if op.kind in LEAST_GROUP
    ]
    least += [(zeros, LEAST_GROUP["sub"])] if zeros else []
    return not any(
        isinstance(field, Field) and 0 < format.block(field)[0] < size for field, size in least
    )


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cycles of the GEMM."""

    problem: Problem
    device: Device
    is_narrow: bool  # W is dequantized in 16 bits
    looked_up: float  # times as many cycles if values come from a table
    is_x_dtype: bool = True  # scales have that of x, if groups are listed

    def blocks(self) -> tuple[tuple[Block, Cycles, Cycles | None], ...]:
        return blocks_for(rules.weight_of(self.problem))

    def listed(self, config: GemmConfig) -> Cycles | None:
        format = rules.weight_of(self.problem).format
        if format.element != format.code and not self.is_narrow and has_long_block(config):
            return None  # a table that is looked up in fp32 spills
        found = {GemmConfig(*block): each[not self.is_narrow] for block, *each in self.blocks()}
        return found.get(dataclasses.replace(config, split_k=1))

    def _cycles(self, config: GemmConfig) -> tuple[float, float]:
        """Of a K iteration: of a CTA alone on its SM, and of two."""
        # A pinned tile that is not in the list costs next to nothing, so it is not shared.
        known = self.listed(config)
        alone, paired = known or (1, 1)
        format = rules.weight_of(self.problem).format
        factor = self.looked_up if format.element != format.code else 1
        factor *= WIDTH ** math.log2((format.code.width or 8) / 4) if self.is_narrow else 1
        if self._hides(config):
            factor = min(factor, 1)
        if has_long_block(config) and packed_zeros(format):
            factor *= PACKED_ZEROS
        factor *= VARYING if loads_scales(rules.weight_of(self.problem), config) else 1
        if self.problem.m > MEDIUM_M and any(name[0] == "n" for name in format.code.offset.digits):
            factor *= OF_COLUMNS
        if self.problem.m > LONG_M:
            reads_all = config.block_n < 128 and self.problem.groups is None
            factor *= SLOWED * (SLOWED_NARROW if reads_all else 1)
        factor += self._of_lists(config) / alone if known and has_lists(format) else 0
        return alone * factor, paired * factor

    def _hides(self, config: GemmConfig) -> bool:
        """Whether products hide what a table, or wider values, take."""
        is_long = self.problem.groups is None and self.problem.m > HIDING_ROWS
        return is_long and config.block_m >= HIDING_ROWS

    def _of_lists(self, config: GemmConfig) -> float:
        """Cycles of a K iteration that a list of groups takes, of a CTA alone on its SM."""
        columns = config.block_n / (8 * config.num_warps)  # of a thread
        wide = 0 if self.is_x_dtype else LISTED_WIDE
        if rows_of(rules.weight_of(self.problem), config):
            each = COPIED + COPIED_K / columns + wide
        else:
            each = LISTED + LISTED_K / columns + wide
        return config.block_n * config.block_k / 128 * each

    def _lacks_registers(self, config: GemmConfig) -> bool:
        """Whether to share tiles, too, would spill: four columns of listed groups a thread and as
        many sums as it can have."""
        is_full = config.block_m * config.block_n == MAX_ACCUMULATORS * 32 * config.num_warps
        is_wide = config.block_n > 16 * config.num_warps
        return is_full and is_wide and has_lists(rules.weight_of(self.problem).format)

    def tiles(self, config: GemmConfig) -> float:
        rows, columns = self.problem.m / config.block_m, self.problem.n / config.block_n
        return math.ceil(rows) * math.ceil(columns)

    def _of_tile(self, config: GemmConfig) -> float:
        """Cycles of a tile beside its K iterations."""
        rows = rows_of(rules.weight_of(self.problem), config) if self.has_lists else None
        copied = ROWS_CYCLES + rows.memory / ROWS_PER_CYCLE if rows else 0
        sums = config.block_m * config.block_n
        added = ADD_CYCLES if consumers(config) > 1 else 0
        return TILE_CYCLES + SUM_CYCLES * sums + copied + added

    @property
    def has_lists(self) -> bool:
        return has_lists(rules.weight_of(self.problem).format)

    def _of_output(self, config: GemmConfig, partials: int = 0) -> float:
        """Cycles of ``partials``, or of stores whose neighbours in memory are columns of other
        tiles."""
        if stores_tiles(self.problem, config):
            return _in_tile_order(self.problem, max(partials, 1))
        of_partials = _of_partials(self.problem, partials) if partials else 0
        return _of_runs(self.problem, config) + of_partials

    def whole(self, config: GemmConfig) -> float:
        """If a CTA computes whole tiles, or slices of K of ``split_k``."""
        split, most = config.split_k, ctas_per_sm(self.problem, config, self.device)
        turn, turns = turns_of(self.problem, config, unrolls(self.problem, config))
        k_iters = turn * math.ceil(turns / split)
        alone, paired = (k_iters * each + self._of_tile(config) for each in self._cycles(config))
        each_sm = math.ceil(self.tiles(config) * split / self.device.num_sms)
        pairs, rest = divmod(each_sm, most)
        loop = pairs * (paired if most > 1 else alone) + rest * alone
        if split > 1 and exchanged_slices(self.problem, config, self.device):
            # What most CTAs of a tile leave the others, and what one reads.
            strips = strips_of(split)
            most, strip = math.ceil(strips / split), config.block_m * config.block_n / strips
            sums = strip * (strips - strips // split + most * (split - 1))
            exchange = EXCHANGE_CYCLES + STRIP_CYCLES * (most - 1) + sums / SUMS_PER_CYCLE
            return START_CYCLES + loop + exchange + self._of_output(config)
        return START_CYCLES + loop + self._of_output(config, split if split > 1 else 0)

    def shared(self, config: GemmConfig) -> float:
        """If all CTAs have the same number of K iterations: of tiles of their own, and of those
        that they share."""
        most = ctas_per_sm(self.problem, config, self.device)
        tiles, ctas = int(self.tiles(config)), most * self.device.num_sms
        whole = max(tiles // ctas - 1, 0)
        shared_tiles = tiles - whole * ctas
        turn, of_a_tile = turns_of(self.problem, config, unrolls(self.problem, config))
        turns = shared_tiles * of_a_tile
        is_other = config.split_k > 1 or consumers(config) > 1
        if is_other or turns < 2 * ctas or self._lacks_registers(config):
            return math.inf
        cycles = self._cycles(config)[most - 1]
        apart = 1 + APART * config.block_m / config.block_n
        loop = turn * math.ceil(turns / ctas) * cycles * apart
        loop += whole * (turn * of_a_tile * cycles + self._of_tile(config))
        sums = math.ceil(ctas / shared_tiles) * config.block_m * config.block_n
        shared = SHARED_CYCLES + sums / SUMS_PER_CYCLE
        return START_CYCLES + loop + self._of_tile(config) + shared + self._of_output(config)
