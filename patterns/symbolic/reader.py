"""The reader: an expression for any element of a node, from the handler of the node's op.

The modules ``views``, ``concat``, ``pointwise`` and ``custom_ops`` register handlers (``handles``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import fx

from .. import fx_utils
from .bits import held_in
from .expr import (
    FLOAT8,
    INTEGERS,
    Choice,
    Expr,
    Load,
    Lookup,
    Number,
    Op,
    at,
    changed,
    each,
    fixed,
    integer,
    limits,
    normalized,
    normalized_index,
    size_of,
    table_of_digit,
    whole,
)
from .index import WHOLE, ZERO, Digit, IndexExpr, Space, SplitConflict, Unsupported, Whole
from .join import join

At = tuple[IndexExpr, ...]
Handler = Callable[["Reader", fx.Node, At], Expr]
_HANDLERS: dict[Any, Handler] = {}
CONSTANT = "get_attr"  # the target under which constant tensors have their handler
OTHERWISE = "otherwise"  # that of the handler that is tried where no other has a form
# The longest known dequantization has 60 nodes, some of which are read once per field of a packed
# word; its expressions have 40 operations at most. A longer one is no weight.
MAX_DEPTH = 100
MAX_READS = 20_000
MAX_SIZE = 500


def handles(*targets: Any) -> Callable[[Handler], Handler]:
    """Registers the handler of these ops. An op of another package is given by name: it exists
    only once that package is imported."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(targets, handler))
        return handler

    return register


class Reader:
    """Expressions of the elements of one operand. ``space`` holds the digits of its position;
    ``whole``: see ``Space``.

    row   of the product, if each row may select a weight of its own
    ids   the tensor that does; what it selects by is the variable "e", not data
    is_same   whether two nodes have one value: the ids of the elements and those of the scales

    With ``computes``, a position that its digits do not divide is read in digits of its own
    (``divided``), and a table of a digit that is split stays one. With ``stops``, what has such a
    table is an element of the node that computes it.
    """

    def __init__(
        self, whole: Whole | None = None, *, computes: bool = False, stops: bool = False
    ) -> None:
        self.space = Space(whole, table_of_digit if computes else None)
        self.computes, self.stops = computes, stops
        self.pieces = 0  # of a dimension whose edges the digits do not meet
        self.parts_of_runs: set[Digit] = set()  # that are being read
        self.constants: dict[fx.Node, list[int]] = {}  # values of constant tensors
        self.row: IndexExpr | None = None
        self.ids: fx.Node | None = None
        self.is_same: Callable[[fx.Node, fx.Node], bool] = operator.is_
        self._expert, self._experts = ZERO, 0
        self.known_nodes: set[fx.Node] = set()  # that were read for another weight alike
        self._memo: dict[tuple[fx.Node, At], Expr] = {}
        self._depth = 0
        self.is_split = False  # a digit that a table of an expression depends on
        self.is_cut = False  # an expression was too large, and a leaf stands for it

    def nodes(self) -> set[fx.Node]:
        """The nodes that were read."""
        return {node for node, _ in self._memo} | self.known_nodes

    def has_codes(self) -> bool:
        """Whether integers or fp8 in memory were read. Keys and values of attention, which are
        tried as weights too, are floats or computed."""
        return any(
            fx_utils.value(node).dtype in (*INTEGERS, *FLOAT8) and fx_utils.is_stored(node)
            for node in self.nodes()
            if fx_utils.is_tensor_node(node)
        )

    def read(self, node: fx.Node, index: At) -> Expr:
        """The value of ``node`` at ``index``, one IndexExpr per dimension."""
        key = (node, index)
        found = self._memo.get(key)
        if found is None:
            if self._depth > MAX_DEPTH or len(self._memo) > MAX_READS:
                return self.leaf(node, index)
            self._depth += 1
            try:
                found = self._read(node, index)
            finally:
                self._depth -= 1
            if isinstance(found, (Op, Lookup, Choice)):
                if size_of(found) > MAX_SIZE:
                    found, self.is_cut = self.leaf(node, index), True
                elif found.at is None:
                    found = changed(found, at=key)
            self._memo[key] = found
        return found

    def _read(self, node: fx.Node, index: At) -> Expr:
        target = CONSTANT if node.op == "get_attr" else node.target
        own = _HANDLERS.get(target) or _HANDLERS.get(str(target))
        for handler in (own, _HANDLERS[OTHERWISE]):
            if handler is not None:
                try:
                    return handler(self, node, index)
                except Unsupported as reason:
                    self.space.is_torn |= isinstance(reason, SplitConflict)
        return self.leaf(node, index)

    def expert(self, ids: fx.Node, index: At, count: int) -> IndexExpr | None:
        """Which of ``count`` weights the element of ``ids`` at ``index`` selects; None if it is not
        the one of the product's row."""
        if self.row is None:
            return None
        flat = ZERO
        for size, i in zip(sizes(ids), index, strict=True):
            flat = flat * size + i
        if self.space.leaves(flat) != self.space.leaves(self.row):
            return None
        if self.ids is None:
            self.ids, self._experts = ids, count
            self._expert = self.space.variable("e", count)
        if count != self._experts or not self.is_same(ids, self.ids):
            raise Unsupported("rows that select by several tensors")
        return self._expert

    @property
    def selected(self) -> tuple[IndexExpr, int]:
        """The variable "e", and how many weights ``ids`` selects from."""
        return self._expert, self._experts

    def leaf(self, node: fx.Node, index: At) -> Expr:
        dtype = fx_utils.value(node).dtype
        if dtype in INTEGERS:
            return whole(node, index, dtype)
        return Load(node, index, dtype)

    def by_cases(
        self,
        index: IndexExpr,
        branch: Callable[[IndexExpr, Callable[[IndexExpr], IndexExpr]], Expr],
    ) -> Expr:
        """``branch(index, fix)`` for every value that ``index`` takes, as one expression.

        In a branch, index is a constant; ``fix`` restricts another IndexExpr to the same case.
        """
        index = self.space.leaves(index)
        if index.is_const:
            return branch(index, lambda other: other)
        digit = self.space.cases(index)[0]
        cases = []
        for value in range(digit.radix):

            def fix(other: IndexExpr, value: int = value) -> IndexExpr:
                return fixed(other, self.space, digit, value)

            def inner(
                index: IndexExpr,
                deeper: Callable[[IndexExpr], IndexExpr],
                fix: Callable[[IndexExpr], IndexExpr] = fix,
            ) -> Expr:
                return branch(index, lambda other: deeper(fix(other)))

            cases.append(self.by_cases(index.at(digit, value), inner))
        return self.joined(digit, cases)

    def joined(self, digit: Digit, cases: list[Expr]) -> Expr:
        """``cases[v]`` where ``digit`` is v."""
        if digit.children is not None:
            raise SplitConflict("a digit is split on which cases depend")
        return self._joined(digit, [self.normalized(case) for case in cases])

    def _joined(self, digit: Digit, cases: list[Expr]) -> Expr:
        joined = join(digit, cases, self.space.as_data)
        self.space.is_torn |= isinstance(joined, Choice)
        return joined

    def apply(self, function: Callable[..., Expr], *args: Expr) -> Expr:
        """``function(*args)``, case by case if an argument has cases."""
        digits = [arg.digit for arg in args if isinstance(arg, Choice)]
        if not digits:
            return function(*args)
        if math.prod(digit.radix for digit in set(digits)) > MAX_SIZE:
            self.is_cut = True
            raise Unsupported("too many cases")
        args = tuple(map(self.normalized, args))
        digit = digits[0]
        cases = [
            self.apply(function, *(at(arg, digit, value) for arg in args))
            for value in range(digit.radix)
        ]
        return self._joined(digit, cases)

    def normalized(self, expr: Expr) -> Expr:
        """The same expression in unsplit digits."""
        try:
            return normalized(expr, self.space)
        except SplitConflict:
            self.is_split = True
            if not self.stops or not isinstance(expr, Op):
                raise
        with contextlib.suppress(SplitConflict):
            return dataclasses.replace(expr, args=each(expr, self.normalized))
        if expr.at is None:
            raise SplitConflict("no node computes it")
        node, index = expr.at
        found = self.leaf(node, normalized_index(index, self.space))
        return found if found.dtype == expr.dtype else held_in(found, expr.dtype)

    def operand(self, item: Any, node: fx.Node, index: At) -> Expr:
        """An argument of a pointwise op, broadcast to the shape of ``node``."""
        if fx_utils.is_tensor_node(item):
            return self.read(item, broadcast(item, index))
        if isinstance(item, bool):
            raise Unsupported("a bool")
        if isinstance(item, int):
            dtype = fx_utils.value(node).dtype
            if dtype in INTEGERS:  # torch wraps a number around in the dtype of the result
                low, high = limits(dtype)
                return integer((item - low) % (high - low + 1) + low, dtype)
            return Number(float(item), dtype)
        if isinstance(item, float):
            return Number(item, fx_utils.value(node).dtype)
        raise Unsupported("an argument that is no tensor")


Found = TypeVar("Found")


def attempt(read: Callable[[Reader], Found], is_good: Callable[[Found], bool]) -> Found:
    """The result of ``read``; after conflicting splits of a digit, retried with it kept whole, or
    in digits of their own where a dimension's edges are not met."""
    reader = Reader()
    first = read(reader)
    if is_good(first) or not reader.space.is_torn or reader.is_cut:
        return first
    if not reader.has_codes() and not reader.pieces:  # keys and values of attention, say
        return first
    ways = [functools.partial(Reader, kept) for kept in WHOLE]
    likely = len(WHOLE)
    if reader.pieces:
        ways.sort(key=lambda way: way.args[0].radix != reader.pieces)
        likely = sum(kept.radix == reader.pieces for kept in WHOLE)
    ways.insert(likely, functools.partial(Reader, computes=True))
    for way in ways:
        try:
            found = read(reader := way())
        except Unsupported:
            continue
        if is_good(found):
            return found
        if reader.is_split and not reader.stops:
            ways.append(functools.partial(way, stops=True))
    return first


# Stand for size symbols that are read for all their values at once. They are primes larger than any
# size of a tensor, so each cancels against itself only, and a position has the same form for every
# other size.
ANY_SIZES = (2**31 - 1, 2**61 - 1)
_NONE: dict[Any, int] = {}
_any_symbols: ContextVar[dict[Any, int]] = ContextVar("any_symbols", default=_NONE)


@contextlib.contextmanager
def for_any(*sizes: int | torch.SymInt) -> Iterator[None]:
    """Within, the symbolic factors of ``sizes``, such as batch and sequence, have ANY_SIZES."""
    found = [fx_utils.factors(size) for size in sizes if not isinstance(size, int)]
    symbols = sorted({base for each in found if each is not None for base in each[1]}, key=str)
    is_known = len(symbols) <= len(ANY_SIZES)
    token = _any_symbols.set(dict(zip(symbols, ANY_SIZES, strict=False)) if is_known else _NONE)
    try:
        yield
    finally:
        _any_symbols.reset(token)


_INT = frozenset([int])


def sizes(node: fx.Node) -> list[int]:
    """The shape of a node. Raises Unsupported if it is symbolic, except within ``for_any``."""
    shape = fx_utils.value(node).shape
    if not _any_symbols.get() and set(map(type, shape)) <= _INT:
        return list(shape)
    return [_size(size) for size in shape]


def _size(size: int | torch.SymInt) -> int:
    known = _any_symbols.get()
    if isinstance(size, int):
        if known and size >= min(ANY_SIZES):
            raise Unsupported("a size as large as ANY_SIZES")
        return size
    found = fx_utils.factors(size) if known else None
    if found is None or not found[1].keys() <= known.keys():
        raise Unsupported("a symbolic shape")
    factor, powers = found
    return factor * math.prod(known[symbol] ** power for symbol, power in powers.items())


def broadcast(node: fx.Node, index: At) -> At:
    """The position in ``node``, which is broadcast, of the element at ``index``."""
    shape = sizes(node)
    if len(shape) > len(index):
        raise Unsupported("an operand of more dimensions")
    last = index[len(index) - len(shape) :]
    return tuple([ZERO if size == 1 else i for size, i in zip(shape, last, strict=True)])


def dimension(dim: int, rank: int) -> int:
    """``dim`` counted from the front."""
    return dim + rank if dim < 0 else dim
