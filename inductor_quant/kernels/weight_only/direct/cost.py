"""The time of a configuration of ``weight_only_direct``; README.md says what was measured."""

from __future__ import annotations

import dataclasses
import math

import torch

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem, Weight
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import has_lists, varying, words_in_order
from inductor_quant.kernels.weight_only.direct.codegen import MAX_WARPS, warps_at_once
from inductor_quant.spec.weight_format import Field, WeightFormat


@dataclasses.dataclass(frozen=True)
class FewRows:
    """What a tile of at most 16 rows costs, in cycles of which 1755 are a microsecond.

    launch           the launch
    split, partials  of K that is split; each 1000 partials
    bytes_per_cycle  of W that the GPU reads
    value, product   of an iteration, what the SM does for each value of W, and for 64 rows of it
    x                and for each value of x
    wait, wait_value, wait_x
                     of an iteration, its wait; for each value of W and of x of a thread
    warp, sums       a warp, and each 1024 sums of it
    wide, looked_up, in_pairs, computed
                     times as many cycles for W: for values above 4 bits, from a table, from one
                     that is looked up in pairs, from one whose entries are computed
    pairs            to write a table of pairs
    long             times as many cycles with 16 rows and 4 bits or more, where LONG_WARPS and more
                     have several slices of LONG_SLICE of K: x and W take their registers
    """

    launch: float
    split: float
    partials: float
    bytes_per_cycle: float
    value: float
    product: float
    wait: float
    wait_value: float
    warp: float
    sums: float
    wide: float
    looked_up: float
    in_pairs: float = 1.0
    computed: float = 1.5
    pairs: float = 0.0
    x: float = 0.0
    wait_x: float = 0.0
    long: float = 1.0


LAYER = FewRows(
    launch=2460,
    split=2020,
    partials=1.64,
    bytes_per_cycle=2410,
    value=0.0091,
    product=0.0503,
    wait=269,
    wait_value=2.93,
    warp=64,
    sums=120,
    wide=1.25,
    looked_up=2.7,
    in_pairs=0.92,
    computed=2.0,
    pairs=710,
    x=0.0064,
    wait_x=5.31,
    long=1.11,
)
LONG_SLICE, LONG_WARPS = 128, 8
FEW_X_SHARED = 1.7  # times as many cycles for x if it takes the way of shared memory
JOINED = 3.0  # and for W of several fields (whatever the rows)
# If scales and zero points of groups are applied to sums: by columns and k of a warp's tile.
SUMMED_COLUMNS, SUMMED_K = 6.5, 24.5
# From 17 rows on, in the same cycles: the launch; partials of K. Of an iteration, what the SM does
# for each k of a warp: for a row of x, for a column, for 64 of both.
LAUNCH_CYCLES, SPLIT_CYCLES = 2050, 1835
ROW_CYCLES, COLUMN_CYCLES, PRODUCT_CYCLES = 0.0127, 0.0281, 0.0022
# Its wait: for memory, for 32 values of W, for 64 of x. And each 1024 sums of a warp.
WAIT_CYCLES, WAIT_W_CYCLES, WAIT_X_CYCLES, SUM_CYCLES = 589, 3.05, 4.96, 124
# Times as many cycles for W: for each doubling of its bits, from 4 on; from a table, one that is
# rounded for each small group, and one whose entries are computed; if x takes the way of shared
# memory; if scales change with every k.
WIDTH, LOOKED_UP, ROUNDED, COMPUTED, X_SHARED, VARYING = 1.365, 1.48, 1.63, 1.2, 1.78, 3.0
SMALL_GROUP = 32
# If a tensor lists the group of each k, times as many cycles for W: for a value, and for each k of
# a tile. From instructions: they tell tiles apart, what was timed took up to 1.7 times as long.
LISTED, LISTED_K = 1.3, 41.0
LISTED_WAIT = 1.65  # with 9 to 16 rows times as many cycles of all but the launch, as was timed
# Of all, if x is read in another order.
UNEVEN = 1.35


def of_few_rows(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    *,
    scales_sums: bool = False,
    x_is_shared: bool = False,
    looks_up_pairs: bool = False,
    costs: FewRows = LAYER,
) -> float:
    """Of at most 16 rows; ``scales_sums``: instead of W; ``x_is_shared``: as below;
    ``looks_up_pairs``: in a table in shared memory."""
    weight = rules.weight_of(problem)
    format = weight.format
    width = format.code.total_width or 8
    slice_k = config.block_k // config.num_warps
    iterations = math.ceil(math.ceil(problem.k / slice_k / config.split_k) / config.num_warps)
    of_one_sm = math.ceil(math.ceil(problem.n / config.block_n) * config.split_k / device.num_sms)
    waves = math.ceil(of_one_sm / (MAX_WARPS // config.num_warps))
    warps, values = of_one_sm * config.num_warps, config.block_n * slice_k
    x_values = config.block_m * slice_k * (FEW_X_SHARED if x_is_shared else 1)
    factor = costs.wide if width > 4 else 1.0
    if format.element != format.code:
        looked_up = costs.in_pairs if looks_up_pairs else costs.looked_up
        factor *= costs.computed if _is_computed(weight) else looked_up
    factor *= JOINED if format.code.high else 1.0
    factor *= _of_list(format, config) or 1.0
    factor *= SUMMED_COLUMNS / config.block_n + SUMMED_K / slice_k if scales_sums else 1.0
    busy = values * (costs.value * factor + costs.product * config.block_m / 64)
    busy += costs.x * x_values
    wait = costs.wait + (costs.wait_value * values * factor + costs.wait_x * x_values) / 32
    loop = iterations * (warps * busy + waves * wait)
    reading = problem.n * problem.k * width / 8 / costs.bytes_per_cycle
    sums = costs.sums * warps * config.block_m * config.block_n / 1024
    partials = costs.partials * config.split_k * problem.m * problem.n / 1000
    total = costs.launch + math.hypot(loop, reading) + sums
    total += waves * (costs.warp * config.num_warps + costs.pairs * looks_up_pairs)
    total += costs.split + partials if config.split_k > 1 else 0
    is_long = config.num_warps >= LONG_WARPS and slice_k >= LONG_SLICE
    is_full = is_long and width >= 4 and iterations > 1 and config.block_m > 8
    total *= costs.long if is_full else 1.0
    is_listed = has_lists(format) and config.block_m > 8
    return costs.launch + (total - costs.launch) * (LISTED_WAIT if is_listed else 1.0)


def cycles(problem: Problem, config: GemmConfig, device: Device, *, x_is_shared: bool) -> float:
    """Of more than 16 rows; ``x_is_shared``: x takes the way of shared memory."""
    rows, columns, slice_k = config.block_m, config.block_n, config.block_k // config.num_warps
    slices = math.ceil(problem.k / slice_k / config.split_k)
    iterations = math.ceil(slices / config.num_warps)
    ctas = math.ceil(problem.m / rows) * math.ceil(problem.n / columns) * config.split_k
    of_one_sm = math.ceil(ctas / device.num_sms)
    waves = math.ceil(of_one_sm / max(1, warps_at_once(rows) // config.num_warps))
    dequantized = _factor(rules.weight_of(problem), config) * (X_SHARED if x_is_shared else 1)
    busy = ROW_CYCLES * min(problem.m, rows) + COLUMN_CYCLES * columns * dequantized
    busy = slice_k * (busy + PRODUCT_CYCLES * rows * columns / 64)
    wait = WAIT_W_CYCLES * columns / 32 * dequantized + WAIT_X_CYCLES * rows / 64
    wait = WAIT_CYCLES + slice_k * wait
    warps = of_one_sm * config.num_warps
    loop = iterations * (warps * busy + waves * wait)
    sums = SUM_CYCLES * warps * rows * columns / 1024
    weight = rules.weight_of(problem)
    is_uneven = words_in_order(weight)[1] is not None
    total = LAUNCH_CYCLES + loop + sums + (SPLIT_CYCLES if config.split_k > 1 else 0)
    return total * (UNEVEN if is_uneven else 1)


def _is_computed(weight: Weight) -> bool:
    """Whether the entries of a table are computed: not if scales of groups are in fp32."""
    format = weight.format
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    of_groups = [field for field in operands if format.block(field)[0] > 0]
    is_wide = any(weight.tensors[field.source].dtype == torch.float32 for field in of_groups)
    return bool(format.element.entries) and not is_wide


def _of_list(format: WeightFormat, config: GemmConfig) -> float:
    """Times as many cycles for W if a tensor lists the group of each k; else 0."""
    return LISTED + LISTED_K / config.block_n if has_lists(format) else 0.0


def _factor(weight: Weight, config: GemmConfig) -> float:
    """Times as many cycles as 4 bits take."""
    format = weight.format
    factor = WIDTH ** math.log2((format.code.total_width or 8) / 4)
    factor *= _of_list(format, config) or (VARYING if varying(format) else 1)
    factor *= JOINED if format.code.high else 1
    if format.element == format.code:
        return factor
    if _is_computed(weight):
        return factor * COMPUTED
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    is_small = any(0 < format.block(field)[0] <= SMALL_GROUP for field in operands)
    return factor * LOOKED_UP * (ROUNDED if is_small else 1)
