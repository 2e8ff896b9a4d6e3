"""What is read from one op or two, and beside each the near miss that must not be.

A positive is decoded to stored numbers, and what was decoded is what the graph computes, exactly;
a near miss is rejected. Inputs hold any bits.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from inductor_quant._compat import inductor as compat
from inductor_quant.ops.weight_only import dequantize
from inductor_quant.patterns.weights.decode import Weight
from tests.support.graphs.reading import CPU, Body, Graph, read, read_weight, tensors_of

aten, QD = torch.ops.aten, torch.ops.quantized_decomposed
i8, u8, i32, i64 = torch.int8, torch.uint8, torch.int32, torch.int64
f32 = torch.float32
K, N = 16, 8
Node = Any


def ints(*shape: int, dtype: torch.dtype = i8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)


def scatter(target: str, *places: tuple[int, int, int]) -> Body:
    """Halves of ``q`` written over (start, end, step), in turns, into ``empty`` or zeros."""

    def body(g: Graph, q: Node) -> Node:
        if target == "empty":
            whole = g(aten.empty.memory_format, [K, N], dtype=i8, device=CPU)
            g.values[whole].fill_(77)
        else:
            whole = g.full([K, N], 0, i8)
        row = 0
        for start, end, step in places:
            count = len(range(K)[start:end:step])
            part = g.rows(q, row, row + count)
            whole = g(aten.slice_scatter.default, whole, part, 0, start, end, step)
            row += count
        return whole

    return body


def at(*indices: int, dim: int = 0, dtype: torch.dtype = i64) -> Body:
    """Rows or columns by constant positions."""
    return lambda g, q: g(aten.index.Tensor, q, [None] * dim + [g.constant(*indices, dtype=dtype)])


def by_table(op: Any, dtype: torch.dtype = i32) -> Body:
    """Shifts by an input, then masked."""
    return lambda g, q, t: g(
        aten.reshape.default,
        g.mask(g(op, g(aten.unsqueeze.default, q, 1), g(aten.unsqueeze.default, t, 1)), 15),
        [-1, N],
    )


def masked_by_table(mask_dtype: torch.dtype) -> Body:
    """``((q & (15 << t)) >> t) & 15`` for shifts in an input."""

    def body(g: Graph, q: Node, t: Node) -> Node:
        q, t = g(aten.unsqueeze.default, q, 1), g(aten.unsqueeze.default, t, 1)
        ones = g.full([1], 15, mask_dtype)
        mask = g(aten.bitwise_left_shift.Tensor, ones, t)
        field = g(aten.bitwise_right_shift.Tensor, g(aten.bitwise_and.Tensor, q, mask), t)
        return g(aten.reshape.default, g.mask(field, 15), [-1, N])

    return body


def divided_by_table(g: Graph, q: Node, t: Node) -> Node:
    """``q // (1 << t) % 16``: 1 << 31 is negative."""
    q, t = g(aten.unsqueeze.default, q, 1), g(aten.unsqueeze.default, t, 1)
    power = g(aten.bitwise_left_shift.Tensor, g.full([1], 1, i32), t)
    quotient = g(aten.div.Tensor_mode, q, power, rounding_mode="floor")
    return g(aten.reshape.default, g(aten.remainder.Scalar, quotient, 16), [-1, N])


def signed_where(bound: int, less: int) -> Body:
    def body(g: Graph, q: Node) -> Node:
        field = g.mask(q)
        return g(
            aten.where.self, g(aten.ge.Scalar, field, bound), g(aten.sub.Tensor, field, less), field
        )

    return body


def wrapped_iota(size: int) -> Body:
    """The last K of so many positions, counted in int8."""

    def body(g: Graph, q: Node) -> Node:
        rows = g.cast(g.rows(g.iota(size, i8), size - K, size), i64)
        return g(aten.index.Tensor, q, [rows])

    return body


Q, WORDS, BYTES = ints(K, N), ints(2, N, dtype=i32), ints(K, N, dtype=u8)
POWERS = torch.exp2(torch.arange(2 * K) % 5)
AMOUNTS = torch.arange(0, 32, 4, dtype=i32)
ORDER = (0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
F8 = torch.float8_e4m3fn

# name -> (inputs, what is read, near misses that are not)
Case = tuple[list[torch.Tensor], Body, dict[str, Body]]
CASES: dict[str, Case] = {
    # integers that wrap around
    "a sum within the type": (
        [Q],
        lambda g, q: g(aten.add.Tensor, g.mask(q), 112),
        {
            "of the whole word": lambda g, q: g(aten.add.Tensor, q, 1),
            "just beyond": lambda g, q: g(aten.add.Tensor, g.mask(q), 113),
        },
    ),
    "a difference within the type": (
        [BYTES],
        lambda g, q: g(aten.sub.Tensor, g.cast(g.mask(q), i8), 8),
        {
            "unsigned": lambda g, q: g(aten.sub.Tensor, g.mask(q), 8),
            "by alpha": lambda g, q: g(aten.sub.Tensor, g.cast(g.mask(q), i8), 8, alpha=2),
            "by a positional alpha": lambda g, q: g(aten.sub.Scalar, g.cast(g.mask(q), i8), 8, 2),
        },
    ),
    "a negative number": (
        [Q],
        lambda g, q: g(aten.neg.default, g.mask(q)),
        {"of the whole word": lambda g, q: g(aten.neg.default, q)},
    ),
    "a product within the type": (
        [Q],
        lambda g, q: g(aten.mul.Tensor, g.mask(q), 8),
        {
            "beyond": lambda g, q: g(aten.mul.Tensor, g.mask(q), 16),
            "of itself": lambda g, q: g(aten.mul.Tensor, g.mask(q), g.mask(q)),
        },
    ),
    # casts that drop bits
    "the low byte of a word": (
        [ints(K, N, dtype=i32)],
        lambda g, q: g.cast(g.shift(q, 8), i8),
        {
            "as it is": lambda g, q: g.shift(q, 8),
            "of a sum": lambda g, q: g.cast(g(aten.add.Tensor, g.mask(q, 255), 1), i8),
        },
    ),
    "bytes that change their sign": (
        [BYTES],
        lambda g, q: g.cast(q, i8),
        {"on the way through a sum": lambda g, q: g.cast(g(aten.add.Tensor, q, 1), i8)},
    ),
    # fields
    "fields that are apart": (
        [Q, ints(K, N, dtype=i8).flip(0)],
        lambda g, a, b: g.mask(g(aten.bitwise_or.Tensor, g.mask(a, 15), g.mask(b, 48)), 15),
        {
            "overlapping": lambda g, a, b: g.mask(
                g(aten.bitwise_or.Tensor, g.mask(a, 15), g.mask(b, 56)), 15
            ),
            "on top of each other": lambda g, a, b: g(
                aten.bitwise_or.Tensor, g.mask(a, 15), g.mask(b, 15)
            ),
            "and masked": lambda g, a, b: g.mask(g(aten.bitwise_or.Tensor, a, b), 15),
            "both of them": lambda g, a, b: g(aten.bitwise_or.Tensor, g.mask(a, 15), g.mask(b, 48)),
        },
    ),
    "a sign bit flipped": (
        [Q],
        lambda g, q: g(aten.bitwise_xor.Scalar, g.mask(q), 8),
        {
            "another bit": lambda g, q: g(aten.bitwise_xor.Scalar, g.mask(q), 4),
            "beyond the field": lambda g, q: g(aten.bitwise_xor.Scalar, g.mask(q), 16),
        },
    ),
    "the sign bit of a byte": (
        [Q],
        lambda g, q: g(aten.bitwise_xor.Scalar, q, -128),
        {
            "of the type that holds it": lambda g, q: g(
                aten.bitwise_xor.Scalar, g.cast(q, i32), -(2**31)
            )
        },
    ),
    "a sign by comparing": (
        [Q],
        signed_where(8, 16),
        {"at another bound": signed_where(7, 16), "by another step": signed_where(8, 15)},
    ),
    "a remainder": (
        [Q],
        lambda g, q: g(aten.remainder.Scalar, q, 16),
        {
            "by no power of two": lambda g, q: g(aten.remainder.Scalar, q, 15),
            "by a negative number": lambda g, q: g(aten.remainder.Scalar, q, -16),
            "as C has it": lambda g, q: g(aten.fmod.Scalar, q, 16),
        },
    ),
    "a quotient rounded down": (
        [Q],
        lambda g, q: g(aten.div.Tensor_mode, q, 16, rounding_mode="floor"),
        {
            "rounded to zero": lambda g, q: g(aten.div.Tensor_mode, q, 16, rounding_mode="trunc"),
            "of floats": lambda g, q: g(aten.floor_divide.default, g.cast(q), g.constant(16)),
        },
    ),
    # shifts by data
    "a shift by an input": (
        [WORDS, AMOUNTS],
        by_table(aten.bitwise_right_shift.Tensor),
        {"to the left": by_table(aten.bitwise_left_shift.Tensor)},
    ),
    "a mask shifted by an input": (
        [WORDS, AMOUNTS],
        masked_by_table(i32),
        {"and cut off": lambda g, q, t: masked_by_table(u8)(g, q, g.cast(t, u8))},
    ),
    "a shift by an input beside a quotient": (
        [WORDS, AMOUNTS],
        by_table(aten.bitwise_right_shift.Tensor),
        {"by a power of an input": divided_by_table},
    ),
    "a shift to the left and back": (
        [Q],
        lambda g, q: g.shift(g(aten.bitwise_left_shift.Tensor_Scalar, q, 4), 4),
        {
            "not as far back": lambda g, q: g.shift(
                g(aten.bitwise_left_shift.Tensor_Scalar, q, 4), 3
            )
        },
    ),
    # what is written where
    "empty that is overwritten": (
        [Q],
        scatter("empty", (0, 8, 1), (8, K, 1)),
        {
            "but for a row": scatter("empty", (0, 8, 1), (8, K - 1, 1)),
            "but for the first": scatter("empty", (1, 8, 1), (8, K, 1)),
        },
    ),
    "every second row written": (
        [Q],
        scatter("zeros", (0, K, 2), (1, K, 2)),
        {
            "but for the last": scatter("zeros", (0, K, 2), (1, K - 1, 2)),
            "from the third on": scatter("zeros", (0, K, 2), (3, K, 2)),
        },
    ),
    "written over": (
        [Q],
        scatter("zeros", (0, 8, 1), (8, K, 1), (0, 0, 1)),
        {
            "by zeros": lambda g, q: g(
                aten.slice_scatter.default,
                q,
                g.full([4, N], 0, i8),
                0,
                4,
                8,
            ),
        },
    ),
    # views
    "a slice from the end": (
        [ints(40, N)],
        lambda g, q: g.rows(q, -36, -4, 2),
        {"of a sorted one": lambda g, q: g(aten.flip.default, g.rows(q, -36, -4, 2), [0])},
    ),
    "a part of a split": (
        [ints(40, N)],
        lambda g, q: g(operator.getitem, g(aten.split.Tensor, q, K), 1),
        {
            "the last, which is shorter": lambda g, q: g(
                operator.getitem, g(aten.split.Tensor, q, K), -1
            )
        },
    ),
    "bytes of words": (
        [ints(K, 2, dtype=i32)],
        lambda g, q: g(aten.view.dtype, q, i8),
        {
            "words of bytes": lambda g, q: g(
                aten.view.dtype, g(aten.reshape.default, g(aten.view.dtype, q, i8), [4, 32]), i32
            )
        },
    ),
    "bits that are fp8": (
        [BYTES],
        lambda g, q: g.cast(g(aten.view.dtype, q, F8)),
        {
            "after a shift": lambda g, q: g.cast(g(aten.view.dtype, g.shift(q, 1), F8)),
            "of another kind": lambda g, q: g.cast(
                g(aten.view.dtype, g.mask(q, 126), torch.float8_e4m3fnuz)
            ),
            "as numbers": lambda g, q: g.cast(g.cast(g.mask(q), F8)),
        },
    ),
    # indexing
    "rows in an order": (
        [Q],
        at(*ORDER),
        {"of no size": lambda g, q: g(aten.index.Tensor, q, [g(aten.ge.Scalar, g.iota(K), 0)])},
    ),
    "rows from the end": (
        [Q],
        at(*range(-K, 0)),
        {"from both ends, in no order": at(3, -1, 4, -1, 5, -9, 2, -6, 5, -3, 5, -8, 9, -7, 9, -3)},
    ),
    "positions that are counted": (
        [ints(200, N)],
        wrapped_iota(128),
        {"and wrap around": wrapped_iota(150)},
    ),
    "a table of values": (
        [BYTES, torch.arange(16.0).square()],
        lambda g, q, t: g(aten.index.Tensor, t, [g.cast(g.mask(q), i64)]),
        {
            "by a sum of two": lambda g, q, t: g(
                aten.index.Tensor,
                t,
                [g(aten.add.Tensor, g.cast(g.mask(q, 7), i64), g.cast(g.shift(q, 5), i64))],
            )
        },
    ),
    "a table from its end": (
        [ints(K, N).remainder(16), torch.arange(16.0).square()],
        lambda g, q, t: g(aten.index.Tensor, t, [g(aten.sub.Tensor, g.cast(g.mask(q), i64), 16)]),
        {
            "as floats": lambda g, q, t: g(
                aten.index.Tensor,
                g(aten.neg.default, g(aten.cumsum.default, g.cast(q), 0)),
                [g.iota(K)],
            )
        },
    ),
    # floats
    "two scales": (
        [Q, torch.rand(N), torch.rand(K, 1)],
        lambda g, q, a, b: g(aten.mul.Tensor, g(aten.mul.Tensor, g.cast(q, f32), 2.0), 0.5),
        {
            "to a power": lambda g, q, a, b: g(aten.pow.Tensor_Scalar, g.cast(q), 2),
            "by itself": lambda g, q, a, b: g(aten.mul.Tensor, g.cast(q), g.cast(q)),
            "as a divisor": lambda g, q, a, b: g(aten.div.Tensor, a, g.cast(q)),
        },
    ),
    # ops that dequantize
    "a channel dequantized": (
        [Q, POWERS[:N], ints(N)],
        lambda g, q, s, z: g(
            QD.dequantize_per_channel.default, q, s, g.cast(z, i64), 1, -128, 127, i8
        ),
        {
            "where the difference wraps": lambda g, q, s, z: g(
                QD.dequantize_per_channel.default, q, s, z, 1, -128, 127, i8
            ),
        },
    ),
    "groups dequantized": (
        [Q, POWERS.reshape(K, 2), ints(K, 2)],
        lambda g, q, s, z: g(
            QD.dequantize_per_channel_group.default, q, s, g.cast(z, i32), -128, 127, i8, 4, f32
        ),
        {
            "where the difference wraps": lambda g, q, s, z: g(
                QD.dequantize_per_channel_group.default, q, s, z, -128, 127, i8, 4, f32
            ),
            "by scales in another shape": lambda g, q, s, z: g(
                QD.dequantize_per_channel_group.default,
                q,
                g(aten.reshape.default, s, [2, K]),
                g.cast(z, i32),
                *(-128, 127, i8, 4, f32),
            ),
        },
    ),
}

NEAR_MISSES = {
    f"{name}, {miss}": (inputs, body)
    for name, (inputs, _, misses) in CASES.items()
    for miss, body in misses.items()
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_the_graph_computes(name: str) -> None:
    inputs, body, _ = CASES[name]
    weight, graph, want = read(body, *inputs)
    assert isinstance(weight, Weight), weight
    sources = tensors_of(weight, graph.values)
    assert all(any(source is value for value in inputs) for source in sources)
    torch.testing.assert_close(
        dequantize(weight.format, sources, torch.float64),
        want.double(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_not_read_alike(name: str) -> None:
    """It has a leaf that the graph computes, or is another function of the field."""
    inputs, body = NEAR_MISSES[name]
    found, graph, want = read(body, *inputs)
    if isinstance(found, Weight):
        sources = tensors_of(found, graph.values)
        got = dequantize(found.format, sources, torch.float64)
        torch.testing.assert_close(got, want.double(), rtol=0, atol=0, equal_nan=True)


def test_a_frozen_table_is_not_known_by_its_values() -> None:
    """Inductor's cache tells frozen parameters apart by their shapes alone."""
    g = Graph()
    order = g.constant(1, 0, 3, 2)
    weight = g.cast(g(aten.index.Tensor, g.input(torch.ones(4, 8, dtype=torch.int8)), [order]))
    known = read_weight(weight)
    assert isinstance(known, Weight)
    assert len(known.sources) == 1
    g.values[order]._is_frozen_param = True
    unknown = read_weight(weight)
    assert isinstance(unknown, Weight)
    assert order in unknown.sources


@pytest.mark.parametrize("frozen", [False, True])
def test_a_table_of_a_package_is_data_where_it_may_be_replaced(monkeypatch, frozen) -> None:
    monkeypatch.setattr(compat, "is_exporting", lambda: True)
    monkeypatch.setattr(compat, "is_freezing", lambda: frozen)
    g = Graph()
    order = g.constant(1, 0, 3, 2, name="g_idx")
    weight = g.cast(g(aten.index.Tensor, g.input(torch.ones(4, 8, dtype=torch.int8)), [order]))
    found = read_weight(weight)
    assert isinstance(found, Weight)
    assert (order in found.sources) == (not frozen)
