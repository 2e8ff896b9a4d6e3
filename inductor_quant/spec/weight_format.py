"""``WeightFormat``: how a quantized weight is stored, and the ops that dequantize it.

A weight W [K, N] is a function of k and n. Both are written in mixed radix: ``k = (24, 8)`` has the
digits ``k0 = k // 8`` and ``k1 = k % 8``. Every packed format we know reads a stored word at an
index and a bit field at an offset, and each of these is a *sum over the digits*: linear
(``16*k0 + k1``), or a small table where the order within a word is permuted. So a format is data,
and kernels query it for the properties that they need.

    AWQ    k = (K,)  n = (N/8, 8)   element = w0[k0, n0] >> {0,16,4,20,8,24,12,28}[n1] & 15
    GPTQ   k = (K/8, 8)  n = (N,)   element = w0[k0, n0] >> 4*k1 & 15

A stack of weights W [E, K, N], one for each expert of a layer, has digits of e too.

Everything here is frozen, hashable and independent of tensors. ``encode`` and ``decode`` give the
text that ``torch.ops.inductor_quant.weight_only`` takes as an argument.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

DequantOpKind = Literal["add", "sub", "mul", "div", "round", "wrap"]
TO_INT8 = ("round", "wrap")  # kinds
NO_TENSOR = -1
# The values of the codes of e2m1 (OCP MX 1.0): the highest of four bits is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


@dataclasses.dataclass(frozen=True)
class AffineIndex:
    """``const + sum(coef * digit) + sum(table[digit]) + sum(coef * field)``.

    A field is read from a tensor, such as the group of each k in GPTQ's act-order.
    """

    const: int = 0
    linear: tuple[tuple[str, int], ...] = ()
    tables: tuple[tuple[str, tuple[int, ...]], ...] = ()
    fields: tuple[tuple[Field, int], ...] = ()

    @property
    def digits(self) -> frozenset[str]:
        """The digits on which the value depends."""
        names = {name for name, _ in self.linear + self.tables}
        return frozenset(names).union(*(field.digits for field, _ in self.fields))

    @property
    def is_data(self) -> bool:
        return bool(self.fields)

    def value(self, digits: Mapping[str, int]) -> int:
        """The value at these digits, without the fields."""
        linear = sum(coef * digits[name] for name, coef in self.linear)
        return self.const + linear + sum(table[digits[name]] for name, table in self.tables)

    def bounds(self, radix: Callable[[str], int]) -> tuple[int, int]:
        """(smallest, largest) value over all digits, without the fields."""
        low = high = self.const
        for name in sorted({name for name, _ in self.linear + self.tables}):
            part = AffineIndex(
                linear=tuple(term for term in self.linear if term[0] == name),
                tables=tuple(term for term in self.tables if term[0] == name),
            )
            last = radix(name) - 1
            digits = range(last + 1) if part.tables else (0, last)
            values = [part.value({name: digit}) for digit in digits]
            low, high = low + min(values), high + max(values)
        return low, high

    def __str__(self) -> str:
        parts = [name if coef == 1 else f"{coef}*{name}" for name, coef in self.linear]
        parts += [f"{{{','.join(map(str, table))}}}[{name}]" for name, table in self.tables]
        parts += [f"{field}" if coef == 1 else f"{coef}*{field}" for field, coef in self.fields]
        if self.const or not parts:
            parts.append(str(self.const))
        return "+".join(parts)


@dataclasses.dataclass(frozen=True)
class Field:
    """A value stored in tensor ``source`` (its position among the op's tensors).

    The element at ``index``, one ``AffineIndex`` per dimension; if ``width`` is not 0, its
    ``width`` bits from bit ``offset`` on (0 is the least significant), sign-extended if ``signed``.
    Then ``+ add``, and with ``wrap`` modulo 2**width. Shifts are arithmetic in the word's dtype. An
    index below 0 counts from the end, as in torch; a field that is part of an index has ``size``
    added if it is below 0. With ``float8`` the eight bits are such a float: "e4m3", "e5m2", or, of
    scales alone, a power of two (``ops.dequantize.EXPONENTS``).

    With ``entries`` the tensor is a table whose values are known: "e2m1", those of its 16 codes.

    With ``high``, an unsigned field, these bits are the lowest of a number whose other bits are
    those of ``high``, before ``add``: fields of two words, or of two tensors.

    Without a tensor (``source`` is NO_TENSOR) the value is a digit of a position that the digits of
    k and n do not divide: ``index[0] // divisor % modulus``, or the entry of ``table`` there. Such
    a field is part of an index.

    Last, the integer field ``minus`` is subtracted in integers of ``bits`` bits, which wrap around.
    Only the element has one: a zero point that a dequant op, in fp32, might round.
    """

    source: int
    index: tuple[AffineIndex, ...]
    offset: AffineIndex = AffineIndex()
    width: int = 0
    signed: bool = False
    add: int = 0
    wrap: bool = False
    size: int = 0
    float8: str = ""
    divisor: int = 0
    modulus: int = 0
    table: tuple[int, ...] = ()
    minus: Field | None = None
    bits: int = 64
    high: Field | None = None
    entries: str = ""

    @property
    def digits(self) -> frozenset[str]:
        """The digits on which the value depends."""
        own = self.offset.digits.union(*(index.digits for index in self.index))
        return own | self.high.digits if self.high else own

    @property
    def is_position(self) -> bool:
        """Whether the value depends on the position alone."""
        return self.source == NO_TENSOR

    @property
    def total_width(self) -> int:
        """The width of the number, with the bits of ``high``."""
        return self.width + (self.high.total_width if self.high else 0)

    @property
    def nested(self) -> tuple[Field, ...]:
        """The fields that this one's index and offset are computed from, and ``high``."""
        indices = (*self.index, self.offset)
        found = tuple(field for index in indices for field, _ in index.fields)
        return (*found, self.high) if self.high else found

    def __str__(self) -> str:
        if self.is_position:
            table = f"{{{','.join(map(str, self.table))}}}" if self.table else ""
            return f"{table}(({self.index[0]})//{self.divisor}%{self.modulus})"
        text = f"w{self.source}[{','.join(map(str, self.index))}]"
        if self.width:
            kind = self.float8 or f"{'i' if self.signed else 'u'}{self.width}"
            text += f":{kind}@{self.offset}"
        if self.high:
            text = f"({text} | {self.high} << {self.width})"
        if self.add:
            text = f"({text}{self.add:+d})"
        text = f"{text}%{1 << self.width}" if self.wrap else text
        return f"i{self.bits}({text} - {self.minus})" if self.minus else text


@dataclasses.dataclass(frozen=True)
class DequantOp:
    """``value <kind> operand``, with a field or a constant as operand.

    Two kinds have none, and make an int8: "round" to the nearest integer (half to even), clamped;
    "wrap" an integer modulo 256. They come last, and ``w4a8`` alone takes them.
    """

    kind: DequantOpKind
    operand: Field | float = 0.0

    def __str__(self) -> str:
        if self.kind in TO_INT8:
            return self.kind
        symbol = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[self.kind]
        operand = self.operand
        return f"{symbol} {operand if isinstance(operand, Field) else f'{operand:g}'}"


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """``W[k, n] = dequant_ops(element[k, n])``.

    k, n         radices of the digits of k and n, most significant first, with products K and N
    element      the quantized value: a bit field, a whole int8 or fp8 element, or, if its index is
                 itself a field, an entry of a lookup table
    dequant_ops  applied in order; scales are ``mul`` or ``div``, zero points ``sub``
    e            radices of the digits of e, with product E; () of a single weight
    """

    k: tuple[int, ...]
    n: tuple[int, ...]
    element: Field
    dequant_ops: tuple[DequantOp, ...] = ()
    e: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return math.prod(self.k), math.prod(self.n)

    @property
    def experts(self) -> int:
        """E; 1 of a single weight."""
        return math.prod(self.e)

    def radices(self, axis: str) -> tuple[int, ...]:
        """Of the digits of "k", "n" or "e"."""
        return {"k": self.k, "n": self.n, "e": self.e}[axis]

    def radix(self, digit: str) -> int:
        return self.radices(digit[0])[int(digit[1:])]

    def digits(self, axis: str) -> list[str]:
        """The digits of an axis that take more than one value, most significant first."""
        return [f"{axis}{i}" for i, radix in enumerate(self.radices(axis)) if radix > 1]

    def weight_of(self, digit: str) -> int:
        """The place value of ``digit`` in its axis: the product of the radices after it."""
        return math.prod(self.radices(digit[0])[int(digit[1:]) + 1 :])

    def fields(self) -> Iterator[Field]:
        """All fields of tensors: the element, the operands of the ops, those nested in each."""
        operands = (op.operand for op in self.dequant_ops)
        fields = (self.element, self.element.minus, *operands)
        todo = [field for field in fields if isinstance(field, Field)]
        while todo:
            field = todo.pop(0)
            if not field.is_position:
                yield field
                todo.extend(field.nested)

    @property
    def code(self) -> Field:
        """The field that holds the quantized value: the element, or the index of a lookup table.

        A table is indexed by data alone, or has entries of its own for each k or n. Data that does
        not depend on both selects a row there, or an expert.
        """
        field = self.element
        while data := [
            nested for index in field.index for nested, _ in index.fields if not nested.is_position
        ]:
            own = {name[0] for index in field.index for name, _ in index.linear + index.tables}
            selects = not {name[0] for each in data for name in each.digits} >= {"k", "n"}
            if len(data) != 1 or (own & {"k", "n"} and selects):
                break
            field = data[0]
        return field

    def block(self, field: Field) -> tuple[int, int]:
        """(elements along K, along N) of W that share one value of ``field``; -1: all of them.

        1 if the field's index is data that depends on k (act-order): it may change at any k.
        """
        return self._extent(field, "k", self.k), self._extent(field, "n", self.n)

    @property
    def column_ops(self) -> tuple[DequantOp, ...]:
        """The trailing scales that are the same for all k, which may be applied to the sum over k
        instead of to each weight."""
        count = 0
        for op in reversed(self.dequant_ops):
            varies = isinstance(op.operand, Field) and self.block(op.operand)[0] != -1
            if op.kind not in ("mul", "div") or varies:
                break
            count += 1
        return self.dequant_ops[len(self.dequant_ops) - count :]

    @property
    def to_int8(self) -> str:
        """How W becomes an int8, a kind of ``DequantOp``; "": it does not."""
        last = self.dequant_ops[-1].kind if self.dequant_ops else ""
        return last if last in TO_INT8 else ""

    @property
    def pack_axis(self) -> Literal["k", "n"] | None:
        """The axis along which a word packs its values; None: it holds one, or packs both axes."""
        axes = {name[0] for name in self.code.offset.digits}
        if len(axes) != 1:
            return None
        return "k" if axes == {"k"} else "n"

    @property
    def pack_order(self) -> tuple[int, ...]:
        """The bit offsets of the values of one word, in the order of the digits that choose among
        them, most significant first; () if the offset is data.

        GPTQ (0, 4, ..., 28), AWQ (0, 16, 4, 20, 8, 24, 12, 28), HQQ's halves (4, 0).
        """
        offset = self.code.offset
        if offset.is_data:
            return ()
        names = sorted(offset.digits, key=lambda name: (name[0], int(name[1:])))
        ranges = [range(self.radix(name)) for name in names]
        cases = (dict(zip(names, values, strict=True)) for values in itertools.product(*ranges))
        return tuple(offset.value(digits) for digits in cases)

    @property
    def zero(self) -> DequantOp | None:
        """The op of the zero point: the first that subtracts or adds."""
        return next((op for op in self.dequant_ops if op.kind in ("add", "sub")), None)

    @property
    def scales(self) -> tuple[DequantOp, ...]:
        """The ops that multiply or divide by a tensor."""
        ops = (op for op in self.dequant_ops if op.kind in ("mul", "div"))
        return tuple(op for op in ops if isinstance(op.operand, Field))

    def _extent(self, field: Field, axis: str, radices: tuple[int, ...]) -> int:
        used = [int(name[1:]) for name in field.digits if name[0] == axis]
        return math.prod(radices[max(used) + 1 :]) if used else -1

    def encode(self) -> str:
        """A compact text, read back by ``decode``."""
        return json.dumps(_pack(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> WeightFormat:
        """The inverse of ``encode``. Raises ValueError for other text."""
        try:
            k, n, element, ops, e = json.loads(text)
            return cls(tuple(k), tuple(n), _field(element), tuple(map(_op, ops)), tuple(e))
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{text!r} is no weight format: {error!r}") from error

    def __str__(self) -> str:
        axes = ("k", "n", "e") if self.e else ("k", "n")
        sizes = [f"{axis.upper()}={'.'.join(map(str, self.radices(axis)))}" for axis in axes]
        return " ".join([*sizes, ":", str(self.element), *map(str, self.dequant_ops)])


def _pack(item: Any) -> Any:
    """Nested lists of the fields' values, without their names."""
    if isinstance(item, (str, int, float)) or item is None:
        return item
    parts = item if isinstance(item, tuple) else vars(item).values()  # in the order of the fields
    return [_pack(part) for part in parts]


def _index(raw: Any) -> AffineIndex:
    const, linear, tables, fields = raw
    return AffineIndex(
        const,
        tuple((name, coef) for name, coef in linear),
        tuple((name, tuple(table)) for name, table in tables),
        tuple((_field(field), coef) for field, coef in fields),
    )


def _field(raw: Any) -> Field:
    source, index, offset, *rest, table, minus, bits, high, entries = raw
    found = Field(source, tuple(map(_index, index)), _index(offset), *rest)
    minus, high = (_field(each) if each else None for each in (minus, high))
    found = dataclasses.replace(found, table=tuple(table), minus=minus, bits=bits, high=high)
    return dataclasses.replace(found, entries=entries)


def _op(raw: Any) -> DequantOp:
    kind, operand = raw
    return DequantOp(kind, _field(operand) if isinstance(operand, list) else operand)
