"""``weight_only_mm_sm90``: x [M, K] @ W [K, N] for every weight format, in Gluon with TMA.

Chosen on sm_90 for 16-bit x whose rows are aligned and M from 17 on, or from 9 on where there are
tiles for it (``_has_few_rows``), or from 1 on of bytes whose K 64 does not divide, if the packed
words of a tile are a box of a matrix (``box``), while ``weight_only_direct``, or W written once and
a product of the library, take longer.

swap_ab, with wgmma, warp-specialized and persistent: producer warps load x and packed weights by
TMA, and the consumer warpgroups take turns at dequantizing and multiplying. The statements that
read and dequantize W follow from the digits of the format. W goes from shared memory to the
registers of wgmma's first operand and is never written.

Where tiles would leave SMs idle, K is split, and the CTAs of a tile exchange their sums
(``exchanged_slices``) or the lowering adds partials; or the K iterations of all tiles are divided
evenly among the CTAs, which add what others leave them (stream-K). Two consumers of a CTA may take
turns along K (``consumers``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from inductor_quant.kernels.codegen.digits import pair_lookup
from inductor_quant.kernels.codegen.digits.tile import TilePlan
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.kernel import ColumnOrder
from inductor_quant.kernels.problem import DECODE_M, Device, Problem, Weight
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.shared.grids import tile_grid
from inductor_quant.kernels.weight_only import library, rules
from inductor_quant.kernels.weight_only.digit_tiles import (
    columns_of,
    has_lists,
    loads_scales,
    n_order,
    operand_rejection,
    pair_of,
    words_in_parts,
)
from inductor_quant.kernels.weight_only.mm_sm90.box import WordBox
from inductor_quant.kernels.weight_only.mm_sm90.codegen import MMSm90Codegen
from inductor_quant.kernels.weight_only.mm_sm90.cost import (
    BLOCKS,
    LOOKED_UP,
    LOOKED_UP_IN_PAIRS,
    MOST_M_LONG,
    Costs,
    blocks_for,
    has_long_block,
    stores_tiles,
)
from inductor_quant.kernels.weight_only.mm_sm90.loop import (
    MAX_ACCUMULATORS,
    UNROLLED,
    WARPGROUP,
    boxed,
    consumers,
    count_copied,
    ctas_per_sm,
    exchanged_slices,
    has_halves,
    is_crowded,
    loaded_together,
    memory_of_cta,
    memory_of_tile,
    most_ctas,
    of_consumer,
    padded,
    rows_of,
    strips_of,
    turns_misfit,
    unrolls,
)
from inductor_quant.kernels.weight_only.mm_sm90.products import products_of
from inductor_quant.kernels.weight_only.mm_sm90.relay import listed_positions
from inductor_quant.kernels.weight_only.row_boxes import RowBoxes
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import Field

REGISTERS, THREADS = 65536, 256  # of an SM; of a CTA with one warpgroup of consumers
# If threads load a scale for each value of a tile: values of a tile, and M up to which it is faster
# than W written once.
MAX_VARYING, MAX_VARYING_M = 4096, 128
NARROW = BLOCKS[0][0]  # a tile
# A tile that takes 1.05 to 1.22 of the time that is predicted if values are looked up in a table.
NOT_LOOKED_UP = (32, 128, 64)
SPLITS = (1, 2, 3, 4, 5, 6)
LEAST_M = 9  # of a layer that has tiles for it; up to 8 rows weight_only_direct has tiles of 8
MIN_K_ITERS = 8  # of a split
POWERS = ("block_n", "block_k", "num_warps")  # of two
SIGNAL = 8  # bytes, with which a warp says that its sums are there


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
        least = _least_m(problem)
        if problem.m < least and problem.m_is_bounded:
            return no_kernel(f"M = {problem.m} is not above {least - 1}")
        if not problem.has_weight_descriptors:
            return no_kernel("x or the packed weights have no TMA descriptor")
        refused = operand_rejection(spec, problem, device, lists=self.takes_lists)
        if refused is not None:
            return refused
        weight, narrow = rules.weight_of(problem), GemmConfig(*NARROW)
        is_loaded = loads_scales(weight, narrow) or has_lists(weight.format)
        if problem.m > MAX_VARYING_M and is_loaded and not rows_of(weight, narrow):
            return no_kernel("a scale for each weight of a tile is loaded")
        if any(
            index.linear or index.tables for index, _ in listed_positions(rules.weight_of(problem))
        ):
            return no_kernel("where a field is depends on a list and on n")
        return None

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, strips: int = 1
    ) -> MMSm90Codegen:
        found = boxed(rules.weight_of(problem), config, in_pairs=True)
        if found is not None:
            codegen = self._codegen(spec, problem, config, found, strips)
            if codegen.reads_pairs:
                return codegen
        found = boxed(rules.weight_of(problem), config)
        assert found is not None
        return self._codegen(spec, problem, config, found, strips)

    def _codegen(
        self,
        spec: QuantGemmSpec,
        problem: Problem,
        config: GemmConfig,
        found: tuple[TilePlan, WordBox],
        strips: int,
    ) -> MMSm90Codegen:
        view, k_order = words_in_parts(rules.weight_of(problem), config.block_k)
        tile = rules.tile_of(spec, view.weight, of_consumer(config))
        codegen = MMSm90Codegen(
            *(tile, view, found[0], n_order(view.weight.format)),
            k_order=k_order,
            is_gated=problem.is_gated,
            strips=strips,
            has_halves=has_halves(problem, config),
        )
        boxes = RowBoxes.of(problem, config.block_m, has_halves=codegen.has_halves)
        codegen.load_in(boxes)
        codegen.load_together(loaded_together(problem, config))
        return codegen

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        found = super().constants(spec, problem, config, device)
        found["CONSUMERS"] = consumers(config)
        found["SHARES_TILES"] = self.shares_tiles(spec, problem, config, device)
        found["TILE_ORDER"] = self.column_order(spec, problem, config, device) is not None
        if slices := exchanged_slices(problem, config, device):
            strips = strips_of(slices)
            found |= {
                "CODEGEN": self.codegen(spec, problem, config, strips),
                "EXCHANGED_SLICES": slices,
                "STRIPS": strips,
                "SPLIT_K": 1,
            }
        return {**found, "COPIED": count_copied(problem, config, found)}

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        ctas, together = ctas_per_sm(problem, config, device), loaded_together(problem, config)
        offered = unrolls(problem, config)
        return constants_of(problem, config, device, ctas, offered, together=together)

    def scratch(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> int:
        sums = config.block_m * config.block_n
        signals = of_consumer(config).num_warps * SIGNAL // 4
        if slices := exchanged_slices(problem, config, device):
            tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
            return tiles * slices * (sums + slices * signals)
        if self.shares_tiles(spec, problem, config, device):
            return ctas_per_sm(problem, config, device) * device.num_sms * (sums + signals)
        return 0

    def launched_warps(self, config: GemmConfig) -> int:
        return of_consumer(config).num_warps

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

    def column_order(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> ColumnOrder | None:
        if not stores_tiles(problem, config):
            return None
        format, n_digits = columns_of(rules.weight_of(problem), config)
        names = [digit.name for digit in n_digits]
        return ColumnOrder(
            tuple(map(format.radix, names)), tuple(map(names.index, format.digits("n")))
        )

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
        if consumers(config) > 1 and (misfit := turns_misfit(problem, config, device)):
            return bad_blocks(f"{config}: {misfit}")
        whole = dataclasses.replace(config, split_k=1)
        tiles = most_ctas(config) * memory_of_tile(weight, whole)
        return tile_misfit(
            *(problem, of_consumer(config), device, boxed(weight, config)),
            memory=max(tiles, memory_of_cta(weight, whole)),
            offered=unrolls(problem, config),
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
        legal = []
        blocks = blocks_for(rules.weight_of(problem))
        for block, split in itertools.product((block for block, *_ in blocks), SPLITS):
            config = GemmConfig(*block, split_k=split)
            if split > 1 and problem.k < split * config.block_k * MIN_K_ITERS:
                continue
            if not _suits_rows(problem, config) or is_crowded(problem, config):
                continue
            if block[:3] == NOT_LOOKED_UP and looks_up_pairs(problem):
                continue
            if self.config_rejection(spec, problem, config, device) is not None:
                continue
            is_large = split > 1 or config.block_n * config.block_k > MAX_VARYING
            if not (is_large and loads_scales(rules.weight_of(problem), config)):
                legal.append(config)
        if not legal:
            return {}
        costs = self._costs(spec, problem, legal[0], device)
        listed = [config for config in legal if costs.listed(config)]
        return {config: min(costs.whole(config), costs.shared(config)) for config in listed}


def _has_few_rows(problem: Problem) -> bool:
    """Whether tiles are offered up to 16 rows: for a single layer those of 16 rows, for that of a
    table, which is slower in ``weight_only_direct``, of 32 too."""
    blocks = (block for block, *_ in blocks_for(rules.weight_of(problem)))
    has_tiles = any(block_m <= DECODE_M for block_m, *_ in blocks)
    return problem.groups is None and (has_tiles or looks_up_pairs(problem))


def _least_m(problem: Problem) -> int:
    if _has_ragged_bytes(problem):
        # The tiles of weight_only_bytes, which may end beyond K, are faster for int8 up to 8 rows.
        weight = rules.weight_of(problem)
        is_integer = weight.tensors[weight.format.code.source].dtype == torch.int8
        is_scaled = all(op.kind in ("mul", "div") for op in weight.format.dequant_ops)
        return LEAST_M if is_integer and is_scaled else 1
    return LEAST_M if _has_few_rows(problem) else DECODE_M + 1


def _has_ragged_bytes(problem: Problem) -> bool:
    """Whether W is whole bytes, with numbers that all of a column share, of a K that 64 does not
    divide: ``weight_only_direct`` has hardly a tile for them. Of others nothing was timed."""
    format = rules.weight_of(problem).format
    fields = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    is_of_columns = all(format.block(field)[0] < 0 for field in fields)
    is_byte = not format.code.width and format.element == format.code
    return is_byte and is_of_columns and problem.k % NARROW[2] != 0


def _suits_rows(problem: Problem, config: GemmConfig) -> bool:
    """Whether half of a tile's rows, or more, are there. Up to 16 rows one tile has them; if M is
    any number, it is taken to be larger."""
    m = problem.m if problem.m_is_bounded else max(problem.m, DECODE_M + 1)
    if m <= DECODE_M:
        is_other = looks_up_pairs(problem) or _has_ragged_bytes(problem)
        return config.block_m <= (2 * DECODE_M if is_other else DECODE_M)
    if has_long_block(config):
        # With a table in each CTA one tile has all rows.
        most = config.block_m if looks_up_pairs(problem) else MOST_M_LONG
        if m > most or not problem.m_is_bounded:
            return False
    return DECODE_M < config.block_m < 2 * m


def tile_misfit(
    problem: Problem,
    config: GemmConfig,
    device: Device,
    found: tuple[TilePlan, WordBox] | None,
    *,
    memory: int,
    sums: int = 1,
    offered: Sequence[int] = UNROLLED,
) -> Rejection | None:
    """Why ``config``, whose tiles are ``found``, cannot run; ``memory``: bytes of shared memory of
    the CTAs of an SM; ``sums``: accumulators for each output; ``offered``: K iterations in the
    loop's body."""
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
    first, more = products_of(config.block_m)
    if more and not (has_halves(problem, config) and 2 * more == first):
        return bad_blocks(f"{config}: tiles of two products are those of experts, with 96 rows")
    most = MAX_ACCUMULATORS // sums
    return rules.reject_if_too_many_accumulators(config, most) or tile_rejection(
        *(config, device), element_bytes=2, shared_bytes=memory, powers=POWERS
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
        "STRIPS": 1,
        "TILE_ORDER": False,
        "MAX_REGISTERS": REGISTERS // (ctas * THREADS) if ctas > 1 else 0,
    }


def looks_up_pairs(problem: Problem) -> bool:
    """Whether values are looked up in a table, two at a time."""
    view = words_in_parts(rules.weight_of(problem), NARROW[2])[0]
    found = boxed(rules.weight_of(problem), GemmConfig(*NARROW))
    return found is not None and pair_lookup.places_of(view.weight, found[0]) is not None


def count_words(weight: Weight) -> int:
    """Elements of the packed weight as they are read: bytes four at a time."""
    weight = as_words(weight).weight
    return math.prod(size or 0 for size in weight.tensors[weight.format.code.source].shape)


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
