"""``weight_only_mm_sm90``: x [M, K] @ W [K, N] for every weight format, in Gluon with TMA.

Chosen on sm_90 for 16-bit x whose rows are aligned and M from 17 on, if the packed words of a tile
are a box of a matrix (``box``), while W written once and a product of the library take longer.

swap_ab, with wgmma, warp-specialized and persistent as ``weight_only_large_m_sm90``, but the
statements that read and dequantize W follow from the digits of the format. W goes from shared
memory to the registers of wgmma's first operand and is never written.

Where tiles would leave SMs idle, K is split, and the CTAs of a tile exchange their sums
(``exchanged_slices``) or the lowering adds partials; or the K iterations of all tiles are divided
evenly among the CTAs, which add what others leave them (stream-K).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from inductor_quant.kernels.codegen.digits import pair_lookup
from inductor_quant.kernels.codegen.digits.tile import LINE, TilePlan
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, MEDIUM_M, Device, Problem, Weight
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.shared.grids import tile_grid
from inductor_quant.kernels.weight_only import library, rules
from inductor_quant.kernels.weight_only.digit_tiles import (
    has_lists,
    n_order,
    operand_rejection,
    pair_of,
    plan_of,
    varying,
    words_in_parts,
)
from inductor_quant.kernels.weight_only.mm_sm90.box import WordBox, word_box
from inductor_quant.kernels.weight_only.mm_sm90.codegen import MMSm90Codegen, listed_positions
from inductor_quant.kernels.weight_only.row_boxes import RowBoxes
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import DequantOp, Field

WARPGROUP = 4
MAX_ACCUMULATORS = 128  # per thread
UNROLLED = (4, 2)  # K iterations in the loop's body
# Scales and zero points that a thread has for each of four K iterations if K is in parts, half as
# many in the largest tiles: with more it spills.
MAX_SCALES = 8
INT32 = 4
BARRIERS = 1024  # bytes of shared memory beside the stages
STAGES_APART = 8  # a multiple of it, so that four pairs of stages are filled at different times
REGISTERS, THREADS = 65536, 256  # of an SM; of a CTA with one warpgroup of consumers
Block = tuple[int, int, int, int, int]
Cycles = tuple[int, int]
# (block_m, block_n, block_k, warps, stages); cycles of a K iteration of a CTA alone on its SM, and
# of two that share it (0: they do not), if W is dequantized in 16 bits; in fp32. 1755 are a
# microsecond. README.md says what was measured.
BLOCKS: tuple[tuple[Block, Cycles, Cycles | None], ...] = (
    ((32, 64, 64, 4, 8), (350, 490), (400, 590)),
    ((32, 64, 128, 4, 4), (645, 915), (645, 1050)),
    ((32, 128, 64, 4, 8), (510, 870), (620, 1150)),
    ((64, 64, 64, 4, 8), (390, 650), (415, 710)),
    ((64, 64, 128, 4, 4), (690, 1165), (690, 1320)),
    ((64, 128, 64, 4, 4), (630, 1080), (800, 1380)),
    ((64, 128, 64, 8, 8), (585, 0), (710, 0)),
    ((64, 128, 128, 8, 4), (1060, 0), (1255, 0)),
    ((64, 256, 64, 8, 4), (1045, 0), None),
    ((128, 64, 64, 4, 4), (525, 770), (580, 860)),
    ((128, 128, 64, 8, 8), (675, 0), (805, 0)),
    ((128, 128, 128, 8, 4), (1320, 0), None),
    ((256, 64, 64, 4, 4), (670, 0), (705, 0)),
    ((256, 128, 64, 8, 4), (1110, 0), (1180, 0)),
)
# If a tensor lists the group of each k, this too: a thread has four columns of each k, whose scales
# and zero points it loads at once. Cycles without what the lists take.
LISTED_BLOCKS: tuple[tuple[Block, Cycles, Cycles | None], ...] = (
    ((128, 128, 64, 4, 4), (790, 1300), None),
)
# If each value of a tile has a scale of its own: values of a tile, and M up to which it is faster
# than W written once.
MAX_VARYING, MAX_VARYING_M = 4096, 128
# Times as many cycles if the values of a table are looked up one by one, and by pairs.
LOOKED_UP, LOOKED_UP_IN_PAIRS = 1.4, 1.12
WIDTH = 1.09  # and for each doubling of the bits of a value, from 4 on
VARYING = 2.0  # and if each value of a tile has a scale of its own
# If a tensor lists the group of each k, cycles of a CTA alone on its SM for 128 values: for each
# value, for each k of a thread, and for each value if scales are of another type than x.
LISTED, LISTED_K, LISTED_WIDE = 6.0, 22.0, 6.3
LONG_M, SLOWED = 4 * MEDIUM_M, 1.08  # so many above this M, where power limits the clock
OF_COLUMNS = 1.12  # above MEDIUM_M if the values of a word belong to several columns of W
# If x is larger than the L2 cache: CTAs that share tiles do not read it at the same time.
CACHED_BYTES, BEYOND_CACHE = 50 << 20, 1.12
SPLITS = (1, 2, 3, 4, 6)
MIN_K_ITERS = 8  # of a split
PARTIALS_PER_CYCLE = 370  # stored here and added by the lowering's kernel
START_CYCLES = 3250  # of the launch
TILE_CYCLES, SUM_CYCLES = 1100, 0.06  # of a tile, and for each sum that is stored
SPLIT_CYCLES = 1300  # of partials, beside what grows with them
# Of a launch whose CTAs share tiles; the sums that they exchange in a cycle; by how much a K
# iteration takes longer in a square tile, and the more x it reads: CTAs that read the same x or W
# do so at different times.
SHARED_CYCLES, SUMS_PER_CYCLE, APART = 4250, 10.4, 0.06
COPIED_K = 256  # of K, that the consumers copy while the other warps start
# Slices of K whose CTAs exchange sums, of parts of so many rows at least; cycles beside what grows
# with the sums. A GPU runs up to 128 grids at a time: with as many SMs, not all have a CTA that
# waits for one that has none.
EXCHANGED, LEAST_ROWS, EXCHANGE_CYCLES, MAX_GRIDS = (2, 4), 8, 2000, 128
SIGNAL = 8  # bytes, with which a warp says that its sums are there


def unrolled(problem: Problem, config: GemmConfig, offered: Sequence[int] = UNROLLED) -> int:
    """K iterations in the loop's body, a turn; 0: K is no multiple, or has too few turns."""
    turns = ((n, *divmod(problem.k, n * config.block_k)) for n in offered)
    return next((n for n, count, rest in turns if count >= config.split_k and not rest), 0)


def padded(problem: Problem, config: GemmConfig, offered: Sequence[int] = UNROLLED) -> int:
    """``unrolled``, or of the last turn a part is beyond K; 0: K is no multiple of a block, or has
    too few turns."""
    turns, rest = divmod(problem.k, offered[-1] * config.block_k)
    may_pad = turns >= config.split_k and rest % config.block_k == 0
    return unrolled(problem, config, offered) or (offered[-1] if may_pad else 0)


def turns_of(problem: Problem, config: GemmConfig, offered: Sequence[int]) -> tuple[int, int]:
    """K iterations of a turn, and turns of a tile."""
    turn = padded(problem, config, offered) or 1
    return turn, math.ceil(problem.k / (turn * config.block_k))


def _groups(problem: Problem, config: GemmConfig) -> dict[DequantOp, int]:
    """Groups of a K iteration, those of each part if K is in parts, for each scale and zero point;
    0: all of K has one."""
    view, _ = words_in_parts(rules.weight_of(problem), config.block_k)
    format = view.weight.format
    ops = [op for op in format.dequant_ops if isinstance(op.operand, Field)]
    blocks = {op: format.block(op.operand)[0] for op in ops if isinstance(op.operand, Field)}
    return {op: math.ceil(config.block_k / size) if size > 0 else 0 for op, size in blocks.items()}


def _unrolls(problem: Problem, config: GemmConfig) -> Sequence[int]:
    """The scales and zero points of many groups take the registers that large tiles need: of a
    table's values, and if K is in parts. What each k has of its own takes much code."""
    format = rules.weight_of(problem).format
    if has_lists(format):
        return UNROLLED[-1:]
    groups = _groups(problem, config).values()
    is_full = config.block_m * config.block_n == MAX_ACCUMULATORS * 32 * config.num_warps
    if format.element != format.code and is_full and min(groups, default=0) and max(groups) > 1:
        return UNROLLED[-1:]
    _, in_parts = words_in_parts(rules.weight_of(problem), config.block_k)
    columns = config.block_n // (8 * config.num_warps)  # of a thread
    most = MAX_SCALES // 2 if is_full else MAX_SCALES
    return UNROLLED[-1:] if in_parts and columns * sum(groups) > most else UNROLLED


def is_crowded(problem: Problem, config: GemmConfig) -> bool:
    """Whether a tile of 128 x 128 x 128 has zero points and scales of more than two groups: it
    spills."""
    if config.block_m < 128 or config.block_k < 128:
        return False
    groups = _groups(problem, config)
    return any(op.kind == "sub" for op in groups) and max(groups.values()) > 2


def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """A CTA for each tile and slice of K, at most ``NUM_CTAS``; so many to share tiles."""
    meta = sizes[-1]
    if meta["SHARES_TILES"]:
        return (meta["NUM_CTAS"], 1, 1)
    if slices := meta["EXCHANGED_SLICES"]:
        tiles, _, _ = tile_grid(*sizes, cdiv=cdiv)
        return (tiles * slices, 1, 1)
    return split_k.persistent_grid(*sizes, cdiv=cdiv, min=min)


class WeightOnlyMMSm90(rules.WeightOnlyKernel):
    name = "weight_only_mm_sm90"
    template = "weight_only/mm_sm90/template"
    grid = staticmethod(grid)
    is_gluon = True
    takes_lists: ClassVar[bool] = True  # of the group of each k

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in rules.WGMMA_ARCHS:
            return no_kernel(f"written for sm_90, this is sm_{device.arch}")
        if problem.m <= DECODE_M and problem.m_is_bounded:
            return no_kernel(f"M = {problem.m} is not above {DECODE_M}")
        if not problem.has_weight_descriptors:
            return no_kernel("x or the packed weights have no TMA descriptor")
        refused = operand_rejection(spec, problem, device, lists=self.takes_lists)
        if refused is not None:
            return refused
        if varying(rules.weight_of(problem).format) and problem.m > MAX_VARYING_M:
            return no_kernel("a scale for each weight of a tile is loaded")
        if any(
            index.linear or index.tables for index, _ in listed_positions(rules.weight_of(problem))
        ):
            return no_kernel("where a field is depends on a list and on n")
        return None

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, slices: int = 1
    ) -> MMSm90Codegen:
        found = boxed(rules.weight_of(problem), config)
        assert found is not None
        view, k_order = words_in_parts(rules.weight_of(problem), config.block_k)
        tile = rules.tile_of(spec, view.weight, config)
        codegen = MMSm90Codegen(
            *(tile, view, found[0], n_order(view.weight.format)),
            k_order=k_order,
            is_gated=problem.is_gated,
            slices=slices,
        )
        codegen.load_in(RowBoxes.of(problem, config.block_m))
        return codegen

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        found = super().constants(spec, problem, config, device)
        found["SHARES_TILES"] = self.shares_tiles(spec, problem, config, device)
        if slices := exchanged_slices(problem, config, device):
            found |= {
                "CODEGEN": self.codegen(spec, problem, config, slices),
                "EXCHANGED_SLICES": slices,
                "SPLIT_K": 1,
            }
        return {**found, "COPIED": count_copied(problem, config, found)}

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        ctas, together = ctas_per_sm(config), loaded_together(problem, config)
        offered = _unrolls(problem, config)
        return constants_of(problem, config, device, ctas, offered, together=together)

    def scratch(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> int:
        sums, signals = config.block_m * config.block_n, config.num_warps * SIGNAL // 4
        if slices := exchanged_slices(problem, config, device):
            tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
            return tiles * slices * (sums + slices * signals)
        if self.shares_tiles(spec, problem, config, device):
            return ctas_per_sm(config) * device.num_sms * (sums + signals)
        return 0

    def shares_tiles(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> bool:
        """Whether the K iterations of the last tiles are divided among all CTAs."""
        costs = self._costs(spec, problem, config, device)
        return costs.shared(config) < costs.whole(config)

    def partials(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> int:
        return 1 if exchanged_slices(problem, config, device) else config.split_k

    def _costs(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Costs:
        codegen = self.codegen(spec, problem, config)
        is_float8 = bool(codegen.format.element.float8) and not codegen.loop_ops
        is_narrow = is_float8 or codegen.is_in_16_bits() or codegen.is_looked_up_in_16_bits()
        looked_up = LOOKED_UP_IN_PAIRS if codegen.pair_places else LOOKED_UP
        is_x_dtype = all(
            codegen.is_in_x_dtype(field) for field in codegen.listed if not field.width
        )
        return Costs(problem, device, is_narrow, looked_up, is_x_dtype)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        weight = rules.weight_of(problem)
        found, ctas = boxed(weight, config), ctas_per_sm(config)
        view, _ = words_in_parts(weight, config.block_k)
        is_looked_up = found and pair_lookup.places_of(view.weight, found[0])
        table = pair_lookup.MEMORY if is_looked_up else 0
        lists = config.num_stages * config.block_k * INT32 * len(listed_positions(weight))
        return tile_misfit(
            *(problem, config, device, found),
            x_bytes=2,
            ctas=ctas,
            beside=table + lists,
            offered=_unrolls(problem, config),
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        cost = self._cost(spec, problem, device)
        most = library.cycles(problem, device)
        order = sorted(cost, key=cost.__getitem__)
        return split_k.same_split([config for config in order if cost[config] < most])

    def least_cycles(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> float:
        """Of the best configuration or of the library, whichever is less."""
        is_taken = self.rejection(spec, problem, device) is None
        cost = self._cost(spec, problem, device) if is_taken else {}
        return min([library.cycles(problem, device), *cost.values()])

    def prefers_library(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
        """The later kernels are slower than this one, wherever it has a tile. If M is any number,
        its cost is that of one number alone."""
        cost = self._cost(spec, problem, device) if problem.m_is_bounded else {}
        return bool(cost) and min(cost.values()) >= library.cycles(problem, device)

    def _cost(
        self, spec: QuantGemmSpec, problem: Problem, device: Device
    ) -> dict[GemmConfig, float]:
        """Cycles of each legal configuration."""
        format = rules.weight_of(problem).format
        is_varying = bool(varying(format)) and not has_lists(format)
        legal = []
        blocks = blocks_for(rules.weight_of(problem))
        for block, split in itertools.product((block for block, *_ in blocks), SPLITS):
            config = GemmConfig(*block, split_k=split)
            if split > 1 and problem.k < split * config.block_k * MIN_K_ITERS:
                continue
            if problem.m <= config.block_m // 2 and config.block_m > BLOCKS[0][0][0]:
                continue
            if is_varying and (split > 1 or config.block_n * config.block_k > MAX_VARYING):
                continue
            if is_crowded(problem, config):
                continue
            if self.config_rejection(spec, problem, config, device) is None:
                legal.append(config)
        if not legal:
            return {}
        costs = self._costs(spec, problem, legal[0], device)
        listed = [config for config in legal if costs.listed(config)]
        return {config: min(costs.whole(config), costs.shared(config)) for config in listed}


def tile_misfit(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    found: tuple[TilePlan, WordBox] | None,
    *,
    x_bytes: int,
    ctas: int,
    sums: int = 1,
    beside: int = 0,
    offered: Sequence[int] = UNROLLED,
) -> Rejection | None:
    """Why ``config``, whose tiles are ``found``, cannot run with ``ctas`` an SM; ``sums``:
    accumulators for each output; ``beside``: bytes of shared memory for a table and for lists;
    ``offered``: K iterations in the loop's body."""
    if not padded(problem, config, offered):
        return bad_blocks(f"{config} does not divide K={problem.k}")
    refused = split_k.reject_if_unbounded(problem, config)
    if refused is not None:
        return refused
    is_tile = config.num_warps in (WARPGROUP, 2 * WARPGROUP) and config.block_m <= 256
    if not is_tile or config.block_n % (16 * config.num_warps) or config.block_k % 64:
        return bad_blocks(f"{config} is no tile of wgmma")
    if found is None or config.num_stages < 3:
        return bad_blocks(f"{config} does not suit the digits of {problem.weight}")
    words = found[1].count * found[1].rows * found[1].columns
    view = as_words(rules.weight_of(problem)).weight
    packed = words * view.tensors[view.format.code.source].dtype.itemsize
    stage = x_bytes * config.block_m * config.block_k + packed
    most = MAX_ACCUMULATORS // sums
    return rules.reject_if_too_many_accumulators(config, most) or tile_rejection(
        config,
        device,
        element_bytes=2,
        shared_bytes=ctas * (config.num_stages * stage + BARRIERS + beside),
    )


def constants_of(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    ctas: int,
    offered: Sequence[int] = UNROLLED,
    together: int = 1,
) -> dict[str, Any]:
    """The template's constants, for ``ctas`` an SM, ``together`` K iterations under one barrier."""
    return {
        "UNROLLED": padded(problem, config, offered),
        "TOGETHER": together,
        "NUM_CTAS": ctas * device.num_sms,
        "EXCHANGED_SLICES": 0,
        "MAX_REGISTERS": REGISTERS // (ctas * THREADS) if ctas > 1 else 0,
    }


def exchanged_slices(problem: Problem, config: GemmConfig, device: Device) -> int:
    """Of so many slices of K the CTAs exchange their sums. 0: of none; partials are stored if K is
    split. As they wait for each other, all must run at a time."""
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    runs_at_once = tiles * config.split_k <= ctas_per_sm(config) * device.num_sms
    has_rows = config.block_m >= LEAST_ROWS * config.split_k
    is_offered = config.split_k in EXCHANGED and device.num_sms >= MAX_GRIDS
    is_taken = is_offered and problem.m_is_static and runs_at_once and has_rows
    return config.split_k if is_taken else 0


def count_copied(problem: Problem, config: GemmConfig, constants: dict[str, Any]) -> int:
    """How many fills of its stages the consumers of a CTA copy: as many as the first part of K has
    of each CTA."""
    if problem.n % config.block_n:
        return 0
    k_iters, turn = problem.k // config.block_k, constants["UNROLLED"]
    turns = math.ceil(k_iters / turn)
    parts = turns if constants["SHARES_TILES"] else config.split_k
    starts = [turn * (i * turns // parts) for i in range(parts + 1)]
    least = min(min(end, k_iters) - begin for begin, end in itertools.pairwise(starts))
    return int(min(COPIED_K // config.block_k, config.num_stages, least) // constants["TOGETHER"])


def loaded_together(problem: Problem, config: GemmConfig) -> int:
    """Of how many K iterations the tiles are loaded under one barrier: two if their rows are the
    halves of the same lines of memory."""
    weight = as_words(rules.weight_of(problem)).weight
    found = boxed(rules.weight_of(problem), config)
    assert found is not None
    box = found[1]
    is_along_k = any(name[0] == "k" and 0 < step < box.pitch for name, step in box.strides.items())
    row = box.columns * weight.tensors[weight.format.code.source].dtype.itemsize
    return 2 if is_along_k and 2 * row == LINE and config.num_stages % STAGES_APART == 0 else 1


def blocks_for(weight: Weight) -> tuple[tuple[Block, Cycles, Cycles | None], ...]:
    return (*BLOCKS, *LISTED_BLOCKS) if has_lists(weight.format) else BLOCKS


def ctas_per_sm(config: GemmConfig) -> int:
    return 2 if config.num_warps == WARPGROUP and config.block_m <= 128 else 1


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cycles of the GEMM."""

    problem: Problem
    device: Device
    is_narrow: bool  # W is dequantized in 16 bits
    looked_up: float  # times as many cycles if values come from a table
    is_x_dtype: bool = True  # scales have that of x, if groups are listed

    def listed(self, config: GemmConfig) -> Cycles | None:
        blocks = blocks_for(rules.weight_of(self.problem))
        found = {GemmConfig(*block): each[not self.is_narrow] for block, *each in blocks}
        return found.get(dataclasses.replace(config, split_k=1))

    def _cycles(self, config: GemmConfig) -> tuple[float, float]:
        """Of a K iteration: of a CTA alone on its SM, and of two."""
        # A pinned tile that is not in the list costs next to nothing, so it is not shared.
        known = self.listed(config)
        alone, paired = known or (1, 1)
        format = rules.weight_of(self.problem).format
        factor = self.looked_up if format.element != format.code else 1
        factor *= WIDTH ** math.log2((format.code.width or 8) / 4) if self.is_narrow else 1
        factor *= VARYING if varying(format) and not has_lists(format) else 1
        if self.problem.m > MEDIUM_M and any(name[0] == "n" for name in format.code.offset.digits):
            factor *= OF_COLUMNS
        factor *= SLOWED if self.problem.m > LONG_M else 1
        factor *= BEYOND_CACHE if 2 * self.problem.m * self.problem.k > CACHED_BYTES else 1
        factor += self._of_lists(config) / alone if known and has_lists(format) else 0
        return alone * factor, paired * factor

    def _of_lists(self, config: GemmConfig) -> float:
        """Cycles of a K iteration that a list of groups takes, of a CTA alone on its SM."""
        columns = config.block_n / (8 * config.num_warps)  # of a thread
        each = LISTED + LISTED_K / columns + (0 if self.is_x_dtype else LISTED_WIDE)
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

    def whole(self, config: GemmConfig) -> float:
        """If a CTA computes whole tiles, or slices of K of ``split_k``."""
        split, most = config.split_k, ctas_per_sm(config)
        turn, turns = turns_of(self.problem, config, _unrolls(self.problem, config))
        k_iters = turn * math.ceil(turns / split)
        alone, paired = (k_iters * each + _of_tile(config) for each in self._cycles(config))
        each_sm = math.ceil(self.tiles(config) * split / self.device.num_sms)
        pairs, rest = divmod(each_sm, most)
        loop = pairs * (paired if most > 1 else alone) + rest * alone
        if split > 1 and exchanged_slices(self.problem, config, self.device):
            sums = config.block_m * config.block_n * (split - 1) / split
            return START_CYCLES + loop + EXCHANGE_CYCLES + 2 * sums / SUMS_PER_CYCLE
        partials = split * self.problem.m * self.problem.n / PARTIALS_PER_CYCLE
        return START_CYCLES + loop + (SPLIT_CYCLES + partials if split > 1 else 0)

    def shared(self, config: GemmConfig) -> float:
        """If all CTAs have the same number of K iterations: of tiles of their own, and of those
        that they share."""
        most = ctas_per_sm(config)
        tiles, ctas = int(self.tiles(config)), most * self.device.num_sms
        whole = max(tiles // ctas - 1, 0)
        shared_tiles = tiles - whole * ctas
        turn, of_a_tile = turns_of(self.problem, config, _unrolls(self.problem, config))
        turns = shared_tiles * of_a_tile
        if config.split_k > 1 or turns < 2 * ctas or self._lacks_registers(config):
            return math.inf
        cycles = self._cycles(config)[most - 1]
        apart = 1 + APART * config.block_m / config.block_n
        loop = turn * math.ceil(turns / ctas) * cycles * apart
        loop += whole * (turn * of_a_tile * cycles + _of_tile(config))
        sums = math.ceil(ctas / shared_tiles) * config.block_m * config.block_n
        shared = SHARED_CYCLES + sums / SUMS_PER_CYCLE
        return START_CYCLES + loop + _of_tile(config) + shared


def _of_tile(config: GemmConfig) -> float:
    """Cycles of a tile beside its K iterations."""
    return TILE_CYCLES + SUM_CYCLES * config.block_m * config.block_n


def count_words(weight: Weight) -> int:
    """Elements of the packed weight as they are read: bytes four at a time."""
    weight = as_words(weight).weight
    return math.prod(size or 0 for size in weight.tensors[weight.format.code.source].shape)


def boxed(
    weight: Weight, config: GemmConfig, plan: TilePlan | None = None
) -> tuple[TilePlan, WordBox] | None:
    """How a tile is assigned to threads, and the box of its words: for 16-bit x, or of a ``plan``
    whose tiles are neighbours along K."""
    view = as_words(weight) if plan else words_in_parts(weight, config.block_k)[0]
    plan = plan or plan_of(view, config)
    box = word_box(view.weight, plan) if plan is not None else None
    return (plan, box) if plan is not None and box is not None else None


def has_pairs(problem: Problem, config: GemmConfig) -> bool:
    """Whether a thread has the sums of both columns of a pair, which the last digit of n counts."""
    weight = rules.weight_of(problem)
    found, bit = boxed(weight, config), pair_of(weight, config)
    if found is None or bit is None:
        return False
    # The bits of a row of the MMA: three of lanes, one of a thread, those of warps, of a thread.
    row = found[0].rows.index(bit)
    return row == 3 or row >= 3 + config.num_warps.bit_length()


WEIGHT_ONLY_MM_SM90 = WeightOnlyMMSm90()
