"""Handlers of cat, slice_scatter and select_scatter: the position decides which source is read.

An element that was never written reads as ``Undefined``; so reading an ``empty`` proves that it is
fully overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from .. import fx_utils
from ..fx_utils import aten
from . import arithmetic
from .divided import divided
from .expr import Expr
from .index import IndexExpr, SplitConflict, Unsupported
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
    bounds = here.bounds()
    for begin, end, read in pieces:
        if begin <= bounds[0] and bounds[1] < end:
            return read((*index[:dim], here + -begin, *index[dim + 1 :]))
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

    def branch(value: IndexExpr, fix: Callable[[IndexExpr], IndexExpr]) -> Expr:
        return _piecewise(reader, tuple(map(fix, index)), dim, pieces)

    return reader.by_cases(block, branch)


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
