"""``Statements``: reads and dequantizes a tile of a weight, from its ``WeightFormat``.

In a stack of weights the template says which one, ``expert``, a scalar: a digit of e is one too.

A position is a sum over digits of k and n, so its k part [rows, 1] and its n part [1, columns] are
computed apart; unless it is data it costs two vectors per tile. Each field is read at the coarsest
resolution at which it is constant (one packed word for eight values, one row of scales per group)
and repeated in registers: ``[rows, 1, columns]`` is broadcast and reshaped.

All sizes here are constants of the format and of the configuration. Templates provide only the
strides, and the sizes that bound positions that are data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.base import Codegen, Hook
from inductor_quant.kernels.codegen.runs import WORD, Run, run_of
from inductor_quant.ops.dequantize import EXPONENTS
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field

_FLOAT8 = {"e4m3": "float8e4nv", "e5m2": "float8e5"}
# An integer b below 2**23 under this exponent is the fp32 number 2**23 + b. Subtracting 2**23 is
# exact, and takes an eighth of the time of a conversion.
MAGIC_BITS, _MAGIC = 0x4B000000, 1 << 23
_MAX_MAGIC = 1 << 22
_INT32_MAX = (1 << 31) - 1
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)


@dataclasses.dataclass(frozen=True)
class Value:
    """A variable or expression [rows, columns]; a scalar if both are 1.

    bias    an integer to be added, which the conversion to float folds in
    limit   0 <= code < limit; None: unknown
    """

    code: str
    rows: int
    columns: int
    is_float: bool = False
    bias: int = 0
    limit: int | None = None

    @property
    def whole(self) -> Value:
        """With the bias added, of an integer."""
        code = f"({self.code} + {self.bias})" if self.bias else self.code
        return Value(code, self.rows, self.columns)


class Statements:
    """``lines`` of statements in order; the same expression is assigned once.

    The names of the variables contain ``tag``, which tells apart those of several writers.
    """

    def __init__(self, codegen: Codegen, stride: Hook, size: Hook, *, tag: str = "") -> None:
        self.codegen, self.format, self.dialect = codegen, codegen.format, codegen.dialect
        self.lang = self.dialect.lang
        self.stride, self.size, self.tag = stride, size, tag
        self.lines: list[str] = []
        self._known: dict[str, str] = {}
        self._fields: dict[Field, Value] = {}

    def assign(self, prefix: str, expression: str) -> str:
        """The variable that holds ``expression``."""
        if expression.isidentifier():
            return expression
        if expression not in self._known:
            name = f"{prefix}{self.tag}{len(self._known)}"
            self._known[expression] = name
            self.lines.append(f"{name} = {expression}")
        return self._known[expression]

    # positions

    def position(self, axis: str, count: int, period: int, layout: str) -> str:
        """The k or n, in units of ``codegen.unit``, of each of ``count`` equal parts of the tile,
        modulo ``period``: int32 [count], or a scalar."""
        spread = self.dialect.arange(count, axis, layout)
        if count % period == 0:
            return spread  # the same in every tile
        unit = self.codegen.unit(axis, count)
        start = self.codegen.origin(axis)
        position = self.assign("p", f"{start} // {unit}" if unit > 1 else start)
        return self.assign("p", f"{position} + {spread}") if count > 1 else position

    def digit(self, name: str, count: int, layout: str, span: int = 1) -> str:
        """The digit at each of ``count`` equal parts of the tile, int32 [count], or a scalar.

        ``span`` digits, of which ``name`` is the last, are read as one number.
        """
        axis, last = name[0], int(name[1:])
        first = last - span + 1
        radix = math.prod(self.format.radix(f"{axis}{i}") for i in range(first, last + 1))
        divisor = self.format.weight_of(name) // self.codegen.unit(axis, count)
        position = self.position(axis, count, divisor * radix, layout)
        if divisor > 1:
            position = f"({position} // {divisor})"
        # Parts beyond the end wrap around; what they yield is dropped.
        is_within = first == 0 and self.codegen.is_within(axis)
        return self.assign("d", position if is_within else f"{position} % {radix}")

    def spans(self, index: AffineIndex, axis: str) -> list[tuple[str, int, int]]:
        """The linear terms of one axis as (last digit, number of digits, coefficient). Digits that
        count as one number become one term: then the compiler sees that neighbours are contiguous.
        """
        found: list[tuple[str, int, int]] = []
        terms = [term for term in index.linear if term[0][0] == axis]
        for name, coef in sorted(terms, key=lambda term: int(term[0][1:])):
            if found:
                last, span, high = found[-1]
                follows = name == f"{last[0]}{int(last[1:]) + 1}"
                if follows and high == coef * self.format.radix(name):
                    found[-1] = (name, span + 1, coef)
                    continue
            found.append((name, 1, coef))
        return found

    def index(self, index: AffineIndex, rows: int, columns: int, layout: str) -> str:
        """The index as an expression [rows, columns]: int32, int64 if it is data."""
        index = self._without_trivial_digits(index)
        terms = [self.axis_part(index, "k", rows, layout)]
        terms.append(self.axis_part(index, "n", columns, layout))
        terms.append(self.axis_part(index, "e", 1, layout))
        for field, coef in index.fields:
            value = self.widen(self.field(field), rows, columns)
            terms.append(f"({value.code} + {value.bias}) * {coef}")
        if index.const or not any(terms):
            terms.append(str(index.const))
        return " + ".join(term for term in terms if term)

    def axis_part(self, index: AffineIndex, axis: str, count: int, layout: str) -> str:
        """The sum of an axis' terms: [count, 1], [1, count] or a scalar; "": none."""
        is_wide = max(map(abs, index.bounds(self.format.radix))) > _INT32_MAX
        terms = []
        for name, span, coef in self.spans(index, axis):
            digit = self.digit(name, count, layout, span)
            digit += f".to({self.lang}.int64)" if is_wide else ""
            terms.append(digit if coef == 1 else f"{digit} * {coef}")
        for name, table in index.tables:
            if name[0] == axis:
                digit = self.digit(name, count, layout)
                terms.append(self.assign("t", self.dialect.lookup(table, digit)))
        if not terms:
            return ""
        # Added up before they get their second dimension: fewer and smaller tensors.
        whole = self.assign("i", " + ".join(terms))
        return whole if count == 1 else f"{whole}[{':, None' if axis == 'k' else 'None, :'}]"

    def _without_trivial_digits(self, index: AffineIndex) -> AffineIndex:
        """The same index without digits of radix 1."""
        radix = self.format.radix
        return AffineIndex(
            index.const + sum(table[0] for name, table in index.tables if radix(name) == 1),
            tuple(term for term in index.linear if radix(term[0]) > 1),
            tuple(term for term in index.tables if radix(term[0]) > 1),
            index.fields,
        )

    def layout(self, columns: int) -> str:
        """The name of the layout of positions [1, columns]; "" in Triton."""
        return ""

    def pointer(self, field: Field, layout: str | None = None) -> tuple[str, int, int]:
        """The address of each element, and (rows, columns) of them."""
        rows, columns = self.codegen.resolution(*field.index)
        layout = self.layout(columns) if layout is None else layout
        source = self.codegen.sources[field.source]
        terms = [source]
        for dim, index in enumerate(map(self._without_trivial_digits, field.index)):
            low, high = index.bounds(self.format.radix)
            stride = self.stride(source, dim)
            if index.is_data or low < 0 <= high:
                position = self.assign("i", self.index(index, rows, columns, layout))
                terms.append(f"{self.inside(position, index, source, dim)} * {stride}")
                continue
            for axis, count in (("k", rows), ("n", columns), ("e", 1)):
                part = self.axis_part(index, axis, count, layout)
                if part:
                    terms.append(f"{part}.to(INDEX_DTYPE) * {stride}")
            if low < 0:
                terms.append(f"({index.const} + {self.size(source, dim)}) * {stride}")
            elif index.const:
                terms.append(f"{index.const} * {stride}")
        return " + ".join(terms), rows, columns

    def inside(self, position: str, index: AffineIndex, source: str, dim: int) -> str:
        """``position``, counted from the end if it is negative. Data is clamped to the tensor,
        because autotuning runs on arbitrary values."""
        size, lang = self.size(source, dim), self.lang
        low, high = self._data_bounds(index)
        if low < 0:
            code = f"{lang}.where({position} < 0, {position} + {size}, {position})"
            position = self.assign("i", code)
        length = self.codegen.shapes[int(source[1:])][dim]
        if index.is_data and (low < 0 or length is None or high >= length):
            code = f"{lang}.minimum({lang}.maximum({position}, 0), {size} - 1)"
            position = self.assign("i", code)
        return f"{position}.to(INDEX_DTYPE)"

    def _data_bounds(self, index: AffineIndex) -> tuple[float, float]:
        low, high = map(float, index.bounds(self.format.radix))
        for field, coef in index.fields:
            value = self.field(field)
            if value.limit is None:
                return -math.inf, math.inf
            ends = (coef * value.bias, coef * (value.bias + value.limit - 1))
            low, high = low + min(ends), high + max(ends)
        return low, high

    # values

    def field(self, field: Field) -> Value:
        if field not in self._fields:
            value = self._field(field)
            self._fields[field] = self._less(value, field) if field.minus else value
        return self._fields[field]

    def in_x_dtype(self, field: Field) -> str:
        """``field``, all of whose values x's dtype has."""
        code = self.field(field).code
        if not field.float8 and self.codegen.dtypes[field.source] == self.codegen.x_dtype:
            return code
        return self.assign("f", f"{code}.to({self.codegen.x_type})")

    def twice_in_bf16(self, field: Field) -> str:
        """A field of ``EXPONENTS`` in both halves of an int32."""
        code = self.assign("b", self.stored_bits(field).code)
        return self.assign("f", self._power_of_two(code, field.float8, 0x00800080))

    def _less(self, value: Value, field: Field) -> Value:
        """``value - field.minus``, wrapped to ``field.bits``."""
        assert field.minus is not None
        minus = self.field(field.minus)
        rows, columns = max(value.rows, minus.rows), max(value.columns, minus.columns)
        int64 = f"{self.lang}.int64"
        terms = [
            f"(({each.code}).to({int64}) + {each.bias})"
            for each in (self.widen(value, rows, columns), self.widen(minus, rows, columns))
        ]
        code = self.assign("b", f"({' - '.join(terms)}).to({self.lang}.int{field.bits})")
        return Value(code, rows, columns)

    def read(self, field: Field) -> tuple[str, int, int]:
        """The variable that holds the field's stored words, and (rows, columns) of them."""
        pointer, rows, columns = self.pointer(field)
        return self.assign("w", f"{self.lang}.load({pointer})"), rows, columns

    def _field(self, field: Field) -> Value:
        if field.is_position:
            return self._position(field)
        dtype = self.codegen.dtypes[field.source]
        if dtype.is_floating_point:
            return Value(*self.read(field), is_float=True)
        if not field.width:
            return self._whole(Value(*self.read(field)), dtype, field)
        if (run := run_of(self.format, field)) and dtype == torch.int32:
            return self._of_run(run, field)
        stored = self.stored_bits(field)
        bits, rows_out, columns_out = stored.code, stored.rows, stored.columns
        if field.float8:
            code = self._float8(self.assign("b", bits), field.float8)
            return dataclasses.replace(stored, code=self.assign("f", code), is_float=True)
        is_wide, bias = self._is_wide(dtype, field), field.add
        if field.high:
            above = self.field(field.high)
            rows_out, columns_out = max(rows_out, above.rows), max(columns_out, above.columns)
            low = self.widen(
                Value(self.assign("b", bits), *self.codegen.resolution(*field.index, field.offset)),
                rows_out,
                columns_out,
            )
            above = self.widen(above, rows_out, columns_out)
            bits = f"({low.code} | ({above.code} << {field.width}))"
        if field.signed:
            sign = 1 << field.total_width - 1
            bits, bias = f"({bits} ^ {sign})", bias - sign
        if field.wrap:
            bits, bias = f"(({bits} + {bias}) & {(1 << field.width) - 1})", 0
        if is_wide and field.width < 31:
            bits = f"{bits}.to({self.lang}.int32)"
        limit = 1 << field.total_width
        value = Value(self.assign("b", bits), rows_out, columns_out, bias=bias, limit=limit)
        return self._from_end(value, field)

    def stored_bits(self, field: Field) -> Value:
        """The bits of a field, an unsigned integer, without those of ``high``."""
        dtype = self.codegen.dtypes[field.source]
        word, rows, columns = self.read(field)
        is_wide = self._is_wide(dtype, field)
        word = self._as_word(word, dtype, is_wide)
        rows_out, columns_out = self.codegen.resolution(*field.index, field.offset)
        wide = self.widen(Value(word, rows, columns), rows_out, columns_out)
        return Value(self._bits(wide, field, 64 if is_wide else 32), rows_out, columns_out)

    def _of_run(self, run: Run, field: Field) -> Value:
        """Of the words of a run those with the ends of each number."""
        rows, columns = self.codegen.resolution(*field.index, field.offset)
        layout = self.layout(columns)
        words = [self.widen(Value(*self.read(word)), rows, columns).code for word in run.words]

        def of_word(bits: int) -> str:
            """The word with a number's bit ``bits``, of each number."""
            code, last = words[0], 0
            for number, bit in enumerate(run.bits):
                if (word := (bit + bits) // WORD) > last:
                    code = f"{self.lang}.where({position} >= {number}, {words[word]}, {code})"
                    last = word
            return self.assign("w", code)

        position = self.index(AffineIndex(linear=((run.digit, 1),)), rows, columns, layout)
        place = self.index(run.place, rows, columns, layout)
        bits = self.from_bit(of_word(0), of_word(run.width - 1), place)
        code = self.assign("b", f"{bits} & {(1 << run.width) - 1}")
        return Value(code, rows, columns, bias=run.add, limit=1 << run.width)

    def from_bit(self, low: str, high: str, place: str) -> str:
        """32 bits from bit ``place`` of ``low`` on, the last ones of ``high``."""
        int64 = f"{self.lang}.int64"
        both = f"({high}.to({int64}) << {WORD}) | ({low}.to({int64}) & {(1 << WORD) - 1})"
        return self.assign("b", f"(({both}) >> ({place})).to({self.lang}.int32)")

    def _float8(self, code: str, kind: str) -> str:
        if kind in EXPONENTS:
            bits = self._power_of_two(code, kind, 1 << 23)
            return f"({bits}).to({self.lang}.float32, bitcast=True)"
        type = f"{self.lang}.{_FLOAT8[kind]}"
        return f"{code}.to({self.lang}.uint8).to({type}, bitcast=True)"

    def _power_of_two(self, code: str, kind: str, one: int) -> str:
        """The bits of a float whose exponent is ``code``, times ``one``."""
        first, last = EXPONENTS[kind]
        code = self.assign("b", f"({code}).to({self.lang}.int32)")  # of a wide word too
        bits, half = f"{code} * {one}", one >> 1
        if first:  # half of the smallest number that has an exponent
            bits = f"{self.lang}.maximum({bits}, {half})"
        if math.isnan(last):
            bits = f"{self.lang}.where({code} == 255, {255 * one | half}, {bits})"
        return bits

    def _position(self, field: Field) -> Value:
        """A digit of a position, which is not negative."""
        (index,) = field.index
        rows, columns = self.codegen.resolution(index)
        code = f"({self.index(index, rows, columns, self.layout(columns))}) // {field.divisor}"
        if index.bounds(self.format.radix)[1] // field.divisor >= field.modulus:
            code = f"{code} % {field.modulus}"
        code = self.assign("q", code)
        if not field.table:
            return Value(code, rows, columns, limit=field.modulus)
        least, most = min(field.table), max(field.table)
        code = self.dialect.lookup(tuple(value - least for value in field.table), code)
        return Value(self.assign("t", code), rows, columns, bias=least, limit=most - least + 1)

    def _from_end(self, value: Value, field: Field) -> Value:
        """``value`` with the field's ``size`` added if it is negative."""
        if not field.size or (value.limit is not None and value.bias >= 0):
            return value
        number = self.assign("b", f"{value.code} + {value.bias}")
        code = f"{self.lang}.where({number} < 0, {number} + {field.size}, {number})"
        limit = None
        if value.limit is not None and value.bias + field.size >= 0:
            limit = max(value.limit + value.bias, field.size)
        return dataclasses.replace(value, code=self.assign("b", code), bias=0, limit=limit)

    def _whole(self, word: Value, dtype: torch.dtype, field: Field) -> Value:
        code, bias = word.code, field.add
        if dtype not in _NARROW:
            if dtype != torch.int32 or bias:
                code = f"{code}.to({self.lang}.int64)"
            value = dataclasses.replace(word, code=self.assign("b", code), bias=bias)
            return self._from_end(value, field)
        limit = 1 << 8 * dtype.itemsize
        is_last = field == self.format.element and not self.codegen.loop_ops
        if is_last and self.codegen.casts_directly:
            return word
        code = f"{code}.to({self.lang}.int32)"
        if dtype.is_signed:
            code, bias = f"({code} & {limit - 1}) ^ {limit >> 1}", bias - (limit >> 1)
        code = self.assign("b", code)
        return self._from_end(dataclasses.replace(word, code=code, bias=bias, limit=limit), field)

    def _is_wide(self, dtype: torch.dtype, field: Field) -> bool:
        """Whether the word is shifted as an int64."""
        is_unsigned = dtype == torch.uint32 and field.offset.is_data
        return dtype.itemsize == 8 or is_unsigned or field.width > 30

    def _as_word(self, word: str, dtype: torch.dtype, is_wide: bool) -> str:
        if dtype == (torch.int64 if is_wide else torch.int32):
            return word
        bitcast = ", bitcast=True" if dtype == torch.uint32 and not is_wide else ""
        return self.assign("w", f"{word}.to({self.lang}.int{64 if is_wide else 32}{bitcast})")

    def _bits(self, word: Value, field: Field, word_bits: int) -> str:
        """The unsigned integer at the field's offset in each word."""
        mask = (1 << field.width) - 1
        if field.offset == AffineIndex():
            return f"({word.code} & {mask})"
        rows, columns = self.codegen.resolution(field.offset)
        shift = self.index(field.offset, rows, columns, self.layout(columns))
        shift = self.assign("s", shift)
        if field.offset.is_data:
            last = word_bits - 1  # torch shifts no further: the sign is left
            outside = f"({shift} < 0) | ({shift} > {last})"
            shift = f"{self.lang}.where({outside}, {last}, {shift}).to({self.lang}.int{word_bits})"
            shift = self.assign("s", shift)
        wide = self.widen(Value(shift, rows, columns), word.rows, word.columns)
        return f"(({word.code} >> {wide.code}) & {mask})"

    def widen(self, value: Value, rows: int, columns: int) -> Value:
        """``value`` at a finer resolution; dimensions of size 1 are left to broadcasting."""
        if 1 < value.rows < rows:
            code = self.dialect.repeat(value.code, (value.rows, value.columns), 0, rows)
            value = dataclasses.replace(value, code=self.assign("x", code), rows=rows)
        if 1 < value.columns < columns:
            code = self.dialect.repeat(value.code, (value.rows, value.columns), 1, columns)
            value = dataclasses.replace(value, code=self.assign("x", code), columns=columns)
        return value

    def to_float(self, value: Value) -> Value:
        """``value`` as fp32; exact for integers of up to 24 bits and for all narrower floats."""
        fp32 = f"{self.lang}.float32"
        if value.is_float:
            code = f"{value.code}.to({fp32})"
        elif value.limit is not None and max(value.limit, abs(value.bias)) <= _MAX_MAGIC:
            magic = f"({value.code} | {MAGIC_BITS}).to({fp32}, bitcast=True)"
            code = f"{magic} - {float(_MAGIC - value.bias)}"
        else:
            code = f"({value.code} + {value.bias}).to({fp32})"
        return Value(self.assign("f", code), value.rows, value.columns, is_float=True)

    # dequantization ops

    def operand(self, op: DequantOp) -> Value:
        if isinstance(op.operand, Field):
            return self.to_float(self.field(op.operand))
        return Value(repr(float(op.operand)), 1, 1, is_float=True)

    def apply(self, value: Value, ops: Sequence[DequantOp]) -> Value:
        for op in ops:
            operand = self.operand(op)
            rows = max(value.rows, operand.rows)
            columns = max(value.columns, operand.columns)
            value, operand = (self.widen(each, rows, columns) for each in (value, operand))
            code = self.assign("f", self.dialect.apply(op, value.code, operand.code))
            value = Value(code, rows, columns, is_float=True)
        return value

    def apply_to_sums(self, op: DequantOp, sums: str, operand: str) -> None:
        """The statement that applies ``op`` to the variable ``sums``, ``operand`` of each column.

        A quotient is the product with the inverse of the column, in fp64, rounded: none is as close
        to the middle of two fp32 numbers as this can err. To divide each sum takes a branch and
        hundreds of cycles.
        """
        code = self.dialect.apply(op, sums, operand)
        if op.kind == "div" and isinstance(op.operand, Field):
            double = f"{self.lang}.float64"
            one = f"{self.lang}.full([], 1.0, {double})"
            inverse = self.assign("f", f"{one} / ({operand}).to({double})")
            code = f"({sums}.to({double}) * {inverse}).to({self.lang}.float32)"
        self.lines.append(f"{sums} = {code}")

    def integers(self, value: Value, ops: Sequence[DequantOp]) -> Value:
        """``ops`` on integers, applied in int32, which has all of their results."""
        for op in ops:
            if isinstance(op.operand, Field):
                operand = self.field(op.operand)
            else:
                operand = Value("0", 1, 1, bias=int(op.operand))
            rows, columns = max(value.rows, operand.rows), max(value.columns, operand.columns)
            value, operand = (self.widen(each, rows, columns) for each in (value, operand))
            if op.kind == "mul":
                code, bias = f"({value.whole.code}) * ({operand.whole.code})", 0
            else:
                sign, symbol = (1, "+") if op.kind == "add" else (-1, "-")
                bias = value.bias + sign * operand.bias
                code = f"{value.code} {symbol} {operand.code}"
            value = Value(self.assign("z", code), rows, columns, bias=bias)
        return value.whole
