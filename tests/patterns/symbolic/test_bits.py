"""Bits of integer expressions, by evaluation."""

from __future__ import annotations

import operator
import random

import torch
from torch import fx

from inductor_quant.patterns.symbolic.bits import (
    cast_integer,
    concatenated,
    dense_parts,
    extract,
    parts_of,
)
from inductor_quant.patterns.symbolic.expr import Bits, Expr, Lookup, Op, Position, integer, limits
from inductor_quant.patterns.symbolic.index import ZERO, IndexExpr, Unsupported

i8, u8, i32, i64 = torch.int8, torch.uint8, torch.int32, torch.int64
WORD = 32


def words(rng: random.Random) -> dict[fx.Node, int]:
    graph = fx.Graph()
    return {graph.placeholder(f"w{i}"): rng.getrandbits(WORD) for i in range(2)}


def field(node: fx.Node, offset: int, width: int, *, signed: bool = False) -> Bits:
    return Bits(node, (), IndexExpr(offset), width, signed, i64)


def value(expr: Expr, known: dict[fx.Node, int]) -> int:
    """As ``Op`` defines it."""
    if isinstance(expr, Position):
        return expr.index.const
    if isinstance(expr, Bits):
        bits = known[expr.node] >> expr.offset.const & ((1 << expr.width) - 1)
        return bits - (bits >> expr.width - 1 << expr.width) if expr.signed else bits
    assert isinstance(expr, Op)
    if expr.name == "trunc":
        low, high = limits(expr.args[1])
        return (value(expr.args[0], known) - low) % (high - low + 1) + low
    ops = {"or": operator.or_, "and": operator.and_, "shl": operator.lshift, "shr": operator.rshift}
    return ops[expr.name](*(value(arg, known) for arg in expr.args))  # type: ignore[no-any-return]


def draw(rng: random.Random, nodes: list[fx.Node], depth: int) -> Expr:
    if depth == 0:
        width = rng.randrange(1, 9)
        return field(
            rng.choice(nodes), rng.randrange(WORD - width), width, signed=rng.random() < 0.2
        )
    name = rng.choice(("or", "or", "and", "shl", "shr", "trunc"))
    inner = draw(rng, nodes, depth - 1)
    if name == "trunc":
        return Op(name, (inner, rng.choice((i8, u8, i32))), i64)
    number = rng.randrange(1, 256) if name == "and" else rng.randrange(5)
    other = draw(rng, nodes, depth - 1) if name == "or" else integer(number, i64)
    return Op(name, (inner, other), i64)


def test_parts_and_extracted_bits_are_those_of_the_value() -> None:
    found = 0
    for seed in range(3000):
        rng = random.Random(seed)
        known = words(rng)
        expr = draw(rng, list(known), rng.randrange(1, 4))
        low, width = rng.randrange(6), rng.randrange(1, 9)
        want = value(expr, known) >> low & ((1 << width) - 1)
        for read in (
            lambda: concatenated(parts_of(expr, low, width), i64),  # noqa: B023
            lambda: extract(expr, IndexExpr(low), width),  # noqa: B023
        ):
            try:
                got = value(read(), known)
            except Unsupported:
                continue
            assert got == want, (seed, expr, low, width)
            found += 1
    assert found > 1500


def test_two_fields_are_one_number_if_nothing_is_between_them() -> None:
    a, b = words(random.Random(0))
    low, high = field(a, 4, 4), field(b, 2, 2)

    def joined(by: int) -> Op:
        return Op("or", (low, Op("shl", (high, integer(by, i64)), i64)), i64)

    assert dense_parts(joined(4)) == (low, high)
    assert dense_parts(joined(5)) == ()  # a bit between them
    assert dense_parts(joined(3)) == ()  # one bit is in both


def test_a_table_keeps_its_numbers_in_another_dtype() -> None:
    [a, _] = words(random.Random(0))
    numbers = torch.tensor([0, -3, 7, 2], dtype=i8)
    table = Lookup(field(a, 0, 2), numbers.numpy().tobytes(), i8)
    wide = cast_integer(table, i32)
    assert isinstance(wide, Lookup)
    assert torch.equal(wide.tensor(), numbers.to(i32))
    assert wide.code.offset == ZERO
