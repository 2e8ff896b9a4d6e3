"""What one element of a tensor is, as an expression of its position: loads, bit fields, arithmetic.

Integers are exact: an expression is the mathematical value. A value that might wrap around in its
dtype is refused (``Unsupported``; the reader then treats the node as a leaf). So a cast between
integer dtypes changes nothing but the dtype, and shifts and masks become ``Bits``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..match import Derived
from .index import ZERO, Datum, Digit, IndexExpr, Space, SplitConflict, Unsupported, merge

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
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


@dataclasses.dataclass(frozen=True)
class Number:
    """A float that is the same everywhere."""

    value: float
    dtype: torch.dtype


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
    """A function of one field: ``values[code]``, where ``values`` is the memory of a tensor of
    ``dtype``, so that equal means equal bit for bit; or what computes that tensor, from a table
    that the model stores. ``at``: as of ``Op``."""

    code: Bits
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


def size_of(expr: Any) -> int:
    """The number of operations in an expression, shared ones counted every time."""
    return expr.size if isinstance(expr, (Op, Choice)) else 0


def _operands(expr: Op) -> list[Any]:
    return [arg for arg in expr.args if not isinstance(arg, torch.dtype)]


def _each(expr: Op, function: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The arguments, with ``function`` applied to expressions."""
    return tuple(arg if isinstance(arg, torch.dtype) else function(arg) for arg in expr.args)


def forms(expr: Expr, *, through_data: bool = True) -> tuple[IndexExpr, ...]:
    """All indices of an expression, with ``through_data`` also those inside data.

    The data of a field's offset always counts, because it selects the value within the word. Data
    in an index only selects the word.
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


def _mapped(
    expr: Expr,
    indices: Callable[[tuple[IndexExpr, ...]], tuple[IndexExpr, ...]],
    inner: Callable[[Any], Any],
) -> Expr:
    """``expr`` with ``indices`` applied to its own indices, and ``inner`` to its arguments."""
    if isinstance(expr, Load):
        return dataclasses.replace(expr, index=indices(expr.index))
    if isinstance(expr, Bits):
        *index, offset = indices((*expr.index, expr.offset))
        return dataclasses.replace(expr, index=tuple(index), offset=offset)
    if isinstance(expr, Position):
        return dataclasses.replace(expr, index=indices((expr.index,))[0])
    if isinstance(expr, Op):
        return dataclasses.replace(expr, args=_each(expr, inner))
    if isinstance(expr, Lookup):
        return dataclasses.replace(expr, code=inner(expr.code))
    if isinstance(expr, Choice):
        return dataclasses.replace(expr, cases=tuple(map(inner, expr.cases)))
    return expr


def at(expr: Expr, digit: Digit, value: int) -> Expr:
    """The expression where ``digit`` has this value."""
    if isinstance(expr, Choice) and expr.digit is digit:
        return expr.cases[value]
    found = _mapped(expr, lambda i: _at(i, digit, value), lambda arg: at(arg, digit, value))
    if found == expr:
        return expr
    if isinstance(found, (Op, Lookup, Choice)):
        return dataclasses.replace(found, at=None)
    return found


def _at(forms: tuple[IndexExpr, ...], digit: Digit, value: int) -> tuple[IndexExpr, ...]:
    return tuple(
        form.at(digit, value)
        + sum(
            (by_data(at(datum.expr, digit, value)) * coef for datum, coef in form.data), start=ZERO
        )
        for form in forms
    )


def fixed(index: IndexExpr, space: Space, digit: Digit, value: int) -> IndexExpr:
    """An index where ``digit`` has this value, also within its data."""
    return _at(_normalized((index,), space), digit, value)[0]


def normalized(expr: Expr, space: Space) -> Expr:
    """The same expression in unsplit digits; needed before a digit is fixed or forms compared."""
    if isinstance(expr, Choice) and expr.digit.children is not None:
        raise SplitConflict("a digit is split on which cases depend")
    return _mapped(expr, lambda i: _normalized(i, space), lambda arg: normalized(arg, space))


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
    return tuple(found)


def join(digit: Digit, cases: list[Expr]) -> Expr:
    """One expression that is ``cases[v]`` where ``digit`` is v."""
    joined = _join(digit, cases) or _join_bits(digit, cases)
    return joined if joined is not None else Choice(digit, tuple(cases), cases[0].dtype)


def _join_bits(digit: Digit, cases: list[Expr]) -> Expr | None:
    """Integers whose bits come from one word here, from two there: bit by bit."""
    dtype = cases[0].dtype
    if dtype not in INTEGERS or any(case.dtype != dtype for case in cases):
        return None
    bounds = [interval(case) for case in cases]
    width = max(high for _, high in bounds).bit_length()
    if min(low for low, _ in bounds) < 0 or not 0 < width <= 8:
        return None
    try:
        bits = [[parts_of(case, at, 1) for case in cases] for at in range(width)]
    except Unsupported:
        return None
    if any(len(part) != 1 for parts in bits for part in parts):
        return None
    joined = [_join(digit, [part[0][1] for part in parts]) for parts in bits]
    if any(bit is None for bit in joined):
        return None
    return concatenated(_merged(list(enumerate(joined))), dtype)  # type: ignore[arg-type]


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
    if isinstance(first, Lookup):
        code = _join(digit, [case.code for case in cases])
        if not isinstance(code, Bits) or any(case.values != first.values for case in cases):
            return None
        return Lookup(code, first.values, first.dtype)
    if isinstance(first, Op):
        if any((c.name, len(c.args)) != (first.name, len(first.args)) for c in cases):
            return None
        args = [_join(digit, list(parts)) for parts in zip(*(c.args for c in cases), strict=True)]
        if any(arg is None for arg in args):
            return None
        return Op(first.name, tuple(args), first.dtype)
    return None


def _join_indices(digit: Digit, cases: list[tuple[IndexExpr, ...]]) -> tuple[IndexExpr, ...] | None:
    joined = [_join_index(digit, list(parts)) for parts in zip(*cases, strict=True)]
    return None if any(form is None for form in joined) else tuple(joined)  # type: ignore[arg-type]


def _join_index(digit: Digit, cases: list[IndexExpr]) -> IndexExpr | None:
    found = merge(digit, cases)
    if found is not None or len({tuple(coef for _, coef in case.data) for case in cases}) > 1:
        return found
    found = merge(digit, [dataclasses.replace(case, data=()) for case in cases])
    for place, (_, coef) in enumerate(cases[0].data):
        data = _join(digit, [case.data[place][0].expr for case in cases])
        if found is None or data is None:
            return None
        found = found + by_data(data) * coef
    return found


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
    if isinstance(expr, Lookup) and isinstance(expr.values, bytes):
        numbers = _numbers(expr.values, expr.dtype)
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
    if isinstance(expr, Op) and expr.name == "trunc":
        return limits(expr.args[1])
    if isinstance(expr, Op) and expr.name == "shl" and not expr.args[1].index.data:
        shifted = [e << by for e in interval(expr.args[0]) for by in expr.args[1].index.bounds()]
        return min(shifted), max(shifted)
    return limits(expr.dtype)


def _numbers(memory: bytes, dtype: torch.dtype) -> list[int]:
    size, is_signed = dtype.itemsize, limits(dtype)[0] < 0
    parts = (memory[at : at + size] for at in range(0, len(memory), size))
    return [int.from_bytes(part, sys.byteorder, signed=is_signed) for part in parts]


def _memory(numbers: list[int], dtype: torch.dtype) -> bytes:
    is_signed = limits(dtype)[0] < 0
    return b"".join(n.to_bytes(dtype.itemsize, sys.byteorder, signed=is_signed) for n in numbers)


def whole(node: fx.Node, index: tuple[IndexExpr, ...], dtype: torch.dtype) -> Bits:
    """An element of an integer tensor."""
    info = torch.iinfo(dtype)
    return Bits(node, index, ZERO, info.bits, info.min < 0, dtype)


def is_whole(expr: Bits) -> bool:
    """Whether the field is the whole element, read as its own dtype."""
    word = torch.iinfo(expr.node.meta["val"].dtype)
    return (expr.offset, expr.width, expr.signed) == (ZERO, word.bits, word.min < 0)


def by_data(expr: Expr) -> IndexExpr:
    """An index whose value is an integer in a tensor."""
    return IndexExpr(data=((Datum(expr, *interval(expr)), 1),))


def constant(expr: Expr) -> int | None:
    """The value of an integer that is the same everywhere."""
    return expr.index.const if isinstance(expr, Position) and expr.index.is_const else None


def integer(value: int, dtype: torch.dtype) -> Position:
    return Position(IndexExpr(value), dtype)


def extract(expr: Expr, low: IndexExpr, width: int) -> Expr:
    """Bits ``low ... low + width - 1`` of a two's complement integer, as an unsigned integer."""
    if isinstance(expr, Bits):
        return _extract_bits(expr, low, width)
    if isinstance(expr, Position) and expr.index.is_const and low.is_const:
        return integer((expr.index.const >> low.const) & ((1 << width) - 1), expr.dtype)
    if isinstance(expr, Op):
        found = _extract_op(expr, low, width)
        if found is not None:
            return found
        if low.is_const and expr.name in ("or", "and", "shl", "trunc"):
            return concatenated(parts_of(expr, low.const, width), expr.dtype)
    raise Unsupported(f"bits {low} of {type(expr).__name__}")


def _extract_bits(expr: Bits, low: IndexExpr, width: int) -> Expr:
    least, most = low.bounds()
    if low.data:  # an arithmetic shift by data, then a mask: right for any amount
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


def _extract_op(expr: Op, low: IndexExpr, width: int) -> Expr | None:
    if expr.name == "trunc":
        inner, dtype = expr.args
        if low.bounds()[1] + width > torch.iinfo(dtype).bits:
            return None  # the sign, or truncated bits
        return extract(inner, low, width)
    if expr.name == "shr":
        inner, amount = expr.args
        if isinstance(inner, Op) and inner.name == "masked" and low == ZERO:
            # ((x & (15 << s)) >> s) & 15; also if 15 << s exceeds the word, as both shifts repeat
            # the sign
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


Parts = tuple[tuple[int, Bits], ...]


def parts_of(expr: Expr, low: int, width: int) -> Parts:
    """Bits ``low ... low + width - 1`` of an integer as unsigned fields, each with its position in
    the result, the lowest first; between them are zeros."""
    if width <= 0:
        return ()
    if isinstance(expr, Bits):
        if expr.signed and low + width > expr.width:
            raise Unsupported("a sign bit among the fields")
        width = min(width, expr.width - low)
        field = dataclasses.replace(expr, offset=expr.offset + low, width=width, signed=False)
        return ((0, field),) if width > 0 else ()
    if (value := constant(expr)) is not None and value >> low & ((1 << width) - 1) == 0:
        return ()
    if isinstance(expr, Op):
        return _merged(_parts_of_op(expr, low, width))
    raise Unsupported("bits of a number that has no fields")


def _parts_of_op(expr: Op, low: int, width: int) -> list[tuple[int, Bits]]:
    inner, *others = expr.args
    number = constant(others[0]) if others and not isinstance(others[0], torch.dtype) else None
    if expr.name == "or":
        return [part for arg in expr.args for part in parts_of(arg, low, width)]
    if expr.name == "shr" and number is not None:
        return list(parts_of(inner, low + number, width))
    if expr.name == "shl" and number is not None:
        before = max(0, number - low)
        parts = parts_of(inner, max(0, low - number), width - before)
        return [(place + before, field) for place, field in parts]
    if expr.name == "trunc" and low + width <= torch.iinfo(others[0]).bits:
        return list(parts_of(inner, low, width))
    if expr.name == "and" and number is not None:
        kept = [at for at in range(width) if number >> low + at & 1]
        bits = [(at, parts_of(inner, low + at, 1)) for at in kept]
        return [(at, field) for at, parts in bits for _, field in parts]
    raise Unsupported(f"bits of {expr.name}")


def _merged(parts: list[tuple[int, Bits]]) -> Parts:
    """In order, with neighbours of one word joined. Raises Unsupported if two share a bit."""
    found: list[tuple[int, Bits]] = []
    for place, field in sorted(parts, key=lambda part: part[0]):
        if found:
            at, last = found[-1]
            if at + last.width > place:
                raise Unsupported("fields that share a bit")
            follows = dataclasses.replace(last, offset=last.offset + last.width, width=field.width)
            if at + last.width == place and follows == field:
                found[-1] = (at, dataclasses.replace(last, width=last.width + field.width))
                continue
        found.append((place, field))
    return tuple(found)


def concatenated(parts: Parts, dtype: torch.dtype) -> Expr:
    """The integer that consists of these fields."""
    found: Expr = integer(0, dtype)
    for place, field in parts:
        part: Expr = dataclasses.replace(field, dtype=dtype)
        if place:
            part = Op("shl", (part, integer(place, torch.int64)), dtype)
        found = part if constant(found) == 0 else Op("or", (found, part), dtype)
    return held_in(found, dtype)


def sign_extended(field: Expr) -> Bits:
    """The bits of an unsigned field, read as a signed integer."""
    if not isinstance(field, Bits) or field.signed:
        raise Unsupported("a sign bit outside of a field")
    return dataclasses.replace(field, signed=True)


def held_in(expr: Expr, dtype: torch.dtype) -> Expr:
    """The same integer in another dtype. Raises Unsupported if it might not fit."""
    low, high = interval(expr)
    least, most = limits(dtype)
    if low < least or high > most:
        raise Unsupported(f"a value of {low} ... {high} may wrap around in {dtype}")
    if isinstance(expr, Lookup) and dtype != expr.dtype:
        if isinstance(expr.values, Derived):
            raise Unsupported("a cast of a table of the model")
        numbers = _numbers(expr.values, expr.dtype)
        return dataclasses.replace(expr, values=_memory(numbers, dtype), dtype=dtype)
    return dataclasses.replace(expr, dtype=dtype)


def cast_integer(expr: Expr, dtype: torch.dtype) -> Expr:
    """An integer cast to an integer dtype: the same value, or its lowest bits."""
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
