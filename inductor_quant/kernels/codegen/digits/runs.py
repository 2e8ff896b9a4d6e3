"""Numbers that follow one another in 32-bit words without a gap, so that some cross two words.

As GPTQ packs 3 bits: 32 numbers in three words. A graph joins them from fields, whose places are
tables.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from inductor_quant.kernels.codegen.digits.order import is_linear, split
from inductor_quant.kernels.codegen.digits.words import BITS, BYTES, WordView, parts_of
from inductor_quant.kernels.problem import Weight
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
    def words(self) -> tuple[Field, ...]:
        return tuple(self._moved(AffineIndex(number)) for number in range(self.width))

    @property
    def ends(self) -> tuple[Field, Field]:
        """The words of the first and of the last bit of each number."""
        bits = [self.width * number for number in range(WORD)]
        first, last = (
            AffineIndex(tables=((self.digit, tuple((bit + above) // WORD for bit in bits)),))
            for above in (0, self.width - 1)
        )
        return self._moved(first), self._moved(last)

    @property
    def place(self) -> AffineIndex:
        """The bit of its word at which each number begins."""
        bits = tuple(self.width * number % WORD for number in range(WORD))
        return AffineIndex(tables=((self.digit, bits),))

    def _moved(self, by: AffineIndex) -> Field:
        index = list(self.first.index)
        old = index[self.dim]
        index[self.dim] = dataclasses.replace(old, const=old.const + by.const, tables=by.tables)
        return dataclasses.replace(self.first, index=tuple(index))


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


@functools.lru_cache(maxsize=1024)
def words_of_runs(weight: Weight) -> WordView | None:
    """The view of a weight whose numbers follow one another along K, four neighbours as the bytes
    of a word; None: it has others."""
    format, code = weight.format, weight.format.code
    run = run_of(format, code)
    if format.element != code or run is None or run.digit[0] != "k" or run.width > BITS:
        return None
    tensor = weight.tensors[code.source]
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    format = dataclasses.replace(format, element=run.first)
    if tensor.dtype != torch.int32 or not is_linear(format, run.digit):
        return None
    if any(run.digit in field.digits for field in operands):
        return None  # scales change within a run
    format = split(format, run.digit, BYTES)
    place = int(run.digit[1:]) + 1
    offset = AffineIndex(
        linear=((f"k{place}", BITS),), tables=((run.digit, (0,) * (WORD // BYTES)),)
    )
    element = dataclasses.replace(format.element, offset=offset, width=run.width, add=run.add)
    counted = dataclasses.replace(run, first=format.element)
    view = Weight(dataclasses.replace(format, element=element), weight.tensors)
    return WordView(view, parts=counted.words, run=run.digit)
