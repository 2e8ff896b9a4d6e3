"""Gluon statements that load a tile of any format to registers and dequantize it there.

A value has one dimension for each digit of the tile (``tile``). What is loaded for one K
iteration is kept in registers while the one before is dequantized: ``load`` and ``dequantized`` are
apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import Codegen, Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import Dim, bits
from inductor_quant.kernels.codegen.digits import joined, narrow, pair_lookup, table_lookup
from inductor_quant.kernels.codegen.digits.narrow import is_in_place, power
from inductor_quant.kernels.codegen.digits.tile import (
    WARP,
    TilePlan,
    is_listed,
    pair_bit,
    tile_digits,
)
from inductor_quant.kernels.codegen.digits.words import BYTES, WordView
from inductor_quant.kernels.codegen.gluon_columns import Gluon
from inductor_quant.kernels.codegen.gluon_layout import Layout, layout, positions
from inductor_quant.kernels.codegen.runs import run_of
from inductor_quant.kernels.codegen.statements import MAGIC_BITS, Statements, Value
from inductor_quant.kernels.codegen.unpack_ptx import MASK_AND_FLIP, PLACES, float8_pair
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field

BYTE_TYPES = (torch.uint8, torch.int8)
TABLE = 16  # entries of a table that lanes hold, one each
MAX_ZERO = 1 << 12  # small beside 2**23 / 2**15


class DigitStatements(Statements):
    """``digits``: the terms of which each digit is the sum."""

    codegen: DigitCodegen

    def __init__(
        self,
        codegen: DigitCodegen,
        stride: Hook,
        size: Hook,
        tag: str,
        digits: Mapping[str, list[str]],
    ) -> None:
        super().__init__(codegen, stride, size, tag=tag)
        self.digits = digits

    def index(self, index: AffineIndex, rows: int = 1, columns: int = 1, layout: str = "") -> str:
        index = self._without_trivial_digits(index)
        terms = self.linear(index)
        for name, table in index.tables:
            position = self.assign("d", _sum(self.digits[name]))
            terms.append(self.assign("t", self.dialect.lookup(table, position)))
        for field, coef in index.fields:
            value = self.field(field)
            terms.append(f"({value.code} + {value.bias}) * {coef}")
        return _sum([*terms, str(index.const)] if index.const or not terms else terms)

    def linear(self, index: AffineIndex) -> list[str]:
        return [
            term if coef == 1 else f"{term} * {coef}"
            for name, coef in self._without_trivial_digits(index).linear
            for term in self.digits[name]
        ]

    def offset(self, field: Field) -> str:
        """The sum of ``index * stride`` over the dimensions of the field's tensor."""
        source, terms = self.codegen.sources[field.source], []
        for dim, index in enumerate(map(self._without_trivial_digits, field.index)):
            stride = self.stride(source, dim)
            if self.is_word(field):
                stride = f"({stride} // {BYTES})" if dim != self.codegen.view.dim else "1"
            low, high = index.bounds(self.format.radix)
            if index.is_data or low < 0 <= high:
                position = self.assign("i", self.index(index))
                terms.append(f"{self.inside(position, index, source, dim)} * {stride}")
                continue
            plain = AffineIndex(linear=index.linear)
            tables = AffineIndex(tables=index.tables)
            parts = self.linear(plain) + ([self.index(tables)] if index.tables else [])
            terms += [f"({part}).to(INDEX_DTYPE) * {stride}" for part in parts]
            if low < 0:
                terms.append(f"({index.const} + {self.size(source, dim)}) * {stride}")
            elif index.const:
                terms.append(f"{index.const} * {stride}")
        return _sum(terms)

    def pointer(self, field: Field, layout: str | None = None) -> tuple[str, int, int]:
        source = self.codegen.sources[field.source]
        if self.is_word(field):
            source += ".to(gl.pointer_type(gl.int32), bitcast=True)"
        return f"{source} + {self.offset(field)}", 1, 1

    def is_word(self, field: Field) -> bool:
        view = self.codegen.view
        words = {part.source for part in (self.format.code, *view.parts)}
        return view.dim is not None and field.source in words


class Uses(DigitStatements):
    """Computes with what was loaded into ``kept``."""

    def __init__(self, codegen: DigitCodegen, stride: Hook, size: Hook, slot: int = 0) -> None:
        digits = codegen.digits("d_", "n")
        for name in codegen.digits_of_places:
            digits[name] = [*digits[name], f"was_{name}"]
        super().__init__(codegen, stride, size, "u", digits)
        self.slot = slot
        self.listed = Listed(codegen, stride, size, "g", codegen.digits("g_", "n"))

    def read(self, field: Field) -> tuple[str, int, int]:
        if field == self.format.code and self.codegen.view.parts:
            return joined.words(self), 1, 1
        if field in self.codegen.loaded:
            word = self.codegen.used(self.codegen.loaded.index(field), self.slot)
            is_scalar = not self.codegen.varies(field)
            code = word if is_scalar else f"gl.convert_layout({word}, TILE, assert_trivial=True)"
            return self.assign("w", code), 1, 1
        if field in self.codegen.listed:
            pointer, _, _ = self.listed.pointer(field)
            self.lines += self.listed.lines
            self.listed.lines.clear()
            code = f"gl.convert_layout(gl.load({pointer}), TILE, assert_trivial=True)"
            return self.assign("w", code), 1, 1
        # An entry of the table in registers, for each element of the tile.
        codegen, (index,) = self.codegen, field.index
        position = self.assign("i", f"({self.index(index)}).to(gl.int32)")
        flat = f"gl.reshape({position}, [{codegen.block_n * codegen.block_k}])"
        return self.assign("w", f"gl.reshape(gl.gather(table, {flat}, 0), {codegen.shape})"), 1, 1

    def _field(self, field: Field) -> Value:
        run = self.codegen.runs.get(field)
        return super()._field(field) if run is None else joined.number_of_run(self, run)

    def dequantized(self) -> str:
        """W in x's dtype."""
        element, codegen = self.format.element, self.codegen
        if codegen.table and codegen.places:
            return table_lookup.looked_up(self, codegen.table, codegen.plan, codegen.places)
        if codegen.table and codegen.pair_places:
            [pair] = codegen.plan.low
            return pair_lookup.looked_up(self, codegen.table, pair, self.offset_of("0"))
        if not self.codegen.loop_ops and self.codegen.dtypes[element.source].is_floating_point:
            return f"({self.field(element).code}).to({self.codegen.x_type})"
        if not self.codegen.loop_ops and element.float8 and self.codegen.is_paired:
            return f"({self.float8()}).to({self.codegen.x_type})"
        return narrow.in_16_bits(self) or f"({self.in_fp32().code}).to({self.codegen.x_type})"

    def float8(self) -> str:
        """Two values at once, as fp16."""
        field = self.format.element
        assembly, digit = float8_pair(field.float8)
        first, second = (f"(({self.offset_of(half)}) >> 3)" for half in "01")
        apart = 8 if digit else 4  # digits of the selector that the two bytes go to
        selector = f"({first} << {4 * digit}) | ({second} + 4 << {4 * digit + apart})"
        [pair] = self.codegen.plan.low
        arguments = [
            f"{self.read(field)[0]}.to(gl.int32)",
            f"{selector} + d_{pair.name} * 0",
        ]
        arguments = [self.assign("a", code) for code in arguments]
        self.lines += self.dialect.inline_asm(assembly, ["pairs"], arguments, torch.float16)
        return "pairs"

    def offset_of(self, which: str) -> str:
        """The bit offset of one of the values that are dequantized together: ``which`` has its
        position along each of ``low``."""
        digits = self.codegen.digits("d_", "n", which)
        out = DigitStatements(self.codegen, self.stride, self.size, f"h{which}_", digits)
        code = out.index(self.format.code.offset)
        self.lines += out.lines
        return code

    def in_fp32(self) -> Value:
        """W in fp32, to be rounded."""
        format, ops = self.format, self.codegen.loop_ops
        if format.element.float8 and self.codegen.is_paired:
            return self.apply(Value(self.float8(), 1, 1, is_float=True), ops)
        if not is_in_place(format.element):
            return self.apply(self.to_float(self.field(format.element)), ops)
        # A field under an exponent is ``2**(23 - at) + field``, times ``2**at``. One multiply-add
        # takes this off; a zero point that is a small integer is added to it first, per column.
        field = format.element
        shift = self.assign("s", self.index(field.offset))
        at, mask = self.assign("s", f"({shift}) & 15"), (1 << field.width) - 1
        word = f"({self.read(field)[0]} >> (({shift}) & 16))"
        sign = 1 << field.width - 1 if field.signed else 0
        exponent = f"({sign} << {at}) | {MAGIC_BITS}"
        arguments = [word, f"{mask} << {at}", exponent]
        self.lines += self.dialect.inline_asm(MASK_AND_FLIP, ["bits"], arguments, torch.int32)
        base = self.assign("z", power(f"150 - ({at})"))
        if field.add - sign:
            base = self.assign("z", f"{base} - {float(field.add - sign)}")
        if ops and (subtrahend := self.integer_within(ops[0], -MAX_ZERO, MAX_ZERO)):
            base, ops = self.assign("z", f"{base} + {subtrahend}"), ops[1:]
        code = f"bits.to(gl.float32, bitcast=True) * {power(f'127 - ({at})')} - {base}"
        value = Value(self.assign("f", code), 1, 1, is_float=True)
        if self.is_exact_product(ops):  # then a multiply-add rounds once, as the two ops do
            zero, scale = (self.operand(op).code for op in ops[:2])
            product = self.assign("f", f"{zero} * {scale}")
            code = self.assign("f", f"{value.code} * {scale} - {product}")
            value, ops = dataclasses.replace(value, code=code), ops[2:]
        return self.apply(value, ops)

    def is_exact_product(self, ops: Sequence[DequantOp]) -> bool:
        """Whether ``ops`` subtract and then multiply by floats of 16 bits: fp32 has products of
        these, and of the scale with a field, exactly."""
        fields = [op.operand for op in ops[:2] if isinstance(op.operand, Field)]
        is_plain = all(not field.width and not field.float8 for field in fields)
        dtypes = {self.codegen.dtypes[field.source] for field in fields}
        kinds = [op.kind for op in ops[:2]]
        return kinds == ["sub", "mul"] and len(fields) == 2 and is_plain and dtypes <= set(PLACES)

    def integer_within(self, op: DequantOp, low: int, high: int) -> str:
        """The operand of a ``sub``, an integer from ``low`` to ``high``, as fp32; else ""."""
        if op.kind != "sub":
            return ""
        if not isinstance(op.operand, Field):
            is_within = float(op.operand).is_integer() and low <= op.operand <= high
            return repr(float(op.operand)) if is_within else ""
        value = self.field(op.operand)
        if value.limit is None or value.is_float:
            return ""
        is_within = low <= value.bias and value.bias + value.limit - 1 <= high
        return self.to_float(value).code if is_within else ""


class Listed(DigitStatements):
    """Reads what a list of the group of each k points to, in the layout LISTED."""

    def read(self, field: Field) -> tuple[str, int, int]:
        codegen = self.codegen
        group = codegen.used(codegen.loaded.index(field), 0)
        return self.assign("w", f"gl.convert_layout({group}, LISTED, assert_trivial=True)"), 1, 1


class DigitCodegen(Codegen):
    """``n_order``: the digits of n in the order in which a tile covers them; ``is_gated``: the last
    digit of n chooses a column of a pair, of which one is stored.

    looks_up_pairs  a table is looked up in shared memory, if ``start_of_cta`` is called
    unknown_zero    a variable that is 0 and that the compiler cannot fold: a multiply-add with two
                    constants would copy one of them to a register each time
    """

    unknown_zero = ""
    looks_up_pairs = False

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
        self.k_digits = tile_digits(self.format, "k", self.tile_k) or ()
        self.table = self.format.element if self.format.element != self.format.code else None
        operands = [op.operand for op in self.loop_ops]
        parts = view.parts or (self.format.code,)
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

    @property
    def divisor(self) -> int:
        """``dequantized`` may leave W divided by this; a subclass that overrides it scales sums."""
        return 1

    def is_fetched(self, field: Field, slot: int = 0) -> bool:
        """Whether ``load`` of ``slot`` leaves the field to the template."""
        return False

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
        """Statements before the first tile."""
        if not self.table or not self.pair_places:
            return ""
        return "\n".join(pair_lookup.start(self, self.table, self.pair_places, stride))

    def load(self, tile: str, stride: Hook, size: Hook, slot: int = 0, *, beyond: int = 0) -> str:
        """Statements that load what the tile of K number ``tile`` is computed from: a tensor, if
        each warp has one of its own. ``slot`` tells apart what is kept for several iterations;
        ``beyond``: so much further along the last digit of K."""
        out = DigitStatements(self, stride, size, "l", self.digits("", "k"))
        whole = DigitStatements(self, stride, size, "m", self.digits("l_", "nk"))
        lines = self.first_digits("k", tile)
        for i, field in enumerate(self.loaded):
            if self.is_fetched(field, slot):
                continue
            if _is_data(field):
                pointer, _, _ = whole.pointer(field)
            else:
                moved = Field(
                    field.source, tuple(AffineIndex(linear=each.linear) for each in field.index)
                )
                pointer = f"at{i} + {out.offset(moved)}"
                if beyond:  # added to a pointer it is a part of the instruction
                    last = self.k_digits[-1].name
                    digits = {
                        name: [f"gl.to_tensor({beyond})"] if name == last else []
                        for name in out.digits
                    }
                    step = DigitStatements(self, stride, size, "l", digits)
                    pointer += f" + {step.offset(moved)}"
            # A byte that is kept over the loop would be extended at each use.
            is_byte = self.dtypes[field.source] in BYTE_TYPES and field != self.format.code
            wide = ".to(gl.int32)" if is_byte else ""
            whole.lines.append(f"{kept(i, slot)} = gl.load({pointer}){wide}")
        return "\n".join([*lines, *out.lines, *whole.lines])

    def used(self, i: int, slot: int) -> str:
        """The variable that ``Uses`` reads the ``i``-th field from."""
        return kept(i, slot)

    def varies(self, field: Field) -> bool:
        """Whether a tile has several values of the field."""
        inner = {digit.name for digit in (*self.n_digits, *self.k_digits) if digit.inner > 1}
        if self.is_warps_own:
            inner |= {digit.name for digit in self.k_digits if digit.outer > 1}
        return any(index.digits & inner for index in field.index)

    def in_order(self, value: str) -> str:
        """``value`` [N of the tile, BLOCK_M], its rows as the MMA has them, as [BLOCK_M, N]."""
        m: Dim = ("m", self.block_m)
        dims, target = (*self.mma_dims, m), (m, *self.column_dims)
        return self.dialect.reordered(value, dims, target, f"[BLOCK_M, {self.block_n}]")

    def pairs(self, value: str) -> str:
        """``value`` [BLOCK_M, N], in the order of the tile, as [BLOCK_M, N / 2, 2]."""
        assert self.pair is not None
        m: Dim = ("m", self.block_m)
        dims, target = (m, *self.column_dims), (m, *self.stored_dims, self.pair)
        return self.dialect.reordered(value, dims, target, f"[BLOCK_M, {self.block_n // 2}, 2]")

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
        return "rn" if natural else _sum(reversed(terms))

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements after the loop that apply the column ops to ``out`` [BLOCK_M, BLOCK_N]."""
        format = self.format
        digits = {
            name: [f"(within // {format.weight_of(name)} % {format.radix(name)})"]
            for name in format.digits("n")
        }
        out = DigitStatements(self, stride, size, "c", digits | self.expert())
        lines = [f"within = gl.minimum(idx_n, {self.n - 1}).to(gl.int32)"]
        for op in self.column_ops:
            operand = out.operand(op)
            out.lines.append(f"out = {self.dialect.apply(op, 'out', operand.code)}")
        return "\n".join([*lines, *out.lines])


def kept(i: int, slot: int = 0) -> str:
    """The variable of the ``i``-th field that is loaded."""
    return f"kept{slot}_{i}"


def _is_data(field: Field) -> bool:
    return any(index.is_data for index in field.index)


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms) or "0"
