"""Weights whose columns, or whose K, are counted by other digits, or in another order of them.

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

    def index(old: AffineIndex) -> AffineIndex:
        linear = [(names.get(name, name), coef) for name, coef in old.linear]
        tables = [(names.get(name, name), table) for name, table in old.tables]
        return dataclasses.replace(
            old,
            const=old.const + sum(table[0] for name, table in tables if not name),
            linear=tuple(sorted(term for term in linear if term[0])),
            tables=tuple(sorted(term for term in tables if term[0])),
        )

    return _counted(format, axis, tuple(map(format.radix, order)), index)


def is_linear(format: WeightFormat, name: str) -> bool:
    """Whether no table has a value for each value of a digit."""

    def names(field: Field) -> Iterator[str]:
        for index in (*field.index, field.offset):
            yield from (digit for digit, _ in index.tables)
            for nested, _ in index.fields:
                yield from names(nested)
        for other in (field.minus, field.high):
            yield from names(other) if other else ()

    fields = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    return not any(name in names(field) for field in (format.element, *fields))


def split(format: WeightFormat, name: str, low: int) -> WeightFormat:
    """The same weight with a digit that ``is_linear`` as two: ``name``, and after it one of ``low``
    values."""
    axis, position = name[0], int(name[1:])
    lower = f"{axis}{position + 1}"

    def renamed(digit: str) -> str:
        moves = digit[0] == axis and int(digit[1:]) > position
        return f"{axis}{int(digit[1:]) + 1}" if moves else digit

    def index(old: AffineIndex) -> AffineIndex:
        linear: list[tuple[str, int]] = []
        for digit, coef in old.linear:
            terms = [(name, coef * low), (lower, coef)]
            linear += terms if digit == name else [(renamed(digit), coef)]
        tables = tuple((renamed(digit), table) for digit, table in old.tables)
        return dataclasses.replace(old, linear=tuple(linear), tables=tables)

    digits = list(format.radices(axis))
    digits[position : position + 1] = [digits[position] // low, low]
    return _counted(format, axis, tuple(digits), index)


def divided(format: WeightFormat, axis: str, part: int) -> WeightFormat | None:
    """The same weight, no digit of whose axis reaches from below ``part`` beyond it; None: that
    digit does not divide so."""
    for name in format.digits(axis):
        low = format.weight_of(name)
        if low < part < low * format.radix(name):
            apart, rest = divmod(part, low)
            if rest or format.radix(name) % apart or not is_linear(format, name):
                return None
            return split(format, name, apart)
    return format


def paired(format: WeightFormat, *, is_interleaved: bool) -> WeightFormat | None:
    """The same weight with columns counted in pairs: neighbours, or a column of each half. The
    last digit of n chooses one of a pair. None: the columns do not divide so."""
    digits = format.digits("n")
    if not digits:
        return None
    pair = digits[-1] if is_interleaved else digits[0]
    radix = format.radix(pair)
    if radix % 2 or (radix > 2 and not is_linear(format, pair)):
        return None
    if radix > 2:
        format = split(format, pair, 2 if is_interleaved else radix // 2)
        pair = f"n{int(pair[1:]) + is_interleaved}"
    return reordered(format, "n", [*(name for name in format.digits("n") if name != pair), pair])


def _counted(
    format: WeightFormat,
    axis: str,
    digits: tuple[int, ...],
    renamed: Callable[[AffineIndex], AffineIndex],
) -> WeightFormat:
    """``format`` with other ``digits`` of an axis; ``renamed``: what an index of theirs becomes,
    apart from its fields."""

    def field(old: Field) -> Field:
        return dataclasses.replace(
            old,
            index=tuple(map(index, old.index)),
            offset=index(old.offset),
            minus=old.minus and field(old.minus),
            high=old.high and field(old.high),
        )

    def index(old: AffineIndex) -> AffineIndex:
        fields = tuple((field(each), coef) for each, coef in old.fields)
        return dataclasses.replace(renamed(old), fields=fields)

    ops = tuple(
        DequantOp(op.kind, field(op.operand) if isinstance(op.operand, Field) else op.operand)
        for op in format.dequant_ops
    )
    radices: Any = {axis: digits}
    return dataclasses.replace(format, element=field(format.element), dequant_ops=ops, **radices)


@dataclasses.dataclass(frozen=True)
class Order:
    """Digits of an axis of ``format`` in an order, the most significant first."""

    format: WeightFormat
    digits: tuple[str, ...]

    def counted(self, axis: str) -> WeightFormat:
        """``format`` with the axis counted so."""
        return reordered(self.format, axis, self.digits)

    def runs(self) -> list[tuple[int, int]]:
        """Digits that are next to each other in the axis as well: the lowest one's place value, and
        that above the highest one; the most significant first."""
        found: list[tuple[int, int]] = []
        for _, radix, place in self._steps():
            joins = bool(found) and found[-1][1] == place
            low = found.pop()[0] if joins else place
            found.append((low, place * radix))
        return found[::-1]

    def neighbours(self, block: int) -> int:
        """How many positions of a block follow one another in the axis, from its first one on."""
        count = 1
        for apart, radix, weight in self._steps():
            if apart >= block or apart != weight:
                break
            count = apart * radix
        return min(count, block)

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
