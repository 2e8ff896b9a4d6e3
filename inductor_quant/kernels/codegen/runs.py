"""Numbers that follow one another in 32-bit words without a gap, so that some cross two words.

As GPTQ packs 3 bits: 32 numbers in three words. A graph joins them from fields, whose places are
tables.
"""

from __future__ import annotations

import dataclasses
import functools

from inductor_quant.spec.weight_format import AffineIndex, Field, WeightFormat

WORD = 32  # bits of a word, and numbers of a run, which begins with a word


@dataclasses.dataclass(frozen=True)
class Run:
    """``WORD`` numbers of ``width`` bits, counted by ``digit``. ``first``: their first word; the
    others are its neighbours along dimension ``dim``."""

    digit: str
    width: int
    dim: int
    first: Field
    add: int = 0

    @property
    def bits(self) -> list[int]:
        """Of the run, at which its numbers begin."""
        return [self.width * number for number in range(WORD)]

    @property
    def words(self) -> tuple[Field, ...]:
        return tuple(self._moved(AffineIndex(number)) for number in range(self.width))

    @property
    def ends(self) -> tuple[Field, Field]:
        """The words of the first and of the last bit of each number."""
        first, last = (
            AffineIndex(tables=((self.digit, tuple((bit + above) // WORD for bit in self.bits)),))
            for above in (0, self.width - 1)
        )
        return self._moved(first), self._moved(last)

    @property
    def place(self) -> AffineIndex:
        """The bit of its word at which each number begins."""
        return AffineIndex(tables=((self.digit, tuple(bit % WORD for bit in self.bits)),))

    def _moved(self, by: AffineIndex) -> Field:
        index = list(self.first.index)
        old = index[self.dim]
        index[self.dim] = dataclasses.replace(old, const=old.const + by.const, tables=by.tables)
        return dataclasses.replace(self.first, index=tuple(index))


def parts_of(code: Field) -> list[Field]:
    """The fields that make up a number, the lowest first."""
    found = [code]
    while high := found[-1].high:
        found.append(high)
    return found


@functools.lru_cache(maxsize=1024)
def run_of(format: WeightFormat, field: Field) -> Run | None:
    """The run in which a number is that the graph joins from fields; None: it is in none."""
    parts = parts_of(field)
    digits = {name for part in parts for name, _ in part.offset.tables}
    if len(digits) != 1 or field.signed or field.wrap or field.size or field.minus:
        return None
    [digit] = digits
    dims = {d for part in parts for d, index in enumerate(part.index) if digit in index.digits}
    if format.radix(digit) != WORD or len(dims) != 1:
        return None
    [dim] = dims
    found, below = set(), 0
    for part in parts:
        of_word, rest = _by(digit, part.index[dim])
        of_bit, others = _by(digit, part.offset)
        if others != AffineIndex() or rest.tables or rest.fields:
            return None
        begins = [WORD * of_word.value({digit: n}) + of_bit.value({digit: n}) for n in range(WORD)]
        if begins != [begins[0] + field.total_width * n for n in range(WORD)]:
            return None
        if (begins[0] - below) % WORD:
            return None
        index = list(part.index)
        index[dim] = dataclasses.replace(rest, const=(begins[0] - below) // WORD)
        found.add(Field(part.source, tuple(index)))
        below += part.width
    return Run(digit, below, dim, found.pop(), field.add) if len(found) == 1 else None


def _by(digit: str, index: AffineIndex) -> tuple[AffineIndex, AffineIndex]:
    """The terms of a digit with the constant, and all others."""
    own = AffineIndex(
        index.const,
        tuple(term for term in index.linear if term[0] == digit),
        tuple(term for term in index.tables if term[0] == digit),
    )
    linear = tuple(term for term in index.linear if term[0] != digit)
    tables = tuple(term for term in index.tables if term[0] != digit)
    return own, AffineIndex(0, linear, tables, index.fields)
