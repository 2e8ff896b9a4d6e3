"""Rows that are written in the order of lanes for the product that reads them: by the product
before, or by the kernel that computes them. Run by Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.experts.mm_sm90 import kernel as mm_sm90
from inductor_quant.lowering import experts
from inductor_quant.lowering.select import lower_gemm
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.experts import Case, gemm, make_inputs, reference, stacked
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import assert_close
from tests.support.sampling import sampled

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

COUNTS, HIDDEN, INNER = (7, 0, 70), 128, 192
TALL, WIDE = "experts_mm_sm90 96x128x64_w4_s6_g8", "experts_mm_sm90 64x128x64_w8_s8_g8"
SMALL = "experts_mm_sm90 32x64x64_w4_s8_g8"
bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def a_small_chip(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    monkeypatch.setattr(mm_sm90, "MIN_MEAN", 0)
    monkeypatch.setattr(mm_sm90, "MIN_MEAN_COMPUTED", 0)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=2)
    monkeypatch.setitem(simulate.GPUS, 90, small)  # a CTA has several tiles


class Layer:
    """Two products; ``between``: of what the first one stores, N columns or what its gate gives."""

    def __init__(
        self, first: str, second: str, gate: str = "", n=2 * INNER, between=lambda y: y, left=5
    ):
        self.cases = up, _ = (
            Case(first, COUNTS, n, HIDDEN, left, gate=gate),
            Case(second, COUNTS, HIDDEN, INNER, left),
        )
        self.between, self.products = between, tuple(map(gemm, self.cases))
        self.count = len(up.packed.tensors)
        torch.manual_seed(0)
        self.inputs = self.make("cpu")

    def make(self, device):
        up, down = (make_inputs(case, device) for case in self.cases)
        return *up, *down[2:]

    def __call__(self, x, route, *weight):
        up, down = self.products
        y = up(x, route, *weight[: self.count])
        return down(self.between(y), route, *weight[self.count :])

    def reference(self) -> torch.Tensor:
        x, route, *weight = self.inputs
        up, down = self.cases
        y = reference(up, (x, route, *weight[: self.count])).to(bf16)
        return reference(down, (self.between(y), route, *weight[self.count :]))

    def ordered(self, tile: str, fn=None) -> list[bool]:
        """Whether K of each weight is in another order than that of memory; results are right."""
        with collect() as report:
            generated = generate(fn or self, self.make, tile)
        got = simulate.interpret(generated, self.inputs)
        got = got[0] if isinstance(got, tuple) else got
        assert_close(got, self.reference(), slack=8)  # rows between are rounded
        natural = [stacked(case.packed, len(COUNTS)) for case in self.cases]
        found = [choice.weight[0] for choice in report.kernels if choice.weight]
        return [each.k != format.k for each, format in zip(found, natural, strict=True)]


@pytest.mark.parametrize(
    ("first", "second", "gate", "tile"),
    sampled(
        [
            ("nibble_pairs", "nibble_pairs", "silu", TALL),
            ("nibble_pairs", "mxfp4", "clamped", WIDE),
            ("int8_channel", "nibble_pairs", "silu", WIDE),
            ("gptq", "nibble_pairs", "silu", WIDE),
            ("mxfp4", "mxfp4", "silu", WIDE),
        ],
        2,
    ),
)
def test_a_product_stores_its_columns_in_the_order_of_the_next(first, second, gate, tile):
    assert Layer(first, second, gate).ordered(tile) == [False, True]


def test_rows_that_something_else_reads_are_in_the_order_of_memory():
    layer = Layer("nibble_pairs", "nibble_pairs", "silu")

    def fn(x, route, *weight):
        y = layer.products[0](x, route, *weight[: layer.count])
        return layer.products[1](y, route, *weight[layer.count :]), y.sum(1)

    assert layer.ordered(TALL, fn) == [False, False]


def test_few_rows_are_in_the_order_of_memory():
    assert Layer("nibble_pairs", "nibble_pairs", "silu").ordered(SMALL) == [False, False]


@pytest.mark.parametrize(("without", "kernels"), [(1, 2), (2, 1)])
def test_a_product_that_has_no_kernel_reads_and_writes_what_the_other_does(
    without, kernels, monkeypatch
):
    """The first one has none with its columns in order, then one in that of memory; or the second
    one has none."""
    layer, calls = Layer("nibble_pairs", "nibble_pairs", "silu", left=0), []

    def lowered(*args, **kwargs):
        calls.append(args)
        return None if len(calls) == without else lower_gemm(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(experts, "lower_gemm", lowered)
        generated = generate(layer, layer.make, TALL)
    assert_close(simulate.interpret(generated, layer.inputs), layer.reference(), slack=8)
    assert sum("warp_specialize" in text for text in generated.kernels.values()) == kernels


@pytest.mark.parametrize(
    ("n", "is_ordered"),
    [
        (INNER + 64, True),
        (INNER, False),  # an epilogue of the first product
    ],
)
def test_a_kernel_of_its_own_computes_rows_in_the_order_of_lanes(n, is_ordered):
    layer = Layer(
        "nibble_pairs", "nibble_pairs", n=n, between=lambda y: torch.relu(y[:, n - INNER :])
    )
    assert layer.ordered(WIDE) == [False, is_ordered]


def test_a_weight_that_is_computed_between_two_products_has_rows_in_the_order_of_lanes():
    layer = Layer("nibble_pairs", "nibble_pairs", "silu")

    def fn(x, route, *weight):
        up, down = layer.products
        y = up(x, route, *weight[: layer.count])
        codes, scales = weight[layer.count :]
        return down(y, route, codes, scales.abs())  # none is below 0

    assert layer.ordered(TALL, fn) == [False, True]


ONE = Case("nibble_pairs", COUNTS, HIDDEN, INNER)


def stored_at_once(x, table):
    """So many reads that Inductor gives it a buffer."""
    for i in range(8):
        x = x + table[i]
    return x


def written_by_index(x, table, made=torch.zeros_like):
    y = made(x)
    y[torch.arange(len(x) - 1, -1, -1, device=x.device)] = x
    return y


def written_in_part(x, table):
    y = stored_at_once(x, table)
    y[:, :5] = table[0, :, :5]
    return y.index_fill(0, torch.zeros(1, dtype=torch.int64, device=x.device), 2.0)


def empty_at_first(x, table):
    return written_by_index(x, table, torch.empty_like)


def from_a_table_that_changes(x, table):
    y = stored_at_once(x, table)
    some = x[0, :5].abs().long() % 8
    table.index_put_((some,), torch.ones((), dtype=bf16, device=x.device))
    return y


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "rows",
    [
        stored_at_once,
        written_by_index,
        written_in_part,
        empty_at_first,
        from_a_table_that_changes,
    ],
)
def test_rows_that_have_a_buffer_are_what_is_in_it(rows):
    def fn(op, x, route, table, *weight):
        y = rows(x, table)
        *codes, scales = weight
        # orders what changes the table before the product
        return op(y, route, *codes, scales * table[0, 0, 0].sign())

    def make(device):
        x, route, *weight = make_inputs(ONE, device)
        table = torch.empty(9, *x.shape, dtype=bf16, device=device)
        return x, route, table if device == "cuda" else table.uniform_(), *weight

    torch.manual_seed(0)
    inputs = make("cpu")
    with collect() as report:
        generated = generate(lambda *args: fn(gemm(ONE), *args), make, WIDE)
    got = simulate.interpret(generated, tuple(each.clone() for each in inputs))
    got = got[0] if isinstance(got, tuple) else got

    def eager(x, route, *weight):
        return reference(ONE, (x, route, *weight))

    assert_close(got, fn(eager, *(each.clone() for each in inputs)), slack=8)
    [choice] = report.kernels
    is_ordered = choice.weight[0].k != stacked(ONE.packed, len(COUNTS)).k
    assert is_ordered == (rows is stored_at_once)
