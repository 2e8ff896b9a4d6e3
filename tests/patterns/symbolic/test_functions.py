"""Functions of a field: what is read is what the graph computes, or it is not read."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.ops.weight_only import dequantize
from inductor_quant.patterns.weights.decode import Weight
from inductor_quant.spec.decisions import Rejection
from tests.support.graphs.reading import CPU, Graph, aten, prims, read, tensors_of

u8, i8, i16, i32, f32, bf16 = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.float32, torch.bfloat16),
)
K, N = 8, 6
BYTES = torch.arange(256, dtype=u8).reshape(32, 8)
SHL = aten.bitwise_left_shift.Tensor_Scalar


def shifted(g: Graph, a, b, by: int):
    """Bits of ``b`` above those of ``a``, up to the sign."""
    return g(aten.bitwise_or.Tensor, g.mask(a), g(SHL, g.mask(b), by))


def e2m1(g: Graph, q):
    code = g.cast(g.mask(q, 7), i32)
    bits = g(SHL, g(aten.add.Tensor, g.shift(code, 1), 126), 23)
    bits = g(aten.bitwise_or.Tensor, bits, g(SHL, g.mask(code, 1), 22))
    bits = g(aten.index_put.default, bits, [g(aten.eq.Scalar, code, 0)], g.full([], 0, i32))
    one = g(aten.eq.Scalar, code, 1)
    bits = g(aten.index_put.default, bits, [one], g.full([], 126 << 23, i32))
    sign = g(SHL, g.cast(g.mask(q, 8), i32), 28)
    return g(aten.view.dtype, g(aten.bitwise_or.Tensor, bits, sign), f32)


def power(g: Graph, q):
    return g(aten.pow.Scalar, 2.0, g(aten.sub.Tensor, g.cast(g.mask(q), i32), 8))


# name -> whether it is read, and the body
BODIES = {
    "e2m1 by arithmetic on bits": (True, e2m1),
    "a power of two": (True, power),
    "several runs of a mask": (True, lambda g, q: g.mask(q, 0xA5)),
    "a square": (True, lambda g, q: g(aten.mul.Tensor, g.mask(q), g.mask(q))),
    "a clamp": (True, lambda g, q: g(aten.clamp_max.default, g.cast(q), 77.0)),
    "a choice between floats": (
        True,
        lambda g, q: g(
            *(aten.where.self, g(aten.ge.Scalar, g.mask(q), 8)),
            *(g(aten.sub.Tensor, g.cast(g.mask(q)), 16.0), g.cast(g.mask(q))),
        ),
    ),
    "the absolute value of a flipped byte": (
        True,
        lambda g, q: g(
            aten.abs.default,
            g.cast(g(aten.view.dtype, g(aten.bitwise_xor.Scalar, q, 128), i8), i32),
        ),
    ),
    "a remainder by a number that wraps around": (
        True,
        lambda g, q: g(aten.remainder.Scalar, g(aten.view.dtype, q, i8), 128),
    ),
    "a function that devices compute differently": (
        False,
        lambda g, q: g(aten.sin.default, g.cast(q)),
    ),
    "a power that is rounded": (
        False,
        lambda g, q: g(aten.pow.Scalar, 3.0, g(aten.mul.Tensor, g.cast(g.mask(q)), 0.1)),
    ),
    "random numbers": (False, lambda g, q: g(aten.rand_like.default, g.cast(q))),
    "a sum over neighbours": (False, lambda g, q: g(aten.cumsum.default, g.cast(q), 0)),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_code_is_decoded_as_the_graph_does(name) -> None:
    is_read, body = BODIES[name]
    found, graph, want = read(body, BYTES)
    assert isinstance(found, Weight) == is_read, found
    if isinstance(found, Weight):
        got = dequantize(found.format, tensors_of(found, graph.values))
        assert torch.equal(got, want.float())
        assert f32 in found.same_for


@pytest.mark.parametrize("by", range(1, 8))
@pytest.mark.parametrize("dtype", [i8, i16])
def test_a_number_of_two_fields_may_have_a_sign(dtype, by) -> None:
    torch.manual_seed(0)
    words = [torch.randint(-128, 128, (K, N)).to(dtype) for _ in range(2)]
    found, graph, want = read(lambda g, a, b: shifted(g, a, b, by), *words)
    assert isinstance(found, Weight), found
    got = dequantize(found.format, tensors_of(found, graph.values))
    assert torch.equal(got, want.float()), found.format


def test_a_code_that_is_broadcast_is_declined() -> None:
    def body(g: Graph, q):
        code = g(aten.add.Tensor, g.cast(g.rows(q, 0, 1)), 8.0)
        return g(aten.expand.default, code, [32, 8])

    assert isinstance(read(body, BYTES)[0], Rejection)


@pytest.mark.parametrize("amount", [-2, 2])
def test_a_part_of_a_field_at_an_offset_that_is_data(amount) -> None:
    """A negative shift gives the sign; two more do not make it a field."""

    def body(g: Graph, q, amounts):
        field = g.mask(g(aten.bitwise_right_shift.Tensor, g.cast(q, i32), g.shift(amounts, 28)))
        return g.shift(field, 2)

    amounts = torch.full((32, 8), amount << 28, dtype=i32)
    found, graph, want = read(body, BYTES, amounts)
    assert isinstance(found, Weight), found
    got = dequantize(found.format, tensors_of(found, graph.values))
    assert torch.equal(got, want)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_stored_table_takes_part_as_ops_on_its_entries(is_copied) -> None:
    """|table[q & 7]| times a sign; the table may be on the CPU, and copied in each call."""
    table = torch.tensor([0.0, -1, 2, -3, 4, -5, 6, -7])

    def body(g: Graph, q, table):
        table = g(prims.device_put.default, table, CPU) if is_copied else table
        entry = g(aten.index.Tensor, table, [g.cast(g.mask(q, 7), torch.int64)])
        is_negative = g(prims.convert_element_type.default, g.mask(q, 8), torch.bool)
        one = g.full([], 1.0, f32)
        sign = g(aten.where.self, is_negative, g.full([], -1.0, f32), one)
        return g(aten.mul.Tensor, g(aten.abs.default, entry), sign)

    found, graph, want = read(body, BYTES, table)
    assert isinstance(found, Weight), found
    got = dequantize(found.format, tensors_of(found, graph.values))
    assert torch.equal(got, want)


@pytest.mark.parametrize("size", [1, 3])
def test_a_scale_at_one_place_of_a_vector_is_no_table(size) -> None:
    def body(g: Graph, q, scale):
        one = g(aten.select.int, scale, 0, size - 1)
        return g(aten.mul.Tensor, g.cast(q), g(aten.clamp_min.default, one, 1e-5))

    found, graph, want = read(body, BYTES, torch.rand(size))
    assert isinstance(found, Weight), found
    got = dequantize(found.format, tensors_of(found, graph.values))
    assert torch.equal(got, want)
