"""``weight_only_direct``: x [M, K] @ W [K, N] for every weight format, in Gluon.

Chosen for 16-bit x whose rows are aligned: M <= 16 on sm_80, 86, 89 and 90, when no kernel for one
format takes the GEMM; on sm_90 from M = 9 to 512, of bytes whose K 64 does not divide from 1 on,
where it costs less than ``weight_only_mm_sm90``, and from 17 on than the library, as for small
layers.

swap_ab, with mma.sync: W^T is the first operand. The warps of a CTA split K among themselves. Each
lane loads whole packed words straight to registers, dequantizes them there, and multiplies: nothing
of W passes through shared memory. Which k and n of the tile a lane holds follows from the digits of
the format (``codegen/digits/tile``). Once per tile the warps' sums are added in shared memory.
Scales, zero points and tables need not be applied to each value of W (``operands``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from inductor_quant.kernels.codegen.base import WeightTile
from inductor_quant.kernels.codegen.byte_layout import byte_layout_of
from inductor_quant.kernels.codegen.digits.tile import tile_digits
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, INTERPRETER_ARCH, Device, Problem, Weight
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import library, rules
from inductor_quant.kernels.weight_only.bytes.kernel import has_partial_blocks
from inductor_quant.kernels.weight_only.digit_tiles import (
    are_words_of_columns,
    has_lists,
    is_along_n,
    n_order,
    operand_rejection,
    plan_of,
    varying,
    words_in_order,
)
from inductor_quant.kernels.weight_only.direct import cost
from inductor_quant.kernels.weight_only.direct.codegen import (
    MAX_WARPS,
    WARP_SIZE,
    DirectCodegen,
    half_digit,
    shares_x,
)
from inductor_quant.kernels.weight_only.direct.operands import (
    MAX_VALUES,
    MAX_VALUES_ZEROS,
    ROWS,
    looks_up_pairs,
    scales_sums,
    scales_sums_alone,
    scales_x,
)
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import Field

ARCHS = (INTERPRETER_ARCH, 80, 86, 89, 90)  # that it has run on, or compiles for
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Of W that a thread dequantizes at once, of several fields, or if the group of each k is listed:
# half as many in tiles of 32 rows. More would spill.
MAX_APART = 64
SMALL_GROUP = 64  # a tile has many groups of less than this
# (columns, k) of a warp's tile: up to 4 bits, above, of several fields, and of listed groups. The
# first two have tiles of less than ``SLICE`` of K only where no others fit.
SLICE = 64
TILES = (
    ((32, 128), (16, 128), (32, 64), (16, 64), (64, 32), (128, 32)),
    ((32, 64), (16, 128), (16, 64), (64, 32), (128, 16), (128, 32)),
    ((32, 64), (16, 64), (16, 128), (64, 32)),
    ((64, 32), (32, 64), (32, 32)),
)
TILE_SCALED = (64, 64)  # too, if zero points are applied to sums
# If x is scaled; with 16 rows the first would spill. K is not split, as columns of a tile are far
# apart in the partials.
TILES_X = ((64, 64), (32, 64), (16, 64))
# Too, above 4 bits, up to 8 rows on sm_90, unless columns have scales of groups; K iterations, with
# two it was slower.
TILE_WIDE, LEAST_ITERATIONS_WIDE = (32, 128), 3
# Of words along N; with 16 rows: with more columns it spills; with more warps, a single CTA an SM,
# it takes 1.4 to 1.9 times as long.
TILES_ALONG_N = ((32, 128), (64, 64), (128, 32), (32, 64), (64, 32))
MAX_COLUMNS, MAX_WARPS_ALONG_N = 64, 8
# Of several fields: slices of K have the same bytes, which warps of a CTA read together; with 16
# rows, whose words are neighbours along n; in tiles of 32 rows.
LEAST_WARPS_JOINED, LEAST_COLUMNS_JOINED, COLUMNS_JOINED = 4, 32, 16
_WARPS, _SPLITS = (2, 4, 8, 16), (1, 2, 4)
# Up to 16 rows it is chosen up to so many times the cycles that are predicted for
# weight_only_mm_sm90: what is closer was faster here.
CLOSE = 1.05
# From 17 rows on, in as many tiles as it takes; N x K: of what weight_only_mm_sm90 takes too.
MAX_M, MAX_SIZE = 512, 2**24
ROWS_MEDIUM, MAX_ROWS_SHARED = (32, 64), 32  # of x, if it takes the way of shared memory
TILES_MEDIUM = ((16, 64), (32, 64), (32, 32), (16, 32))
WARPS_MEDIUM, SPLITS_MEDIUM = (4, 8, 16), (1, 2)
MOST_SUMS = 8192  # of all warps of a CTA: more would spill, or leave one CTA an SM


class WeightOnlyDirect(rules.WeightOnlyKernel):
    name = "weight_only_direct"
    template = "weight_only/direct/template"
    is_gluon = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if detail := problem.rows_outside(0, MAX_M):
            return no_kernel(detail)
        if device.arch not in ARCHS:
            return no_kernel(f"never run on sm_{device.arch}")
        refused = operand_rejection(spec, problem, device, FLOAT8, joins=True, lists=True)
        if refused is None and _is_for_bytes(spec, problem):
            return no_kernel(f"weight_only_bytes has better tiles for K = {problem.k}")
        return refused

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> DirectCodegen:
        weight = rules.weight_of(problem)
        (view, k_order), in_halves = words_in_order(weight), multiplies_halves(weight, config)
        if in_halves:
            config = _half(config)
        plan = plan_of(view, config, own=True)
        assert plan is not None
        tile = rules.tile_of(spec, view.weight, config)
        order = n_order(view.weight.format)
        is_few = has_few_rows(problem, config)

        def of(tile: WeightTile) -> DirectCodegen:
            return DirectCodegen(
                *(tile, view, plan, order),
                in_halves=in_halves,
                k_order=k_order,
                is_gated=problem.is_gated,
                masks_rows=is_few and not (_is_sorted(problem) and config.block_m == ROWS[0]),
                reads_once=is_few and not are_words_of_columns(weight),
                looks_up_pairs=looks_up_pairs(problem, config),
            )

        if not in_halves and scales_x(spec, weight, config):
            found = of(dataclasses.replace(tile, loop_ops=(), x_ops=tile.loop_ops))
            if found.is_in_16_bits():
                return found
        if not in_halves and (count := _count_sum_ops(spec, problem, config)):
            ops = tile.loop_ops
            found = of(dataclasses.replace(tile, loop_ops=ops[:-count], sum_ops=ops[-count:]))
            # unless what is added to codes is large
            if found.format.element.float8 or found.is_in_16_bits():
                return found
        return of(tile)

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        rows = ROWS
        if problem.m > DECODE_M:  # in tiles
            rows = ROWS_MEDIUM
            problem = dataclasses.replace(problem, m=min(problem.m, config.block_m))
        weight = rules.weight_of(problem)
        is_apart = bool(weight.format.code.high) or has_lists(weight.format)
        most = MAX_APART if is_apart else MAX_VALUES
        if is_apart and config.block_m == ROWS_MEDIUM[0]:
            most //= 2
        refused = tile_misfit(problem, config, device, most, rows)
        if refused is None and plan_of(words_in_order(weight)[0], config, own=True) is None:
            return bad_blocks(f"{config} does not suit the digits of {problem.weight}")
        return refused

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        if problem.m > DECODE_M:
            return self._medium_configs(spec, problem, device)
        weight = rules.weight_of(problem)
        is_narrow, is_joined = 0 < weight.format.code.width <= 4, bool(weight.format.code.high)
        kind = 3 if has_lists(weight.format) else 2 if is_joined else 0 if is_narrow else 1
        tiles, most_warps = list(TILES[kind]), MAX_WARPS
        is_of_columns = are_words_of_columns(weight)
        is_timed = device.arch in rules.WGMMA_ARCHS and problem.m <= ROWS[0]
        if kind == 1 and is_timed and not _has_groups_of_columns(weight):
            tiles.append(TILE_WIDE)
        if is_of_columns:
            tiles = list(TILES_ALONG_N) if kind == 0 else tiles
            if problem.m > ROWS[0]:
                tiles = [tile for tile in tiles if tile[0] <= MAX_COLUMNS]
                most_warps = MAX_WARPS_ALONG_N
        if is_joined and is_along_n(weight) and problem.m > ROWS[0]:
            tiles = [tile for tile in tiles if tile[0] >= LEAST_COLUMNS_JOINED]

        block_m = rows_of(problem)

        def is_scaling(config: GemmConfig) -> bool:
            return scales_sums(spec, weight, config)

        def cost_of(config: GemmConfig) -> float:
            plan = plan_of(words_in_order(weight)[0], config, own=True)
            return cost.of_few_rows(
                *(problem, config, device),
                scales_sums=is_scaling(config),
                x_is_shared=plan is not None and shares_x(plan, block_m),
                looks_up_pairs=looks_up_pairs(problem, config),
            )

        def cheapest(tiles: Iterable[tuple[int, int]]) -> list[GemmConfig]:
            return cheapest_of_each(
                problem,
                [*tiles],
                cost_of,
                lambda config: (
                    (not is_scaling(config) and has_many_zeros(weight, config))
                    or (kind == 1 and _is_too_wide(problem, config))
                    or (config.split_k > 1 and scales_x(spec, weight, config))
                    or self.config_rejection(spec, problem, config, device) is not None
                ),
                most_warps,
                LEAST_WARPS_JOINED if is_joined else 1,
            )

        scaling = [
            tile
            for tile in dict.fromkeys((TILE_SCALED, *tiles))
            if is_scaling(GemmConfig(block_m, *tile, 1, 1))
        ]
        is_any = kind > 1 or is_of_columns
        scaling += [
            tile
            for tile in TILES_X[block_m // ROWS[-1] :]
            if scales_x(spec, weight, GemmConfig(block_m, *tile, 1, 1))
        ]
        long = tiles if is_any else [tile for tile in tiles if tile[1] >= SLICE]
        found = cheapest(scaling or long) or cheapest(tiles)
        # words along N take tiles of 64 columns, whatever the others cost
        found.sort(key=lambda config: (is_of_columns and config.block_n != 64, cost_of(config)))
        if WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device) is None:
            least = WEIGHT_ONLY_MM_SM90.least_cycles(spec, problem, device)
            if least < library.cycles(problem, device):  # else that kernel would not be chosen
                found = [config for config in found if cost_of(config) < CLOSE * least]
        return split_k.same_split(found)

    def _medium_configs(
        self, spec: QuantGemmSpec, problem: Problem, device: Device
    ) -> list[GemmConfig]:
        """Those that cost less than ``weight_only_mm_sm90`` and the library."""
        format = rules.weight_of(problem).format
        is_small = problem.n * problem.k <= MAX_SIZE
        if device.arch not in rules.WGMMA_ARCHS:
            return []  # never timed there
        if not (is_small or varying(format) or format.code.high):
            return []  # never faster than weight_only_mm_sm90
        costs: dict[GemmConfig, float] = {}
        listed = itertools.product(ROWS_MEDIUM, TILES_MEDIUM, WARPS_MEDIUM, SPLITS_MEDIUM)
        for block_m, (block_n, slice_k), warps, split in listed:
            config = GemmConfig(block_m, block_n, slice_k * warps, warps, 1, split_k=split)
            is_empty = problem.m <= block_m // 2 and block_m > ROWS_MEDIUM[0]
            has_many = warps * block_m * block_n > MOST_SUMS
            is_wide = format.code.high and block_m == ROWS_MEDIUM[0] and block_n > COLUMNS_JOINED
            if (
                is_empty
                or has_many
                or is_wide
                or self.config_rejection(spec, problem, config, device)
            ):
                continue
            plan = plan_of(words_in_order(rules.weight_of(problem))[0], config, own=True)
            assert plan is not None
            x_is_shared = shares_x(plan, block_m)
            if x_is_shared and problem.m > MAX_ROWS_SHARED:
                continue
            costs[config] = cost.cycles(problem, config, device, x_is_shared=x_is_shared)
        most = WEIGHT_ONLY_MM_SM90.least_cycles(spec, problem, device)
        order = sorted(costs, key=costs.__getitem__)
        return split_k.same_split([config for config in order if costs[config] < most])


def _count_sum_ops(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> int:
    """How many of the last ops are applied to the sums of a warp's tile instead of W."""
    weight = rules.weight_of(problem)
    if scales_sums(spec, weight, config):
        return 2
    return int(has_few_rows(problem, config) and scales_sums_alone(spec, weight, config))


def has_few_rows(problem: Problem, config: GemmConfig) -> bool:
    """Up to 16, of a layer, of experts in any order, such as those of one token, or of an expert in
    the mean, if rows are sorted."""
    groups = problem.groups
    experts = groups.experts if groups is not None and groups.is_sorted else 1
    return max(problem.m / experts, config.block_m) <= DECODE_M


def _is_sorted(problem: Problem) -> bool:
    return problem.groups is not None and problem.groups.is_sorted


def _is_too_wide(problem: Problem, config: GemmConfig) -> bool:
    is_wide = (config.block_n, config.block_k // config.num_warps) == TILE_WIDE
    return is_wide and problem.k < LEAST_ITERATIONS_WIDE * config.block_k * config.split_k


def _has_groups_of_columns(weight: Weight) -> bool:
    """Whether each column has a scale or a zero point for each group along K, or several."""
    operands = [op.operand for op in weight.format.dequant_ops if isinstance(op.operand, Field)]
    blocks = [weight.format.block(field) for field in operands]
    return any(k > 0 and n == 1 for k, n in blocks)


def multiplies_halves(weight: Weight, config: GemmConfig) -> bool:
    """Whether a warp dequantizes and multiplies its tile in halves of K: with 16 rows, whose sums
    take many registers, and words along N, of which each column has a scale. A half has one
    group."""
    slice_k = config.block_k // config.num_warps
    is_large = config.block_m == ROWS[-1] and config.block_n * slice_k == MAX_VALUES * WARP_SIZE
    if not is_large or not are_words_of_columns(weight):
        return False
    operands = [op.operand for op in weight.format.dequant_ops if isinstance(op.operand, Field)]
    groups = [weight.format.block(field)[0] for field in operands]
    if any(group > 0 and group % (slice_k // 2) for group in groups):
        return False
    digits = tile_digits(as_words(weight).weight.format, "k", slice_k // 2)
    if not digits or half_digit(digits) is None:
        return False
    return plan_of(words_in_order(weight)[0], _half(config), own=True) is not None


def has_many_zeros(weight: Weight, config: GemmConfig) -> bool:
    """Whether float zero points of groups would spill beside ``MAX_VALUES`` a thread: those in
    fp32, or of each column of a word; with 16 rows, of more than two groups, or of two where 16
    warps have a CTA's few iterations."""
    slice_k = config.block_k // config.num_warps
    if config.block_n * slice_k <= MAX_VALUES_ZEROS * WARP_SIZE:
        return False
    operands = [op.operand for op in weight.format.dequant_ops if op.kind == "sub"]
    for field in operands:
        if not isinstance(field, Field) or field.width:
            continue
        dtype, group = weight.tensors[field.source].dtype, weight.format.block(field)[0]
        if not dtype.is_floating_point or group <= 1:
            continue
        if dtype.itemsize > 2 or are_words_of_columns(weight):
            return True
        least = slice_k if config.num_warps == MAX_WARPS else SMALL_GROUP
        if config.block_m == ROWS[-1] and group < least:
            return True
    return False


def _half(config: GemmConfig) -> GemmConfig:
    return dataclasses.replace(config, block_k=config.block_k // 2)


def tile_misfit(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    most: int,
    rows: Sequence[int] = ROWS,
) -> Rejection | None:
    """Why warps that share K cannot have such tiles, of at most ``most`` values a thread and of one
    of these numbers of ``rows``."""
    slice_k = config.block_k // config.num_warps
    if problem.k % slice_k or problem.k < config.split_k * config.block_k:
        return bad_blocks(f"{config}: slices of {slice_k} do not divide K={problem.k}")
    if config.num_stages > 1 or config.block_m not in rows or problem.m > config.block_m:
        return bad_blocks(f"{config} does not cover M={problem.m}")
    return rules.reject_if_too_many_unpacked(config, most) or tile_rejection(
        GemmConfig(16, config.block_n, 128, config.num_warps, 1),
        device,
        element_bytes=2,
        shared_bytes=config.num_warps * config.block_m * (config.block_n * 4 + slice_k * 2),
    )


def rows_of(problem: Problem) -> int:
    """BLOCK_M, for at most 16 rows."""
    return max(ROWS[0], 1 << (problem.m - 1).bit_length())


def cheapest_of_each(
    problem: Problem,
    tiles: Sequence[tuple[int, int]],
    cost_of: Callable[[GemmConfig], float],
    is_rejected: Callable[[GemmConfig], bool],
    most_warps: int = MAX_WARPS,
    least_warps: int = 1,
) -> list[GemmConfig]:
    """The cheapest configuration of each of ``tiles``, (columns, k) of a warp, that is not
    rejected."""
    block_m = rows_of(problem)
    found: list[GemmConfig] = []
    for block_n, slice_k in tiles:
        listed = [
            GemmConfig(block_m, block_n, slice_k * warps, warps, 1, split_k=split)
            for warps in _WARPS
            for split in _SPLITS
            if least_warps <= warps <= most_warps
        ]
        listed.sort(key=cost_of)
        found += itertools.islice((c for c in listed if not is_rejected(c)), 1)
    return found


def _is_for_bytes(spec: QuantGemmSpec, problem: Problem) -> bool:
    """Whether the tiles of ``weight_only_bytes``, which may end beyond K, are better: of whole
    bytes, where those of 32 columns do not divide K."""
    if problem.m > DECODE_M or problem.k % SLICE == 0:
        return False
    weight = rules.weight_of(problem)
    found = byte_layout_of(weight)
    return found is not None and has_partial_blocks(spec, *found)


WEIGHT_ONLY_DIRECT = WeightOnlyDirect()
