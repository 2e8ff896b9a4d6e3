"""How a quantized weight lies in memory: where each W[k, n] is read, and what makes it real.

A weight of shape [K, N] is a function of two numbers, k and n. Both are written in mixed radix:
``k = (24, 8)`` says that k has the digits ``k0 = k // 8`` and ``k1 = k % 8``. Every packed format
that we know reads a word at an index, and a field of bits at an offset, that are each a *sum over
the digits*: linear (``16*k0 + k1``), or a small table where the order within a word is permuted. So
a format is data, one structure serves all, and a kernel asks it for the properties that it needs.

    AWQ    k = (K,)  n = (N/8, 8)   element = w0[k0, n0] >> {0,16,4,20,8,24,12,28}[n1] & 15
    GPTQ   k = (K/8, 8)  n = (N,)   element = w0[k0, n0] >> 4*k1 & 15

Everything here is frozen, hashable and independent of tensors; ``encode`` and ``decode`` are the
form in which it travels as an argument of ``torch.ops.inductor_quant.weight_only``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

StepKind = Literal["add", "sub", "mul", "div"]


@dataclasses.dataclass(frozen=True)
class Form:
    """An integer function of the digits.

    ``const + sum(coef * digit) + sum(table[digit]) + sum(coef * field)``; a term of ``fields`` is a
    number that lies in a tensor, such as the group of a row in GPTQ's act-order.
    """

    const: int = 0
    linear: tuple[tuple[str, int], ...] = ()
    tables: tuple[tuple[str, tuple[int, ...]], ...] = ()
    fields: tuple[tuple[Field, int], ...] = ()

    @property
    def digits(self) -> frozenset[str]:
        """The digits on which the value depends."""
        own = {name for name, _ in self.linear} | {name for name, _ in self.tables}
        return frozenset(own).union(*(field.digits for field, _ in self.fields))

    @property
    def is_data(self) -> bool:
        return bool(self.fields)

    def value(self, digits: Mapping[str, int]) -> int:
        """The form at these digits; without the terms that are data."""
        linear = sum(coef * digits[name] for name, coef in self.linear)
        return self.const + linear + sum(table[digits[name]] for name, table in self.tables)

    def bounds(self, radix: Callable[[str], int]) -> tuple[int, int]:
        """(smallest, largest) value over all digits, both taken; without the terms that are
        data."""
        low = high = self.const
        for name in sorted({name for name, _ in self.linear + self.tables}):
            own = Form(
                linear=tuple(term for term in self.linear if term[0] == name),
                tables=tuple(term for term in self.tables if term[0] == name),
            )
            last = radix(name) - 1
            # a line is extreme at its ends
            taken = range(last + 1) if own.tables else (0, last)
            values = [own.value({name: digit}) for digit in taken]
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
    """A number in tensor ``source`` (its position among the op's tensors).

    The element at ``index``, one form for each dimension of the tensor; of it, where ``width`` is
    not 0, the ``width`` bits from bit ``offset`` on, counted from the least significant,
    sign-extended if ``signed``. Then ``+ add``, and with ``wrap`` modulo 2**width. Shifts are
    arithmetic in the word's type; an index below 0 counts from the end, as in torch. A field that
    is part of an index has ``size`` added if it is below 0: the length that it counts back from.
    With ``float8`` ("e4m3", "e5m2") the bits, eight of them, are such a number.
    """

    source: int
    index: tuple[Form, ...]
    offset: Form = Form()
    width: int = 0
    signed: bool = False
    add: int = 0
    wrap: bool = False
    size: int = 0
    float8: str = ""

    @property
    def digits(self) -> frozenset[str]:
        """The digits on which the value depends."""
        return self.offset.digits.union(*(form.digits for form in self.index))

    @property
    def parts(self) -> tuple[Field, ...]:
        """The fields that this one's index and offset are computed from."""
        forms = (*self.index, self.offset)
        return tuple(field for form in forms for field, _ in form.fields)

    def __str__(self) -> str:
        text = f"w{self.source}[{','.join(map(str, self.index))}]"
        if self.width:
            text += f":{'i' if self.signed else 'u'}{self.width}@{self.offset}"
        if self.add:
            text = f"({text}{self.add:+d})"
        return f"{text}%{1 << self.width}" if self.wrap else text


@dataclasses.dataclass(frozen=True)
class Step:
    """One affine step: the value so far, ``kind`` the operand (a field or a number)."""

    kind: StepKind
    operand: Field | float

    def __str__(self) -> str:
        symbol = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[self.kind]
        operand = self.operand
        return f"{symbol} {operand if isinstance(operand, Field) else f'{operand:g}'}"


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """``W[k, n] = steps(element[k, n])``.

    k, n     radices of the digits of k and n, most significant first; their products are K and N
    element  the stored number: a field of bits, a whole int8 or fp8 element, or, where its index
             is itself a field, an entry of a look-up table
    steps    what makes it real, applied in order; scales are ``mul`` or ``div``, zeros ``sub``
    """

    k: tuple[int, ...]
    n: tuple[int, ...]
    element: Field
    steps: tuple[Step, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return math.prod(self.k), math.prod(self.n)

    def radix(self, digit: str) -> int:
        return (self.k if digit[0] == "k" else self.n)[int(digit[1:])]

    def weight_of(self, digit: str) -> int:
        """What one unit of ``digit`` counts in k or n: the product of the radices behind it."""
        radices = self.k if digit[0] == "k" else self.n
        return math.prod(radices[int(digit[1:]) + 1 :])

    def fields(self) -> Iterator[Field]:
        """All fields: the element, the steps' operands, and the parts of each."""
        todo = [self.element, *(s.operand for s in self.steps if isinstance(s.operand, Field))]
        while todo:
            field = todo.pop(0)
            yield field
            todo.extend(field.parts)

    @property
    def num_sources(self) -> int:
        return 1 + max(field.source for field in self.fields())

    @property
    def code(self) -> Field:
        """The field that holds the quantized number: the element, or what a look-up table is
        indexed with."""
        field = self.element
        while data := [part for form in field.index for part, _ in form.fields]:
            if len(data) != 1:
                break
            field = data[0]
        return field

    def block(self, field: Field) -> tuple[int, int]:
        """(rows along K, columns along N) of W that share one value of ``field``; -1: all of them.

        Where the field's index is data that depends on k (act-order): 1, it may change at any k.
        """
        return self._extent(field, "k", self.k), self._extent(field, "n", self.n)

    @property
    def column_steps(self) -> tuple[Step, ...]:
        """The trailing scales that are the same for all k: they may be applied to the sum over k
        instead of to each weight."""
        count = 0
        for step in reversed(self.steps):
            operand = step.operand
            varies = isinstance(operand, Field) and self.block(operand)[0] != -1
            if step.kind not in ("mul", "div") or varies:
                break
            count += 1
        return self.steps[len(self.steps) - count :]

    @property
    def pack_axis(self) -> Literal["k", "n"] | None:
        """The axis along which the numbers of one word lie; None: one a word, or both axes."""
        axes = {name[0] for name in self.code.offset.digits}
        if len(axes) != 1:
            return None
        return "k" if axes == {"k"} else "n"

    @property
    def pack_order(self) -> tuple[int, ...]:
        """The bit offsets of the numbers of one word, in the order of the digits that choose among
        them, most significant first; () where the offset is data.

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
    def zero(self) -> Step | None:
        """The step that subtracts (or adds) the zero point, if there is one: the first of its
        kind."""
        return next((step for step in self.steps if step.kind in ("add", "sub")), None)

    @property
    def scales(self) -> tuple[Step, ...]:
        """The steps that multiply or divide by a tensor."""
        return tuple(
            step
            for step in self.steps
            if step.kind in ("mul", "div") and isinstance(step.operand, Field)
        )

    def _extent(self, field: Field, axis: str, radices: tuple[int, ...]) -> int:
        used = [int(name[1:]) for name in field.digits if name[0] == axis]
        return math.prod(radices[max(used) + 1 :]) if used else -1

    def encode(self) -> str:
        """A compact text, read back by ``decode``."""
        return json.dumps(_pack(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> WeightFormat:
        """The format that ``encode`` gave. Raises ValueError for other text."""
        try:
            k, n, element, steps = json.loads(text)
            return cls(tuple(k), tuple(n), _field(element), tuple(map(_step, steps)))
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"{text!r} is no weight format: {error!r}") from error

    def __str__(self) -> str:
        radices = (".".join(map(str, radices)) for radices in (self.k, self.n))
        return " ".join(["K={} N={} :".format(*radices), str(self.element), *map(str, self.steps)])


def _pack(item: Any) -> Any:
    """Nested lists of the fields' values, without their names."""
    if dataclasses.is_dataclass(item):
        return [_pack(getattr(item, field.name)) for field in dataclasses.fields(item)]
    if isinstance(item, tuple):
        return [_pack(part) for part in item]
    return item


def _form(raw: Any) -> Form:
    const, linear, tables, fields = raw
    return Form(
        const,
        tuple((name, coef) for name, coef in linear),
        tuple((name, tuple(table)) for name, table in tables),
        tuple((_field(field), coef) for field, coef in fields),
    )


def _field(raw: Any) -> Field:
    source, index, offset, *rest = raw
    return Field(source, tuple(map(_form, index)), _form(offset), *rest)


def _step(raw: Any) -> Step:
    kind, operand = raw
    return Step(kind, _field(operand) if isinstance(operand, list) else operand)
