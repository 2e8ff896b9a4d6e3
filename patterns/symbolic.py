"""Reads what a node computes, element by element: an expression of the position.

``Reader.read(node, index)`` is the value of ``node`` at a symbolic position. Views only change the
position on the way to their source; what joins tensors (cat, slice_scatter) decides by the digits
of the position which of them is read; pointwise ops build expressions. An op that is not known, or
a position that has no form, makes the node a leaf: a tensor that lies in memory as far as we know.
So reading never fails, and how a producer spells its unpacking does not matter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant.patterns import arithmetic, graph
from inductor_quant.patterns.digits import ZERO, Index, Space, Unsupported
from inductor_quant.patterns.expression import (
    FLOATS,
    INTEGERS,
    Bits,
    Choice,
    Expr,
    Load,
    Number,
    Op,
    Position,
    Undefined,
    at,
    by_data,
    extract,
    fixed,
    integer,
    interval,
    join,
    normalized,
    sign_extended,
    whole,
)
from inductor_quant.patterns.graph import aten

prims = torch.ops.prims
At = tuple[Index, ...]
Handler = Callable[["Reader", fx.Node, At], Expr]
_HANDLERS: dict[Any, Handler] = {}
# Integer tensors of the graph itself that are read for their values: orders, shift amounts.
MAX_CONSTANT = 1 << 17
# The longest dequantization that we know has 60 nodes, and reads some of them once for each field
# of a word. What is longer than this is no weight.
MAX_DEPTH = 200
MAX_READS = 20_000


def handles(*targets: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(targets, handler))
        return handler

    return register


class Reader:
    """Expressions of the elements of one operand; ``space`` holds the digits of its position."""

    def __init__(self) -> None:
        self.space = Space()
        self._memo: dict[tuple[fx.Node, At], Expr] = {}
        self._depth = 0

    def nodes(self) -> set[fx.Node]:
        """The nodes that were read."""
        return {node for node, _ in self._memo}

    def read(self, node: fx.Node, index: At) -> Expr:
        """The value of ``node`` at ``index``, one form for each dimension."""
        key = (node, index)
        found = self._memo.get(key)
        if found is None:
            if self._depth > MAX_DEPTH or len(self._memo) > MAX_READS:
                return self.leaf(node, index)
            self._depth += 1
            try:
                found = self._memo[key] = self._read(node, index)
            finally:
                self._depth -= 1
        return found

    def _read(self, node: fx.Node, index: At) -> Expr:
        handler = _handler_of(node)
        if handler is not None:
            try:
                return handler(self, node, index)
            except Unsupported:
                pass
        return self.leaf(node, index)

    def leaf(self, node: fx.Node, index: At) -> Expr:
        dtype = graph.value(node).dtype
        if dtype in INTEGERS:
            return whole(node, index, dtype)
        return Load(node, index, dtype)

    def by_cases(
        self, index: Index, branch: Callable[[Index, Callable[[Index], Index]], Expr]
    ) -> Expr:
        """``branch(index, fix)`` for every value that ``index`` takes, as one expression.

        In a branch, index is a constant; ``fix`` brings other forms to the same case.
        """
        index = self.space.leaves(index)
        if index.is_const:
            return branch(index, lambda other: other)
        digit = self.space.cases(index)[0]
        cases = []
        for value in range(digit.radix):

            def fix(other: Index, value: int = value) -> Index:
                return fixed(other, self.space, digit, value)

            def inner(
                index: Index,
                deeper: Callable[[Index], Index],
                fix: Callable[[Index], Index] = fix,
            ) -> Expr:
                return branch(index, lambda other: deeper(fix(other)))

            cases.append(self.by_cases(index.at(digit, value), inner))
        if digit.children is not None:
            raise Unsupported("a digit is split on which cases depend")
        return join(digit, [normalized(case, self.space) for case in cases])

    def apply(self, function: Callable[..., Expr], *args: Expr) -> Expr:
        """``function(*args)``, case by case where an argument has cases."""
        choice = next((arg for arg in args if isinstance(arg, Choice)), None)
        if choice is None:
            return function(*args)
        args = tuple(normalized(arg, self.space) for arg in args)
        digit = choice.digit
        cases = [
            self.apply(function, *(at(arg, digit, value) for arg in args))
            for value in range(digit.radix)
        ]
        return join(digit, cases)

    def operand(self, item: Any, node: fx.Node, index: At) -> Expr:
        """An argument of a pointwise op, broadcast to the shape of ``node``."""
        if isinstance(item, bool):
            raise Unsupported("a bool")
        if isinstance(item, int):
            dtype = graph.value(node).dtype
            return integer(item, dtype) if dtype in INTEGERS else Number(float(item), dtype)
        if isinstance(item, float):
            return Number(item, graph.value(node).dtype)
        if not graph.is_tensor_node(item):
            raise Unsupported("an argument that is no tensor")
        return self.read(item, _broadcast(item, index))


def sizes(node: fx.Node) -> list[int]:
    """The shape of a node. Raises Unsupported where it is symbolic."""
    shape = list(graph.value(node).shape)
    if not all(isinstance(size, int) for size in shape):
        raise Unsupported("a symbolic shape")
    return shape


def _broadcast(node: fx.Node, index: At) -> At:
    shape = sizes(node)
    if len(shape) > len(index):
        raise Unsupported("an operand of more dimensions")
    last = index[len(index) - len(shape) :]
    return tuple(ZERO if size == 1 else i for size, i in zip(shape, last, strict=True))


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


# ------------------------------------------------------------------------------------------
# views


@handles(*graph.RESHAPES)
def _reshape(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = graph.arguments(node, "self")
    flat = ZERO
    for size, i in zip(sizes(node), index, strict=True):
        flat = flat * size + i
    return reader.read(source, reader.space.unflatten(flat, sizes(source)))


@handles(aten.permute.default)
def _permute(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dims = graph.arguments(node, "self", "dims")
    moved = dict(zip((_dim(d, len(index)) for d in dims), index, strict=True))
    return reader.read(source, tuple(moved[d] for d in range(len(index))))


@handles(aten.t.default)
def _t(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = graph.arguments(node, "self")
    return reader.read(source, tuple(reversed(index)))


@handles(aten.transpose.int)
def _transpose(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, a, b = graph.arguments(node, "self", "dim0", "dim1")
    swapped = list(index)
    a, b = _dim(a, len(index)), _dim(b, len(index))
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return reader.read(source, tuple(swapped))


@handles(aten.unsqueeze.default)
def _unsqueeze(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim = graph.arguments(node, "self", "dim")
    dim = _dim(dim, len(index))
    return reader.read(source, (*index[:dim], *index[dim + 1 :]))


@handles(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dims = graph.arguments(node, "self", "dim")
    shape = sizes(source)
    chosen = range(len(shape)) if dims is None else dims if isinstance(dims, Sequence) else [dims]
    gone = {_dim(d, len(shape)) for d in chosen}
    rest = iter(index)
    full = (ZERO if d in gone and size == 1 else next(rest) for d, size in enumerate(shape))
    return reader.read(source, tuple(full))


@handles(aten.expand.default)
def _expand(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = graph.arguments(node, "self")
    return reader.read(source, _broadcast(source, index))


@handles(aten.repeat.default)
def _repeat(reader: Reader, node: fx.Node, index: At) -> Expr:
    (source,) = graph.arguments(node, "self")
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
)
def _same(reader: Reader, node: fx.Node, index: At) -> Expr:
    return reader.read(node.args[0], index)  # type: ignore[arg-type]


@handles(aten.slice.Tensor)
def _slice(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim, start, _, step = graph.arguments(node, "self", "dim", "start", "end", "step")
    dim = _dim(dim or 0, len(index))
    begin, _ = _bounds(start, None, sizes(source)[dim])
    if step is not None and not isinstance(step, int):
        raise Unsupported("a symbolic step")
    moved = index[dim] * (1 if step is None else step) + begin
    return reader.read(source, (*index[:dim], moved, *index[dim + 1 :]))


def _bounds(start: Any, end: Any, size: int) -> tuple[int, int]:
    """Start and end of a slice of a dimension of this size, as torch clamps them."""
    if not all(edge is None or isinstance(edge, int) for edge in (start, end)):
        raise Unsupported("a symbolic slice")
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


@handles(aten.select.int)
def _select(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim, position = graph.arguments(node, "self", "dim", "index")
    dim = _dim(dim, len(index) + 1)
    if not isinstance(position, int):
        raise Unsupported("a symbolic position")
    fixed = Index(_dim(position, sizes(source)[dim]))
    return reader.read(source, (*index[:dim], fixed, *index[dim:]))


@handles(operator.getitem)
def _getitem(reader: Reader, node: fx.Node, index: At) -> Expr:
    """A part of unbind or split."""
    parts, number = node.args[:2]
    if not isinstance(parts, fx.Node) or not isinstance(number, int):
        raise Unsupported("an item of what is no split")
    if parts.target == aten.unbind.int:
        source, dim = graph.arguments(parts, "self", "dim")
        dim = _dim(dim or 0, len(index) + 1)
        fixed = Index(_dim(number, sizes(source)[dim]))
        return reader.read(source, (*index[:dim], fixed, *index[dim:]))
    if parts.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        raise Unsupported("an item of what is no split")
    source, size, dim = graph.arguments(parts, "self", "split_size", "dim")
    dim = _dim(dim or 0, len(index))
    start = size * number if isinstance(size, int) else sum(size[:number])
    return reader.read(source, (*index[:dim], index[dim] + start, *index[dim + 1 :]))


@handles(aten.view.dtype)
def _view_dtype(reader: Reader, node: fx.Node, index: At) -> Expr:
    """The bytes of memory in another type; the last dimension is counted in the new type. The
    lowest byte comes first, as on every machine that we run on."""
    source, dtype = graph.arguments(node, "self", "dtype")
    old = graph.value(source).dtype
    if old.itemsize == dtype.itemsize:
        return reader.apply(lambda x: arithmetic.bitcast(x, dtype), reader.read(source, index))
    if old not in INTEGERS or dtype not in INTEGERS or old.itemsize < dtype.itemsize:
        raise Unsupported("a view that makes words of bytes")
    word, part = reader.space.divmod(index[-1], old.itemsize // dtype.itemsize)
    bits = torch.iinfo(dtype).bits

    def narrow(x: Expr) -> Expr:
        field = extract(x, part * bits, bits)
        if torch.iinfo(dtype).min < 0:
            field = sign_extended(field)
        return arithmetic.cast(field, dtype)

    return reader.apply(narrow, reader.read(source, (*index[:-1], word)))


# ------------------------------------------------------------------------------------------
# joining tensors


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
    dim = _dim(dim or 0, len(index))
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
    dim = _dim(dim or 0, len(index))
    size = sizes(base)[dim]
    first, last = _bounds(start, end, size)
    if step in (None, 1):
        return _overwritten(reader, base, source, index, dim, first, last, lambda i: i)
    # Every step-th element; as digits only if the pattern goes through the whole dimension.
    if first >= step or last + step <= size or size % step:
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
    dim = _dim(dim, len(index))
    if not isinstance(position, int):
        raise Unsupported("a symbolic position")
    position = _dim(position, sizes(base)[dim])
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


# ------------------------------------------------------------------------------------------
# sources


@handles(prims.iota.default)
def _iota(reader: Reader, node: fx.Node, index: At) -> Expr:
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    dtype = graph.value(node).dtype
    if not isinstance(start, int) or not isinstance(step, int) or dtype not in INTEGERS:
        raise Unsupported("an iota that is symbolic or no integer")
    return Position(index[0] * step + start, dtype)


@handles(aten.full.default, aten.scalar_tensor.default)
def _full(reader: Reader, node: fx.Node, index: At) -> Expr:
    value = node.args[1] if node.target == aten.full.default else node.args[0]
    dtype = graph.value(node).dtype
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unsupported("a fill value that is no number")
    if dtype in INTEGERS:
        return integer(int(value), dtype)
    return Number(torch.tensor(value, dtype=dtype).item(), dtype)


@handles(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default)
def _empty(reader: Reader, node: fx.Node, index: At) -> Expr:
    return Undefined(graph.value(node).dtype)


@handles(aten.copy.default)
def _copy(reader: Reader, node: fx.Node, index: At) -> Expr:
    target, source = graph.arguments(node, "self", "src")
    dtype = graph.value(target).dtype
    value = reader.operand(source, node, index)
    return reader.apply(lambda x: arithmetic.cast(x, dtype), value)


def _constant(reader: Reader, node: fx.Node, index: At) -> Expr:
    """A tensor of the graph itself: small integer ones are known by value."""
    tensor = graph.attribute(node)
    if tensor is None or tensor.dtype not in INTEGERS or tensor.numel() > MAX_CONSTANT:
        raise Unsupported("no constant that is read for its values")
    flat = ZERO
    for size, i in zip(tensor.shape, index, strict=True):
        flat = flat * size + i
    return Position(reader.space.look_up(tensor.flatten().tolist(), flat), tensor.dtype)


@handles(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, indices = graph.arguments(node, "self", "indices")
    given = [d for d, item in enumerate(indices) if item is not None]
    if not given or given != list(range(given[0], given[0] + len(given))):
        raise Unsupported("indices of dimensions that are apart")
    rank = max(len(sizes(indices[d])) for d in given)
    first = given[0]
    inner = index[first : first + rank]
    chosen = tuple(
        _chosen(reader, reader.read(indices[d], _broadcast(indices[d], inner)), sizes(source)[d])
        for d in given
    )
    return reader.read(source, (*index[:first], *chosen, *index[first + rank :]))


@handles(aten.index_select.default)
def _index_select(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim, indices = graph.arguments(node, "self", "dim", "index")
    dim = _dim(dim, len(index))
    chosen = _chosen(reader, reader.read(indices, (index[dim],)), sizes(source)[dim])
    return reader.read(source, (*index[:dim], chosen, *index[dim + 1 :]))


@handles(aten.embedding.default)
def _embedding(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, indices = graph.arguments(node, "weight", "indices")
    chosen = _chosen(reader, reader.read(indices, index[:-1]), sizes(source)[0])
    return reader.read(source, (chosen, index[-1]))


def _chosen(reader: Reader, value: Expr, size: int) -> Index:
    """An index that is a value of the graph, brought to [0, size) as torch does."""
    if isinstance(value, Position):
        low, high = value.index.bounds()
        if low >= 0 and (high < size or value.index.data):
            return value.index  # data beyond the end is an error in torch
        if -size <= low and high < 0:
            return value.index + size
        raise Unsupported("an index of both signs, or out of bounds")
    if isinstance(value, (Bits, Op)) and value.dtype in INTEGERS:
        if interval(value)[0] < 0:
            value = Op("from_end", (value, integer(size, torch.int64)), value.dtype)
        return by_data(value)
    raise Unsupported("an index that is computed")


# ------------------------------------------------------------------------------------------
# pointwise


@handles(prims.convert_element_type.default)
def _cast(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dtype = node.args[:2]
    value = reader.read(source, index)  # type: ignore[arg-type]
    return _placed(reader.apply(lambda x: arithmetic.cast(x, dtype), value), node, index)  # type: ignore[arg-type]


def _placed(expr: Expr, node: fx.Node, index: At) -> Expr:
    """``expr`` with the note that ``node`` computes it."""
    if isinstance(expr, Op):
        return Op(expr.name, expr.args, expr.dtype, (node, index))
    return expr


def _binary(name: str) -> Handler:
    function = arithmetic.BINARY[name]

    def handler(reader: Reader, node: fx.Node, index: At) -> Expr:
        if node.kwargs.get("alpha", 1) != 1:
            raise Unsupported("a multiple of the second term")
        left, right, dtype = _operands(reader, node, index)
        if isinstance(left, Position) and isinstance(right, Position) and dtype in INTEGERS:
            return arithmetic.of_positions(name, left, right, dtype, reader.space)
        found = reader.apply(lambda a, b: function(a, b, dtype), left, right)
        return _placed(found, node, index)

    return handler


def _operands(reader: Reader, node: fx.Node, index: At) -> tuple[Expr, Expr, torch.dtype]:
    """Both arguments and the type of the result; all of them numbers."""
    dtype = graph.value(node).dtype
    left, right = (reader.operand(item, node, index) for item in node.args[:2])
    allowed = INTEGERS if dtype in INTEGERS else (*INTEGERS, *FLOATS)
    if dtype not in allowed or any(arg.dtype not in allowed for arg in (left, right)):
        raise Unsupported(f"arithmetic of {left.dtype} and {right.dtype} to {dtype}")
    return left, right, dtype


_BINARY_OPS = {
    "and": ("bitwise_and", "__and__"),
    "or": ("bitwise_or", "__or__"),
    "xor": ("bitwise_xor", "__xor__"),
    "shl": ("bitwise_left_shift", "__lshift__"),
    "shr": ("bitwise_right_shift", "__rshift__"),
    "floor_divide": ("floor_divide",),
    "remainder": ("remainder",),
    "add": ("add",),
    "sub": ("sub",),
    "mul": ("mul",),
    "div": ("div",),
}
_OVERLOADS = ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor", "default")
for _name, _ops in _BINARY_OPS.items():
    for _op in _ops:
        _packet = getattr(aten, _op)
        _overloads = (getattr(_packet, o) for o in _packet.overloads() if o in _OVERLOADS)
        handles(*_overloads)(_binary(_name))


@handles(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(reader: Reader, node: fx.Node, index: At) -> Expr:
    if len(node.args) > 2 or node.kwargs:
        raise Unsupported("a multiple of the second term")
    right, left, dtype = _operands(reader, node, index)
    found = reader.apply(lambda a, b: arithmetic.subtract(a, b, dtype), left, right)
    return _placed(found, node, index)


@handles(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(reader: Reader, node: fx.Node, index: At) -> Expr:
    if node.kwargs.get("rounding_mode") != "floor":
        raise Unsupported("a division that rounds otherwise")
    left, right, dtype = _operands(reader, node, index)
    if dtype not in INTEGERS:
        raise Unsupported("a rounded division of floats")
    if isinstance(left, Position) and isinstance(right, Position):
        return arithmetic.of_positions("floor_divide", left, right, dtype, reader.space)
    return reader.apply(lambda a, b: arithmetic.floor_divide(a, b, dtype), left, right)


@handles(aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
def _pow(reader: Reader, node: fx.Node, index: At) -> Expr:
    left, right, dtype = _operands(reader, node, index)
    if dtype not in INTEGERS or not isinstance(left, Position) or not isinstance(right, Position):
        raise Unsupported("a power")
    return arithmetic.of_positions("pow", left, right, dtype, reader.space)


@handles(aten.neg.default)
def _neg(reader: Reader, node: fx.Node, index: At) -> Expr:
    dtype = graph.value(node).dtype
    value = reader.operand(node.args[0], node, index)
    return _placed(reader.apply(lambda x: arithmetic.negate(x, dtype), value), node, index)


@handles(aten.reciprocal.default)
def _reciprocal(reader: Reader, node: fx.Node, index: At) -> Expr:
    dtype = graph.value(node).dtype
    value = reader.operand(node.args[0], node, index)
    return _placed(reader.apply(lambda x: arithmetic.reciprocal(x, dtype), value), node, index)


def _comparison(name: str) -> Handler:
    def handler(reader: Reader, node: fx.Node, index: At) -> Expr:
        left, right = node.args[:2]
        if not graph.is_tensor_node(left) or graph.value(left).dtype not in INTEGERS:  # type: ignore[arg-type]
            raise Unsupported("a comparison of what are no integers")
        a = reader.operand(left, node, index)
        b = (
            integer(right, a.dtype)
            if isinstance(right, int)
            else reader.operand(right, node, index)
        )
        return Op(name, (a, b), torch.bool)

    return handler


for _name in ("ge", "gt", "le", "lt"):
    handles(getattr(aten, _name).Scalar, getattr(aten, _name).Tensor)(_comparison(_name))


@handles(aten.where.self)
def _where(reader: Reader, node: fx.Node, index: At) -> Expr:
    dtype = graph.value(node).dtype
    args = [reader.operand(item, node, index) for item in node.args[:3]]
    return reader.apply(lambda c, a, b: arithmetic.where(c, a, b, dtype), *args)


def _dequantize_per_channel(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_channel``: (q - zero_point[c]) * scale[c]."""
    source, scales, zeros, axis = node.args[:4]
    channel = (index[_dim(axis, len(index))],)  # type: ignore[arg-type]
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, channel)  # type: ignore[arg-type]


def _dequantize_per_channel_group(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_channel_group``: groups along the last dimension."""
    source, scales, zeros = node.args[:3]
    size = graph.arguments(node, *_GROUP_ARGUMENTS)[6]
    group = (index[0], reader.space.divmod(index[1], size)[0])
    return _dequantized(reader, node, reader.read(source, index), scales, zeros, group)  # type: ignore[arg-type]


_GROUP_ARGUMENTS = ("input", "scales", "zero_points", "quant_min", "quant_max", "dtype", "size")


def _dequantize_per_tensor(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quantized_decomposed.dequantize_per_tensor``: (q - zero_point) * scale."""
    source, scale, zero = node.args[:3]
    return _dequantized(reader, node, reader.read(source, index), scale, zero, ())  # type: ignore[arg-type]


def _dequantized(reader: Reader, node: fx.Node, q: Expr, scale: Any, zero: Any, index: At) -> Expr:
    """In fp32, as these ops compute; tensors are read at ``index``, those of one element at 0."""

    def number(item: Any) -> Expr:
        if not isinstance(item, fx.Node):
            return Number(float(item), torch.float32)
        shape = sizes(item)
        if math.prod(shape) == 1:
            at: At = (ZERO,) * len(shape)
        elif len(shape) == len(index):
            at = index
        else:
            raise Unsupported("scales in a shape of their own")
        return arithmetic.cast(reader.read(item, at), torch.float32)

    value = arithmetic.cast(q, torch.float32)
    if zero is not None:
        value = arithmetic.subtract(value, number(zero), torch.float32)
    value = arithmetic.multiply(value, number(scale), torch.float32)
    return arithmetic.cast(value, graph.value(node).dtype)


def _quanto_unpack(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``quanto.unpack(packed, bits)``: the fields of a byte lie in blocks along the first
    dimension, the lowest bits first."""
    source, bits = node.args[:2]
    if not isinstance(bits, int) or graph.value(source).dtype != torch.uint8:  # type: ignore[arg-type]
        raise Unsupported("an unknown packing")
    block, row = reader.space.divmod(index[0], sizes(source)[0])  # type: ignore[arg-type]
    word = reader.read(source, (row, *index[1:]))  # type: ignore[arg-type]
    dtype = graph.value(node).dtype
    return reader.apply(lambda x: arithmetic.cast(extract(x, block * bits, bits), dtype), word)


# By name: these ops exist once something has imported them.
_BY_NAME: dict[str, Handler] = {
    "quantized_decomposed.dequantize_per_channel.default": _dequantize_per_channel,
    "quantized_decomposed.dequantize_per_channel_group.default": _dequantize_per_channel_group,
    "quantized_decomposed.dequantize_per_tensor.default": _dequantize_per_tensor,
    "quantized_decomposed.dequantize_per_tensor.tensor": _dequantize_per_tensor,
    "quanto.unpack.default": _quanto_unpack,
}


def _handler_of(node: fx.Node) -> Handler | None:
    if node.op == "get_attr":
        return _constant
    return _HANDLERS.get(node.target) or _BY_NAME.get(str(node.target))
