"""Gluon statements of a tile that is covered by digits: ``DigitStatements`` finds places, ``Uses``
dequantizes what was loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.digits import joined, narrow, pair_lookup, table_lookup
from inductor_quant.kernels.codegen.digits.narrow import is_in_place, power
from inductor_quant.kernels.codegen.digits.words import BYTES
from inductor_quant.kernels.codegen.statements import MAGIC_BITS, Statements, Value
from inductor_quant.kernels.codegen.unpack_ptx import MASK_AND_FLIP, float8_pair
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field

MAX_ZERO = 1 << 12  # small beside 2**23 / 2**15


class DigitStatements(Statements):
    """``digits``: the terms of which each digit is the sum."""

    codegen: Any  # ``DigitCodegen``

    def __init__(
        self,
        codegen: Any,
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
            position = self.assign("d", sum_of(self.digits[name]))
            terms.append(self.assign("t", self.dialect.lookup(table, position)))
        for field, coef in index.fields:
            value = self.field(field)
            terms.append(f"({value.code} + {value.bias}) * {coef}")
        return sum_of([*terms, str(index.const)] if index.const or not terms else terms)

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
        return sum_of(terms)

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

    def __init__(self, codegen: Any, stride: Hook, size: Hook, slot: int = 0) -> None:
        digits = codegen.digits("d_", "n")
        for name in codegen.digits_of_places:
            digits[name] = [*digits[name], f"was_{name}"]
        super().__init__(codegen, stride, size, "u", digits)
        self.slot = slot
        self.listed = Listed(codegen, stride, size, slot)

    def read(self, field: Field) -> tuple[str, int, int]:
        if field == self.format.code and self.codegen.view.parts:
            return joined.words(self), 1, 1
        if field in self.codegen.loaded:
            word = self.codegen.used(self.codegen.loaded.index(field), self.slot)
            is_scalar = not self.codegen.varies(field)
            code = word if is_scalar else f"gl.convert_layout({word}, TILE, assert_trivial=True)"
            return self.assign("w", code), 1, 1
        if field in self.codegen.listed:
            loaded = self.codegen.load_listed(self.listed, field)
            self.lines += self.listed.lines
            self.listed.lines.clear()
            code = f"gl.convert_layout({loaded}, TILE, assert_trivial=True)"
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
        selector = f"({self.codegen.selector_of(first, second, apart)}) << {4 * digit}"
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
        if self.codegen.is_exact_product(ops):  # then a multiply-add rounds once, as the two ops do
            product, scale = self.exact_product(ops[:2]), self.operand(ops[1]).code
            code = self.assign("f", f"{value.code} * {scale} - {product}")
            value, ops = dataclasses.replace(value, code=code), ops[2:]
        return self.apply(value, ops)

    def exact_product(self, ops: Sequence[DequantOp]) -> str:
        """Of the operands of two ops."""
        zero, scale = (self.operand(op).code for op in ops)
        return self.assign("f", f"{zero} * {scale}")

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

    def __init__(self, codegen: Any, stride: Hook, size: Hook, slot: int) -> None:
        super().__init__(codegen, stride, size, "g", codegen.digits("g_", "n"))
        self.slot = slot

    def read(self, field: Field) -> tuple[str, int, int]:
        codegen = self.codegen
        group = codegen.used(codegen.loaded.index(field), self.slot)
        return self.assign("w", f"gl.convert_layout({group}, LISTED, assert_trivial=True)"), 1, 1


def sum_of(terms: Iterable[str]) -> str:
    return " + ".join(terms) or "0"
