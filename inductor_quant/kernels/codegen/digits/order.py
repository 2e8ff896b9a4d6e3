"""Weights whose columns, or whose K, are counted in another order than that of their digits.

A tile has neighbours of that order: columns that share their scales where these change with every k
(HQQ with axis 0), or the values of the same words where these are far apart along K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat


def reordered(format: WeightFormat, axis: str, order: Sequence[str]) -> WeightFormat:
    """The same weight with an axis counted by its digits in another ``order``, of all that take
    more than one value, the most significant first."""
    if list(order) == format.digits(axis):
        return format
    names = {f"{axis}{i}": "" for i in range(len(format.radices(axis)))}  # "": of one value
    names |= {old: f"{axis}{i}" for i, old in enumerate(order)}
    radices: Any = {axis: tuple(map(format.radix, order))}

    def index(linear: _Linear, tables: _Tables) -> tuple[int, _Linear, _Tables]:
        linear = [(names.get(name, name), coef) for name, coef in linear]
        tables = [(names.get(name, name), table) for name, table in tables]
        return (
            sum(table[0] for name, table in tables if not name),
            [term for term in linear if term[0]],
            [term for term in tables if term[0]],
        )

    return dataclasses.replace(_mapped(format, index), **radices)


def paired(format: WeightFormat, *, is_interleaved: bool) -> WeightFormat | None:
    """The same weight with columns counted in pairs: neighbours, or a column of each half. The
    last digit of n chooses one of a pair. None: the columns do not divide so."""
    digits = format.digits("n")
    if not digits:
        return None
    whole = digits[-1] if is_interleaved else digits[0]
    radix, at = format.radix(whole), int(whole[1:])
    high, low = (radix // 2, 2) if is_interleaved else (2, radix // 2)
    if radix % 2 or (radix > 2 and any(whole in dict(i.tables) for i in _indices(format))):
        return None
    names = {f"n{i}": f"n{i + 1}" if i > at else f"n{i}" for i in range(len(format.n)) if i != at}

    def index(linear: _Linear, tables: _Tables) -> tuple[int, _Linear, _Tables]:
        found = [(names.get(name, name), coef) for name, coef in linear if name != whole]
        for name, coef in linear:
            found += [(f"n{at}", coef * low), (f"n{at + 1}", coef)] if name == whole else []
        here = f"n{at + 1}" if is_interleaved else f"n{at}"  # of two values, if there is a table
        named = [(here if name == whole else names.get(name, name), t) for name, t in tables]
        return 0, found, named

    n = (*format.n[:at], high, low, *format.n[at + 1 :])
    split = dataclasses.replace(_mapped(format, index), n=n)
    pair = f"n{at + 1}" if is_interleaved else f"n{at}"
    return reordered(split, "n", [*(d for d in split.digits("n") if d != pair), pair])


_Linear = list[tuple[str, int]]
_Tables = list[tuple[str, tuple[int, ...]]]


def _mapped(
    format: WeightFormat,
    change: Callable[[_Linear, _Tables], tuple[int, _Linear, _Tables]],
) -> WeightFormat:
    """``format`` with the terms of each index changed; ``change`` gives a constant to add, too."""

    def field(old: Field) -> Field:
        return dataclasses.replace(
            old,
            index=tuple(map(index, old.index)),
            offset=index(old.offset),
            minus=old.minus and field(old.minus),
            high=old.high and field(old.high),
        )

    def index(old: AffineIndex) -> AffineIndex:
        const, linear, tables = change(list(old.linear), list(old.tables))
        fields = tuple((field(each), coef) for each, coef in old.fields)
        return AffineIndex(old.const + const, tuple(sorted(linear)), tuple(sorted(tables)), fields)

    ops = tuple(
        DequantOp(op.kind, field(op.operand) if isinstance(op.operand, Field) else op.operand)
        for op in format.dequant_ops
    )
    return dataclasses.replace(format, element=field(format.element), dequant_ops=ops)


def _indices(format: WeightFormat) -> Iterator[AffineIndex]:
    positions = [format.element, *(op.operand for op in format.dequant_ops)]
    todo = [each for each in positions if isinstance(each, Field)]
    while todo:
        field = todo.pop()
        yield from (*field.index, field.offset)
        todo += [*field.nested, *([field.minus] if field.minus else [])]


@dataclasses.dataclass(frozen=True)
class Order:
    """Digits of an axis of ``format`` in an order, the most significant first."""

    format: WeightFormat
    digits: tuple[str, ...]

    def place(self, position: str) -> str:
        """The position in the axis of what is at ``position`` in this order."""
        return " + ".join(
            f"({position}) // {apart} % {radix} * {weight}"
            for apart, radix, weight in self._steps()
        )

    def place_within(self, position: str, block: int) -> str:
        """The same of a ``position`` below ``block``."""
        terms = []
        for apart, radix, weight in self._steps():
            if apart < block:
                term = f"({position})" if apart == 1 else f"({position}) // {apart}"
                term += f" % {radix}" if apart * radix < block else ""
                terms.append(term if weight == 1 else f"{term} * {weight}")
        return " + ".join(terms) or "0"

    def place_of_block(self, number: str, block: int) -> str:
        """The same of the first position of a block, which does not end within two digits."""
        terms = []
        for apart, radix, weight in self._steps():
            if apart >= block:
                terms.append(f"({number}) // {apart // block} % {radix} * {weight}")
            elif apart * radix > block:
                here = apart * radix // block
                terms.append(f"({number}) % {here} * {block // apart * weight}")
        return " + ".join(terms) or "0"

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        """(place value in this order, radix, place value in the axis) of each digit."""
        apart = 1
        for name in reversed(self.digits):
            radix = self.format.radix(name)
            yield apart, radix, self.format.weight_of(name)
            apart *= radix
