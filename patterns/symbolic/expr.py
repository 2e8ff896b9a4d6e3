"""What one element of a tensor is, as an expression of its position: loads, bit fields, arithmetic.

Integers are exact: an expression is the mathematical value. A value that might wrap around in its
dtype is refused (``Unsupported``; the reader then treats the node as a leaf). So a cast between
integer dtypes changes nothing but the dtype, and shifts and masks become ``Bits`` (``bits``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

from inductor_quant._compat import inductor as compat

from ..match import Derived
from .index import (
    SELECTING,
    ZERO,
    Datum,
    Digit,
    IndexExpr,
    Run,
    Space,
    SplitConflict,
    Unsupported,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
E8M0 = torch.float8_e8m0fnu  # of scales
INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32),
)
EXACT_IN_FP32 = 2**24  # integers up to this magnitude convert exactly


@dataclasses.dataclass(frozen=True)
class Load:
    """An element of a tensor of floats or bools."""

    node: fx.Node
    index: tuple[IndexExpr, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Bits:
    """The ``width`` bits of an integer element from bit ``offset`` up, sign-extended if ``signed``;
    the value is held in ``dtype``."""

    node: fx.Node
    index: tuple[IndexExpr, ...]
    offset: IndexExpr
    width: int
    signed: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    """A float that is the same everywhere. Equal means equal bit for bit: 0.0 is not -0.0."""

    value: float
    dtype: torch.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash(self._bits())

    def _bits(self) -> tuple[bytes, torch.dtype]:
        return struct.pack("d", self.value), self.dtype


@dataclasses.dataclass(frozen=True)
class Position:
    """An integer that depends on the position alone."""

    index: IndexExpr
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Undefined:
    """An element of ``empty`` that was never written."""

    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Op:
    """``name`` of ``args``. ``at`` is where the graph computes it, (node, index); None if no single
    node does.

    The value of an integer op is exact, whatever ``dtype`` holds it. The less obvious names:
        shl, shr   (x, amount)         x * 2**amount, and floor(x / 2**amount)
        trunc      (x, dtype)          the lowest bits of x, read as that dtype
        masked     (x, width, amount)  x & (2**width - 1 << amount), in the dtype of x
        wrap       (x, width)          x modulo 2**width
        from_end   (x, size)           x + size where x < 0
        float8     (x,)                eight bits read as ``dtype``
        difference (x, y)              x - y, which wraps around in ``dtype``
        digit      (x, d, m)           x // d modulo m, of a position x
    """

    name: str
    args: tuple[Any, ...]
    dtype: torch.dtype
    at: tuple[fx.Node, tuple[IndexExpr, ...]] | None = dataclasses.field(
        default=None, compare=False
    )
    size: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + sum(map(size_of, self.args)))


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A function of one field, or of a number of several: ``values[code]``, where ``values`` is the
    memory of a tensor of ``dtype``, so that equal means equal bit for bit; or what computes that
    tensor, from a table that the model stores. ``at``: as of ``Op``."""

    code: Any
    values: bytes | Derived
    dtype: torch.dtype
    at: tuple[fx.Node, tuple[IndexExpr, ...]] | None = dataclasses.field(
        default=None, compare=False
    )

    def tensor(self) -> torch.Tensor | None:
        if isinstance(self.values, Derived):
            return None
        return torch.frombuffer(bytearray(self.values), dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class Choice:
    """``cases[v]`` where ``digit`` is v, for expressions without a common form. ``at``: as of
    ``Op``."""

    digit: Digit
    cases: tuple[Any, ...]
    dtype: torch.dtype
    at: tuple[fx.Node, tuple[IndexExpr, ...]] | None = dataclasses.field(
        default=None, compare=False
    )
    size: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + sum(map(size_of, self.cases)))


Expr = Load | Bits | Number | Position | Undefined | Op | Lookup | Choice


Kind = TypeVar("Kind", bound=Expr)


def changed(expr: Kind, **fields: Any) -> Kind:
    """``dataclasses.replace`` at a tenth of its cost; not of ``args`` or ``cases``."""
    found = object.__new__(type(expr))
    found.__dict__.update(expr.__dict__, **fields)
    return found


def size_of(expr: Any) -> int:
    """The number of operations in an expression, shared ones counted every time."""
    return expr.size if isinstance(expr, (Op, Choice)) else 0


def _operands(expr: Op) -> list[Any]:
    return [arg for arg in expr.args if not isinstance(arg, torch.dtype)]


def each(expr: Op, function: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments, with ``function`` applied to expressions."""
    return tuple(arg if isinstance(arg, torch.dtype) else function(arg) for arg in expr.args)


def forms(expr: Expr, *, through_data: bool = True) -> tuple[IndexExpr, ...]:
    """All indices of an expression, with ``through_data`` also those inside data.

    The data of a field's offset always counts, because it selects the value within the word; so do
    digits of a position. Data in an index only selects the word.
    """
    own: tuple[IndexExpr, ...] = ()
    if isinstance(expr, (Load, Bits)):
        own = (*expr.index, expr.offset) if isinstance(expr, Bits) else expr.index
    elif isinstance(expr, Position):
        own = (expr.index,)
    elif isinstance(expr, Lookup):
        return forms(expr.code, through_data=through_data)
    elif isinstance(expr, Op):
        return tuple(i for arg in _operands(expr) for i in forms(arg, through_data=through_data))
    elif isinstance(expr, Choice):
        return tuple(i for case in expr.cases for i in forms(case, through_data=through_data))
    if not through_data:
        places = [data for form in own for data in form.data if is_position(data[0].expr)]
        shifts = expr.offset.data if isinstance(expr, Bits) else ()
        return (*own, *(index for data, _ in (*shifts, *places) for index in forms(data.expr)))
    inner = (index for form in own for data, _ in form.data for index in forms(data.expr))
    return (*own, *inner)


def is_position(expr: Expr) -> bool:
    """Whether it is a digit of a position that the digits of the space do not divide, or a table
    of such a digit."""
    code = expr.code if isinstance(expr, Lookup) else expr
    return isinstance(code, Op) and code.name == "digit"


def digit_of(place: IndexExpr, divisor: int, modulus: int) -> Op:
    sizes = (integer(size, torch.int64) for size in (divisor, modulus))
    return Op("digit", (Position(place, torch.int64), *sizes), torch.int64)


def table_of_digit(place: IndexExpr, radix: int, table: tuple[int, ...]) -> Datum:
    """``table[place]``."""
    memory = b"".join(value.to_bytes(8, sys.byteorder, signed=True) for value in table)
    values = Lookup(digit_of(place, 1, radix), memory, torch.int64)
    return Datum(values, min(table), max(table))


def value_at(index: IndexExpr, position: Mapping[Digit, int]) -> int:
    """The value at these digits. Its data are digits of a position or tables of such."""
    value = index.const
    for digit, term in index.terms:
        at = position[digit]
        value += term[at] if isinstance(term, tuple) else term * at
    for datum, coef in index.data:
        expr = datum.expr
        digit = expr.code if isinstance(expr, Lookup) else expr
        place, divisor, modulus = (each.index for each in digit.args)
        at = value_at(place, position) // divisor.const % modulus.const
        if isinstance(expr, Lookup) and isinstance(expr.values, bytes):
            at = numbers_of(expr.values, expr.dtype)[at]
        value += coef * at
    return value


def digits(expr: Expr, space: Space, *, through_data: bool = True) -> set[Digit]:
    """The digits on which an expression depends."""
    indices = forms(expr, through_data=through_data)
    found = {digit for index in indices for digit, _ in space.leaves(index).terms}
    if isinstance(expr, Choice):
        found.add(expr.digit)
    return found


def told_apart(expr: Expr, space: Space, *, through_data: bool = True) -> set[Digit]:
    """The digits each of whose values is at another place: in tables, no two are the same."""
    found = {expr.digit} if isinstance(expr, Choice) else set()
    tables: dict[Digit, list[tuple[int, ...]]] = {}
    for index in forms(expr, through_data=through_data):
        for digit, term in space.leaves(index).terms:
            if isinstance(term, tuple):
                tables.setdefault(digit, []).append(term)
            else:
                found.add(digit)
    for digit, terms in tables.items():
        if len(set(zip(*terms, strict=True))) == digit.radix:
            found.add(digit)
    return found


def mapped(
    expr: Expr,
    indices: Callable[[tuple[IndexExpr, ...]], tuple[IndexExpr, ...]],
    inner: Callable[[Any], Any],
) -> Expr:
    """``expr`` with ``indices`` applied to its own indices, and ``inner`` to its arguments; itself
    if that changes none."""
    if isinstance(expr, Load):
        found = indices(expr.index)
        return expr if found is expr.index else Load(expr.node, found, expr.dtype)
    if isinstance(expr, Bits):
        own = (*expr.index, expr.offset)
        if (moved := indices(own)) is own:
            return expr
        return Bits(expr.node, moved[:-1], moved[-1], expr.width, expr.signed, expr.dtype)
    if isinstance(expr, Position):
        (index,) = indices((expr.index,))
        return expr if index is expr.index else Position(index, expr.dtype)
    if isinstance(expr, Op):
        args = each(expr, inner)
        is_same = all(map(operator.is_, args, expr.args))
        return expr if is_same else Op(expr.name, args, expr.dtype, expr.at)
    if isinstance(expr, Lookup):
        return dataclasses.replace(expr, code=inner(expr.code))
    if isinstance(expr, Choice):
        return dataclasses.replace(expr, cases=tuple(map(inner, expr.cases)))
    return expr


def at(expr: Expr, digit: Digit, value: int | Run) -> Expr:
    """The expression where ``digit`` has this value, or the values of a run."""
    if isinstance(expr, Choice) and expr.digit is digit:
        if isinstance(value, int):
            return expr.cases[value]
        end = value.first + value.part.radix
        return Choice(value.part, expr.cases[value.first : end], expr.dtype)
    found = mapped(expr, lambda i: _at(i, digit, value), lambda arg: at(arg, digit, value))
    if found is expr or found == expr:
        return expr
    if isinstance(found, (Op, Lookup, Choice)):
        return changed(found, at=None)
    return found


def _at(forms: tuple[IndexExpr, ...], digit: Digit, value: int | Run) -> tuple[IndexExpr, ...]:
    if not any(form.data or digit in dict(form.terms) for form in forms):
        return forms
    found = []
    for form in forms:
        new = form.at(digit, value)
        for datum, coef in form.data:
            new = new + by_data(at(datum.expr, digit, value)) * coef
        found.append(new)
    return tuple(found)


def fixed(index: IndexExpr, space: Space, digit: Digit, value: int | Run) -> IndexExpr:
    """An index where ``digit`` has this value, or those of a run, also within its data."""
    return _at(_normalized((index,), space), digit, value)[0]


def normalized_index(index: tuple[IndexExpr, ...], space: Space) -> tuple[IndexExpr, ...]:
    """The same position in unsplit digits, also within its data."""
    return _normalized(index, space)


def normalized(expr: Expr, space: Space) -> Expr:
    """The same expression in unsplit digits; needed before a digit is fixed or forms compared."""
    if isinstance(expr, Choice) and expr.digit.children is not None:
        raise SplitConflict("a digit is split on which cases depend")
    found = mapped(expr, lambda i: _normalized(i, space), lambda arg: normalized(arg, space))
    if isinstance(found, (Op, Lookup, Choice)) and found.at is not None:
        node, index = found.at
        with contextlib.suppress(Unsupported):
            if (here := _normalized(index, space)) is not index:
                return changed(found, at=(node, here))
    return found


def _normalized(forms: tuple[IndexExpr, ...], space: Space) -> tuple[IndexExpr, ...]:
    found = []
    for form in forms:
        new = space.leaves(form)
        if new.data:
            data = tuple(
                (by_data(normalized(d.expr, space)).data[0][0], coef) for d, coef in new.data
            )
            new = dataclasses.replace(new, data=data)
        found.append(new)
    return forms if all(map(operator.is_, found, forms)) else tuple(found)


def is_gathered(index: tuple[IndexExpr, ...], space: Space) -> bool:
    """Whether a position is that of a row of the product, which selects a weight."""
    return any(d.axis in SELECTING for form in _normalized(index, space) for d, _ in form.terms)


def rounded(value: float, dtype: torch.dtype) -> float:
    """``value`` in a float dtype, as torch rounds it."""
    return _rounded(struct.pack("d", value), dtype)  # 0.0 is not -0.0


@functools.lru_cache(4096)
def _rounded(value: bytes, dtype: torch.dtype) -> float:
    with compat.real_tensors():
        (number,) = struct.unpack("d", value)
        return torch.tensor(number, dtype=dtype).item()


# ------------------------------------------------------------------------------------------
# integers


def limits(dtype: torch.dtype) -> tuple[int, int]:
    if dtype not in INTEGERS:
        raise Unsupported(f"the limits of {dtype}")
    info = torch.iinfo(dtype)
    return info.min, info.max


def interval(expr: Expr) -> tuple[int, int]:
    """The smallest and largest value that an integer expression can have."""
    if isinstance(expr, Bits):
        if expr.signed:
            return -(1 << (expr.width - 1)), (1 << (expr.width - 1)) - 1
        return 0, (1 << expr.width) - 1
    if isinstance(expr, Position):
        return expr.index.bounds()
    if isinstance(expr, Lookup) and isinstance(expr.values, bytes):
        numbers = numbers_of(expr.values, expr.dtype)
        return min(numbers), max(numbers)
    if isinstance(expr, Op) and expr.name in ("add", "sub", "mul"):
        (a, b), (c, d) = (interval(arg) for arg in expr.args)
        if expr.name == "add":
            return a + c, b + d
        if expr.name == "sub":
            return a - d, b - c
        ends = (a * c, a * d, b * c, b * d)
        return min(ends), max(ends)
    if isinstance(expr, Op) and expr.name == "or":
        bounds = [interval(arg) for arg in expr.args]
        if min(low for low, _ in bounds) >= 0:
            return 0, (1 << max(high for _, high in bounds).bit_length()) - 1
    if isinstance(expr, Op) and expr.name == "and" and (constant(expr.args[1]) or -1) >= 0:
        return 0, constant(expr.args[1]) or 0
    if isinstance(expr, Op) and expr.name == "wrap":
        return 0, (1 << expr.args[1].index.const) - 1
    if isinstance(expr, Op) and expr.name == "from_end":
        return 0, expr.args[1].index.const - 1  # others are an error in torch
    if isinstance(expr, Op) and expr.name == "digit":
        return 0, expr.args[2].index.const - 1
    if isinstance(expr, Op) and expr.name == "trunc":
        return limits(expr.args[1])
    if isinstance(expr, Op) and expr.name == "shl" and not expr.args[1].index.data:
        shifted = [e << by for e in interval(expr.args[0]) for by in expr.args[1].index.bounds()]
        return min(shifted), max(shifted)
    return limits(expr.dtype)


def numbers_of(memory: bytes, dtype: torch.dtype) -> list[int]:
    """The integers of a tensor's memory."""
    size, is_signed = dtype.itemsize, limits(dtype)[0] < 0
    parts = (memory[at : at + size] for at in range(0, len(memory), size))
    return [int.from_bytes(part, sys.byteorder, signed=is_signed) for part in parts]


def whole(node: fx.Node, index: tuple[IndexExpr, ...], dtype: torch.dtype) -> Bits:
    """An element of an integer tensor."""
    info = torch.iinfo(dtype)
    return Bits(node, index, ZERO, info.bits, info.min < 0, dtype)


def is_whole(expr: Bits) -> bool:
    """Whether the field is the whole element, read as its own dtype."""
    dtype = expr.node.meta["val"].dtype
    word = torch.iinfo(torch.uint8 if dtype == E8M0 else dtype)
    return (expr.offset, expr.width, expr.signed) == (ZERO, word.bits, word.min < 0)


def varying(expr: Expr) -> IndexExpr | None:
    """A position, not the same everywhere, that integer ops combine with others."""
    if isinstance(expr, Position):
        return None if expr.index.is_const or expr.index.data else expr.index
    if not isinstance(expr, Op) or expr.dtype not in INTEGERS:
        return None
    return next(filter(None, map(varying, _operands(expr))), None)


def by_data(expr: Expr) -> IndexExpr:
    """An index whose value is an integer in a tensor."""
    return IndexExpr(data=((Datum(expr, *interval(expr)), 1),))


def constant(expr: Expr) -> int | None:
    """The value of an integer that is the same everywhere."""
    return expr.index.const if isinstance(expr, Position) and expr.index.is_const else None


def integer(value: int, dtype: torch.dtype) -> Position:
    return Position(IndexExpr(value), dtype)
