"""Weights whose columns or K are counted in another order."""

from __future__ import annotations

import itertools

import pytest
import torch

from inductor_quant.kernels.codegen.digits.order import Order, is_linear, reordered, split
from inductor_quant.ops import weight_only
from tests.support.gemms.formats import build


@pytest.mark.parametrize("axis", ["k", "n"])
@pytest.mark.parametrize(
    "name", ["gptq", "awq", "int8_shuffled", "shards", "groups_of_n", "mxfp4", "act_order"]
)
def test_the_weight_has_the_same_values_in_other_places(name, axis):
    torch.manual_seed(0)
    packed = build(name, 512, 64)
    format, weight = packed.format, packed.make()
    values = weight_only.dequantize(format, weight)
    for order in itertools.permutations(format.digits(axis)):
        size = format.shape[axis == "n"]
        counted = Order(format, order)
        at = torch.tensor([eval(counted.place(str(i))) for i in range(size)])
        assert at.sort().values.equal(torch.arange(size))
        got = weight_only.dequantize(reordered(format, axis, order), weight)
        assert got.equal(values[at] if axis == "k" else values[:, at]), order


def test_a_place_is_that_of_its_block_and_within_it():
    format = build("shards", 512, 64).format
    order = Order(format, ("k2", "k3", "k0", "k1"))
    for block in (1, 8, 16, 64, 256, 512):  # none ends within two digits
        for i in range(512):
            first, within = divmod(i, block)
            parts = order.place_of_block(str(first), block), order.place_within(str(within), block)
            assert eval(order.place(str(i))) == sum(map(eval, parts))


@pytest.mark.parametrize("name", ["gptq", "awq", "int8_shuffled", "shards", "mxfp4", "act_order"])
def test_a_digit_as_two_is_the_same_weight(name):
    """Of AWQ and of the shuffled int8, a table has a value for each value of a digit."""
    torch.manual_seed(0)
    packed = build(name, 512, 64)
    format, weight = packed.format, packed.make()
    values, kept = weight_only.dequantize(format, weight), []
    for digit in (*format.digits("k"), *format.digits("n")):
        if not is_linear(format, digit):
            kept.append(digit)
            continue
        low = 2
        counted = split(format, digit, low)
        assert counted.shape == format.shape
        assert counted.radix(digit) * low == format.radix(digit)
        assert weight_only.dequantize(counted, weight).equal(values), digit
    assert bool(kept) == (name in ("awq", "int8_shuffled"))


def test_neighbours_of_an_order_are_those_of_the_axis():
    format = build("halves_of_k", 512, 64).format  # digits of 2, 8 and 32
    for order, block, count in (
        (("k0", "k1", "k2"), 64, 64),
        (("k1", "k0", "k2"), 64, 32),
        (("k1", "k0", "k2"), 16, 16),
        (("k1", "k2", "k0"), 64, 1),
    ):
        assert Order(format, order).neighbours(block) == count
