"""Weights whose columns or K are counted in another order."""

from __future__ import annotations

import itertools

import pytest
import torch

from inductor_quant.kernels.codegen.digits.order import Order, is_linear, paired, reordered, split
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.problem import Weight, WeightTensor
from inductor_quant.kernels.weight_only.lane_order import lane_order
from inductor_quant.lowering.expert_order import as_columns, columns_in_order
from inductor_quant.ops import weight_only
from inductor_quant.spec.gate import Gate
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat
from tests.support.gemms import formats, fp4
from tests.support.gemms.formats import build, form


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


def weight_of(packed: formats.Packed) -> Weight:
    tensors = (WeightTensor(dtype, shape) for _, shape, dtype in packed.tensors)
    return Weight(packed.format, tuple(tensors))


def words_along_k(k: int, n: int, *, is_reversed: bool = False) -> Weight:
    """compressed-tensors' words of eight values along K."""
    offset = form(("k1", -4), const=28) if is_reversed else form(("k1", 4))
    code = Field(0, (form(("n0", 1)), form(("k0", 1))), offset, 4)
    scale = DequantOp("mul", Field(1, (form(("n0", 1)),)))
    format = WeightFormat((k // 8, 8), (n,), code, (scale,))
    return Weight(
        format, (WeightTensor(torch.int32, (n, k // 8)), WeightTensor(torch.bfloat16, (n,)))
    )


@pytest.mark.parametrize("group", [32, 128])
def test_a_lane_has_all_values_of_its_words(group, monkeypatch):
    """Of each 16 of K the lanes of a row have two neighbours, and two 8 behind them."""
    monkeypatch.setattr(formats, "GROUP", group)
    for weight in (weight_of(build("nibble_pairs", 512, 64)), words_along_k(512, 64)):
        order = lane_order(weight)
        assert order is not None
        at = [eval(order.place(str(i))) for i in range(512)]
        want = torch.arange(512).view(-1, 8, 4).transpose(1, 2).flatten()
        assert at == want.tolist()
        for lane in range(4):
            first = torch.arange(0, 32, 8)[:, None] + torch.tensor([2 * lane, 2 * lane + 1])
            assert len({at[i] // 8 for i in first.flatten().tolist()}) == 1
        words = as_words(Weight(order.counted("k"), weight.tensors)).weight
        assert words.tensors[0].dtype == torch.int32
        # 16 bits apart are the two that are next to each other
        last = words.format.digits("k")[-1]
        assert dict(words.format.code.offset.linear)[last] == 16


def test_a_lane_has_pairs_of_its_words_that_are_looked_up():
    """Neighbours in memory, which are a byte."""
    weight = weight_of(fp4.mxfp4(512, 64, 32))
    order = lane_order(weight)
    assert order is not None
    at = [eval(order.place(str(i))) for i in range(512)]
    assert at == torch.arange(512).view(-1, 4, 4, 2).transpose(1, 2).flatten().tolist()
    words = as_words(Weight(order.counted("k"), weight.tensors)).weight
    assert words.tensors[0].dtype == torch.int32
    assert dict(words.format.code.offset.linear)[words.format.digits("k")[-1]] == 4


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("gptq", 128),  # neighbouring words are along N
        ("awq", 128),
        ("int8_channel", 128),
        ("uint2", 128),
        ("halves_of_k", 128),  # neighbours are in other words
        ("nf4", 128),  # the first of two is in the upper half of a byte
        ("act_order", 128),
        ("nibble_pairs", 16),  # a lane would have values of several groups
    ],
)
def test_other_weights_have_no_order_of_lanes(name, group, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    assert lane_order(weight_of(build(name, 512, 64))) is None


def test_words_in_another_order_have_no_order_of_lanes():
    assert lane_order(words_along_k(512, 64)) is not None
    assert lane_order(words_along_k(512, 64, is_reversed=True)) is None
    assert lane_order(words_along_k(496, 64)) is None


def test_runs_are_digits_that_are_neighbours_in_both_orders():
    format = build("halves_of_k", 512, 64).format  # digits of 2, 8 and 32
    for order, runs in (
        (("k0", "k1", "k2"), [(1, 512)]),
        (("k1", "k2", "k0"), [(1, 256), (256, 512)]),
        (("k2", "k0", "k1"), [(1, 32), (32, 512)]),
        (("k1", "k0", "k2"), [(32, 256), (256, 512), (1, 32)]),
    ):
        assert Order(format, order).runs() == runs


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_columns_are_stored_in_the_order_of_the_next_k(is_interleaved):
    torch.manual_seed(0)
    after = lane_order(words_along_k(320, 64))
    assert after is not None
    packed = build("gptq", 64, 640)
    weight, gate = packed.make(), Gate((("mul", 0, 1),), is_interleaved=is_interleaved)
    values = weight_only.dequantize(packed.format, weight)
    pairs = paired(packed.format, is_interleaved=is_interleaved)
    assert pairs is not None
    found = columns_in_order(pairs, after)
    assert found is not None
    at = torch.tensor([eval(after.place(str(i))) for i in range(320)])
    first, second = (2 * at, 2 * at + 1) if is_interleaved else (at, at + 320)
    got = weight_only.dequantize(found, weight)
    assert got.equal(values[:, torch.stack([first, second], 1).flatten()])
    got = weight_only.dequantize(as_columns(found, gate), weight)
    both = torch.stack([first, second], int(is_interleaved)).flatten()
    assert got.equal(values[:, both])
    others = paired(build("gptq", 64, 320).format, is_interleaved=is_interleaved)
    assert others is not None
    assert columns_in_order(others, after) is None
