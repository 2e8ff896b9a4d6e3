"""Handlers of pointwise ops (the arithmetic is in ``arithmetic``), of constants and of indexing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from inductor_quant._compat import inductor as compat

from .. import fx_utils
from ..fx_utils import aten
from . import arithmetic
from .bits import held_in
from .expr import (
    FLOATS,
    INTEGERS,
    Bits,
    Expr,
    Lookup,
    Number,
    Op,
    Position,
    Undefined,
    by_data,
    integer,
    interval,
    rounded,
    varying,
)
from .index import MAX_CASES, ZERO, IndexExpr, Unsupported
from .reader import CONSTANT, At, Handler, Reader, broadcast, dimension, handles, sizes

prims = torch.ops.prims
# The longest constant tensor that is read by value: an order, or shift amounts.
MAX_CONSTANT = 1 << 17
MAX_TERMS = 8  # of a sum: the bits of a code


@handles(prims.iota.default)
def _iota(reader: Reader, node: fx.Node, index: At) -> Expr:
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    dtype = fx_utils.value(node).dtype
    if not isinstance(start, int) or not isinstance(step, int) or dtype not in INTEGERS:
        raise Unsupported("an iota that is symbolic or no integer")
    return held_in(Position(index[0] * step + start, dtype), dtype)


@handles(aten.full.default, aten.scalar_tensor.default)
def _full(reader: Reader, node: fx.Node, index: At) -> Expr:
    value = node.args[1] if node.target == aten.full.default else node.args[0]
    dtype = fx_utils.value(node).dtype
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unsupported("a fill value that is no number")
    if dtype in INTEGERS:
        if not math.isfinite(value):
            raise Unsupported("a fill value that is no integer")
        return held_in(integer(int(value), dtype), dtype)
    return Number(rounded(value, dtype), dtype)


@handles(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default)
def _empty(reader: Reader, node: fx.Node, index: At) -> Expr:
    return Undefined(fx_utils.value(node).dtype)


@handles(aten.copy.default)
def _copy(reader: Reader, node: fx.Node, index: At) -> Expr:
    target, source = fx_utils.arguments(node, "self", "src")
    dtype = fx_utils.value(target).dtype
    value = reader.operand(source, node, index)
    return reader.apply(lambda x: arithmetic.cast(x, dtype), value)


@handles(CONSTANT)
def _constant(reader: Reader, node: fx.Node, index: At) -> Expr:
    """A constant tensor: a small integer vector, or a literal of the code, is read by value.

    A constant of an exported package may be replaced on loading, so it is data like an input. A
    matrix that is no literal is taken for a weight.
    """
    values, dtype = reader.constants.get(node) or _values_of(node), fx_utils.value(node).dtype
    reader.constants[node] = values
    flat = ZERO
    for size, i in zip(sizes(node), index, strict=True):
        flat = flat * size + i
    try:
        return Position(reader.space.look_up(values, flat), dtype)
    except Unsupported:
        if not all(value > 0 and not value & (value - 1) for value in values):
            raise
    exponents = reader.space.look_up([value.bit_length() - 1 for value in values], flat)
    return Op("shl", (integer(1, dtype), Position(exponents, torch.int64)), dtype)


def _values_of(node: fx.Node) -> list[int]:
    if not fx_utils.has_fixed_values(node):
        raise Unsupported("a buffer that may be replaced")
    tensor = fx_utils.attribute(node)
    shape = fx_utils.value(node).shape
    is_matrix = sum(size > 1 for size in shape) > 1 and math.prod(shape) > MAX_CASES
    if not fx_utils.is_literal(node) and is_matrix:
        raise Unsupported("a matrix that is no literal of the code")
    if tensor is None or tensor.dtype not in INTEGERS or tensor.numel() > MAX_CONSTANT:
        raise Unsupported("a constant that is not read by value")
    return compat.values_of(tensor)


@handles(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, indices = fx_utils.arguments(node, "self", "indices")
    given = [d for d, item in enumerate(indices) if item is not None]
    if not given or given != list(range(given[0], given[0] + len(given))):
        raise Unsupported("indices of dimensions that are not adjacent")
    rank = max(len(sizes(indices[d])) for d in given)
    first = given[0]
    inner = index[first : first + rank]
    if len(given) == 1:
        expert = reader.expert(indices[first], inner, sizes(source)[first])
        if expert is not None:
            return reader.read(source, (*index[:first], expert, *index[first + rank :]))
    chosen = tuple(
        _chosen(reader, reader.read(indices[d], broadcast(indices[d], inner)), sizes(source)[d])
        for d in given
    )
    return reader.read(source, (*index[:first], *chosen, *index[first + rank :]))


@handles(aten.gather.default)
def _gather(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim, indices = fx_utils.arguments(node, "self", "dim", "index")
    dim = dimension(dim, len(index))
    chosen = _chosen(reader, reader.read(indices, index), sizes(source)[dim])
    return reader.read(source, (*index[:dim], chosen, *index[dim + 1 :]))


@handles(aten.index_select.default)
def _index_select(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, dim, indices = fx_utils.arguments(node, "self", "dim", "index")
    dim = dimension(dim, len(index))
    chosen = _chosen(reader, reader.read(indices, (index[dim],)), sizes(source)[dim])
    return reader.read(source, (*index[:dim], chosen, *index[dim + 1 :]))


@handles(aten.embedding.default)
def _embedding(reader: Reader, node: fx.Node, index: At) -> Expr:
    source, indices = fx_utils.arguments(node, "weight", "indices")
    chosen = _chosen(reader, reader.read(indices, index[:-1]), sizes(source)[0])
    return reader.read(source, (chosen, index[-1]))


def _chosen(reader: Reader, value: Expr, size: int) -> IndexExpr:
    """An index that the graph computes, wrapped to [0, size) as torch does."""
    if isinstance(value, Position):
        low, high = value.index.bounds()
        if low >= 0 and (high < size or value.index.data):
            return value.index  # data beyond the end is an error in torch
        if -size <= low and high < 0:
            return value.index + size
        raise Unsupported("an index of both signs, or out of bounds")
    if isinstance(value, (Bits, Op, Lookup)) and value.dtype in INTEGERS:
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
    return reader.apply(lambda x: arithmetic.cast(x, dtype), value)  # type: ignore[arg-type]


def _binary(name: str) -> Handler:
    function = arithmetic.BINARY[name]

    def handler(reader: Reader, node: fx.Node, index: At) -> Expr:
        if len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1:
            raise Unsupported("a multiple of the second term")
        left, right, dtype = _operands(reader, node, index)
        if dtype not in INTEGERS and name not in _OF_FLOATS:
            raise Unsupported(f"{name} of floats")
        if isinstance(left, Position) and isinstance(right, Position) and dtype in INTEGERS:
            return arithmetic.of_positions(name, left, right, dtype, reader.space)
        found = reader.apply(lambda a, b: function(a, b, dtype), left, right)
        place = varying(found) if isinstance(found, Op) and found.name == "and" else None
        if place is None:
            return found
        # bits of a number of several words: another word for each shift
        return reader.by_cases(place, lambda _, fix: reader.read(node, tuple(map(fix, index))))

    return handler


def _operands(reader: Reader, node: fx.Node, index: At) -> tuple[Expr, Expr, torch.dtype]:
    """Both arguments and the dtype of the result; no bools."""
    dtype = fx_utils.value(node).dtype
    left = reader.operand(node.args[0], node, index)
    right = reader.operand(node.args[1], node, index)
    allowed = INTEGERS if dtype in INTEGERS else (*INTEGERS, *FLOATS)
    if dtype not in allowed or left.dtype not in allowed or right.dtype not in allowed:
        raise Unsupported(f"arithmetic of {left.dtype} and {right.dtype} to {dtype}")
    return left, right, dtype


_OF_FLOATS = ("add", "sub", "mul", "div")
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
    return reader.apply(lambda a, b: arithmetic.subtract(a, b, dtype), left, right)


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


def _unary(function: Callable[[Expr, torch.dtype], Expr]) -> Handler:
    def handler(reader: Reader, node: fx.Node, index: At) -> Expr:
        dtype = fx_utils.value(node).dtype
        value = reader.operand(node.args[0], node, index)
        return reader.apply(lambda x: function(x, dtype), value)

    return handler


handles(aten.neg.default)(_unary(arithmetic.negate))
handles(aten.reciprocal.default)(_unary(arithmetic.reciprocal))


@handles(aten.addcmul.default)
def _addcmul(reader: Reader, node: fx.Node, index: At) -> Expr:
    """``self + value * tensor1 * tensor2``, rounded once. In fp64 here: who computes it may round
    the product, or not."""
    if node.kwargs.get("value", 1) != 1:
        raise Unsupported("a multiple of the product")
    base, left, right = (reader.operand(item, node, index) for item in node.args[:3])
    dtype, wide = fx_utils.value(node).dtype, torch.float64
    if dtype not in FLOATS:
        raise Unsupported("a sum of products of integers")

    def combined(x: Expr, a: Expr, b: Expr) -> Expr:
        a, b, x = (arithmetic.cast(item, wide) for item in (a, b, x))
        total = arithmetic.add(x, arithmetic.multiply(a, b, wide), wide)
        return arithmetic.cast(total, dtype)

    return reader.apply(combined, base, left, right)


@handles(aten.sum.dim_IntList)
def _sum(reader: Reader, node: fx.Node, index: At) -> Expr:
    """A sum of a few integers, such as bits times powers of two."""
    source, dims, keepdim = fx_utils.arguments(node, "self", "dim", "keepdim")
    shape, dtype = sizes(source), fx_utils.value(node).dtype
    along = dimension(dims[0], len(shape)) if len(dims or ()) == 1 else -1
    if along < 0 or dtype not in INTEGERS or not 0 < shape[along] <= MAX_TERMS:
        raise Unsupported("a sum of floats, or of many")
    rest = index[along + 1 :] if keepdim else index[along:]
    terms = [
        reader.read(source, (*index[:along], IndexExpr(place), *rest))
        for place in range(shape[along])
    ]
    wide = [reader.apply(lambda x: arithmetic.cast(x, dtype), term) for term in terms]
    total = wide[0]
    for term in wide[1:]:
        total = reader.apply(lambda a, b: arithmetic.add(a, b, dtype), total, term)
    return total


def _comparison(name: str) -> Handler:
    def handler(reader: Reader, node: fx.Node, index: At) -> Expr:
        left, right = node.args[:2]
        if not fx_utils.is_tensor_node(left) or fx_utils.value(left).dtype not in INTEGERS:  # type: ignore[arg-type]
            raise Unsupported("a comparison of floats")
        a = reader.operand(left, node, index)
        is_number = isinstance(right, int)
        b = integer(right, a.dtype) if is_number else reader.operand(right, node, index)  # type: ignore[arg-type]
        return Op(name, (a, b), torch.bool)

    return handler


for _name in ("ge", "gt", "le", "lt"):
    handles(getattr(aten, _name).Scalar, getattr(aten, _name).Tensor)(_comparison(_name))


@handles(aten.where.self)
def _where(reader: Reader, node: fx.Node, index: At) -> Expr:
    dtype = fx_utils.value(node).dtype
    args = [reader.operand(item, node, index) for item in node.args[:3]]
    return reader.apply(lambda c, a, b: arithmetic.where(c, a, b, dtype), *args)
