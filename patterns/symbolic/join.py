"""One expression for all values of a digit, from the expression for each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch

from .bits import concatenated, merged, parts_of
from .expr import (
    INTEGERS,
    Bits,
    Choice,
    Expr,
    Load,
    Lookup,
    Op,
    Position,
    by_data,
    forms,
    interval,
    is_position,
    value_at,
)
from .index import MAX_CASES, AsData, Digit, IndexExpr, Unsupported, merge


def join(digit: Digit, cases: list[Expr], as_data: AsData | None = None) -> Expr:
    """One expression that is ``cases[v]`` where ``digit`` is v. ``as_data``: see ``Space``."""
    joined = _join(digit, cases, as_data) or _join_bits(digit, cases, as_data)
    return joined if joined is not None else Choice(digit, tuple(cases), cases[0].dtype)


def _join_bits(digit: Digit, cases: list[Expr], as_data: AsData | None) -> Expr | None:
    """Joins integers bit by bit, where cases read their bits from different words."""
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
    joined = [_join(digit, [part[0][1] for part in parts], as_data) for parts in bits]
    if any(bit is None for bit in joined):
        return None
    return concatenated(merged(list(enumerate(joined))), dtype)  # type: ignore[arg-type]


def _join(digit: Digit, cases: list[Any], as_data: AsData | None) -> Expr | None:
    first = cases[0]
    if all(case == first for case in cases):
        return _common(cases)
    if isinstance(first, torch.dtype):
        return None
    if any(type(case) is not type(first) or case.dtype != first.dtype for case in cases):
        return None
    if isinstance(first, Load) and all(case.node is first.node for case in cases):
        index = _join_indices(digit, [case.index for case in cases], as_data)
        return None if index is None else dataclasses.replace(first, index=index)
    if isinstance(first, Position):
        form = _merged(digit, [case.index for case in cases], as_data)
        return None if form is None else dataclasses.replace(first, index=form)
    if isinstance(first, Bits):
        if any(
            (case.node, case.width, case.signed) != (first.node, first.width, first.signed)
            for case in cases
        ):
            return None
        index = _join_indices(digit, [(*case.index, case.offset) for case in cases], as_data)
        if index is None:
            return None
        return dataclasses.replace(first, index=index[:-1], offset=index[-1])
    if isinstance(first, Lookup):
        code = _join(digit, [case.code for case in cases], as_data)
        if not isinstance(code, (Bits, Op)) or any(case.values != first.values for case in cases):
            return None
        return Lookup(code, first.values, first.dtype)
    if isinstance(first, Op):
        if any((c.name, len(c.args)) != (first.name, len(first.args)) for c in cases):
            return None
        args = [
            _join(digit, list(parts), as_data)
            for parts in zip(*(c.args for c in cases), strict=True)
        ]
        if any(arg is None for arg in args):
            return None
        return Op(first.name, tuple(args), first.dtype)
    return None


def _common(cases: list[Any]) -> Any:
    """One of several equal expressions; computed by no node where the nodes differ."""
    first = cases[0]
    if all(case is first for case in cases) or not isinstance(first, (Op, Lookup, Choice)):
        return first
    if isinstance(first, Op):
        args = tuple(_common(list(parts)) for parts in zip(*(c.args for c in cases), strict=True))
        first = dataclasses.replace(first, args=args)
    elif isinstance(first, Choice):
        parts = tuple(_common(list(p)) for p in zip(*(c.cases for c in cases), strict=True))
        first = dataclasses.replace(first, cases=parts)
    is_same = all(case.at == first.at for case in cases)
    return first if is_same else dataclasses.replace(first, at=None)


def _join_indices(
    digit: Digit, cases: list[tuple[IndexExpr, ...]], as_data: AsData | None
) -> tuple[IndexExpr, ...] | None:
    joined = [_join_index(digit, list(parts), as_data) for parts in zip(*cases, strict=True)]
    return None if any(form is None for form in joined) else tuple(joined)  # type: ignore[arg-type]


def _join_index(digit: Digit, cases: list[IndexExpr], as_data: AsData | None) -> IndexExpr | None:
    found = _merged(digit, cases, as_data)
    if found is not None or len({tuple(coef for _, coef in case.data) for case in cases}) > 1:
        return found
    found = _merged(digit, [dataclasses.replace(case, data=()) for case in cases], as_data)
    for place, (_, coef) in enumerate(cases[0].data):
        data = _join(digit, [case.data[place][0].expr for case in cases], as_data)
        if found is None or data is None:
            return None
        found = found + by_data(data) * coef
    return found


def _merged(digit: Digit, cases: list[IndexExpr], as_data: AsData | None) -> IndexExpr | None:
    """``merge``; where other digits have terms of their own in each case, with a table of all."""
    found = merge(digit, cases)
    data = [datum.expr for case in cases for datum, _ in case.data]
    if found is not None or as_data is None or not all(map(is_position, data)):
        return found
    first = cases[0]
    same = tuple(term for term in first.terms if all(term in case.terms for case in cases))
    rest = [IndexExpr(c.const, tuple(t for t in c.terms if t not in same), c.data) for c in cases]
    others = {d for index in rest for d, _ in index.terms}
    others |= {d for expr in data for index in forms(expr) for d, _ in index.terms}
    place, order = IndexExpr(0, ((digit, 1),)), sorted(others, key=lambda d: d.serial)
    for other in order:
        place = place * other.radix + IndexExpr(0, ((other, 1),))
    count = digit.radix * math.prod(other.radix for other in order)
    if count > MAX_CASES:
        return None
    values = [
        value_at(index, dict(zip(order, position, strict=True)))
        for index in rest
        for position in itertools.product(*(range(other.radix) for other in order))
    ]
    table = as_data(place, count, tuple(value - values[0] for value in values))
    return IndexExpr(values[0], same, ((table, 1),))
