"""Statements that read numbers which are not one field of a word; ``out``: ``statements.Uses``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_quant.kernels.codegen.digits.narrow import int32
from inductor_quant.kernels.codegen.digits.words import BITS, BYTES
from inductor_quant.kernels.codegen.runs import WORD, Run
from inductor_quant.kernels.codegen.statements import Value
from inductor_quant.spec.weight_format import AffineIndex


def words(out: Any) -> str:
    """The words whose bytes are the numbers: of four neighbours in a run, or in the words of each
    part of a number."""
    view, width = out.codegen.view, out.format.code.width
    terms, place = [], 0
    if view.run:
        numbers = _four_of_run(out)
        for i in range(BYTES):
            moved = f"({numbers} << {(BITS - width) * i})" if i else numbers
            terms.append(f"({moved} & {int32(((1 << width) - 1) << BITS * i)})")
        return str(out.assign("j", " | ".join(terms)))
    for part in view.parts:
        mask = ((1 << part.width) - 1) * 0x01010101
        code = f"(({out.read(part)[0]} >> ({out.index(part.offset)})) & {mask})"
        terms.append(f"({code} << {place})" if place else code)
        place += part.width
    return str(out.assign("j", " | ".join(terms)))


def number_of_run(out: Any, run: Run) -> Value:
    low, high = (out.read(end)[0] for end in run.ends)
    bits = out.from_bit(low, high, out.index(run.place))
    code = out.assign("b", f"{bits} & {(1 << run.width) - 1}")
    return Value(code, 1, 1, bias=run.add, limit=1 << run.width)


def _four_of_run(out: Any) -> str:
    """The bits of four numbers each, and others above them."""
    read = [out.read(part)[0] for part in out.codegen.view.parts]
    digit, four = out.codegen.view.run, BYTES * out.format.code.width
    begins = [four * number for number in range(out.format.radix(digit))]
    low, high = (
        _chosen(out, read, [(begin + above) // WORD for begin in begins], digit)
        for above in (0, four - 1)
    )
    place = AffineIndex(tables=((digit, tuple(begin % WORD for begin in begins)),))
    return str(out.from_bit(low, high, out.index(place)))


def _chosen(out: Any, values: Sequence[str], which: Sequence[int], digit: str) -> str:
    """For each value of a digit one of ``values``; ``which`` rises."""
    position, code = out.index(AffineIndex(linear=((digit, 1),))), values[which[0]]
    for i in range(1, len(which)):
        if which[i] != which[i - 1]:
            code = f"gl.where({position} >= {i}, {values[which[i]]}, {code})"
    return str(out.assign("w", code))
