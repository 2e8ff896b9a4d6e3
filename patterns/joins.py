"""What joins tensors: the position decides which of them is read.

A part that was never written is ``Undefined`` and stays visible; so that an ``empty`` is fully
overwritten is proved by reading it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import fx

from inductor_quant.patterns import arithmetic, graph
from inductor_quant.patterns.digits import Index, Unsupported
from inductor_quant.patterns.expression import Expr
from inductor_quant.patterns.graph import aten
from inductor_quant.patterns.reader import At, Reader, dimension, handles, sizes
from inductor_quant.patterns.views import slice_bounds


def _piecewise(
    reader: Reader,
    index: At,
    dim: int,
    pieces: Sequence[tuple[int, int, Callable[[At], Expr]]],
) -> Expr:
    """Reads the piece (begin, end, read) in which ``index[dim]`` lies, with its position within."""
    here = reader.space.leaves(index[dim])
    bounds = here.bounds()
    for begin, end, read in pieces:
        if begin <= bounds[0] and bounds[1] < end:
            return read((*index[:dim], here + -begin, *index[dim + 1 :]))
    unit = math.gcd(*(edge for begin, end, _ in pieces for edge in (begin, end)))
    block, _ = reader.space.divmod(here, unit)
    if block.is_const:
        raise Unsupported("a position on both sides of an edge")

    def branch(value: Index, fix: Callable[[Index], Index]) -> Expr:
        return _piecewise(reader, tuple(map(fix, index)), dim, pieces)

    return reader.by_cases(block, branch)


@handles(aten.cat.default)
def _cat(reader: Reader, node: fx.Node, index: At) -> Expr:
    tensors, dim = graph.arguments(node, "tensors", "dim")
    dim = dimension(dim or 0, len(index))
    pieces, begin = [], 0
    for tensor in tensors:
        shape = sizes(tensor)
        if len(shape) != len(index):
            continue  # the empty tensor that cat allows
        pieces.append((begin, begin + shape[dim], _reads(reader, tensor, graph.value(node).dtype)))
        begin += shape[dim]
    return _piecewise(reader, index, dim, [piece for piece in pieces if piece[0] < piece[1]])


def _reads(reader: Reader, node: fx.Node, dtype: torch.dtype) -> Callable[[At], Expr]:
    """Reads ``node`` converted to the type of what it becomes a part of."""

    def read(index: At) -> Expr:
        return reader.apply(lambda x: arithmetic.cast(x, dtype), reader.read(node, index))

    return read


@handles(aten.slice_scatter.default)
def _slice_scatter(reader: Reader, node: fx.Node, index: At) -> Expr:
    base, source, dim, start, end, step = graph.arguments(
        node, "self", "src", "dim", "start", "end", "step"
    )
    dim = dimension(dim or 0, len(index))
    size = sizes(base)[dim]
    first, last = slice_bounds(start, end, size)
    if step in (None, 1):
        return _overwritten(reader, base, source, index, dim, first, last, lambda i: i)
    # Every step-th element; as digits only if the pattern goes through the whole dimension.
    if first >= step or last + step <= size + first or size % step:
        raise Unsupported("a strided slice of a part")
    place, rest = reader.space.divmod(index[dim], step)
    read = _reads(reader, source, graph.value(base).dtype)

    def branch(value: Index, fix: Callable[[Index], Index]) -> Expr:
        fixed = tuple(map(fix, index))
        if value.const != first:
            return reader.read(base, fixed)
        return read((*fixed[:dim], fix(place), *fixed[dim + 1 :]))

    return reader.by_cases(rest, branch)


@handles(aten.select_scatter.default)
def _select_scatter(reader: Reader, node: fx.Node, index: At) -> Expr:
    base, source, dim, position = graph.arguments(node, "self", "src", "dim", "index")
    dim = dimension(dim, len(index))
    if not isinstance(position, int):
        raise Unsupported("a symbolic position")
    position = dimension(position, sizes(base)[dim])
    return _overwritten(reader, base, source, index, dim, position, position + 1, None)


def _overwritten(
    reader: Reader,
    base: fx.Node,
    source: fx.Node,
    index: At,
    dim: int,
    first: int,
    last: int,
    along: Callable[[Index], Index] | None,
) -> Expr:
    """``base`` with [first, last) along ``dim`` replaced; ``along`` None: source lacks the
    dimension."""

    def outside(begin: int) -> Callable[[At], Expr]:
        return lambda i: reader.read(base, (*i[:dim], i[dim] + begin, *i[dim + 1 :]))

    read = _reads(reader, source, graph.value(base).dtype)

    def inside(i: At) -> Expr:
        return read((*i[:dim], *i[dim + 1 :]) if along is None else i)

    edges = (
        (0, first, outside(0)),
        (first, last, inside),
        (last, sizes(base)[dim], outside(last)),
    )
    return _piecewise(reader, index, dim, [piece for piece in edges if piece[0] < piece[1]])
