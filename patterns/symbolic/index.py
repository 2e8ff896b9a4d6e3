"""Index arithmetic in mixed radix: an index is a sum over digits, and a reshape only splits digits.

The position of an element is a set of variables, the *digits*. Views, slices and indexing by
constants give ``const + sum(coef * digit) + sum(table[digit])``. To divide such a sum by a size, as
a reshape does, at most a finer digit is needed: ``k`` becomes ``8*k0 + k1``. So there is no floor
and no modulo, equality is equality of coefficients, and nothing needs simplification. (General
sympy expressions took a hundred times as long, and decide equality by heuristics.)

``IndexExpr`` is the form while a graph is read: its digits are objects, which split on demand. The
finished form is ``AffineIndex`` in ``spec/weight_format.py``: digits by name, frozen, serializable.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .divisors import divisors

# The most values that are enumerated: a packed word has at most 64 fields, and permutations within
# a word or a group are short.
MAX_CASES = 64
MAX_TABLE = 1 << 17  # entries of a constant index tensor: K or N
# The axes of rows that select weights, and of how many each selects.
SELECTING = ROW, CHOICE = "row", "choice"


class Unsupported(Exception):
    """The result is no sum over digits. Never leaves the reader."""


class SplitConflict(Unsupported):
    """A digit was split that had to stay whole: see ``Space``."""


class Digit:
    """A digit with the values 0 ... radix - 1, of the variable ``axis``. A ``whole`` digit is never
    split; what would split it becomes a table."""

    __slots__ = ("axis", "children", "radix", "serial", "whole")

    def __init__(self, axis: str, radix: int, serial: int, *, whole: bool = False) -> None:
        self.axis = axis
        self.radix = radix
        self.serial = serial
        self.whole = whole
        self.children: tuple[Digit, Digit] | None = None  # once it is split: high and low

    def __repr__(self) -> str:
        return f"{self.axis}{self.serial}:{self.radix}"


Table = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """The values of a digit from ``first`` on that the digit ``part`` counts."""

    first: int
    part: Digit


@dataclasses.dataclass(frozen=True)
class Datum:
    """An integer in a tensor, within ``low`` ... ``high``."""

    expr: Any
    low: int
    high: int


@dataclasses.dataclass(frozen=True)
class IndexExpr:
    """``const + sum(coef * digit) + sum(table[digit]) + sum(coef * data)``.

    ``terms`` are (digit, coefficient or table), ``data`` are (datum, coefficient), such as
    the group of a row in act-order.
    """

    const: int = 0
    terms: tuple[tuple[Digit, int | Table], ...] = ()
    data: tuple[tuple[Datum, int], ...] = ()

    def __init__(  # a third of the time of the generated one; there are thousands
        self,
        const: int = 0,
        terms: tuple[tuple[Digit, int | Table], ...] = (),
        data: tuple[tuple[Datum, int], ...] = (),
    ) -> None:
        held = self.__dict__
        held["const"], held["terms"], held["data"] = const, terms, data

    def __hash__(self) -> int:  # computed once: most are part of keys
        if "_hash" not in self.__dict__:
            self.__dict__["_hash"] = hash((self.const, self.terms, self.data))
        return int(self.__dict__["_hash"])

    @property
    def is_const(self) -> bool:
        return not self.terms and not self.data

    def __add__(self, other: IndexExpr | int) -> IndexExpr:
        if isinstance(other, int):
            return IndexExpr(self.const + other, self.terms, self.data) if other else self
        if other.is_const:
            return self + other.const
        if self.is_const:
            return other + self.const
        return _index(
            self.const + other.const, (*self.terms, *other.terms), (*self.data, *other.data)
        )

    def __mul__(self, factor: int) -> IndexExpr:
        if factor == 1:
            return self
        if self.is_const or not factor:
            return IndexExpr(self.const * factor)
        terms = tuple([(d, _scaled(t, factor)) for d, t in self.terms])
        data = tuple([(d, c * factor) for d, c in self.data])
        return IndexExpr(self.const * factor, terms, data)

    def __sub__(self, other: IndexExpr) -> IndexExpr:
        return self + other * -1

    def at(self, digit: Digit, value: int | Run) -> IndexExpr:
        """The index where ``digit`` has this value, or the values of a run; without the data."""
        first = value.first if isinstance(value, Run) else value
        const, terms = self.const, []
        for known, term in self.terms:
            if known is not digit:
                terms.append((known, term))
                continue
            start = term[first] if isinstance(term, tuple) else term * first
            const += start
            if isinstance(value, Run):
                if isinstance(term, tuple):
                    end = first + value.part.radix
                    term = tuple([entry - start for entry in term[first:end]])
                terms.append((value.part, term))
        return _index(const, terms) if isinstance(value, Run) else IndexExpr(const, tuple(terms))

    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest value."""
        low = high = self.const
        ends: Sequence[int]
        for datum, coef in self.data:
            ends = (coef * datum.low, coef * datum.high)
            low, high = low + min(ends), high + max(ends)
        for digit, term in self.terms:
            ends = term if isinstance(term, tuple) else (0, term * (digit.radix - 1))
            low, high = low + min(ends), high + max(ends)
        return low, high

    def values(self) -> list[int]:
        """All values, if there are at most ``MAX_CASES``."""
        if self.data or math.prod(digit.radix for digit, _ in self.terms) > MAX_CASES:
            raise Unsupported("too many values to go through")
        return _values(self)


ZERO = IndexExpr()
AsData = Callable[[IndexExpr, int, Table], Datum]


def _scaled(term: int | Table, factor: int) -> int | Table:
    return tuple([v * factor for v in term]) if isinstance(term, tuple) else term * factor


def _index(
    const: int, terms: Iterable[tuple[Digit, int | Table]], data: Iterable[tuple[Datum, int]] = ()
) -> IndexExpr:
    """A sum whose terms may repeat a digit, in canonical form: a linear table is a coefficient."""
    linear: dict[Digit, int] = {}
    tables: dict[Digit, list[int]] = {}
    for digit, term in terms:
        if isinstance(term, tuple):
            old = tables.get(digit)
            tables[digit] = list(term) if old is None else list(map(operator.add, old, term))
        else:
            linear[digit] = linear.get(digit, 0) + term
    found: list[tuple[Digit, int | Table]] = []
    for digit in sorted({**linear, **tables} if tables else linear, key=_serial):
        coef = linear.get(digit, 0)
        if digit in tables:
            values = tables[digit]
            if coef:
                values = [v + coef * i for i, v in enumerate(values)]
            first = values[0]
            const += first
            if not _is_linear(values):
                found.append((digit, tuple([v - first for v in values] if first else values)))
                continue
            coef = values[1] - values[0] if len(values) > 1 else 0
        if coef:
            found.append((digit, coef))
    merged: dict[Datum, int] = {}
    for datum, factor in data:
        merged[datum] = merged.get(datum, 0) + factor
    return IndexExpr(const, tuple(found), tuple((d, c) for d, c in merged.items() if c))


_serial = operator.attrgetter("serial")


@dataclasses.dataclass(frozen=True)
class Whole:
    """The highest or the lowest digit of ``axis``, with ``radix`` values."""

    axis: str
    radix: int
    is_lowest: bool


# Possible numbers of bit fields in an element of 8 to 64 bits, which may be far apart; and of
# neighbours whose fields fill several words.
WHOLE = (
    *(Whole(axis, radix, False) for axis in "kn" for radix in (2, 4, 5, 8, 10, 16, 21, 32)),
    *(Whole(axis, radix, True) for axis in "kn" for radix in (4, 8, 16, 32)),
)


class Space:
    """The digits of one operand; they are final once everything has been read.

    ``axes`` maps "k" and "n" to the digits of that variable, most significant first.

    The fields of a packed word may be far apart along an axis, in a permuted order, and a group may
    end between them. Then the group splits the digit that counts the fields, and their order is no
    sum over the parts: ``is_torn``. The same where neighbours' fields cross words. A second reading
    avoids that: ``whole`` keeps a digit whole from the start. With ``as_data``, what cannot be
    split stays a table of the digit, (its position, radix, table) -> data.
    """

    def __init__(self, whole: Whole | None = None, as_data: AsData | None = None) -> None:
        self.axes: dict[str, list[Digit]] = {}
        self.is_torn = False
        self.as_data = as_data
        self._whole = whole
        self._serials = itertools.count()

    def variable(self, axis: str, size: int) -> IndexExpr:
        """A new variable that takes the values 0 ... size - 1."""
        if self._whole and axis == self._whole.axis:
            radix, is_lowest = self._whole.radix, self._whole.is_lowest
            if size % radix or size == radix:
                raise Unsupported(f"{size} is not a multiple of {radix}")
            radices = (size // radix, radix) if is_lowest else (radix, size // radix)
            serials = next(self._serials), next(self._serials)
            high = Digit(axis, radices[0], serials[0], whole=not is_lowest)
            low = Digit(axis, radices[1], serials[1], whole=is_lowest)
            self.axes[axis] = [high, low]
            return IndexExpr(0, ((high, radices[1]), (low, 1)))
        digit = Digit(axis, size, next(self._serials))
        self.axes[axis] = [digit]
        return IndexExpr(0, ((digit, 1),)) if size > 1 else ZERO

    def split(self, digit: Digit, low: int) -> None:
        """Write ``digit`` as ``low * high_digit + low_digit``."""
        if digit.whole or digit.children or digit.radix % low or not 1 < low < digit.radix:
            raise Unsupported(f"{digit} is not split into parts of {low}")
        high = Digit(digit.axis, digit.radix // low, next(self._serials))
        rest = Digit(digit.axis, low, next(self._serials))
        digit.children = (high, rest)
        digits = self.axes[digit.axis]
        at = digits.index(digit)
        digits[at : at + 1] = [high, rest]

    def run(self, digit: Digit, first: int, count: int) -> Run:
        return Run(first, Digit(digit.axis, count, next(self._serials), whole=True))

    def leaves(self, index: IndexExpr) -> IndexExpr:
        """The same index in unsplit digits."""
        for digit, _ in index.terms:
            if digit.children is not None:
                break
        else:
            return index
        terms: list[tuple[Digit, int | Table]] = []
        const, data = index.const, list(index.data)
        todo = list(index.terms)
        while todo:
            digit, term = todo.pop()
            if digit.children is None:
                terms.append((digit, term))
                continue
            high, low = digit.children
            if isinstance(term, tuple):
                try:
                    first, upper, lower = _outer_sum(term, low.radix)
                except SplitConflict:
                    if self.as_data is None:
                        raise
                    place = self.leaves(IndexExpr(0, ((digit, 1),)))
                    data.append((self.as_data(place, digit.radix, term), 1))
                    continue
                const += first
                todo += [(high, upper), (low, lower)]
            else:
                todo += [(high, term * low.radix), (low, term)]
        return _index(const, terms, data)

    def divmod(self, index: IndexExpr, size: int) -> tuple[IndexExpr, IndexExpr]:
        """Quotient and remainder of an index >= 0; splits digits as needed."""
        if size == 1:
            return index, ZERO
        if size == 0:
            raise Unsupported("an empty dimension")
        while True:
            index = self.leaves(index)
            quotient, rest = _parts(index, size)
            low, high = rest.bounds()
            if low >= 0 and high < size:
                return self._simplified(quotient), self._simplified(rest)
            self._split_across(rest, size)

    def _simplified(self, index: IndexExpr) -> IndexExpr:
        """The same index; a table that is a sum over finer digits becomes one."""
        index = self.leaves(index)
        if all(isinstance(term, int) or digit.radix < 4 for digit, term in index.terms):
            return index
        found = IndexExpr(index.const, (), index.data)
        for digit, term in index.terms:
            if isinstance(term, tuple):
                found = found + self._profile(digit, list(term))
            else:
                found = found + _index(0, [(digit, term)])
        return self.leaves(found)

    def _split_across(self, rest: IndexExpr, size: int) -> None:
        """Split the digit whose values are on both sides of ``size``."""
        for digit, term in rest.terms:
            if isinstance(term, tuple) or term <= 0 or size % term:
                continue
            low = size // term
            if 1 < low < digit.radix and digit.radix % low == 0:
                self.split(digit, low)
                return
        raise SplitConflict(f"{rest} does not divide by {size}")

    def unflatten(self, index: IndexExpr, shape: Sequence[int]) -> tuple[IndexExpr, ...]:
        """The position in a row-major tensor of ``shape`` at flat ``index``."""
        found: list[IndexExpr] = []
        for size in reversed(shape[1:]):
            index, rest = self.divmod(index, size)
            found.append(rest)
        return (*([index] if shape else []), *reversed(found))

    def look_up(self, values: Sequence[int], index: IndexExpr) -> IndexExpr:
        """``values[index]`` as a sum over digits, or Unsupported."""
        index = self.leaves(index)
        if index.data:
            raise Unsupported("a table is indexed by data")
        low, high = index.bounds()
        if low < 0 or high >= len(values):
            raise Unsupported("a table is indexed beyond its end")
        if math.prod(digit.radix for digit, _ in index.terms) > MAX_TABLE:
            raise Unsupported("a table over too many positions")
        is_whole = [(d.radix, term) for d, term in index.terms] == [(len(values), 1)]
        if index.const or not is_whole:
            values = [values[place] for place in _values(index)]
        return self._simplified(from_values(index, values))

    def _profile(self, digit: Digit, values: list[int]) -> IndexExpr:
        """``values[digit]``, where values[0] is 0; splits the digit if that is simpler."""
        if _is_linear(values):
            return _index(0, [(digit, values[1] if len(values) > 1 else 0)])
        low = 0 if digit.whole else _simplest_split(values)
        if low:
            self.split(digit, low)
            high, rest = digit.children  # type: ignore[misc]
            return self._profile(high, values[::low]) + self._profile(rest, values[:low])
        if digit.radix > MAX_CASES:
            raise Unsupported("a table without structure")
        return _index(0, [(digit, tuple(values))])

    def cases(self, index: IndexExpr) -> list[Digit]:
        """The digits on which ``index`` depends; Unsupported if they have too many values."""
        index = self.leaves(index)
        total = math.prod(digit.radix for digit, _ in index.terms)
        if index.data or total > MAX_CASES:
            raise Unsupported(f"{total} cases")
        return [digit for digit, _ in index.terms]


def from_values(index: IndexExpr, values: Sequence[int]) -> IndexExpr:
    """The index over the digits of ``index`` whose ``values()`` are ``values``."""
    first = values[0]
    stride = len(values)
    tables: list[tuple[Digit, int | Table]] = []
    for digit, _ in index.terms:
        block = values[: stride : stride // digit.radix]
        stride //= digit.radix
        tables.append((digit, tuple([value - first for value in block])))
    if len(tables) > 1 and _values(IndexExpr(first, tuple(tables))) != list(values):
        raise SplitConflict("a table that is no sum over digits")
    return _index(first, tables)


def tabulate(function: Callable[[int, int], int], a: IndexExpr, b: IndexExpr) -> IndexExpr:
    """``function(a, b)`` of two indices in unsplit digits, by enumeration."""
    if a.data or b.data:
        raise Unsupported("a function of indices that are data")
    joint = IndexExpr(0, tuple((d, 1) for d in {**dict(a.terms), **dict(b.terms)}))
    joint.values()  # few enough
    first, second = (
        _values(IndexExpr(i.const, tuple((d, dict(i.terms).get(d, 0)) for d, _ in joint.terms)))
        for i in (a, b)
    )
    return from_values(joint, list(map(function, first, second)))


def merge(digit: Digit, cases: Sequence[IndexExpr]) -> IndexExpr | None:
    """The index that is ``cases[v]`` where ``digit`` is v; None if it is no sum over digits."""
    first = cases[0]
    if any(case.terms != first.terms or case.data != first.data for case in cases[1:]):
        return None
    table = tuple([case.const - first.const for case in cases])
    return _index(first.const, [*first.terms, (digit, table)], first.data)


def _parts(index: IndexExpr, size: int) -> tuple[IndexExpr, IndexExpr]:
    """``index = size * quotient + rest`` with every coefficient of ``rest`` in [0, size)."""
    upper: list[tuple[Digit, int | Table]] = []
    lower: list[tuple[Digit, int | Table]] = []
    const = index.const
    for digit, term in index.terms:
        is_negative = isinstance(term, int) and term < 0 and digit.radix <= MAX_CASES
        if isinstance(term, int) and (is_negative or (digit.whole and term % size)):
            term = tuple([term * i for i in range(digit.radix)])
        if isinstance(term, tuple):
            least = min(term)
            const += least
            upper.append((digit, tuple([(v - least) // size for v in term])))
            lower.append((digit, tuple([(v - least) % size for v in term])))
        else:
            upper.append((digit, term // size))
            lower.append((digit, term % size))
    quotient, rest = divmod(const, size)
    above = [(datum, coef // size) for datum, coef in index.data]
    below = [(datum, coef % size) for datum, coef in index.data]
    return _index(quotient, upper, above), _index(rest, lower, below)


def _is_linear(values: Sequence[int]) -> bool:
    step = values[1] - values[0] if len(values) > 1 else 0
    if not step:
        return values.count(values[0]) == len(values)
    return list(values) == list(range(values[0], values[0] + step * len(values), step))


def _simplest_split(values: list[int]) -> int:
    """The radix of the lower of two digits over which ``values`` is a sum; 0 if there are none.

    Prefers two linear parts, then a linear upper part and the shortest table (an order within
    words), then the longest linear lower part (groups).
    """
    best = (0, 0, 0)
    uppers = {1: values}  # of the radices that were found
    for low in divisors(len(values)):
        known = max(radix for radix in uppers if low % radix == 0)
        every, step = uppers[known], low // known
        upper, lower = every[::step], values[:low]
        if every[-1] != upper[-1] + every[step - 1]:
            continue
        if every != [u + v for u in upper for v in every[:step]]:
            continue
        uppers[low] = upper
        is_upper, is_lower = _is_linear(upper), _is_linear(lower)
        if is_upper and is_lower:
            return low
        if is_lower:
            best = max(best, (1, low, low))
        elif low <= MAX_CASES:
            best = max(best, (2 if is_upper else 0, -low, low))
    return best[2]


def _outer_sum(table: Table, low: int) -> tuple[int, Table, Table]:
    """``table[low * h + l] = first + upper[h] + lower[l]``, or SplitConflict."""
    first = table[0]
    upper = tuple([v - first for v in table[::low]])
    lower = tuple([v - first for v in table[:low]])
    if table != tuple([first + u + v for u in upper for v in lower]):
        raise SplitConflict("a digit is split on which a table depends")
    return first, upper, lower


def _values(index: IndexExpr) -> list[int]:
    """The value at every position, the last digit counting fastest; without the data."""
    found = [index.const]
    for digit, term in index.terms:
        steps = term if isinstance(term, tuple) else [term * i for i in range(digit.radix)]
        found = [value + step for value in found for step in steps]
    return found
