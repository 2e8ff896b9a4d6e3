"""Handlers of cat, slice_scatter and select_scatter: the position decides which source is read.

An element that was never written reads as ``Undefined``; so reading an ``empty`` proves that it is
fully overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from .. import fx_utils
from ..fx_utils import aten
from . import arithmetic
from .divided import divided
from .expr import Bits, Expr, at, fixed, normalized
from .index import Digit, IndexExpr, Run, SplitConflict, Unsupported
from .reader import At, Reader, dimension, handles, sizes
from .views import slice_bounds


def _piecewise(
    reader: Reader,
    index: At,
    dim: int,
    pieces: Sequence[tuple[int, int, Callable[[At], Expr]]],
) -> Expr:
    """Reads the piece (begin, end, read) that contains ``index[dim]``, at its position in it."""
    here = reader.space.leaves(index[dim])
    within = _piece(here, pieces)
    if within is not None:
        begin, _, read = pieces[within]
        return read((*index[:dim], here + -begin, *index[dim + 1 :]))
    for digit, _ in here.terms:
        if digit in reader.parts_of_runs and (ends := _ends(here, digit, pieces))[0] > 1:
            raise _Edge(digit, ends[0])
    unit = math.gcd(*(edge for begin, end, _ in pieces for edge in (begin, end)))

    def at_digits(position: IndexExpr) -> Expr:
        return _piecewise(reader, (*index[:dim], position, *index[dim + 1 :]), dim, pieces)

    try:
        block, _ = reader.space.divmod(here, unit)
    except SplitConflict:
        reader.pieces = pieces[-1][1] // unit
        if not reader.computes:
            raise
        return divided(reader, here, unit, at_digits)
    if block.is_const:
        raise Unsupported("a position on both sides of an edge")
    digit = reader.space.cases(block)[0]
    ends = _ends(reader.space.leaves(here), digit, pieces)

    def at_value(value: int | Run) -> Expr:
        fixed_index = tuple(fixed(i, reader.space, digit, value) for i in index)
        return _piecewise(reader, fixed_index, dim, pieces)

    return reader.joined(digit, list(_by_runs(reader, digit, ends, at_value)))


def _piece(here: IndexExpr, pieces: Sequence[tuple[int, int, Callable[[At], Expr]]]) -> int | None:
    """The number of the piece that a position is in; None: of several."""
    low, high = here.bounds()
    for number, (begin, end, _) in enumerate(pieces):
        if begin <= low and high < end:
            return number
    return None


def _ends(
    here: IndexExpr, digit: Digit, pieces: Sequence[tuple[int, int, Callable[[At], Expr]]]
) -> list[int]:
    """The ends of the runs of ``digit`` within which the position stays in one piece."""
    found: list[int | None] = [None] * digit.radix
    if not here.data:
        found = [_piece(here.at(digit, value), pieces) for value in range(digit.radix)]
    edges = (at for at in range(1, len(found)) if found[at] is None or found[at] != found[at - 1])
    return [*edges, digit.radix]


class _Edge(Exception):
    """A run of a digit, counted by ``part``, has several pieces; the first ends at ``end``."""

    def __init__(self, part: Digit, end: int) -> None:
        super().__init__(part, end)
        self.part, self.end = part, end


def _by_runs(
    reader: Reader, digit: Digit, ends: list[int], read: Callable[[int | Run], Expr]
) -> Iterator[Expr]:
    """``read`` for each value of ``digit``, in order; at once for runs that are a field."""
    todo, first = ends[::-1], 0
    while todo:
        end = todo[-1]
        if end - first == 1:
            yield read(first)
            first = todo.pop()
            continue
        run = reader.space.run(digit, first, end - first)
        reader.parts_of_runs.add(run.part)
        try:
            found = normalized(read(run), reader.space)
        except _Edge as edge:
            if edge.part is not run.part:
                raise
            todo.append(first + edge.end)
            continue
        finally:
            reader.parts_of_runs.discard(run.part)
        if isinstance(found, Bits) and fx_utils.is_stored(found.node):
            yield from (at(found, run.part, value) for value in range(end - first))
            first = todo.pop()
        else:
            todo += range(end - 1, first, -1)


@handles(aten.cat.default)
def _cat(reader: Reader, node: fx.Node, index: At) -> Expr:
    tensors, dim = fx_utils.arguments(node, "tensors", "dim")
    dim = dimension(dim or 0, len(index))
    pieces, begin = [], 0
    for tensor in tensors:
        shape = sizes(tensor)
        if len(shape) != len(index):
            continue  # the empty tensor that cat allows
        end = begin + shape[dim]
        pieces.append((begin, end, _reads(reader, tensor, fx_utils.value(node).dtype)))
        begin = end
    return _piecewise(reader, index, dim, [piece for piece in pieces if piece[0] < piece[1]])


def _reads(reader: Reader, node: fx.Node, dtype: torch.dtype) -> Callable[[At], Expr]:
    """Reads ``node`` converted to ``dtype``."""

    def read(index: At) -> Expr:
        return reader.apply(lambda x: arithmetic.cast(x, dtype), reader.read(node, index))

    return read


@handles(aten.slice_scatter.default)
def _slice_scatter(reader: Reader, node: fx.Node, index: At) -> Expr:
    base, source, dim, start, end, step = fx_utils.arguments(
        node, "self", "src", "dim", "start", "end", "step"
    )
    dim = dimension(dim or 0, len(index))
    size = sizes(base)[dim]
    first, last = slice_bounds(start, end, size)
    if step in (None, 1):
        return _overwritten(reader, base, source, index, dim, first, last)
    # Every step-th element: a digit only if the pattern covers the whole dimension.
    if first >= step or last + step <= size + first or size % step:
        raise Unsupported("a strided slice of a part")
    place, rest = reader.space.divmod(index[dim], step)
    read = _reads(reader, source, fx_utils.value(base).dtype)

    def branch(value: IndexExpr, fix: Callable[[IndexExpr], IndexExpr]) -> Expr:
        fixed = tuple(map(fix, index))
        if value.const != first:
            return reader.read(base, fixed)
        return read((*fixed[:dim], fix(place), *fixed[dim + 1 :]))

    return reader.by_cases(rest, branch)


@handles(aten.select_scatter.default)
def _select_scatter(reader: Reader, node: fx.Node, index: At) -> Expr:
    base, source, dim, position = fx_utils.arguments(node, "self", "src", "dim", "index")
    dim = dimension(dim, len(index))
    if not isinstance(position, int):
        raise Unsupported("a symbolic position")
    position = dimension(position, sizes(base)[dim])
    return _overwritten(reader, base, source, index, dim, position, position + 1, is_selected=True)


def _overwritten(
    reader: Reader,
    base: fx.Node,
    source: fx.Node,
    index: At,
    dim: int,
    first: int,
    last: int,
    *,
    is_selected: bool = False,
) -> Expr:
    """``base`` with [first, last) along ``dim`` replaced by ``source``, which lacks the dimension
    if ``is_selected``."""

    def outside(begin: int) -> Callable[[At], Expr]:
        return lambda i: reader.read(base, (*i[:dim], i[dim] + begin, *i[dim + 1 :]))

    read = _reads(reader, source, fx_utils.value(base).dtype)

    def inside(i: At) -> Expr:
        return read((*i[:dim], *i[dim + 1 :]) if is_selected else i)

    end = sizes(base)[dim]
    edges = ((0, first, outside(0)), (first, last, inside), (last, end, outside(last)))
    return _piecewise(reader, index, dim, [piece for piece in edges if piece[0] < piece[1]])
