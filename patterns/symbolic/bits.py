"""Bits of integers: fields of a word, numbers that consist of several fields, casts."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import torch

from ..match import Derived
from .expr import (
    Bits,
    Expr,
    Lookup,
    Op,
    Position,
    changed,
    constant,
    integer,
    interval,
    is_position,
    is_whole,
    limits,
    numbers_of,
)
from .index import ZERO, IndexExpr, Unsupported


def _memory(numbers: list[int], dtype: torch.dtype) -> bytes:
    is_signed = limits(dtype)[0] < 0
    return b"".join(n.to_bytes(dtype.itemsize, sys.byteorder, signed=is_signed) for n in numbers)


def further(offset: IndexExpr, by: IndexExpr) -> IndexExpr:
    """The offset of a part of a field. Raises Unsupported if the field's shift is data that may be
    negative: such a shift gives the sign, of which a further one makes no field."""
    if offset.data and by != ZERO and offset.bounds()[0] < 0:
        raise Unsupported("a part of a field whose shift may be negative")
    return offset + by


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
    if not all(is_position(datum.expr) for datum, _ in low.data):
        # an arithmetic shift by data, then a mask: right for any amount
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
    offset = further(expr.offset, low)
    return changed(expr, offset=offset, width=width, signed=False)


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
        if width <= 0:
            return ()
        offset = further(expr.offset, IndexExpr(low))
        return ((0, changed(expr, offset=offset, width=width, signed=False)),)
    if (value := constant(expr)) is not None and value >> low & ((1 << width) - 1) == 0:
        return ()
    if isinstance(expr, Op):
        return merged(_parts_of_op(expr, low, width))
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


def merged(parts: list[tuple[int, Bits]]) -> Parts:
    """In order, with neighbours of one word joined. Raises Unsupported if two share a bit."""
    found: list[tuple[int, Bits]] = []
    for place, field in sorted(parts, key=lambda part: part[0]):
        if found:
            at, last = found[-1]
            if at + last.width > place:
                raise Unsupported("fields that share a bit")
            follows = changed(last, offset=last.offset + last.width, width=field.width)
            if at + last.width == place and follows == field:
                found[-1] = (at, changed(last, width=last.width + field.width))
                continue
        found.append((place, field))
    return tuple(found)


def concatenated(parts: Parts, dtype: torch.dtype) -> Expr:
    """The integer that consists of these fields."""
    found: Expr = integer(0, dtype)
    for place, field in parts:
        part: Expr = changed(field, dtype=dtype)
        if place:
            part = Op("shl", (part, integer(place, torch.int64)), dtype)
        found = part if constant(found) == 0 else Op("or", (found, part), dtype)
    return held_in(found, dtype)


def dense_parts(number: Op) -> tuple[Bits, ...]:
    """The fields of a number of several, lowest first; () if it is none."""
    try:
        low, high = interval(number)
        parts = parts_of(number, 0, high.bit_length()) if low >= 0 else ()
    except Unsupported:
        return ()
    widths = itertools.accumulate((part.width for _, part in parts), initial=0)
    is_dense = all(place == width for (place, _), width in zip(parts, widths, strict=False))
    return tuple(part for _, part in parts) if is_dense else ()


def sign_extended(field: Expr) -> Bits:
    """The bits of an unsigned field, read as a signed integer."""
    if not isinstance(field, Bits) or field.signed:
        raise Unsupported("a sign bit outside of a field")
    return changed(field, signed=True)


def held_in(expr: Expr, dtype: torch.dtype) -> Expr:
    """The same integer in another dtype. Raises Unsupported if it might not fit."""
    if isinstance(expr, Bits) and dtype == expr.dtype:
        return expr
    low, high = interval(expr)
    least, most = limits(dtype)
    if low < least or high > most:
        raise Unsupported(f"a value of {low} ... {high} may wrap around in {dtype}")
    if isinstance(expr, Op) and expr.name == "difference" and dtype != expr.dtype:
        raise Unsupported("a difference that wraps around in another dtype")
    if isinstance(expr, Lookup) and dtype != expr.dtype:
        if isinstance(expr.values, Derived):
            raise Unsupported("a cast of a table of the model")
        numbers = numbers_of(expr.values, expr.dtype)
        return dataclasses.replace(expr, values=_memory(numbers, dtype), dtype=dtype)
    return changed(expr, dtype=dtype)


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
