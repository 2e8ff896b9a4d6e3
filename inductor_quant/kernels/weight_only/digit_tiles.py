"""How kernels cover any weight format by the digits of n and k, and which formats they take."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.digits.codegen import TABLE
from inductor_quant.kernels.codegen.digits.narrow import HALF, is_in_place
from inductor_quant.kernels.codegen.digits.order import Order, is_linear, reordered, split
from inductor_quant.kernels.codegen.digits.tile import (
    VECTORS,
    TileDigit,
    TilePlan,
    is_listed,
    pair_bit,
    tile_digits,
    tile_plan,
    word_strides,
)
from inductor_quant.kernels.codegen.digits.words import (
    WordView,
    as_words,
    joined_words,
    words_of_runs,
)
from inductor_quant.kernels.codegen.packed_layout import BASES
from inductor_quant.kernels.codegen.runs import run_of
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem, Weight
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.rules import no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat

LEAST_PART = 16  # columns of x: 32 bytes, the least that its layouts in shared memory take
LEAST_SLICE = 32  # of K, that a warp of ``weight_only_direct`` has of words with several values
# Of a tile whose registers have values of both halves of a word: x of the two is put together, too,
# which is as much with more rows, and waited for where 16 warps have a CTA's few iterations.
MAX_ROWS_HALVES, MAX_WARPS_HALVES = 8, 8


def varying(format: WeightFormat) -> list[Field]:
    """The scales and zero points that change with every k, as where groups run along N."""
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    return [field for field in operands if format.block(field)[0] == 1]


def packed_zeros(format: WeightFormat) -> Field | None:
    """The zero points, if they are bits of words."""
    found = [format.element.minus, *(op.operand for op in format.dequant_ops if op.kind == "sub")]
    return next((each for each in found if isinstance(each, Field) and each.width), None)


def has_zeros(format: WeightFormat) -> bool:
    """Whether zero points are stored, as bits of words or as they are."""
    found = [op.operand for op in format.dequant_ops if op.kind in ("add", "sub")]
    return any(isinstance(each, Field) for each in (format.element.minus, *found))


def relayed(format: WeightFormat, n_digits: Sequence[TileDigit]) -> list[Field]:
    """Those of them that all columns of a tile share, and no tensor lists; none of tables."""
    if format.element != format.code:
        return []
    in_tile = {digit.name for digit in n_digits if digit.inner > 1}
    return [
        field
        for field in varying(format)
        if not (field.digits & in_tile or field.high or is_listed(format, field))
    ]


def loads_scales(weight: Weight, config: GemmConfig) -> bool:
    """Whether a tile has scales or zero points of each k and of several columns, and no list of
    where they are."""
    format, n_digits = columns_of(weight, config)
    return len(relayed(format, n_digits)) < len(varying(format)) and not has_lists(format)


def columns_in_a_row(weight: Weight, config: GemmConfig) -> int:
    """How many columns of a tile are neighbours."""
    format, n_digits = columns_of(weight, config)
    inner, run = {digit.name: digit.inner for digit in n_digits}, 1
    for name in reversed(format.digits("n")):
        run *= inner.get(name, 1)
        if inner.get(name, 1) < format.radix(name):
            break
    return run


def columns_of(weight: Weight, config: GemmConfig) -> tuple[WeightFormat, Sequence[TileDigit]]:
    """The format, and the digits of n of a tile."""
    format = words_in_parts(weight, config.block_k)[0].weight.format
    return format, tile_digits(format, "n", config.block_n, n_order(format)) or ()


def has_lists(format: WeightFormat) -> bool:
    """Whether a tensor lists the group of each k."""
    return any(is_listed(format, field) for field in varying(format))


def are_words_of_columns(weight: Weight) -> bool:
    """Whether the values of a word differ in n alone, as AWQ's."""
    in_word = as_words(weight).weight.format.code.offset.digits
    return bool(in_word) and all(name[0] == "n" for name in in_word)


def is_along_n(weight: Weight, field: Field | None = None) -> bool:
    """Whether neighbours along n have words that are neighbours in memory: those of the quantized
    values, or of another field."""
    strides = word_strides(weight, field or weight.format.code)
    return any(apart == 1 for name, apart in strides.items() if name[0] == "n")


def n_order(format: WeightFormat) -> list[str]:
    """The digits of n in the order in which a tile covers them. Last are those that choose a value
    of a word; before them, if scales change with every k, those that these scales do not depend
    on."""
    changing, in_word = varying(format), format.code.offset.digits

    def rank(name: str) -> int:
        is_shared = bool(changing) and all(name not in field.digits for field in changing)
        return 2 if name in in_word else int(is_shared)

    return sorted(format.digits("n"), key=rank)


@functools.lru_cache(maxsize=1024)
def words_in_order(weight: Weight) -> tuple[WordView, Order | None]:
    """``as_words`` with K in the order in which a tile covers it if x may be read in any, and that
    order, if it is another: last are the digits that choose a value of a word. K stays as it is if
    every tile has all values of its words: x is then read in order, by lanes of whole lines."""
    if weight.format.code.high:
        return words_of_runs(weight) or joined_words(weight) or as_words(weight), None
    view = as_words(weight)
    format = view.weight.format
    in_word = [digit for digit in format.digits("k") if digit in format.code.offset.digits]
    order = sorted(format.digits("k"), key=in_word.__contains__)
    reach = max((format.weight_of(digit) * format.radix(digit) for digit in in_word), default=1)
    if order == format.digits("k") or reach <= LEAST_SLICE:
        return view, None
    counted = dataclasses.replace(view.weight, format=reordered(format, "k", order))
    return dataclasses.replace(view, weight=counted), Order(format, tuple(order))


@functools.lru_cache(maxsize=1024)
def words_in_parts(weight: Weight, block_k: int) -> tuple[WordView, Order | None]:
    """``as_words`` with K in an order in which a tile of ``block_k`` has all values of its words,
    and that order, if it is another. x is then read in parts of neighbours along K: one for each
    value of a word that is far from the others."""
    view = as_words(weight)
    format, in_word = view.weight.format, view.weight.format.code.offset.digits
    apart = [d for d in format.digits("k") if d in in_word and format.weight_of(d) >= block_k]
    part = block_k // math.prod(map(format.radix, apart))
    if not apart or part < LEAST_PART:
        return view, None
    reached = (
        d for d in reversed(format.digits("k")) if format.weight_of(d) * format.radix(d) >= part
    )
    last = next(reached)
    low = part // format.weight_of(last)
    if part % format.weight_of(last) or format.radix(last) % low:
        return view, None
    if low < format.radix(last):
        if not is_linear(format, last):
            return view, None
        format = split(format, last, low)

    def rank(name: str) -> int:
        return 1 if name in apart else 0 if format.weight_of(name) >= part else 2

    order = sorted(format.digits("k"), key=rank)
    counted = dataclasses.replace(view.weight, format=reordered(format, "k", order))
    return dataclasses.replace(view, weight=counted), Order(format, tuple(order))


def plan_of(
    view: WordView,
    config: GemmConfig,
    *,
    own: bool = False,
    low: tuple[int, ...] | None = None,
    ends_beyond: bool = False,
    in_pairs: bool = False,
) -> TilePlan | None:
    """How a tile is assigned to threads; None: the blocks end within a digit, or are too small.
    ``low``: as ``tile_plan`` takes it, by default for 16-bit x; ``ends_beyond``: the last tile may
    end beyond K; ``in_pairs``: as ``tile_plan`` takes it."""
    warps = config.num_warps
    tile_k = config.block_k // (warps if own else 1)
    in_halves = own and config.block_m <= MAX_ROWS_HALVES and warps <= MAX_WARPS_HALVES
    of_lanes = own, low, in_halves, ends_beyond, in_pairs
    return _plan_of(view.weight, config.block_n, tile_k, warps, *of_lanes)


def _bit_of_halves(format: WeightFormat, k: Sequence[TileDigit]) -> int | None:
    """The bit of k that tells the halves of a word apart: fields at the same place of both are
    unpacked together without moving them. None: there is none, a table takes eight at once, or each
    k has a scale of its own, of which neighbours share a register."""
    if format.element != format.code or format.code.width == 8 or varying(format):
        return None
    offset, first = dict(format.code.offset.linear), 0
    for digit in reversed(k):
        count = digit.inner.bit_length() - 1
        for bit in range(count):
            if offset.get(digit.name, 0) << bit == HALF:
                return first + bit
        first += count
    return None


# Many configurations have one tile, and are looked at several times for one GEMM.
@functools.lru_cache(maxsize=4096)
def _plan_of(
    weight: Weight,
    block_n: int,
    tile_k: int,
    warps: int,
    own: bool,
    low: tuple[int, ...] | None,
    in_halves: bool,
    ends_beyond: bool,
    in_pairs: bool,
) -> TilePlan | None:
    format = weight.format
    n = tile_digits(format, "n", block_n, n_order(format))
    k = tile_digits(format, "k", tile_k, ends_beyond=ends_beyond)
    if not n or not k:
        return None
    # These are computed where only the position within the tile is known.
    outer = {digit.name for digit in k if digit.outer > 1}
    for field in format.fields():
        tables = {name for index in field.index for name, _ in index.tables}
        if (field.offset.digits | tables) & outer:
            return None
    if low is None:
        low = (0,) if is_in_place(format.code, 8, is_float=True) else ()
        apart = _bit_of_halves(format, k) if low and in_halves else None
        low = low if apart is None else (apart,)
    # A thread that rounds the table of each group takes long parts of groups; one that looks up the
    # group of each k takes many columns.
    is_long = format.element != format.code or has_lists(format)
    vectors = (2 * VECTORS[0], *VECTORS) if own and is_long else VECTORS
    return tile_plan(
        *(weight, format.code, n, k),
        warps=warps,
        low=low,
        own=own,
        vectors=vectors,
        in_pairs=in_pairs,
    )


def pair_of(weight: Weight, config: GemmConfig, *, in_order: bool = False) -> int | None:
    """``pair_bit`` of a tile of ``plan_of``."""
    format = (words_in_order(weight)[0] if in_order else as_words(weight)).weight.format
    digits = tile_digits(format, "n", config.block_n, n_order(format))
    return pair_bit(format, digits) if digits else None


def operand_rejection(
    spec: QuantGemmSpec,
    problem: Problem,
    device: Device,
    float8: tuple[torch.dtype, ...] = (),
    *,
    joins: bool = False,
    lists: bool = False,
) -> Rejection | None:
    """Rejects all but 16-bit x with aligned rows and formats that there are statements for.
    ``float8``: types that the kernel converts. ``joins``: it joins numbers of several fields.
    ``lists``: the group of each k may be listed."""
    refused = rules.rejection(spec, problem, device) or rules.reject_if_unaligned_rows(problem)
    if refused is not None:
        return refused
    if spec.a.dtype not in BASES:
        return no_kernel(f"x of {spec} does not have 16 bits")
    weight = rules.weight_of(problem)
    loop_ops, _ = rules.dequant_ops_of(spec, weight)
    return format_rejection(weight, loop_ops, float8, joins=joins, lists=lists)


def format_rejection(
    weight: Weight,
    loop_ops: Sequence[DequantOp],
    float8: tuple[torch.dtype, ...] = (),
    *,
    joins: bool = False,
    lists: bool = False,
) -> Rejection | None:
    """``loop_ops``: those that are not applied to sums."""
    format = weight.format
    if set(format.digits("k") + format.digits("n")) - format.code.digits:
        return no_kernel("quantized values are repeated")
    if format.code.minus or (format.code.high and not joins):
        return no_kernel("a value is a difference of integers, or joined from several fields")
    if format.code.high and not (words_of_runs(weight) or joined_words(weight)):
        return no_kernel("a value is joined from fields that are no bytes of words")
    for op in format.dequant_ops:
        if isinstance(op.operand, Field) and op.operand.high:
            run = run_of(format, op.operand)
            if run is None or run.digit[0] != "n":
                return no_kernel("a zero point is joined from several fields")
    table = format.element
    if table != format.code:
        sizes = weight.tensors[table.source].shape
        if sizes != (TABLE,) or len(table.index) != 1 or table.width:
            return no_kernel(f"a table of {sizes}, not of {TABLE} values")
    dtype = weight.tensors[format.code.source].dtype
    code = as_words(weight).weight.format.code
    is_read = code.float8 and is_in_place(code, 8, is_float=True)
    if dtype not in (torch.int32, torch.int8, torch.uint8, *float8) and not is_read:
        return no_kernel(f"quantized values in {dtype}")
    if any(index.is_data for index in (*format.code.index, format.code.offset)):
        return no_kernel("the position of a value is data")
    for field in format.fields():
        if any(index.bounds(format.radix)[0] < 0 for index in field.index):
            return no_kernel("positions are counted from the end")
    for number, op in enumerate(format.dequant_ops):
        if not isinstance(op.operand, Field):
            continue
        if op.operand.size or (op.kind == "div" and number < len(loop_ops)):
            return no_kernel("scales of groups divide, or groups are counted from the end")
        if is_listed(format, op.operand) and not (lists and _is_looked_up(weight, op.operand)):
            return no_kernel("the group of each k is data")
    return None


def _is_looked_up(weight: Weight, field: Field) -> bool:
    """Whether a field that is listed depends on k through plain lists alone, and neighbours along n
    are neighbours in memory, as those of the quantized values: a thread loads several at once."""
    own = {name for index in field.index for name, _ in (*index.linear, *index.tables)}
    is_plain = not any(name[0] != "n" for name in own | field.offset.digits) and not any(
        each.is_position or each.nested or each.high for each in field.nested
    )
    return is_plain and is_along_n(weight) and is_along_n(weight, field)
