"""Pointwise arithmetic on expressions: shifts and masks become fields, the rest stays as it is.

Each function takes the arguments of an aten op as expressions and gives the expression of its
result in ``dtype``; ``Unsupported`` where the value has no form here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from inductor_quant.patterns.digits import Index, Unsupported, from_values
from inductor_quant.patterns.expression import (
    FLOATS,
    INTEGERS,
    Bits,
    Expr,
    Number,
    Op,
    Position,
    Undefined,
    cast_integer,
    constant,
    extract,
    held_in,
    integer,
    interval,
    is_whole,
    limits,
    sign_extended,
)


def cast(expr: Expr, dtype: torch.dtype) -> Expr:
    """``expr`` converted to ``dtype``; a cast that rounds is kept, floats never become integers."""
    if expr.dtype == dtype:
        return expr
    if isinstance(expr, Undefined):
        return Undefined(dtype)
    if expr.dtype in INTEGERS and dtype in INTEGERS:
        return cast_integer(expr, dtype)
    if dtype not in FLOATS:
        raise Unsupported(f"a cast from {expr.dtype} to {dtype}")
    if isinstance(expr, Number):
        return Number(torch.tensor(expr.value, dtype=dtype).item(), dtype)
    value = constant(expr)
    if value is not None and value == torch.tensor(value, dtype=dtype).item():
        return Number(float(value), dtype)
    return Op("cast", (expr,), dtype)


def bitcast(expr: Expr, dtype: torch.dtype) -> Expr:
    """The bits of an integer read as another type of the same size."""
    if dtype in INTEGERS and expr.dtype in INTEGERS:
        field = extract(held_in(expr, expr.dtype), Index(), torch.iinfo(dtype).bits)
        info = torch.iinfo(dtype)
        if info.min < 0 and isinstance(field, Bits) and field.width == info.bits:
            field = sign_extended(field)
        return held_in(field, dtype)
    raise Unsupported("a view as floats")


# ------------------------------------------------------------------------------------------
# integers


def bitwise_and(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if isinstance(a, Position) and not isinstance(b, Position):
        a, b = b, a
    if not isinstance(b, Position):
        raise Unsupported("a mask that is no constant")
    bits = torch.iinfo(dtype).bits
    masks = [value & ((1 << bits) - 1) for value in b.index.values()]
    if not all(masks):
        if any(masks):
            raise Unsupported("a mask that is 0 in places")
        return integer(0, dtype)
    lows = [(mask & -mask).bit_length() - 1 for mask in masks]
    widths = {(mask >> low).bit_length() for mask, low in zip(masks, lows, strict=True)}
    runs = all(
        mask >> low & ((mask >> low) + 1) == 0 for mask, low in zip(masks, lows, strict=True)
    )
    if len(widths) == 1 and runs:
        width = widths.pop()
        if set(lows) == {0}:
            if width == bits:
                return held_in(a, dtype)
            if isinstance(a, Op) and a.name in ("add", "sub"):
                return Op("wrap", (a, integer(width, dtype)), dtype)
            return held_in(extract(a, Index(), width), dtype)
        low = from_values(b.index, lows)
        return Op("shl", (held_in(extract(a, low, width), dtype), Position(low, dtype)), dtype)
    return Op("and", (a, b), dtype)


def bitwise_or(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """Only as far as the fields of the two are apart: see ``extract``."""
    for one, other in ((a, b), (b, a)):
        if constant(one) == 0:
            return held_in(other, dtype)
    return Op("or", (a, b), dtype)


def bitwise_xor(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """``q ^ 8`` of a field of four bits: its sign bit flipped, which is the signed number + 8."""
    if isinstance(a, Position):
        a, b = b, a
    value = constant(b)
    if value is None:
        raise Unsupported("xor with what is no constant")
    if isinstance(a, Bits) and not a.signed and value == 1 << (a.width - 1):
        return Op("add", (sign_extended(a), integer(value, dtype)), dtype)
    if isinstance(a, Bits) and a.signed and is_whole(a) and value in limits(a.dtype)[:1]:
        # int8 ^ -128: the sign bit of the whole word
        unsigned = dataclasses.replace(a, signed=False)
        return Op("sub", (unsigned, integer(1 << (a.width - 1), dtype)), dtype)
    raise Unsupported("xor that does not flip the sign bit of a field")


def shift_left(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    amount = _amount(b, dtype)
    if amount == Index():
        return held_in(a, dtype)
    return Op("shl", (a, Position(amount, dtype)), dtype)


def shift_right(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """Arithmetic: ``floor(a / 2**b)``."""
    amount = _amount(b, dtype)
    if amount == Index():
        return held_in(a, dtype)
    if isinstance(a, Op) and a.name == "shl":
        return _sign_fix(a, amount, dtype)
    if isinstance(a, Bits) and amount.is_const and amount.const < a.width:
        width = a.width - amount.const
        offset = a.offset + amount
        return dataclasses.replace(a, offset=offset, width=width, dtype=dtype)
    return Op("shr", (a, Position(amount, dtype)), dtype)


def _sign_fix(shifted: Op, amount: Index, dtype: torch.dtype) -> Expr:
    """``(x << a) >> b``: the bits from ``b - a`` up to the word's end less a, sign-extended where
    the type has a sign."""
    x, left = shifted.args[0], shifted.args[1].index
    bits = torch.iinfo(shifted.dtype).bits
    signed = torch.iinfo(shifted.dtype).min < 0
    low = amount - left
    bounds = low.bounds()
    if bounds is None or bounds[0] < 0 or not amount.is_const:
        return Op("shr", (shifted, Position(amount, dtype)), dtype)
    _, top = interval(x)
    if interval(x)[0] >= 0 and left.is_const and top << left.const <= limits(shifted.dtype)[1]:
        return held_in(extract(x, low, bits - amount.const), dtype)  # nothing is shifted out
    field = extract(x, low, bits - amount.const)
    if signed:
        if not isinstance(field, Bits) or field.width != bits - amount.const:
            raise Unsupported("a sign that is not that of a field")
        field = sign_extended(field)
    return held_in(field, dtype)


def _amount(b: Expr, dtype: torch.dtype) -> Index:
    """A shift amount as an index; one that lies in a tensor becomes a term of data."""
    if isinstance(b, Position):
        bounds = b.index.bounds()
        if bounds is None or bounds[0] < 0 or bounds[1] >= torch.iinfo(dtype).bits:
            raise Unsupported("a shift by more than the word")
        return b.index
    if isinstance(b, Bits):
        return Index(data=((b, 1),))
    if isinstance(b, Op) and b.name == "mul":  # width * number
        factors = [constant(arg) for arg in b.args]
        if factors[1] is not None and isinstance(b.args[0], Bits):
            return Index(data=((b.args[0], factors[1]),))
    raise Unsupported("a shift by what is no position and no data")


def floor_divide(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """Rounds down, as a shift does."""
    value = constant(b)
    if value is None or value <= 0 or value & (value - 1):
        raise Unsupported("a division of integers by no power of two")
    return shift_right(a, integer(value.bit_length() - 1, dtype), dtype)


def remainder(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """Has the sign of the divisor: the lowest bits."""
    value = constant(b)
    if value is None or value <= 0 or value & (value - 1):
        raise Unsupported("a remainder of integers by no power of two")
    return bitwise_and(a, integer(value - 1, dtype), dtype)


def where(condition: Expr, a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """``q - 16 where q > 7, else q`` of a field of four bits: the field, sign-extended."""
    if not isinstance(condition, Op) or condition.name not in ("ge", "gt", "le", "lt"):
        raise Unsupported("a choice between two values")
    q, bound = condition.args
    value = constant(bound)
    if not isinstance(q, Bits) or q.signed or value is None:
        raise Unsupported("a choice by what is no field")
    if condition.name in ("le", "lt"):
        a, b = b, a
        value += condition.name == "le"  # q < value takes the other
    else:
        value += condition.name == "gt"
    half = 1 << (q.width - 1)
    same = dataclasses.replace(q, dtype=dtype)
    negative = subtract(same, integer(2 * half, dtype), dtype)
    if value == half and held_in(b, dtype) == same and held_in(a, dtype) == negative:
        return held_in(sign_extended(same), dtype)
    raise Unsupported("a choice that is no sign")


# ------------------------------------------------------------------------------------------
# sums and products


def add(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    return _sum("add", a, b, dtype)


def subtract(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    return _sum("sub", a, b, dtype)


def _sum(name: str, a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if dtype not in INTEGERS:
        return Op(name, (_as_float(a), _as_float(b)), dtype)
    if isinstance(a, Position) and isinstance(b, Position):
        index = a.index + b.index if name == "add" else a.index - b.index
        return _in_range(Position(index, dtype))
    if name == "add" and isinstance(a, Position):
        a, b = b, a
    if constant(b) == 0:
        return held_in(a, dtype)
    if (left := _shifted_apart(a, b)) is not None and name == "add":
        return Op("or", left, dtype)
    return _in_range(Op(name, (a, b), dtype))


def _shifted_apart(a: Expr, b: Expr) -> tuple[Expr, Expr] | None:
    """The two where one is a multiple of a power of two that the other does not reach."""
    for low, high in ((a, b), (b, a)):
        if isinstance(high, Op) and high.name == "shl" and isinstance(low, (Bits, Op)):
            amount = high.args[1].index.bounds()
            least, most = interval(low)
            if amount is not None and least >= 0 and most < 1 << amount[0]:
                return a, b
    return None


def multiply(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if dtype not in INTEGERS:
        for one, other in ((a, b), (b, a)):
            if _number(one) == 1.0 and other.dtype == dtype:
                return other
        return Op("mul", (_as_float(a), _as_float(b)), dtype)
    if isinstance(a, Position):
        a, b = b, a
    value = constant(b)
    if value is None:
        raise Unsupported("a product of integers")
    if value == 1:
        return held_in(a, dtype)
    if isinstance(a, Position):
        return _in_range(Position(a.index * value, dtype))
    if value > 0 and value & (value - 1) == 0:
        product = Op("mul", (a, b), dtype)
        _in_range(product)
        return Op("shl", (a, integer(value.bit_length() - 1, dtype)), dtype)
    return _in_range(Op("mul", (a, b), dtype))


def divide(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if dtype in INTEGERS:
        raise Unsupported("a division of integers")
    if _number(b) == 1.0 and a.dtype == dtype:
        return a
    return Op("div", (_as_float(a), _as_float(b)), dtype)


def negate(a: Expr, dtype: torch.dtype) -> Expr:
    if dtype in INTEGERS:
        return subtract(integer(0, dtype), a, dtype)
    return Op("mul", (_as_float(a), Number(-1.0, dtype)), dtype)


def reciprocal(a: Expr, dtype: torch.dtype) -> Expr:
    return Op("div", (Number(1.0, dtype), _as_float(a)), dtype)


def _number(expr: Expr) -> float | None:
    if isinstance(expr, Number):
        return expr.value
    value = constant(expr)
    return None if value is None else float(value)


def _as_float(expr: Expr) -> Expr:
    if isinstance(expr, Undefined):
        raise Unsupported("arithmetic on what was never written")
    return expr


def _in_range(expr: Expr) -> Expr:
    return held_in(expr, expr.dtype)


BINARY: dict[str, Callable[[Expr, Expr, torch.dtype], Expr]] = {
    "and": bitwise_and,
    "or": bitwise_or,
    "xor": bitwise_xor,
    "shl": shift_left,
    "shr": shift_right,
    "floor_divide": floor_divide,
    "remainder": remainder,
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "div": divide,
}
