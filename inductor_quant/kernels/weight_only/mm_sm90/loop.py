"""How ``weight_only_mm_sm90`` divides K and a tile: turns of the loop, stages, what CTAs share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from inductor_quant.kernels.codegen.digits import pair_lookup
from inductor_quant.kernels.codegen.digits.tile import LINE, TilePlan
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import RESERVED_SHARED_MEMORY, GemmConfig
from inductor_quant.kernels.problem import Device, Problem, Weight
from inductor_quant.kernels.shared.grids import memory_of_experts
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import (
    columns_of,
    has_lists,
    plan_of,
    varying,
    words_in_parts,
)
from inductor_quant.kernels.weight_only.mm_sm90.box import WordBox, word_box
from inductor_quant.kernels.weight_only.mm_sm90.listed_rows import ListedRows, listed_rows
from inductor_quant.kernels.weight_only.mm_sm90.relay import most_lists
from inductor_quant.spec.weight_format import DequantOp, Field

INT32 = 4
# Bytes of shared memory of barriers, and of Gluon's barriers and of what starts warps.
BARRIERS, BESIDE = 1024, 512
MAX_ACCUMULATORS = 128  # per thread
WARPGROUP = 4
ROWS_OF_WARP = 16  # of the MMA: columns of W
UNROLLED = (4, 2)  # K iterations in the loop's body, a turn
# That take turns along K; sums of a tile, for which the registers of a launch suffice then.
MOST_CONSUMERS, MOST_SUMS = 2, 128 * 64
# Scales and zero points that a thread has for each of four K iterations if K is in parts, half as
# many in the largest tiles: with more it spills.
MAX_SCALES = 8
LEAST_ROWS_HALVED = 64  # of a tile, half of which may be multiplied alone
MAX_VALUES = 64  # of W a thread, with which four K iterations are unrolled
# Pairs of stages that are filled at different times, at least; fewer if a tile has few rows of x.
PAIRS, FEW_ROWS, PAIRS_FEW_ROWS = 4, 96, 3
# What the consumers copy while the other warps start: of K, and bytes of an SM, which they are busy
# with for as long as it takes.
COPIED_K, COPIED_BYTES = 256, 96 << 10
# Slices of K whose CTAs exchange sums, by strips of so many rows at least, of which a tile has
# ``STRIPS`` if it has more of them than slices. A GPU runs up to 128 grids at a time: with as many
# SMs, not all have a CTA that waits for one that has none.
EXCHANGED, LEAST_ROWS, STRIPS, MAX_GRIDS = (2, 3, 4, 5, 6), 8, 8, 128


def consumers(config: GemmConfig) -> int:
    """Groups of warps that dequantize and multiply, with all columns of the tile each; two take
    turns along K."""
    return max(1, ROWS_OF_WARP * config.num_warps // config.block_n)


def of_consumer(config: GemmConfig) -> GemmConfig:
    """``config`` with the warps of one of its consumers."""
    return dataclasses.replace(config, num_warps=config.num_warps // consumers(config))


def unrolled(problem: Problem, config: GemmConfig, offered: Sequence[int] = UNROLLED) -> int:
    """K iterations in the loop's body, a turn; 0: K is no multiple, or has too few turns."""
    turns = ((n, *divmod(problem.k, n * config.block_k)) for n in offered)
    return next((n for n, count, rest in turns if count >= config.split_k and not rest), 0)


def padded(problem: Problem, config: GemmConfig, offered: Sequence[int] = UNROLLED) -> int:
    """``unrolled``, or of the last turn a part is beyond K; 0: it is neither, or K has too
    few turns."""
    turns, rest = divmod(problem.k, offered[-1] * config.block_k)
    is_whole = rest % config.block_k == 0 or may_end_beyond(rules.weight_of(problem), config)
    may_pad = turns >= config.split_k and is_whole
    return unrolled(problem, config, offered) or (offered[-1] if may_pad else 0)


def may_end_beyond(weight: Weight, config: GemmConfig) -> bool:
    """Whether the last tile may end beyond K, where x is 0 and words read as 0, or as those of the
    next expert: not if that may be NaN, as a table's first value or float8 may, or if each k has
    numbers of its own."""
    view = words_in_parts(weight, config.block_k)[0].weight
    format, code = view.format, view.format.code
    is_float8 = bool(code.float8) or view.tensors[code.source].dtype.is_floating_point
    is_finite = format.element == code or bool(format.element.entries)
    return is_finite and not (is_float8 and format.experts > 1) and not varying(format)


def has_halves(problem: Problem, config: GemmConfig) -> bool:
    """Whether tiles may have no more than ``few_rows``, which are then multiplied alone: those of
    experts, which have one consumer. A second loop for them takes registers, so that a turn has two
    K iterations."""
    return problem.groups is not None and config.block_m >= LEAST_ROWS_HALVED


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


def unrolls(problem: Problem, config: GemmConfig) -> Sequence[int]:
    """The scales and zero points of many groups take the registers that large tiles need: of a
    table's values, and if K is in parts. What each k has of its own takes much code, and two
    loops (``has_halves``) leave fewer registers."""
    format = rules.weight_of(problem).format
    takes_turns, config = consumers(config) > 1, of_consumer(config)
    values = config.block_n * config.block_k // (32 * config.num_warps)  # of a thread
    is_full = config.block_m * config.block_n == MAX_ACCUMULATORS * 32 * config.num_warps
    is_long = has_lists(format) or values > MAX_VALUES or (is_full and varying(format))
    if takes_turns or is_long or has_halves(problem, config):
        return UNROLLED[-1:]
    groups = _groups(problem, config).values()
    if format.element != format.code and is_full and min(groups, default=0) and max(groups) > 1:
        return UNROLLED[-1:]
    _, in_parts = words_in_parts(rules.weight_of(problem), config.block_k)
    columns = config.block_n // (8 * config.num_warps)  # of a thread
    most = MAX_SCALES // 2 if is_full else MAX_SCALES
    return UNROLLED[-1:] if in_parts and columns * sum(groups) > most else UNROLLED


def has_one_group(problem: Problem, config: GemmConfig) -> bool:
    """Whether a K iteration has one group of each scale and zero point."""
    return max(_groups(problem, config).values(), default=0) <= 1


def is_crowded(problem: Problem, config: GemmConfig) -> bool:
    """Whether a tile of 128 x 128 x 128 has zero points and scales of more than two groups: it
    spills."""
    if config.block_m < 128 or config.block_k < 128:
        return False
    groups = _groups(problem, config)
    return any(op.kind == "sub" for op in groups) and max(groups.values()) > 2


def most_ctas(config: GemmConfig) -> int:
    """Of an SM, for which there are registers."""
    return 2 if config.num_warps == WARPGROUP and config.block_m <= 128 else 1


def ctas_per_sm(problem: Problem, config: GemmConfig, device: Device) -> int:
    """Of those as many as run at a time: the tables of two may be just too much."""
    one = memory_of_cta(rules.weight_of(problem), dataclasses.replace(config, split_k=1))
    one += BESIDE + RESERVED_SHARED_MEMORY
    of_sm = device.shared_memory + RESERVED_SHARED_MEMORY
    return most_ctas(config) if 2 * one <= of_sm else 1


def memory_of_cta(weight: Weight, config: GemmConfig) -> int:
    """Bytes of shared memory; 0: a tile is no box."""
    tile = memory_of_tile(weight, config)
    return tile + memory_of_experts(weight.format.experts) if tile and weight.format.e else tile


@functools.lru_cache(maxsize=1024)
def memory_of_tile(weight: Weight, config: GemmConfig) -> int:
    """Without what a CTA has for each expert."""
    found = boxed(weight, config)
    if found is None:
        return 0
    view, _ = words_in_parts(weight, config.block_k)
    table = pair_lookup.MEMORY if pair_lookup.places_of(view.weight, found[0]) else 0
    lists = config.num_stages * config.block_k * INT32 * most_lists(weight)
    rows = rows_of(weight, config)
    stages = config.num_stages * stage_bytes(weight, config, found[1])
    return stages + table + lists + (rows.memory if rows else 0) + BARRIERS


def rows_of(weight: Weight, config: GemmConfig) -> ListedRows | None:
    """What a tensor lists for each k, if that is in shared memory."""
    found, (_, n_digits) = boxed(weight, config), columns_of(weight, config)
    view, _ = words_in_parts(weight, config.block_k)
    warps = of_consumer(config).num_warps
    return listed_rows(view.weight, found[0], n_digits, warps) if found else None


def stage_bytes(weight: Weight, config: GemmConfig, box: WordBox, x_bytes: int = 2) -> int:
    words, view = box.count * box.rows * box.columns, as_words(weight).weight
    itemsize = view.tensors[view.format.code.source].dtype.itemsize
    return x_bytes * config.block_m * config.block_k + words * itemsize


def boxed(
    weight: Weight, config: GemmConfig, plan: TilePlan | None = None, *, in_pairs: bool = False
) -> tuple[TilePlan, WordBox] | None:
    """How a tile is assigned to threads, and the box of its words: for 16-bit x, or of a ``plan``
    whose tiles are neighbours along K. ``in_pairs``: as ``plan_of`` takes it."""
    view = as_words(weight) if plan else words_in_parts(weight, config.block_k)[0]
    if plan is None:
        beyond = may_end_beyond(weight, config)
        plan = plan_of(view, of_consumer(config), ends_beyond=beyond, in_pairs=in_pairs)
    box = word_box(view.weight, plan) if plan is not None else None
    return (plan, box) if plan is not None and box is not None else None


def exchanged_slices(problem: Problem, config: GemmConfig, device: Device) -> int:
    """Of so many slices of K the CTAs exchange their sums. 0: of none; partials are stored if K is
    split. As they wait for each other, all must run at a time."""
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    ctas = ctas_per_sm(problem, config, device) * device.num_sms
    runs_at_once = tiles * config.split_k <= ctas
    has_rows = config.block_m >= LEAST_ROWS * strips_of(config.split_k)
    is_offered = config.split_k in EXCHANGED and device.num_sms >= MAX_GRIDS
    is_taken = is_offered and problem.m_is_static and runs_at_once and has_rows
    return config.split_k if is_taken else 0


def strips_of(slices: int) -> int:
    """Strips of the rows of a tile, a power of two, that the CTAs of so many slices of K store in
    turn; 0 slices: their partials are stored."""
    return STRIPS if slices & (slices - 1) else max(slices, 1)


def count_copied(problem: Problem, config: GemmConfig, constants: dict[str, Any]) -> int:
    """How many fills of its stages the consumers of a CTA copy: of COPIED_K, as many as each CTA's
    first part of K has, and as COPIED_BYTES allow. None of experts: when copies were in the loop
    over tiles, ptxas waited for each product."""
    if problem.groups is not None or problem.n % config.block_n:
        return 0
    k_iters, turn = problem.k // config.block_k, constants["UNROLLED"]  # those within K
    turns = math.ceil(problem.k / (turn * config.block_k))
    parts = turns if constants["SHARES_TILES"] else config.split_k
    starts = [turn * (i * turns // parts) for i in range(parts + 1)]
    least = min(min(end, k_iters) - begin for begin, end in itertools.pairwise(starts))
    found = boxed(rules.weight_of(problem), config)
    assert found is not None
    each = most_ctas(config) * stage_bytes(rules.weight_of(problem), config, found[1])
    most = min(COPIED_K // config.block_k, COPIED_BYTES // each, config.num_stages)
    count = min(most, least) // constants["TOGETHER"]
    return int(count if consumers(config) == 1 or least >= COPIED_K // config.block_k else 0)


def turns_misfit(problem: Problem, config: GemmConfig, device: Device) -> str:
    """Why consumers cannot take turns; "": they can. They add their sums where the stages were, so
    a CTA has one tile."""
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    format = rules.weight_of(problem).format
    if consumers(config) > MOST_CONSUMERS:
        return f"more than {MOST_CONSUMERS} consumers"
    if has_lists(format) or varying(format):
        return "what each k has takes other code"
    if format.element != format.code:
        return "each consumer would have a table"
    if of_consumer(config).num_warps != WARPGROUP or config.block_m * config.block_n > MOST_SUMS:
        return f"consumers have a warpgroup each, and tiles up to {MOST_SUMS} sums"
    if config.block_k != config.block_n:
        return "the stages of a turn do not have the size of the sums"
    is_known = problem.groups is None and problem.m_is_static
    if not is_known or tiles * config.split_k > device.num_sms:
        return "a CTA would have several tiles"
    of_each = consumers(config) * UNROLLED[-1]  # K iterations in a turn of each
    if problem.k < config.split_k * of_each * config.block_k or config.num_stages % of_each:
        return "a turn of each takes more of K, or other stages"
    return ""


def row_along_k(problem: Problem, config: GemmConfig) -> int:
    """Bytes of a row of a tile's packed words; 0 if rows are along N, or the tile is no box."""
    found = boxed(rules.weight_of(problem), config)
    if found is None:
        return 0
    weight, box = as_words(rules.weight_of(problem)).weight, found[1]
    is_along_k = any(name[0] == "k" and 0 < step < box.pitch for name, step in box.strides.items())
    itemsize = weight.tensors[weight.format.code.source].dtype.itemsize
    return box.columns * itemsize if is_along_k else 0


def loaded_together(problem: Problem, config: GemmConfig) -> int:
    """Of how many K iterations the tiles are loaded under one barrier: two if their rows are in the
    same lines of memory."""
    row = row_along_k(problem, config)
    pairs, rest = divmod(config.num_stages, 2)
    has_stages = not rest and pairs >= (PAIRS_FEW_ROWS if config.block_m <= FEW_ROWS else PAIRS)
    return 2 if 0 < 2 * row <= LINE and has_stages else 1
