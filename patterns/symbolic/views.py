"""Handlers of views: they change the position, not the value."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import fx_utils
from ..fx_utils import aten
from . import arithmetic
from .bits import extract, sign_extended
from .expr import E8M0, INTEGERS, Expr, Load, whole
from .index import ZERO, IndexExpr, Unsupported
from .reader import At, Reader, broadcast, dimension, handles, sizes


@handles(*fx_utils.RESHAPES)
def _reshape(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = fx_utils.arguments(node, "self")
    flat = ZERO
    for size, i in zip(sizes(node), index, strict=True):
        flat = flat * size + i
    return reader.read(source, reader.space.unflatten(flat, sizes(source)))


@handles(aten.permute.default)
def _permute(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dims = fx_utils.arguments(node, "self", "dims")
    moved = dict(zip((dimension(d, len(index)) for d in dims), index, strict=True))
    return reader.read(source, tuple(moved[d] for d in range(len(index))))


@handles(aten.t.default)
def _t(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = fx_utils.arguments(node, "self")
    return reader.read(source, tuple(reversed(index)))


@handles(aten.transpose.int)
def _transpose(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, a, b = fx_utils.arguments(node, "self", "dim0", "dim1")
    swapped = list(index)
    a, b = dimension(a, len(index)), dimension(b, len(index))
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return reader.read(source, tuple(swapped))


@handles(aten.unsqueeze.default)
def _unsqueeze(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim = fx_utils.arguments(node, "self", "dim")
    dim = dimension(dim, len(index))
    return reader.read(source, (*index[:dim], *index[dim + 1 :]))


@handles(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dims = fx_utils.arguments(node, "self", "dim")
    shape = sizes(source)
    chosen = range(len(shape)) if dims is None else dims if isinstance(dims, Sequence) else [dims]
    gone = {dimension(d, len(shape)) for d in chosen}
    rest = iter(index)
    full = (ZERO if d in gone and size == 1 else next(rest) for d, size in enumerate(shape))
    return reader.read(source, tuple(full))


@handles(aten.expand.default)
def _expand(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = fx_utils.arguments(node, "self")
    return reader.read(source, broadcast(source, index))


@handles(aten.repeat.default)
def _repeat(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = fx_utils.arguments(node, "self")
    shape = sizes(source)
    last = index[len(index) - len(shape) :]
    folded = (reader.space.divmod(i, size)[1] for size, i in zip(shape, last, strict=True))
    return reader.read(source, tuple(folded))


@handles(
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    torch.ops.prims.device_put.default,
)
def _same(reader: Reader, node: fx.Node, index: At) -> Expr:
    return reader.read(node.args[0], index)  # type: ignore[arg-type]


@handles(aten.slice.Tensor)
def _slice(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim, start, _, step = fx_utils.arguments(node, "self", "dim", "start", "end", "step")
    dim = dimension(dim or 0, len(index))
    begin, _ = slice_bounds(start, None, sizes(source)[dim])
    if step is not None and not isinstance(step, int):
        raise Unsupported("a symbolic step")
    moved = index[dim] * (1 if step is None else step) + begin
    return reader.read(source, (*index[:dim], moved, *index[dim + 1 :]))


def slice_bounds(start: Any, end: Any, size: int) -> tuple[int, int]:
    """Start and end of a slice of a dimension of this size, as torch clamps them."""
    if not all(edge is None or isinstance(edge, int) for edge in (start, end)):
        raise Unsupported("a symbolic slice")
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


@handles(aten.select.int)
def _select(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim, position = fx_utils.arguments(node, "self", "dim", "index")
    dim = dimension(dim, len(index) + 1)
    if not isinstance(position, int):
        raise Unsupported("a symbolic position")
    fixed = IndexExpr(dimension(position, sizes(source)[dim]))
    return reader.read(source, (*index[:dim], fixed, *index[dim:]))


@handles(operator.getitem)
def _getitem(reader: Reader, node: fx.Node, index: At) -> Expr:
    """A part of unbind or split."""
    parts, number = node.args[:2]
    if not isinstance(parts, fx.Node) or not isinstance(number, int) or number < 0:
        raise Unsupported("an item of an op that is no split")
    if parts.target == aten.unbind.int:
        source, dim = fx_utils.arguments(parts, "self", "dim")
        dim = dimension(dim or 0, len(index) + 1)
        fixed = IndexExpr(dimension(number, sizes(source)[dim]))
        return reader.read(source, (*index[:dim], fixed, *index[dim:]))
    if parts.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        raise Unsupported("an item of an op that is no split")
    source, size, dim = fx_utils.arguments(parts, "self", "split_size", "dim")
    dim = dimension(dim or 0, len(index))
    start = size * number if isinstance(size, int) else sum(size[:number])
    return reader.read(source, (*index[:dim], index[dim] + start, *index[dim + 1 :]))


def _bits_of(expr: Expr, dtype: torch.dtype) -> Expr:
    if not isinstance(expr, Load):
        raise Unsupported("the bits of a float that is computed")
    return arithmetic.bitcast(whole(expr.node, expr.index, torch.uint8), dtype)


@handles(aten.view.dtype)
def _view_dtype(reader: Reader, node: fx.Node, index: At) -> Expr:
    """The bytes of memory in another dtype, little-endian; the last dimension counts elements of
    the new dtype."""
    source, dtype = fx_utils.arguments(node, "self", "dtype")
    old = fx_utils.value(source).dtype
    if old == E8M0 and dtype in INTEGERS and dtype.itemsize == old.itemsize:
        return reader.apply(lambda x: _bits_of(x, dtype), reader.read(source, index))
    if old.itemsize == dtype.itemsize:
        return reader.apply(lambda x: arithmetic.bitcast(x, dtype), reader.read(source, index))
    if old not in INTEGERS or dtype not in INTEGERS or old.itemsize < dtype.itemsize:
        raise Unsupported("a view to a wider dtype")
    word, part = reader.space.divmod(index[-1], old.itemsize // dtype.itemsize)
    bits = torch.iinfo(dtype).bits

    def narrow(x: Expr) -> Expr:
        field = extract(x, part * bits, bits)
        if torch.iinfo(dtype).min < 0:
            field = sign_extended(field)
        return arithmetic.cast(field, dtype)

    return reader.apply(narrow, reader.read(source, (*index[:-1], word)))
