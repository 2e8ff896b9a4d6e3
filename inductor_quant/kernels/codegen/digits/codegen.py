"""Gluon statements that load a tile of any format to registers and dequantize it there.

A value has one dimension for each digit of the tile (``tile``). What is loaded for one K
iteration is kept in registers while the one before is dequantized: ``load`` and ``dequantized`` are
apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import Codegen, Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import Dim, bits
from inductor_quant.kernels.codegen.digits import narrow, pair_lookup, table_lookup
from inductor_quant.kernels.codegen.digits.statements import DigitStatements, Listed, Uses, sum_of
from inductor_quant.kernels.codegen.digits.tile import (
    WARP,
    TileDigit,
    TilePlan,
    is_listed,
    pair_bit,
    tile_digits,
)
from inductor_quant.kernels.codegen.digits.words import WordView
from inductor_quant.kernels.codegen.gluon_columns import Gluon
from inductor_quant.kernels.codegen.gluon_layout import Layout, layout, positions
from inductor_quant.kernels.codegen.runs import run_of
from inductor_quant.kernels.codegen.unpack_ptx import PLACES
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field

BYTE_TYPES = (torch.uint8, torch.int8)
TABLE = 16  # entries of a table that lanes hold, one each


class DigitCodegen(Codegen):
    """``n_order``: the digits of n in the order in which a tile covers them; ``is_gated``: the last
    digit of n chooses a column of a pair, of which one is stored.

    looks_up_pairs  a table is looked up in shared memory, if ``start_of_cta`` and ``started_cta``
                    are called
    raised          listed zero points that are read with what wraps around already added
    is_in_fp32      W is not dequantized in 16 bits
    folds           one multiply-add may subtract a zero point and scale (``narrow.folds_zero``)
    word_policy     arguments of the loads of words
    unknown_zero    a variable that is 0 and that the compiler cannot fold: a multiply-add with two
                    constants would copy one of them to a register each time
    """

    unknown_zero = word_policy = ""
    looks_up_pairs = is_in_fp32 = ends_beyond = folds = False
    raised: tuple[Field, ...] = ()

    def __init__(
        self,
        tile: WeightTile,
        view: WordView,
        plan: TilePlan,
        n_order: list[str],
        *,
        is_gated: bool = False,
    ) -> None:
        super().__init__(tile)
        self.view = view
        self.dialect = Gluon(plan.layout)
        self.plan = plan
        self.shape = [digit.inner for digit in plan.digits]
        self.n_digits = tile_digits(self.format, "n", self.block_n, n_order) or ()
        self.is_warps_own = any(digit.name == WARP for digit in plan.digits)
        self.tile_k = self.block_k // (self.warps if self.is_warps_own else 1)
        self.k_digits = (
            tile_digits(self.format, "k", self.tile_k, ends_beyond=self.ends_beyond) or ()
        )
        self.table = self.format.element if self.format.element != self.format.code else None
        operands = [op.operand for op in (*self.loop_ops, *self.sum_ops, *self.x_ops)]
        self.words = parts = view.parts or (self.format.code,)
        fields = [each for each in operands if isinstance(each, Field)]
        self.runs = {field: run for field in fields if (run := run_of(self.format, field))}
        # What each k has of its own is read when it is used: only the list of groups is kept.
        self.listed = [each for each in fields if is_listed(self.format, each)]
        lists = [each for field in self.listed for each in field.nested]
        plain = [each for each in fields if each not in self.listed]
        read = [self.runs[each].ends if each in self.runs else (each,) for each in plain]
        self.loaded = list(dict.fromkeys([*parts, *itertools.chain(*read), *lists]))
        # Digits of K that choose a field, but are the same in a tile.
        in_word = {name for part in parts for name in part.offset.digits}
        self.digits_of_places = [
            digit.name for digit in self.k_digits if digit.outer > 1 and digit.name in in_word
        ]
        # Bits of n: of a row of the MMA, the lowest first; and the highest first, as in memory and
        # as the MMA has them.
        columns: tuple[Dim, ...] = tuple((f"n{bit}", 2) for bit in range(len(plan.rows)))
        self.mma_rows = tuple(columns[bit] for bit in plan.rows)
        self.column_dims, self.mma_dims = columns[::-1], self.mma_rows[::-1]
        bit = pair_bit(self.format, self.n_digits) if is_gated else None
        self.pair: Dim | None = None if bit is None else columns[bit]
        self.stored_dims = tuple(dim for dim in self.column_dims if dim != self.pair)
        self.layouts: dict[str, Layout | str] = {"LOADED": plan.loaded, "TILE": plan.layout}
        if self.listed:
            self.layouts["LISTED"] = plan.along_n()
        self.places = table_lookup.places_of(tile.weight, plan)
        self.pair_places = pair_lookup.places_of(tile.weight, plan) if self.looks_up_pairs else None
        if self.pair_places:
            self.layouts["ENTRIES"] = pair_lookup.layout_of_entries(self.warps)
        elif self.table and not self.places:
            lanes = bits("e", TABLE)
            placed: Any = {"lanes": (*reversed(lanes), ("none", 2)), "warps": (("no", self.warps),)}
            self.layouts["TABLE"] = layout((lanes,), **placed)

    # Appended to constants of the loop that ``start`` hides from ptxas.
    or_hidden_zero = ""

    @property
    def stored_m(self) -> int:
        """The rows of a tile that a CTA stores at once."""
        return self.block_m

    @property
    def divisor(self) -> int:
        """What ``dequantized`` in 16 bits leaves W divided by, where W itself is not scaled, or
        with its zero point in one multiply-add: sums are multiplied by it, with a scale of theirs
        or if they ``are_divided``."""
        if narrow.folds_zero(self):
            return 1 << narrow.FOLDED_BITS
        is_scaled = any(op.kind != "sub" for op in self.loop_ops)
        is_scaled = is_scaled or bool(self.format.element.float8)
        return 1 if is_scaled or self.x_dtype not in PLACES else PLACES[self.x_dtype].divisor

    @property
    def are_divided(self) -> bool:
        """Whether the template's sums over K are to be multiplied by ``divisor``."""
        return self.divisor > 1 and not self.sum_ops and self.is_in_16_bits()

    def selector_of(self, first: str, second: str, apart: int = 8) -> str:
        """The selector, for ``prmt``, of bytes ``first`` and ``second`` of two words: those of two
        values, or, in pairs, both of each. Their digits are ``apart`` bits apart."""
        if self.plan.pair is None:
            return f"({first}) | (({second}) + 4 << {apart})"
        word = f"d_{self.plan.digits[self.plan.pair].name} * 4"
        return f"({first}) + {word} | (({second}) + {word} << {apart})"

    def is_fetched(self, field: Field, slot: int = 0) -> bool:
        """Whether ``load`` of ``slot`` leaves the field to the template."""
        return False

    def is_exact_product(self, ops: Sequence[DequantOp]) -> bool:
        """Whether ``ops`` subtract and then multiply by floats of 16 bits: fp32 has products of
        these, and of the scale with a field, exactly."""
        fields = [op.operand for op in ops[:2] if isinstance(op.operand, Field)]
        is_plain = all(not field.width and not field.float8 for field in fields)
        dtypes = {self.dtypes[field.source] for field in fields}
        kinds = [op.kind for op in ops[:2]]
        return kinds == ["sub", "mul"] and len(fields) == 2 and is_plain and dtypes <= set(PLACES)

    def is_in_16_bits(self) -> bool:
        """Whether W is dequantized in 16 bits: about half as many instructions."""
        return bool(narrow.in_16_bits(Uses(self, _no_hook, _no_hook)))

    @property
    def casts_directly(self) -> bool:
        return False  # a conversion of integers takes eight times as long as bit arithmetic

    def constants(self) -> str:
        return "\n".join(f"{name}: gl.constexpr = {text}" for name, text in self.layouts.items())

    # digits

    def digits(self, inner: str, first: str = "", low: str = "") -> dict[str, list[str]]:
        """The terms of each digit: what varies in a tile, as tensors whose names begin with
        ``inner`` ("": none), and its first value in a tile, for axes in ``first``. ``low``: the
        positions along the plan's ``low``, if they are known. The digits of e belong to the
        position of n."""
        known = dict(zip((digit.name for digit in self.plan.low), low, strict=False))
        found = {name: terms if "n" in first else [] for name, terms in self.expert().items()}
        for digit in (*self.n_digits, *self.k_digits):
            parts = [part for part in self.plan.digits if part.digit == digit.name]
            terms = [
                known.get(part.name, f"{inner}{part.name}")
                + (f" * {part.place}" if part.place > 1 else "")
                for part in parts
                if inner and part.inner > 1
            ]
            if digit.outer > 1 and digit.name[0] in first:
                terms.append(f"first_{digit.name}")
            found[digit.name] = terms
        return found

    def expert(self) -> dict[str, list[str]]:
        """The terms of the digits of e, scalars."""
        format = self.format
        return {
            name: [f"(expert // {format.weight_of(name)} % {format.radix(name)})"]
            for name in format.digits("e")
        }

    @property
    def is_paired(self) -> bool:
        return len(self.plan.low) == 1

    def first_digits(self, axis: str, tile: str) -> list[str]:
        """Statements that set the first value in tile number ``tile`` of each digit."""
        lines, apart = [], 1
        digits = self.n_digits if axis == "n" else self.k_digits
        for digit in reversed(digits):
            if digit.outer > 1:
                code = f"({tile}) // {apart}" if apart > 1 else f"({tile})"
                code += f" % {digit.outer}" if digit != digits[0] else ""
                lines.append(f"first_{digit.name} = ({code}) * {digit.inner}")
            apart *= digit.outer
        return lines

    def start(self, stride: Hook, size: Hook) -> str:
        """Statements before the loop: digits, and the addresses of the tile at k = 0."""
        lines = self.first_digits("n", "pid_n")
        held = [("LOADED", "l_"), ("TILE", "d_"), *([("LISTED", "g_")] if self.listed else [])]
        for name, prefix in held:
            for axis, digit in enumerate(self.plan.digits):
                at = f"{prefix}{digit.name}"
                lines.append(f"{at} = {positions(name, self.plan.rank, axis, digit.inner)}")
                radix = self.format.radix(digit.name) if digit.digit[0] == "n" else 0
                if radix % digit.inner:  # the last tile ends beyond N
                    first = f" - first_{digit.name}" if digit.outer > 1 else ""
                    lines.append(f"{at} = gl.minimum({at}, {radix - 1}{first})")
        out = DigitStatements(self, stride, size, "s", self.digits("l_", "n"))
        for i, field in enumerate(self.loaded):
            if not _is_data(field) and not self.is_fetched(field):
                out.lines.append(f"at{i} = {out.pointer(field)[0]}")
        if self.table and self.places:
            out.lines += table_lookup.start(self, self.table, self.plan, stride)
        elif self.table and not self.pair_places:
            source = self.sources[self.table.source]
            out.lines.append(
                f"table = gl.load({source} + gl.arange(0, {TABLE}, TABLE) * {stride(source, 0)})"
            )
        return "\n".join([*lines, *out.lines])

    def start_of_cta(self, stride: Hook) -> str:
        """Statements at the start of a CTA: loads that nothing waits for."""
        if not self.table or not self.pair_places:
            return ""
        return "\n".join(pair_lookup.start(self, self.table, self.pair_places, stride))

    def started_cta(self) -> str:
        """Statements before the first tile, which may wait for those of ``start_of_cta``."""
        if not self.table or not self.pair_places:
            return ""
        return "\n".join(pair_lookup.written(self, self.table))

    def load(
        self,
        tile: str,
        stride: Hook,
        size: Hook,
        slot: int = 0,
        *,
        beyond: TileDigit | None = None,
    ) -> str:
        """Statements that load what the tile of K number ``tile`` is computed from: a tensor, if
        each warp has one of its own. ``slot`` tells apart what is kept for several iterations;
        ``beyond``: the next values of this digit of K."""
        out = DigitStatements(self, stride, size, "l", self.digits("", "k"))
        whole = DigitStatements(self, stride, size, "m", self.within_k(self.digits("l_", "nk")))
        lines = self.first_digits("k", tile)
        for i, field in enumerate(self.loaded):
            if self.is_fetched(field, slot):
                continue
            if _is_data(field) or self.is_beyond(field):
                pointer, _, _ = whole.pointer(field)
            else:
                moved = Field(
                    field.source, tuple(AffineIndex(linear=each.linear) for each in field.index)
                )
                pointer = f"at{i} + {out.offset(moved)}"
                if beyond is not None:  # added to a pointer it is a part of the instruction
                    digits = {
                        name: [f"gl.to_tensor({beyond.inner})"] if name == beyond.name else []
                        for name in out.digits
                    }
                    step = DigitStatements(self, stride, size, "l", digits)
                    pointer += f" + {step.offset(moved)}"
            # A byte that is kept over the loop would be extended at each use.
            is_byte = self.dtypes[field.source] in BYTE_TYPES and field != self.format.code
            wide = ".to(gl.int32)" if is_byte else ""
            policy = self.word_policy if field in self.words else ""
            whole.lines.append(f"{kept(i, slot)} = gl.load({pointer}{policy}){wide}")
        return "\n".join([*lines, *out.lines, *whole.lines])

    def digit_beyond_k(self) -> TileDigit | None:
        """The digit of K within which the last tile ends."""
        digit = self.k_digits[0] if self.k_digits else None
        return digit if digit and self.format.radix(digit.name) % digit.inner else None

    def is_beyond(self, field: Field) -> bool:
        """Whether a tile may have values of the field beyond K."""
        digit = self.digit_beyond_k()
        return digit is not None and field != self.format.code and digit.name in field.digits

    def within_k(self, digits: dict[str, list[str]]) -> dict[str, list[str]]:
        """``digits``, beyond K those of the last value."""
        if digit := self.digit_beyond_k():
            last = self.format.radix(digit.name) - 1
            digits[digit.name] = [f"gl.minimum({sum_of(digits[digit.name])}, {last})"]
        return digits

    def used(self, i: int, slot: int) -> str:
        """The variable that ``Uses`` reads the ``i``-th field from."""
        return kept(i, slot)

    def load_listed(self, out: Listed, field: Field) -> str:
        """A field of which a tensor lists where each k has its value."""
        return f"gl.load({out.pointer(field)[0]})"

    def varies(self, field: Field) -> bool:
        """Whether a tile has several values of the field."""
        inner = {digit.name for digit in (*self.n_digits, *self.k_digits) if digit.inner > 1}
        if self.is_warps_own:
            inner |= {digit.name for digit in self.k_digits if digit.outer > 1}
        return any(index.digits & inner for index in field.index)

    def in_order(self, value: str) -> str:
        """``value`` [N of the tile, BLOCK_M], its rows as the MMA has them, as [BLOCK_M, N]."""
        m: Dim = ("m", self.stored_m)
        dims, target = (*self.mma_dims, m), (m, *self.column_dims)
        return self.dialect.reordered(value, dims, target, f"[{self.stored_m}, {self.block_n}]")

    def of_columns(self, code: str) -> str:
        """``code``, the same for all k of a tile, for each column [warps with a tile of their own,
        BLOCK_N], as the MMA has them."""
        shape = [1 if part.digit[0] == "k" else part.inner for part in self.plan.digits]
        code = f"gl.broadcast({code}, gl.full({shape}, 0.0, gl.float32, TILE))[0]"
        own: tuple[Dim, ...] = (("w", self.warps),) if self.is_warps_own else ()
        sizes = [*(size for _, size in own), self.block_n]
        dims, target = (*own, *self.column_dims), (*own, *self.mma_dims)
        return self.dialect.reordered(code, dims, target, str(sizes))

    def pairs(self, value: str) -> str:
        """``value`` [BLOCK_M, N], in the order of the tile, as [BLOCK_M, N / 2, 2]."""
        assert self.pair is not None
        m: Dim = ("m", self.stored_m)
        dims, target = (m, *self.column_dims), (m, *self.stored_dims, self.pair)
        return self.dialect.reordered(
            value, dims, target, f"[{self.stored_m}, {self.block_n // 2}, 2]"
        )

    def first_of_pair(self) -> str:
        """The position of the first column of each pair ``rn``."""
        assert self.pair is not None
        apart = 1 << self.column_dims[::-1].index(self.pair)
        return "rn * 2" if apart == 1 else f"rn // {apart} * {2 * apart} + rn % {apart}"

    def column(self) -> str:
        """n of each column ``rn`` of the tile (a position in ``n_digits``)."""
        terms, apart = [], 1
        for digit in reversed(self.n_digits):
            radix = self.format.radix(digit.name)
            code = f"rn // {apart}" if apart > 1 else "rn"
            code = f"({code}) % {radix}" if digit != self.n_digits[0] else f"({code})"
            terms.append(f"{code} * {self.format.weight_of(digit.name)}")
            apart *= radix
        natural = [digit.name for digit in self.n_digits] == self.format.digits("n")
        return "rn" if natural else sum_of(reversed(terms))

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements after the loop that apply the column ops to ``out`` [BLOCK_M, BLOCK_N]."""
        out = DigitStatements(self, stride, size, "c", self._digits_of("n", "within"))
        lines = [f"within = gl.minimum(idx_n, {self.n - 1}).to(gl.int32)"]
        for op in self.column_ops:
            out.apply_to_sums(op, "out", out.operand(op).code)
        return "\n".join([*lines, *out.lines])

    @property
    def fields_of_columns(self) -> list[Field]:
        """What ``columns`` reads of each column."""
        operands = [op.operand for op in self.column_ops]
        fields = [each for each in operands if isinstance(each, Field) and not _is_data(each)]
        of_n = set(self.format.digits("n"))
        return [field for field in fields if field.digits & of_n]

    def prefetch_columns(self, stride: Hook, size: Hook) -> str:
        """Statements that prefetch ``fields_of_columns`` of the columns ``early``."""
        out = DigitStatements(self, stride, size, "p", self._digits_of("n", "early"))
        for field in self.fields_of_columns:
            out.lines.append(f"warps.prefetch({out.pointer(field)[0]})")
        return "\n".join(out.lines)

    def _digits_of(self, axis: str, position: str) -> dict[str, list[str]]:
        """The terms of the digits of an axis at a position, and of those of e."""
        format = self.format
        digits = {
            name: [f"({position} // {format.weight_of(name)} % {format.radix(name)})"]
            for name in format.digits(axis)
        }
        return digits | self.expert()


def kept(i: int, slot: int = 0) -> str:
    """The variable of the ``i``-th field that is loaded."""
    return f"kept{slot}_{i}"


def _is_data(field: Field) -> bool:
    return any(index.is_data for index in field.index)


def _no_hook(name: str, dim: int) -> str:
    return "0"  # of statements that are dropped
