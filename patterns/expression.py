"""What one element of a tensor is, as an expression of its position: loads, bit fields, arithmetic.

Integers are exact: an expression stands for the mathematical value, and what might wrap around in
its type is refused where it is made (``Unsupported``; the reader then treats the node as a leaf).
So a cast between integer types changes nothing but the type, and shifts and masks become ``Bits``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant.patterns.digits import (
    ZERO,
    Datum,
    Digit,
    Index,
    Space,
    Torn,
    Unsupported,
    merge,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EXACT_IN_FP32 = 2**24  # integers up to this magnitude survive the conversion


@dataclasses.dataclass(frozen=True)
class Load:
    """An element of a tensor that is no integer."""

    node: fx.Node
    index: tuple[Index, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Bits:
    """``width`` bits from bit ``offset`` on of an element of an integer tensor, sign-extended if
    ``signed``; the value is held in ``dtype``."""

    node: fx.Node
    index: tuple[Index, ...]
    offset: Index
    width: int
    signed: bool
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Number:
    """A float that is the same everywhere."""

    value: float
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Position:
    """An integer that depends on the position alone."""

    index: Index
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Undefined:
    """An element of ``empty`` that was never written."""

    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Op:
    """``name`` of ``args``. ``at`` is where the graph computes it: (node, index), None where that
    is no single node.

    Of integers, the value is the exact one whatever ``dtype`` holds it. Beside the obvious:
        shl, shr   (x, amount)         x * 2**amount, and floor(x / 2**amount)
        trunc      (x, type)           the lowest bits of x as a number of that type
        masked     (x, width, amount)  x & (2**width - 1 << amount), in x's type
        wrap       (x, width)          x modulo 2**width
        from_end   (x, size)           x + size where x is below 0
        float8     (x,)                eight bits read as a number of ``dtype``
    """

    name: str
    args: tuple[Any, ...]
    dtype: torch.dtype
    at: tuple[fx.Node, tuple[Index, ...]] | None = dataclasses.field(default=None, compare=False)
    size: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + sum(map(size_of, self.args)))


@dataclasses.dataclass(frozen=True)
class Choice:
    """``cases[v]`` where ``digit`` is v; expressions without a common form."""

    digit: Digit
    cases: tuple[Any, ...]
    dtype: torch.dtype
    size: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + sum(map(size_of, self.cases)))


Expr = Load | Bits | Number | Position | Undefined | Op | Choice


def size_of(expr: Any) -> int:
    """How many operations an expression has, those that it shares with itself counted again."""
    return expr.size if isinstance(expr, (Op, Choice)) else 0


def _operands(expr: Op) -> list[Any]:
    return [arg for arg in expr.args if not isinstance(arg, torch.dtype)]


def _each(expr: Op, function: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments, ``function`` of those that are expressions."""
    return tuple(arg if isinstance(arg, torch.dtype) else function(arg) for arg in expr.args)


def forms(expr: Expr, *, through_data: bool = True) -> tuple[Index, ...]:
    """All indices of an expression; with ``through_data`` those inside data as well.

    (The offset of a field always counts with all that it depends on: it chooses the number within
    the word. An index that is data only says where the word is read.)
    """
    own: tuple[Index, ...] = ()
    if isinstance(expr, (Load, Bits)):
        own = (*expr.index, expr.offset) if isinstance(expr, Bits) else expr.index
    elif isinstance(expr, Position):
        own = (expr.index,)
    elif isinstance(expr, Op):
        return tuple(i for arg in _operands(expr) for i in forms(arg, through_data=through_data))
    elif isinstance(expr, Choice):
        return tuple(i for case in expr.cases for i in forms(case, through_data=through_data))
    if not through_data:
        shifts = expr.offset.data if isinstance(expr, Bits) else ()
        return (*own, *(index for data, _ in shifts for index in forms(data.expr)))
    inner = (index for form in own for data, _ in form.data for index in forms(data.expr))
    return (*own, *inner)


def digits(expr: Expr, space: Space, *, through_data: bool = True) -> set[Digit]:
    """The digits on which an expression depends."""
    indices = forms(expr, through_data=through_data)
    found = {digit for index in indices for digit, _ in space.leaves(index).terms}
    if isinstance(expr, Choice):
        found.add(expr.digit)
    return found


def at(expr: Expr, digit: Digit, value: int) -> Expr:
    """The expression where ``digit`` has this value."""
    if isinstance(expr, Load):
        return dataclasses.replace(expr, index=_at(expr.index, digit, value))
    if isinstance(expr, Bits):
        *index, offset = _at((*expr.index, expr.offset), digit, value)
        return dataclasses.replace(expr, index=tuple(index), offset=offset)
    if isinstance(expr, Position):
        return dataclasses.replace(expr, index=_at((expr.index,), digit, value)[0])
    if isinstance(expr, Op):
        return Op(expr.name, _each(expr, lambda arg: at(arg, digit, value)), expr.dtype)
    if isinstance(expr, Choice):
        if expr.digit is digit:
            return expr.cases[value]
        cases = tuple(at(case, digit, value) for case in expr.cases)
        return dataclasses.replace(expr, cases=cases)
    return expr


def _at(forms: tuple[Index, ...], digit: Digit, value: int) -> tuple[Index, ...]:
    return tuple(
        form.at(digit, value)
        + sum(
            (by_data(at(datum.expr, digit, value)) * coef for datum, coef in form.data), start=ZERO
        )
        for form in forms
    )


def fixed(index: Index, space: Space, digit: Digit, value: int) -> Index:
    """An index where ``digit`` has this value, that of its data too."""
    return _at(_normalized((index,), space), digit, value)[0]


def normalized(expr: Expr, space: Space) -> Expr:
    """The same expression in the digits of now; before a digit is fixed or forms are compared."""
    if isinstance(expr, Load):
        return dataclasses.replace(expr, index=_normalized(expr.index, space))
    if isinstance(expr, Bits):
        *index, offset = _normalized((*expr.index, expr.offset), space)
        return dataclasses.replace(expr, index=tuple(index), offset=offset)
    if isinstance(expr, Position):
        return dataclasses.replace(expr, index=_normalized((expr.index,), space)[0])
    if isinstance(expr, Op):
        return dataclasses.replace(expr, args=_each(expr, lambda arg: normalized(arg, space)))
    if isinstance(expr, Choice):
        if expr.digit.children is not None:
            raise Torn("a digit is split on which cases depend")
        cases = tuple(normalized(case, space) for case in expr.cases)
        return dataclasses.replace(expr, cases=cases)
    return expr


def _normalized(forms: tuple[Index, ...], space: Space) -> tuple[Index, ...]:
    found = []
    for form in forms:
        new = space.leaves(form)
        if new.data:
            data = tuple(
                (by_data(normalized(d.expr, space)).data[0][0], coef) for d, coef in new.data
            )
            new = dataclasses.replace(new, data=data)
        found.append(new)
    return tuple(found)


def join(digit: Digit, cases: list[Expr]) -> Expr:
    """One expression for what takes the value ``cases[v]`` where ``digit`` is v."""
    joined = _join(digit, cases)
    return joined if joined is not None else Choice(digit, tuple(cases), cases[0].dtype)


def _join(digit: Digit, cases: list[Any]) -> Expr | None:
    first = cases[0]
    if all(case == first for case in cases):
        return first
    if isinstance(first, torch.dtype):
        return None
    if any(type(case) is not type(first) or case.dtype != first.dtype for case in cases):
        return None
    if isinstance(first, Load) and all(case.node is first.node for case in cases):
        index = _join_indices(digit, [case.index for case in cases])
        return None if index is None else dataclasses.replace(first, index=index)
    if isinstance(first, Position):
        form = merge(digit, [case.index for case in cases])
        return None if form is None else dataclasses.replace(first, index=form)
    if isinstance(first, Bits):
        if any(
            (case.node, case.width, case.signed) != (first.node, first.width, first.signed)
            for case in cases
        ):
            return None
        index = _join_indices(digit, [(*case.index, case.offset) for case in cases])
        if index is None:
            return None
        return dataclasses.replace(first, index=index[:-1], offset=index[-1])
    if isinstance(first, Op):
        if any((c.name, len(c.args)) != (first.name, len(first.args)) for c in cases):
            return None
        args = [_join(digit, list(parts)) for parts in zip(*(c.args for c in cases), strict=True)]
        if any(arg is None for arg in args):
            return None
        return Op(first.name, tuple(args), first.dtype)
    return None


def _join_indices(digit: Digit, cases: list[tuple[Index, ...]]) -> tuple[Index, ...] | None:
    joined = [merge(digit, parts) for parts in zip(*cases, strict=True)]
    return None if any(form is None for form in joined) else tuple(joined)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------
# integers


def limits(dtype: torch.dtype) -> tuple[int, int]:
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
    if isinstance(expr, Op) and expr.name in ("add", "sub", "mul"):
        (a, b), (c, d) = (interval(arg) for arg in expr.args)
        if expr.name == "add":
            return a + c, b + d
        if expr.name == "sub":
            return a - d, b - c
        ends = (a * c, a * d, b * c, b * d)
        return min(ends), max(ends)
    if isinstance(expr, Op) and expr.name == "wrap":
        return 0, (1 << expr.args[1].index.const) - 1
    if isinstance(expr, Op) and expr.name == "from_end":
        return 0, expr.args[1].index.const - 1  # others are an error in torch
    if isinstance(expr, Op) and expr.name == "trunc":
        return limits(expr.args[1])
    if isinstance(expr, Op) and expr.name == "shl" and not expr.args[1].index.data:
        shifted = [e << by for e in interval(expr.args[0]) for by in expr.args[1].index.bounds()]
        return min(shifted), max(shifted)
    return limits(expr.dtype)


def whole(node: fx.Node, index: tuple[Index, ...], dtype: torch.dtype) -> Bits:
    """An element of an integer tensor."""
    info = torch.iinfo(dtype)
    return Bits(node, index, ZERO, info.bits, info.min < 0, dtype)


def is_whole(expr: Bits) -> bool:
    """Whether the field is all of its word, read as the type that the word has."""
    word = torch.iinfo(expr.node.meta["val"].dtype)
    return (expr.offset, expr.width, expr.signed) == (ZERO, word.bits, word.min < 0)


def by_data(expr: Expr) -> Index:
    """An index that is the value of an integer in a tensor."""
    return Index(data=((Datum(expr, *interval(expr)), 1),))


def constant(expr: Expr) -> int | None:
    """The value of an integer that is the same everywhere."""
    return expr.index.const if isinstance(expr, Position) and expr.index.is_const else None


def integer(value: int, dtype: torch.dtype) -> Position:
    return Position(Index(value), dtype)


def extract(expr: Expr, low: Index, width: int) -> Expr:
    """Bits ``low ... low + width - 1`` of an integer in two's complement, as an unsigned number."""
    if isinstance(expr, Bits):
        return _extract_bits(expr, low, width)
    if isinstance(expr, Position) and expr.index.is_const and low.is_const:
        return integer((expr.index.const >> low.const) & ((1 << width) - 1), expr.dtype)
    if isinstance(expr, Op):
        found = _extract_op(expr, low, width)
        if found is not None:
            return found
    raise Unsupported(f"bits {low} of {type(expr).__name__}")


def _extract_bits(expr: Bits, low: Index, width: int) -> Expr:
    least, most = low.bounds()
    if low.data:  # a shift by data: arithmetic, then masked, whatever the amount
        if not is_whole(expr):
            raise Unsupported("a shift by data of a part of a word")
    elif least < 0:
        raise Unsupported("bits below the first")
    elif least >= expr.width and not expr.signed:
        return integer(0, expr.dtype)
    elif most + width > expr.width:
        if expr.signed or not low.is_const:
            raise Unsupported("a field that reaches beyond its word")
        width = expr.width - low.const  # zeros above
    return dataclasses.replace(expr, offset=expr.offset + low, width=width, signed=False)


def _extract_op(expr: Op, low: Index, width: int) -> Expr | None:
    if expr.name == "trunc":
        inner, dtype = expr.args
        if low.bounds()[1] + width > torch.iinfo(dtype).bits:
            return None  # the sign, or bits that are gone
        return extract(inner, low, width)
    if expr.name == "shr":
        inner, amount = expr.args
        if isinstance(inner, Op) and inner.name == "masked" and low == ZERO:
            # ((x & (15 << s)) >> s) & 15: also where bits of 15 << s are beyond the word, since
            # either shift repeats the sign
            word, mask, left = inner.args
            if left.index == amount.index and width <= mask.index.const:
                return extract(word, amount.index, width)
            return None
        return extract(inner, low + amount.index, width)
    if expr.name == "shl":
        shifted = low - expr.args[1].index
        least, most = shifted.bounds()
        if least >= 0:
            return extract(expr.args[0], shifted, width)
        if most + width <= 0:
            return integer(0, expr.dtype)
    if expr.name == "or":
        fields = [extract(arg, low, width) for arg in expr.args]
        zeros = [constant(field) == 0 for field in fields]
        if any(zeros):
            return fields[1] if zeros[0] else fields[0]
    if expr.name == "and" and (mask := constant(expr.args[1])) is not None:
        parts = {(mask >> value) & ((1 << width) - 1) for value in low.values()}
        part = parts.pop()
        if not parts and part == 0:
            return integer(0, expr.dtype)
        if not parts and part & (part + 1) == 0:  # the lowest bits of the field
            return extract(expr.args[0], low, part.bit_length())
    return None


def sign_extended(field: Expr) -> Bits:
    """The bits of an unsigned field read as a signed number."""
    if not isinstance(field, Bits) or field.signed:
        raise Unsupported("a sign that is not that of a field")
    return dataclasses.replace(field, signed=True)


def held_in(expr: Expr, dtype: torch.dtype) -> Expr:
    """The same integer in another type. Raises Unsupported where it might not fit."""
    low, high = interval(expr)
    least, most = limits(dtype)
    if low < least or high > most:
        raise Unsupported(f"a value of {low} ... {high} may wrap around in {dtype}")
    return dataclasses.replace(expr, dtype=dtype)


def cast_integer(expr: Expr, dtype: torch.dtype) -> Expr:
    """An integer converted to an integer type: the same value, or its lowest bits."""
    try:
        return held_in(expr, dtype)
    except Unsupported:
        bits, signed = torch.iinfo(dtype).bits, torch.iinfo(dtype).min < 0
    try:
        low = extract(expr, ZERO, bits)
    except Unsupported:
        return Op("trunc", (expr, dtype), dtype)
    if signed and isinstance(low, Bits) and low.width == bits:
        low = sign_extended(low)
    return held_in(low, dtype)
