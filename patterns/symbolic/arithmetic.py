"""Pointwise arithmetic on expressions: shifts and masks become fields, other ops stay as they are.

Each function takes the arguments of an aten op as expressions and returns its result in ``dtype``.
Raises ``Unsupported`` if the result has no form here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable

import torch

from .bits import cast_integer, extract, further, held_in, merged, parts_of, sign_extended
from .expr import (
    EXACT_IN_FP32,
    FLOAT8,
    FLOATS,
    INTEGERS,
    Bits,
    Expr,
    Number,
    Op,
    Position,
    Undefined,
    by_data,
    changed,
    constant,
    integer,
    interval,
    is_whole,
    limits,
    rounded,
)
from .index import IndexExpr, Space, Unsupported, from_values, tabulate


def cast(expr: Expr, dtype: torch.dtype) -> Expr:
    """``expr`` cast to ``dtype``; a cast that rounds is kept. Floats never become integers."""
    if expr.dtype == dtype:
        return expr
    if isinstance(expr, Undefined):
        return Undefined(dtype)
    if expr.dtype in INTEGERS and dtype in INTEGERS:
        return cast_integer(expr, dtype)
    if dtype in INTEGERS and isinstance(expr, Op) and expr.name == "cast":
        (inner,) = expr.args  # an integer that a float has held
        if inner.dtype in INTEGERS and expr.dtype in FLOATS:
            low, high = interval(inner)
            if max(-low, high) <= 2 / torch.finfo(expr.dtype).eps:
                return cast(inner, dtype)
    if dtype not in FLOATS:
        raise Unsupported(f"a cast from {expr.dtype} to {dtype}")
    if isinstance(expr, Number):
        return Number(rounded(expr.value, dtype), dtype)
    value = constant(expr)
    if value is not None and value == rounded(value, dtype):
        return Number(float(value), dtype)
    return Op("cast", (expr,), dtype)


def bitcast(expr: Expr, dtype: torch.dtype) -> Expr:
    """The bits of an integer, read as another dtype of the same size."""
    if dtype in INTEGERS and expr.dtype in INTEGERS:
        field = extract(held_in(expr, expr.dtype), IndexExpr(), torch.iinfo(dtype).bits)
        info = torch.iinfo(dtype)
        if info.min < 0 and isinstance(field, Bits) and field.width == info.bits:
            field = sign_extended(field)
        return held_in(field, dtype)
    if dtype in FLOAT8 and isinstance(expr, Bits) and expr.width == 8:
        return Op("float8", (expr,), dtype)
    raise Unsupported("a view as floats")


# ------------------------------------------------------------------------------------------
# integers


def bitwise_and(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if isinstance(a, Position) or _shifted_constant(a) is not None:
        a, b = b, a
    if (shifted := _shifted_constant(b)) is not None:
        if isinstance(b, Op) and b.name == "trunc" and b.args[1] != dtype:
            raise Unsupported("a mask that is truncated before the word")
        return _shifted_mask(a, *shifted, dtype)
    if not isinstance(b, Position):
        raise Unsupported("a mask that is not constant")
    bits = torch.iinfo(dtype).bits
    masks = [value & ((1 << bits) - 1) for value in b.index.values()]
    if not all(masks):
        if any(masks):
            raise Unsupported("a mask that is 0 in places")
        return integer(0, dtype)
    lows = [(mask & -mask).bit_length() - 1 for mask in masks]
    runs = {mask >> low for mask, low in zip(masks, lows, strict=True)}
    run = runs.pop()
    if runs or run & (run + 1):  # several widths, or a mask of several runs
        return Op("and", (a, b), dtype)
    width = run.bit_length()
    if any(lows):
        low = from_values(b.index, lows)
        return _shifted_left(held_in(extract(a, low, width), dtype), low, dtype)
    if width == bits:
        return held_in(a, dtype)
    if isinstance(a, Op) and a.name in ("add", "sub"):
        return Op("wrap", (a, integer(width, dtype)), dtype)
    try:
        return held_in(extract(a, IndexExpr(), width), dtype)
    except Unsupported:
        if width >= bits - 1:
            raise
        return Op("and", (a, b), dtype)  # a later mask may take a part that is a field


def _shifted_constant(expr: Expr) -> tuple[int, Position] | None:
    """(c, s) where ``expr`` is ``c << s``."""
    expr = _untruncated(expr)
    if not isinstance(expr, Op) or expr.name != "shl":
        return None
    value = constant(expr.args[0])
    return None if value is None else (value, expr.args[1])


def _untruncated(expr: Expr) -> Expr:
    return expr.args[0] if isinstance(expr, Op) and expr.name == "trunc" else expr


def _shifted_mask(a: Expr, mask: int, amount: Position, dtype: torch.dtype) -> Expr:
    """``a & (15 << amount)``; it becomes a field when it is shifted back."""
    if mask <= 0 or mask & (mask + 1):
        raise Unsupported("a mask of several runs")
    return Op("masked", (a, integer(mask.bit_length(), dtype), amount), dtype)


def bitwise_or(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """``extract`` resolves it if the fields of the two do not overlap."""
    for one, other in ((a, b), (b, a)):
        if constant(one) == 0:
            return held_in(other, dtype)
    return Op("or", (a, b), dtype)


def bitwise_xor(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """``q ^ 8`` of a 4-bit field flips the sign bit: the signed value + 8."""
    if isinstance(a, Position):
        a, b = b, a
    value = constant(b)
    if value is None:
        raise Unsupported("xor with a value that is not constant")
    if isinstance(a, Bits) and not a.signed and value == 1 << (a.width - 1):
        return Op("add", (sign_extended(a), integer(value, dtype)), dtype)
    if isinstance(a, Bits) and a.signed and is_whole(a) and value == -(1 << (a.width - 1)):
        # int8 ^ -128: the sign bit of the whole element, and its copies in a wider dtype
        unsigned = changed(a, signed=False)
        return Op("sub", (unsigned, integer(1 << (a.width - 1), dtype)), dtype)
    raise Unsupported("xor that does not flip the sign bit of a field")


def shift_left(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    amount = _amount(b, dtype)
    if amount == IndexExpr():
        return held_in(a, dtype)
    return _shifted_left(a, amount, dtype)


def _shifted_left(a: Expr, amount: IndexExpr, dtype: torch.dtype) -> Expr:
    """``a * 2**amount``, truncated to ``dtype``."""
    if isinstance(a, Op) and a.name == "shl":
        by: Position
        a, by = a.args
        amount = by.index + amount
    shifted = Op("shl", (a, Position(amount, torch.int64)), dtype)
    least, most = amount.bounds()
    low, high = interval(a)
    if not amount.data and least >= 0:
        ends = (low << least, low << most, high << least, high << most)
        if limits(dtype)[0] <= min(ends) and max(ends) <= limits(dtype)[1]:
            return shifted
    return Op("trunc", (shifted, dtype), dtype)


def shift_right(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """Arithmetic: ``floor(a / 2**b)``."""
    return _shifted_right(a, _amount(b, dtype), dtype)


def _shifted_right(a: Expr, amount: IndexExpr, dtype: torch.dtype) -> Expr:
    if amount == IndexExpr():
        return held_in(a, dtype)
    shifted = _untruncated(a)
    if isinstance(shifted, Op) and shifted.name == "shl":
        held = a.args[1] if shifted is not a else a.dtype  # type: ignore[union-attr]
        return _sign_fix(a, shifted, amount, held, dtype)
    if isinstance(a, Op) and a.name == "masked" and limits(a.dtype)[0] == 0:
        word, width, low = a.args
        if low.index == amount:
            return held_in(extract(word, amount, constant(width) or 0), dtype)
    if isinstance(a, Bits) and amount.is_const and amount.const < a.width:
        width = a.width - amount.const
        offset = further(a.offset, amount)
        return changed(a, offset=offset, width=width, dtype=dtype)
    return Op("shr", (a, Position(amount, dtype)), dtype)


def _sign_fix(
    expr: Expr, shifted: Op, amount: IndexExpr, held: torch.dtype, dtype: torch.dtype
) -> Expr:
    """``(x << a) >> b`` with ``x << a`` held in W bits: the bits of x from ``b - a`` up to
    ``W - a``, sign-extended if the dtype is signed."""
    x, left = shifted.args[0], shifted.args[1].index
    low = amount - left
    if low.bounds()[0] < 0 or not amount.is_const:
        return Op("shr", (expr, Position(amount, dtype)), dtype)
    width = torch.iinfo(held).bits - amount.const
    if width <= 0:  # the value has been held in a wider dtype since
        return Op("shr", (expr, Position(amount, dtype)), dtype)
    field = extract(x, low, width)
    if expr is shifted and interval(x)[0] >= 0:
        return held_in(field, dtype)  # no bit was shifted out, and x has no sign
    if limits(held)[0] < 0:
        if not isinstance(field, Bits) or field.width != width:
            raise Unsupported("a sign bit outside of a field")
        field = sign_extended(field)
    return held_in(field, dtype)


def _amount(b: Expr, dtype: torch.dtype) -> IndexExpr:
    """A shift amount as an index; an amount in a tensor becomes a term of data."""
    if isinstance(b, Position):
        bounds = b.index.bounds()
        if bounds[0] < 0 or bounds[1] >= torch.iinfo(dtype).bits:
            raise Unsupported("a shift by more than the word")
        return b.index
    if isinstance(b, Bits):
        return by_data(b)
    if isinstance(b, Op) and b.name in ("mul", "shl"):  # width * field
        number, factor = b.args[0], constant(b.args[1])
        if factor is not None and isinstance(number, Bits):
            return by_data(number) * (factor if b.name == "mul" else 1 << factor)
    raise Unsupported("a shift amount that is neither a position nor data")


def floor_divide(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """Rounds down, like a shift."""
    # 1 << s without its truncation: 1 << 31 is negative in int32
    if isinstance(b, Op) and b.name == "shl" and constant(b.args[0]) == 1:
        return _shifted_right(a, b.args[1].index, dtype)
    if not isinstance(b, Position):
        raise Unsupported("an integer division by a value that is not constant")
    values = b.index.values()
    if any(value <= 0 or value & (value - 1) for value in values):
        raise Unsupported("an integer division by no power of two")
    amount = from_values(b.index, [value.bit_length() - 1 for value in values])
    return shift_right(a, Position(amount, dtype), dtype)


def remainder(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """Has the sign of the divisor, so it is the lowest bits."""
    value = constant(b)
    if value is None or value <= 0 or value & (value - 1):
        raise Unsupported("an integer remainder by no power of two")
    return bitwise_and(a, integer(value - 1, dtype), dtype)


def where(condition: Expr, a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """``where(q > 7, q - 16, q)`` of a 4-bit field: the field, sign-extended. ``where(p < 0, p +
    2**32, p)`` of a word: unsigned."""
    if dtype not in INTEGERS:
        raise Unsupported("a choice between two floats")
    if not isinstance(condition, Op) or condition.name not in ("ge", "gt", "le", "lt"):
        raise Unsupported("a choice between two values")
    q, bound = condition.args
    value = constant(bound)
    if condition.name == "lt" and value == 0 and isinstance(q, Bits) and q.signed and is_whole(q):
        unsigned = dataclasses.replace(q, signed=False, dtype=dtype)
        around = add(dataclasses.replace(q, dtype=dtype), integer(1 << q.width, dtype), dtype)
        if held_in(b, dtype) == dataclasses.replace(q, dtype=dtype) and held_in(a, dtype) == around:
            return unsigned
    if not isinstance(q, Bits) or q.signed or value is None:
        raise Unsupported("a choice whose condition is not on a field")
    if condition.name in ("le", "lt"):
        a, b = b, a
        value += condition.name == "le"  # now q < value selects b
    else:
        value += condition.name == "gt"
    half = 1 << (q.width - 1)
    same = changed(q, dtype=dtype)
    negative = subtract(same, integer(2 * half, dtype), dtype)
    if value == half and held_in(b, dtype) == same and held_in(a, dtype) == negative:
        return held_in(sign_extended(same), dtype)
    raise Unsupported("a choice that extends no sign")


# ------------------------------------------------------------------------------------------
# sums and products


def add(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    return _sum("add", a, b, dtype)


def subtract(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    return _sum("sub", a, b, dtype)


def _sum(name: str, a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if dtype not in INTEGERS:
        return Op(name, (_as_float(a, dtype), _as_float(b, dtype)), dtype)
    if isinstance(a, Position) and isinstance(b, Position):
        index = a.index + b.index if name == "add" else a.index - b.index
        return _in_range(Position(index, dtype))
    if name == "add" and isinstance(a, Position):
        a, b = b, a
    if name == "sub" and (width := _truncated_width(a, b)):
        return bitwise_and(a, integer((1 << width) - 1, dtype), dtype)
    if name == "sub" and _is_twice_the_sign(a, b):
        return held_in(sign_extended(a), dtype)
    if constant(b) == 0:
        return held_in(a, dtype)
    if name == "add" and _have_no_bit_in_common(a, b):
        return Op("or", (a, b), dtype)
    is_number = isinstance(a, Bits) or (isinstance(a, Op) and a.name == "or")
    if name == "sub" and is_number and isinstance(b, Bits) and _width(a) <= 8 < b.width:
        low, high = interval(Op(name, (a, b), dtype))
        most = min(EXACT_IN_FP32, limits(dtype)[1])
        if dtype in (torch.int16, torch.int32, torch.int64) and max(-low, high) > most:
            return Op("difference", (a, b), dtype)  # a zero point of unknown range
    return _in_range(Op(name, (a, b), dtype))


def _width(expr: Expr) -> int:
    low, high = interval(expr)
    return max(high, -low - 1).bit_length() + (low < 0)


def _truncated_width(a: Expr, b: Expr) -> int:
    """w where b is ``a >> w << w``; 0: it is not."""
    high = _untruncated(b)
    if not isinstance(high, Op) or high.name != "shl" or (width := constant(high.args[1])) is None:
        return 0
    with contextlib.suppress(Unsupported):
        if held_in(high.args[0], a.dtype) == _shifted_right(a, IndexExpr(width), a.dtype):
            return width
    return 0


def _is_twice_the_sign(a: Expr, b: Expr) -> bool:
    """Whether b is ``(a & 8) << 1`` for a 4-bit field a, so that a - b is its signed value."""
    if not isinstance(a, Bits) or a.signed or not isinstance(b, Op) or b.name != "shl":
        return False
    sign, amount = b.args
    top = changed(a, offset=a.offset + (a.width - 1), width=1, dtype=sign.dtype)
    return bool(sign == top and constant(amount) == a.width)


def _have_no_bit_in_common(a: Expr, b: Expr) -> bool:
    """Whether + of two integers, one of which is shifted to the left, is or."""
    for high, low in ((a, b), (b, a)):
        shifted = _untruncated(high)
        if not isinstance(shifted, Op) or shifted.name not in ("shl", "or") or interval(low)[0] < 0:
            continue
        if shifted.name == "shl":
            amount = shifted.args[1].index.bounds()[0]
            if 0 <= amount < 64 and interval(low)[1] < 1 << amount:
                return True
        if interval(high)[0] >= 0:
            with contextlib.suppress(Unsupported):
                merged(
                    [part for x in (a, b) for part in parts_of(x, 0, interval(x)[1].bit_length())]
                )
                return True
    return False


def multiply(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if dtype not in INTEGERS:
        for one, other in ((a, b), (b, a)):
            if _number(one) == 1.0 and other.dtype == dtype:
                return other
        return Op("mul", (_as_float(a, dtype), _as_float(b, dtype)), dtype)
    if constant(b) is None:
        a, b = b, a
    value = constant(b)
    if value is None:
        raise Unsupported("a product of integers")
    if value == 1:
        return held_in(a, dtype)
    if isinstance(a, Position):
        return _in_range(Position(a.index * value, dtype))
    if value > 0 and value & (value - 1) == 0:
        return _shifted_left(a, IndexExpr(value.bit_length() - 1), dtype)
    return _in_range(Op("mul", (a, b), dtype))


def divide(a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    if dtype in INTEGERS:
        raise Unsupported("a division of integers")
    if _number(b) == 1.0 and a.dtype == dtype:
        return a
    return Op("div", (_as_float(a, dtype), _as_float(b, dtype)), dtype)


def negate(a: Expr, dtype: torch.dtype) -> Expr:
    if dtype in INTEGERS:
        return subtract(integer(0, dtype), a, dtype)
    return Op("mul", (_as_float(a, dtype), Number(-1.0, dtype)), dtype)


def reciprocal(a: Expr, dtype: torch.dtype) -> Expr:
    return Op("div", (Number(1.0, dtype), _as_float(a, dtype)), dtype)


def _number(expr: Expr) -> float | None:
    if isinstance(expr, Number):
        return expr.value
    value = constant(expr)
    return None if value is None else float(value)


def _as_float(expr: Expr, dtype: torch.dtype) -> Expr:
    """An operand of arithmetic in ``dtype``; an integer that is the same everywhere is a float."""
    value = constant(expr)
    if value is not None:
        return Number(rounded(value, dtype), dtype)
    if isinstance(expr, Undefined):
        raise Unsupported("arithmetic on undefined memory")
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


def of_positions(name: str, a: Position, b: Position, dtype: torch.dtype, space: Space) -> Expr:
    """An integer op on two values that depend on the position alone."""
    try:
        return _of_positions(name, a, b, dtype, space)
    except Unsupported:
        if name == "shl" and constant(a) is not None:  # a mask; only its shift matters
            return shift_left(a, b, dtype)
        raise


def _of_positions(name: str, a: Position, b: Position, dtype: torch.dtype, space: Space) -> Expr:
    low, by = a.index, constant(b)
    if name in ("add", "sub", "mul"):
        with contextlib.suppress(Unsupported):  # it wraps around: enumerated below
            return BINARY[name](a, b, dtype)
    result = None
    if name == "shr" and by is not None and 0 <= by < 63:
        result = space.divmod(low, 1 << by)[0]
    elif name in ("floor_divide", "remainder") and by is not None and by > 0:
        result = space.divmod(low, by)[name == "remainder"]
    elif name == "and" and by is not None and by > 1 and by & (by + 1) == 0:
        result = space.divmod(low, by + 1)[1]
    if result is not None:
        return _in_range(Position(result, dtype))
    bits = torch.iinfo(dtype).bits

    def wrapped(x: int, y: int) -> int:
        if name in ("shl", "shr", "pow") and not 0 <= y < bits:
            raise Unsupported("a shift by more than the word")
        if name in ("floor_divide", "remainder") and y == 0:
            raise Unsupported("a division by 0")
        value = _INTEGER_OPS[name](x, y) & ((1 << bits) - 1)
        return value - (1 << bits) if value > limits(dtype)[1] else value

    return Position(tabulate(wrapped, space.leaves(low), space.leaves(b.index)), dtype)


_INTEGER_OPS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "mul": operator.mul,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
}
