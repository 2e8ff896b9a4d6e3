"""Positions that the digits of k and n do not divide, read in digits of their own.

HQQ's 3 bits are ten parts of a tensor of ``rows = ceil(groups / 10)`` rows: group g is in part
``g // rows`` at row ``g % rows``, and neither is a sum over digits of g. So g is read as
``rows * part + row`` with new digits, which are then replaced by ``g // rows`` and ``g % rows``,
integers that are data like those in tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .expr import Choice, Expr, Lookup, Op, by_data, changed, digit_of, mapped, normalized
from .index import Digit, IndexExpr, Unsupported
from .reader import Reader


def divided(reader: Reader, place: IndexExpr, unit: int, read: Callable[[IndexExpr], Expr]) -> Expr:
    """``read(place)``, where ``place`` is not divided by ``unit``."""
    space = reader.space
    place = space.leaves(place)
    low, high = place.bounds()
    if low < 0 or place.data:
        raise Unsupported("a position that is negative, or data")
    axes = [f"{name}{len(space.axes)}" for name in ("part", "rest")]
    part, rest = (
        space.variable(axis, n) for axis, n in zip(axes, (high // unit + 1, unit), strict=True)
    )
    found = normalized(read(part * unit + rest), space)
    computed: dict[Digit, IndexExpr] = {}
    divisor = 1
    for digit in reversed([digit for axis in axes for digit in space.axes[axis]]):
        computed[digit] = by_data(digit_of(place, divisor, digit.radix))
        divisor *= digit.radix
    return _computed(found, computed)


def _computed(expr: Expr, digits: Mapping[Digit, IndexExpr]) -> Expr:
    """``expr`` with indices in the place of digits."""
    if isinstance(expr, Choice) and expr.digit in digits:
        raise Unsupported("a choice by a digit that is computed")
    found = mapped(
        expr,
        lambda forms: tuple(_without(form, digits) for form in forms),
        lambda arg: _computed(arg, digits),
    )
    if isinstance(found, (Op, Lookup, Choice)) and found.at is not None:
        return changed(found, at=None)  # its position is in these digits
    return found


def _without(index: IndexExpr, digits: Mapping[Digit, IndexExpr]) -> IndexExpr:
    kept = tuple(term for term in index.terms if term[0] not in digits)
    found = IndexExpr(index.const, kept)
    for digit, term in index.terms:
        if digit in digits:
            if isinstance(term, tuple):
                raise Unsupported("a table of a digit that is computed")
            found = found + digits[digit] * term
    for datum, coef in index.data:
        found = found + by_data(_computed(datum.expr, digits)) * coef
    return found
