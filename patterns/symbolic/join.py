"""One expression for all values of a digit, from the expression for each."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .bits import concatenated, merged, parts_of
from .expr import INTEGERS, Bits, Choice, Expr, Load, Lookup, Op, Position, by_data, interval
from .index import Digit, IndexExpr, Unsupported, merge


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
    return concatenated(merged(list(enumerate(joined))), dtype)  # type: ignore[arg-type]


def _join(digit: Digit, cases: list[Any]) -> Expr | None:
    first = cases[0]
    if all(case == first for case in cases):
        return _common(cases)
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
        if not isinstance(code, (Bits, Op)) or any(case.values != first.values for case in cases):
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
