"""Weights whose columns, or whose K, are counted in another order than that of their digits.

A tile has neighbours of that order: columns that share their scales where these change with every k
(HQQ with axis 0), or the values of the same words where these are far apart along K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat


def reordered(format: WeightFormat, axis: str, order: Sequence[str]) -> WeightFormat:
    """The same weight with an axis counted by its digits in another ``order``, of all that take
    more than one value, the most significant first."""
    if list(order) == format.digits(axis):
        return format
    names = {f"{axis}{i}": "" for i in range(len(format.radices(axis)))}  # "": of one value
    names |= {old: f"{axis}{i}" for i, old in enumerate(order)}

    def field(old: Field) -> Field:
        return dataclasses.replace(
            old,
            index=tuple(map(index, old.index)),
            offset=index(old.offset),
            minus=old.minus and field(old.minus),
            high=old.high and field(old.high),
        )

    def index(old: AffineIndex) -> AffineIndex:
        linear = [(names.get(name, name), coef) for name, coef in old.linear]
        tables = [(names.get(name, name), table) for name, table in old.tables]
        return AffineIndex(
            old.const + sum(table[0] for name, table in tables if not name),
            tuple(sorted(term for term in linear if term[0])),
            tuple(sorted(term for term in tables if term[0])),
            tuple((field(each), coef) for each, coef in old.fields),
        )

    ops = tuple(
        DequantOp(op.kind, field(op.operand) if isinstance(op.operand, Field) else op.operand)
        for op in format.dequant_ops
    )
    radices: Any = {axis: tuple(map(format.radix, order))}
    return dataclasses.replace(format, element=field(format.element), dequant_ops=ops, **radices)


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
