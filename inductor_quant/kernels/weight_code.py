"""Triton statements that read and dequantize a tile of a weight, made from its ``WeightFormat``.

A position is a sum over digits of k and n, so it splits into a part of k, [rows, 1], and a part of
n, [1, columns]; where it is no data it costs two vectors a tile. Every field is read at the
coarsest resolution at which it is constant: one word of eight numbers, one row of scales a group.
It is widened in registers: ``[rows, 1, columns]`` is broadcast and reshaped.

All sizes here are known when the code is generated: those of the format and of the configuration.
Only strides, and sizes that bound positions which are data, are asked of the template.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from inductor_quant.kernels.config import GemmConfig, WeightTensor
from inductor_quant.weight_format import Field, Form, Step, WeightFormat

# (input's name, dimension) -> an expression
Hook = Callable[[str, int], str]

TRITON_TYPES = {
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float32: "tl.float32",
}
_FLOAT8 = {"e4m3": "tl.float8e4nv", "e5m2": "tl.float8e5"}
# Bits b of an integer below 2**23 under this exponent are the fp32 number 2**23 + b. Subtracting is
# exact, and takes an eighth of the time of a conversion.
_MAGIC_BITS, _MAGIC = 0x4B000000, 1 << 23
_MAX_MAGIC = 1 << 22
_INT32_MAX = (1 << 31) - 1
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)


@dataclasses.dataclass(frozen=True)
class Value:
    """A variable, or an expression of one, of shape [rows, columns]; a scalar where both are 1.

    bias    an integer to be added: kept apart because it is folded into the conversion to float
    limit   0 <= code < limit; None: not known
    """

    code: str
    rows: int
    columns: int
    is_float: bool = False
    bias: int = 0
    limit: int | None = None


class WeightCode:
    """The code of one weight in one configuration: what a template's constant ``WEIGHT`` is.

    Templates call its methods. As a constant of the kernel, and in every key, it reads as the text
    of the format; the code that it gives is part of the kernel's source, which is keyed too.
    """

    def __init__(
        self,
        format: WeightFormat,
        tensors: Sequence[WeightTensor],
        config: GemmConfig,
        *,
        x_dtype: torch.dtype,
        loop_steps: Sequence[Step],
        column_steps: Sequence[Step],
    ) -> None:
        self.format = format
        self.dtypes = tuple(tensor.dtype for tensor in tensors)
        self.shapes = tuple(tensor.shape for tensor in tensors)
        self.x_dtype = x_dtype
        self.loop_steps = tuple(loop_steps)
        self.column_steps = tuple(column_steps)
        self.block = {"k": config.block_k, "n": config.block_n}
        self.k, self.n = format.shape
        self.sources = [f"W{number}" for number in range(len(self.dtypes))]
        self.x_type = TRITON_TYPES[x_dtype]

    def __str__(self) -> str:
        return repr(str(self.format))

    __repr__ = __str__

    @property
    def is_even_k(self) -> bool:
        return self.k % self.block["k"] == 0

    def tile(self, stride: Hook, size: Hook) -> str:
        """Statements inside the loop that leave the tile at k in ``w`` [BLOCK_K, BLOCK_N]."""
        out = Statements(self, stride, size)
        value = out.field(self.format.element)
        if self.loop_steps or not self.casts_directly:
            value = out.apply(out.to_float(value), self.loop_steps)
        value = out.widen(value, self.block["k"], self.block["n"])
        code = f"{value.code}.to({self.x_type})"
        if 1 in (value.rows, value.columns):
            code = f"tl.broadcast_to({code}, [BLOCK_K, BLOCK_N])"
        out.lines.append(f"w = {code}")
        if not self.is_even_k:
            # x is 0 there, but what W repeats from its first rows may be infinite.
            out.lines.append("w = tl.where((k + tl.arange(0, BLOCK_K))[:, None] < K, w, 0.0)")
        return "\n".join(out.lines)

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements behind the loop that apply the scales of whole columns to ``out``."""
        out = Statements(self, stride, size)
        for step in self.column_steps:
            value = out.operand(step)
            value = out.widen(value, 1, self.block["n"])
            out.lines.append(f"out = {arithmetic(step, 'out', value.code)}")
        return "\n".join(out.lines)

    def loaded_bytes(self) -> int:
        """Bytes that one step of the loop loads of the weight: what a pipeline stage holds."""
        fields = [self.format.element]
        fields += [step.operand for step in self.loop_steps if isinstance(step.operand, Field)]
        total = 0
        for field in _with_parts(fields):
            rows, columns = self.resolution(*field.index)
            total += rows * columns * self.dtypes[field.source].itemsize
        return total

    def resolution(self, *forms: Form) -> tuple[int, int]:
        """(rows, columns) of a tile at which these forms are told apart."""
        digits = frozenset[str]().union(*(form.digits for form in forms))
        return self._count(digits, "k"), self._count(digits, "n")

    def _count(self, digits: frozenset[str], axis: str) -> int:
        format, block = self.format, self.block[axis]
        used = [
            format.weight_of(name) for name in digits if name[0] == axis and format.radix(name) > 1
        ]
        return block // math.gcd(block, *used) if used else 1

    @property
    def casts_directly(self) -> bool:
        """Whether x's type is one conversion away from the element as it is stored."""
        element = self.format.element
        dtype = self.dtypes[element.source]
        is_byte = dtype in (torch.int8, torch.uint8) and not element.width and not element.add
        return is_byte or dtype == self.x_dtype


class Statements:
    """Statements in order, and the variables that they have left so far."""

    def __init__(self, code: WeightCode, stride: Hook, size: Hook) -> None:
        self.weight, self.format = code, code.format
        self.stride, self.size = stride, size
        self.lines: list[str] = []
        self._known: dict[str, str] = {}
        self._fields: dict[Field, Value] = {}

    def assign(self, prefix: str, expression: str) -> str:
        """The variable that holds ``expression``; the same one for the same text."""
        if expression.isidentifier():
            return expression
        if expression not in self._known:
            name = f"{prefix}{len(self._known)}"
            self._known[expression] = name
            self.lines.append(f"{name} = {expression}")
        return self._known[expression]

    # positions

    def digit(self, name: str, count: int, span: int = 1) -> str:
        """The digit at each of ``count`` equal parts of the tile, int32 [count], or a scalar.

        ``span`` digits, of which ``name`` is the last, are read as one number.
        """
        axis, last = name[0], int(name[1:])
        block, total = self.weight.block[axis], self.weight.k if axis == "k" else self.weight.n
        first = last - span + 1
        radix = math.prod(self.format.radix(f"{axis}{i}") for i in range(first, last + 1))
        unit = block // count
        divisor = self.format.weight_of(name) // unit
        spread = f"tl.arange(0, {count})"
        if block % (divisor * radix * unit) == 0:
            position = spread  # the same in every tile
        else:
            start = "k" if axis == "k" else "(pid_n * BLOCK_N).to(tl.int32)"
            position = self.assign("p", f"{start} // {unit}" if unit > 1 else start)
            if count > 1:
                position = self.assign("p", f"{position} + {spread}")
        # Parts beyond the end wrap around; what they give is dropped.
        is_within = first == 0 and total % block == 0
        if divisor > 1:
            position = f"({position} // {divisor})"
        return self.assign("d", position if is_within else f"{position} % {radix}")

    def spans(self, form: Form, axis: str) -> list[tuple[str, int, int]]:
        """One axis of the linear terms as (last digit, how many, coefficient): digits that count as
        one number are one term, so that neighbours are seen to be neighbours."""
        found: list[tuple[str, int, int]] = []
        terms = [term for term in form.linear if term[0][0] == axis]
        for name, coef in sorted(terms, key=lambda term: int(term[0][1:])):
            if found:
                last, span, high = found[-1]
                follows = name == f"{last[0]}{int(last[1:]) + 1}"
                if follows and high == coef * self.format.radix(name):
                    found[-1] = (name, span + 1, coef)
                    continue
            found.append((name, 1, coef))
        return found

    def form(self, form: Form, rows: int, columns: int) -> str:
        """The form as an expression of shape [rows, columns]: int32, int64 where data is."""
        form = self._without_trivial_digits(form)
        parts = [self.axis_part(form, axis, rows if axis == "k" else columns) for axis in "kn"]
        for field, coef in form.fields:
            value = self.widen(self.field(field), rows, columns)
            parts.append(f"({value.code} + {value.bias}) * {coef}")
        if form.const or not any(parts):
            parts.append(str(form.const))
        return " + ".join(part for part in parts if part)

    def axis_part(self, form: Form, axis: str, count: int) -> str:
        """What the digits of k or n contribute: [count, 1], [1, count] or a scalar; "": nothing."""
        is_wide = max(map(abs, form.bounds(self.format.radix))) > _INT32_MAX
        terms = []
        for name, span, coef in self.spans(form, axis):
            digit = self.digit(name, count, span) + (".to(tl.int64)" if is_wide else "")
            terms.append(digit if coef == 1 else f"{digit} * {coef}")
        for name, table in form.tables:
            if name[0] == axis:
                terms.append(self.table(table, self.digit(name, count)))
        if not terms:
            return ""
        # Added up before they get their second dimension: fewer and smaller tensors.
        whole = self.assign("i", " + ".join(terms))
        return whole if count == 1 else f"{whole}[{':, None' if axis == 'k' else 'None, :'}]"

    def _without_trivial_digits(self, form: Form) -> Form:
        """The same form without digits that take one value only."""
        radix = self.format.radix
        return Form(
            form.const + sum(table[0] for name, table in form.tables if radix(name) == 1),
            tuple(term for term in form.linear if radix(term[0]) > 1),
            tuple(term for term in form.tables if radix(term[0]) > 1),
            form.fields,
        )

    def table(self, table: Sequence[int], digit: str) -> str:
        low, high = min(table), max(table)
        bits = max(1, (high - low).bit_length())
        if bits * len(table) <= 63:
            packed = sum(value - low << bits * digit for digit, value in enumerate(table))
            word = f"tl.full([], {packed}, tl.int64)"
            code = f"((({word} >> ({digit} * {bits})) & {(1 << bits) - 1}).to(tl.int32) + {low})"
        else:
            code = str(table[-1])
            for position in range(len(table) - 2, -1, -1):
                if table[position] != table[position + 1]:
                    code = f"tl.where({digit} <= {position}, {table[position]}, {code})"
            code = f"({code} + {digit} * 0)"
        return self.assign("t", code)

    def pointer(self, field: Field) -> tuple[str, int, int]:
        """The address of each element, and how many (rows, columns) of them."""
        rows, columns = self.weight.resolution(*field.index)
        source = self.weight.sources[field.source]
        parts = [source]
        for dim, form in enumerate(map(self._without_trivial_digits, field.index)):
            low, high = form.bounds(self.format.radix)
            stride = self.stride(source, dim)
            if form.is_data or low < 0 <= high:
                index = self.assign("i", self.form(form, rows, columns))
                parts.append(f"{self.inside(index, form, source, dim)} * {stride}")
                continue
            for axis in "kn":
                part = self.axis_part(form, axis, rows if axis == "k" else columns)
                if part:
                    parts.append(f"{part}.to(INDEX_DTYPE) * {stride}")
            if low < 0:
                parts.append(f"({form.const} + {self.size(source, dim)}) * {stride}")
            elif form.const:
                parts.append(f"{form.const} * {stride}")
        return " + ".join(parts), rows, columns

    def inside(self, index: str, form: Form, source: str, dim: int) -> str:
        """``index`` counted from the end where it is negative. One that is data is kept within the
        tensor: a benchmark runs on arbitrary numbers."""
        size = self.size(source, dim)
        low, high = self._data_bounds(form)
        if low < 0:
            index = self.assign("i", f"tl.where({index} < 0, {index} + {size}, {index})")
        length = self.weight.shapes[int(source[1:])][dim]
        if form.is_data and (low < 0 or length is None or high >= length):
            index = self.assign("i", f"tl.minimum(tl.maximum({index}, 0), {size} - 1)")
        return f"{index}.to(INDEX_DTYPE)"

    def _data_bounds(self, form: Form) -> tuple[float, float]:
        low, high = map(float, form.bounds(self.format.radix))
        for field, coef in form.fields:
            value = self.field(field)
            if value.limit is None:
                return -math.inf, math.inf
            ends = (coef * value.bias, coef * (value.bias + value.limit - 1))
            low, high = low + min(ends), high + max(ends)
        return low, high

    # numbers

    def field(self, field: Field) -> Value:
        if field not in self._fields:
            self._fields[field] = self._field(field)
        return self._fields[field]

    def read(self, field: Field) -> tuple[str, int, int]:
        """The variable that holds the field's words, and how many (rows, columns) of them."""
        pointer, rows, columns = self.pointer(field)
        return self.assign("w", f"tl.load({pointer})"), rows, columns

    def _field(self, field: Field) -> Value:
        dtype = self.weight.dtypes[field.source]
        word, rows, columns = self.read(field)
        if dtype.is_floating_point:
            return Value(word, rows, columns, is_float=True)
        if not field.width:
            return self._whole(Value(word, rows, columns), dtype, field)
        if field.float8:
            return self._float8(Value(word, rows, columns), dtype, field)
        word = self._as_word(word, dtype, field)
        rows_out, columns_out = self.weight.resolution(*field.index, field.offset)
        wide = self.widen(Value(word, rows, columns), rows_out, columns_out)
        bits = self._bits(wide, field, 64 if self._is_wide(dtype, field) else 32)
        bias = field.add
        if field.signed:
            sign = 1 << field.width - 1
            bits, bias = f"({bits} ^ {sign})", bias - sign
        if field.wrap:
            bits, bias = f"(({bits} + {bias}) & {(1 << field.width) - 1})", 0
        if self._is_wide(dtype, field) and field.width < 31:
            bits = f"{bits}.to(tl.int32)"
        limit = 1 << field.width
        value = Value(self.assign("b", bits), rows_out, columns_out, bias=bias, limit=limit)
        return self._from_end(value, field)

    def _from_end(self, value: Value, field: Field) -> Value:
        """``value`` with the field's ``size`` added where it is negative."""
        if not field.size or (value.limit is not None and value.bias >= 0):
            return value
        number = self.assign("b", f"{value.code} + {value.bias}")
        code = self.assign("b", f"tl.where({number} < 0, {number} + {field.size}, {number})")
        limit = None
        if value.limit is not None and value.bias + field.size >= 0:
            limit = max(value.limit + value.bias, field.size)
        return dataclasses.replace(value, code=code, bias=0, limit=limit)

    def _float8(self, word: Value, dtype: torch.dtype, field: Field) -> Value:
        """Eight bits of a word as the number of 8 bits that they are."""
        rows, columns = self.weight.resolution(*field.index, field.offset)
        bits = 64 if self._is_wide(dtype, field) else 32
        code = self._as_word(word.code, dtype, field)
        wide = self.widen(dataclasses.replace(word, code=code), rows, columns)
        code = self.assign("b", self._bits(wide, field, bits))
        cast = f"{code}.to(tl.uint8).to({_FLOAT8[field.float8]}, bitcast=True)"
        return Value(self.assign("f", cast), rows, columns, is_float=True)

    def _whole(self, word: Value, dtype: torch.dtype, field: Field) -> Value:
        code, bias = word.code, field.add
        if dtype not in _NARROW:
            code = code if dtype == torch.int32 and not bias else f"{code}.to(tl.int64)"
            value = dataclasses.replace(word, code=self.assign("b", code), bias=bias)
            return self._from_end(value, field)
        limit = 1 << 8 * dtype.itemsize
        is_last = field == self.format.element and not self.weight.loop_steps
        if is_last and self.weight.casts_directly:
            return word
        code = f"{code}.to(tl.int32)"
        if dtype.is_signed:
            code, bias = f"({code} & {limit - 1}) ^ {limit >> 1}", bias - (limit >> 1)
        code = self.assign("b", code)
        return self._from_end(dataclasses.replace(word, code=code, bias=bias, limit=limit), field)

    def _is_wide(self, dtype: torch.dtype, field: Field) -> bool:
        """Whether the word is shifted as a number of 64 bits."""
        is_unsigned = dtype == torch.uint32 and field.offset.is_data
        return dtype.itemsize == 8 or is_unsigned or field.width > 30

    def _as_word(self, word: str, dtype: torch.dtype, field: Field) -> str:
        if self._is_wide(dtype, field):
            return word if dtype == torch.int64 else self.assign("w", f"{word}.to(tl.int64)")
        if dtype == torch.int32:
            return word
        how = "tl.int32, bitcast=True" if dtype == torch.uint32 else "tl.int32"
        return self.assign("w", f"{word}.to({how})")

    def _bits(self, word: Value, field: Field, word_bits: int) -> str:
        """The unsigned number at the field's offset in each word."""
        mask = (1 << field.width) - 1
        if field.offset == Form():
            return f"({word.code} & {mask})"
        rows, columns = self.weight.resolution(field.offset)
        amount = self.assign("s", self.form(field.offset, rows, columns))
        if field.offset.is_data:
            last = word_bits - 1  # as far as torch shifts: what is left is the sign
            outside = f"({amount} < 0) | ({amount} > {last})"
            amount = f"tl.where({outside}, {last}, {amount}).to(tl.int{word_bits})"
            amount = self.assign("s", amount)
        wide = self.widen(Value(amount, rows, columns), word.rows, word.columns)
        return f"(({word.code} >> {wide.code}) & {mask})"

    def widen(self, value: Value, rows: int, columns: int) -> Value:
        """``value`` at a finer resolution; dimensions of size 1 are left to broadcasting."""
        if 1 < value.rows < rows:
            times = rows // value.rows
            shape = f"[{value.rows}, {times}, {value.columns}]"
            wide = f"tl.broadcast_to({value.code}[:, None, :], {shape})"
            code = f"tl.reshape({wide}, [{rows}, {value.columns}])"
            value = dataclasses.replace(value, code=self.assign("x", code), rows=rows)
        if 1 < value.columns < columns:
            times = columns // value.columns
            shape = f"[{value.rows}, {value.columns}, {times}]"
            wide = f"tl.broadcast_to({value.code}[:, :, None], {shape})"
            code = f"tl.reshape({wide}, [{value.rows}, {columns}])"
            value = dataclasses.replace(value, code=self.assign("x", code), columns=columns)
        return value

    def to_float(self, value: Value) -> Value:
        """``value`` as fp32; exact for integers of up to 24 bits and for all narrower floats."""
        if value.is_float:
            code = f"{value.code}.to(tl.float32)"
        elif value.limit is not None and max(value.limit, abs(value.bias)) <= _MAX_MAGIC:
            magic = f"({value.code} | {_MAGIC_BITS}).to(tl.float32, bitcast=True)"
            code = f"{magic} - {float(_MAGIC - value.bias)}"
        else:
            code = f"({value.code} + {value.bias}).to(tl.float32)"
        return Value(self.assign("f", code), value.rows, value.columns, is_float=True)

    # steps

    def operand(self, step: Step) -> Value:
        if isinstance(step.operand, Field):
            return self.to_float(self.field(step.operand))
        return Value(repr(float(step.operand)), 1, 1, is_float=True)

    def apply(self, value: Value, steps: Sequence[Step]) -> Value:
        for step in steps:
            operand = self.operand(step)
            rows = max(value.rows, operand.rows)
            columns = max(value.columns, operand.columns)
            value = self.widen(value, rows, columns)
            operand = self.widen(operand, rows, columns)
            code = self.assign("f", arithmetic(step, value.code, operand.code))
            value = Value(code, rows, columns, is_float=True)
        return value


def arithmetic(step: Step, value: str, operand: str) -> str:
    if step.kind != "div":
        return f"{value} {'+-*'[('add', 'sub', 'mul').index(step.kind)]} {operand}"
    if isinstance(step.operand, Field):
        return f"tl.div_rn({value}, {operand})"
    if abs(math.frexp(step.operand)[0]) == 0.5:
        return f"{value} * {1 / step.operand!r}"  # a power of two: exact
    return f"tl.div_rn({value}, tl.full([], {operand}, tl.float32))"


def _with_parts(fields: Sequence[Field]) -> list[Field]:
    todo, found = list(fields), []
    while todo:
        field = todo.pop()
        if field not in found:
            found.append(field)
            todo.extend(field.parts)
    return found
