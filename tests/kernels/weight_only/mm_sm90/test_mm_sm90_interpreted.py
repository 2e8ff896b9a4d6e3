"""What surrounds ``weight_only_mm_sm90`` in a graph, in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WeightOnlyMMSm90
from inductor_quant.simulate.interpreter import gluon as interpreter
from tests.support.gemms import formats
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    gemm,
    make_inputs,
    one_hot_rows,
    reference,
)

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

f16 = torch.float16


@pytest.fixture(autouse=True)
def large_groups_and_a_small_chip(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=3)
    monkeypatch.setitem(simulate.GPUS, 90, small)  # so that a CTA has several tiles


def generate_gluon(fn, make, config):
    generated = generate(fn, make, f"weight_only_mm_sm90 {config}")
    assert any("gl.warp_specialize" in source for source in generated.kernels.values())
    return generated


@pytest.mark.parametrize("config", ["32x64x64_w4_s4_g8", "64x128x64_w4_s4_g8"])
@pytest.mark.parametrize(("m", "n"), [(40, 128), (64, 128), (130, 72)])
def test_an_epilogue_is_in_the_kernel(m, n, config):
    """Rows beyond M are clamped, and loads take no mask, if no tile ends beyond N."""
    case = Case("gptq", m, n, 512, f16, bias=True)

    def make(device):
        torch.manual_seed(0)
        return torch.randn(m, n, device=device).to(f16), *make_inputs(case, device)

    def fn(residual, *inputs):
        return torch.nn.functional.silu(gemm(case)(*inputs)) + residual

    residual, *inputs = make("cpu")
    generated = generate_gluon(fn, make, config)
    [source] = generated.kernels.values()
    assert ("store_mask" in source) == (n == 128)
    sums = reference(case, tuple(inputs)).to(f16).double()  # rounded, as in the graph
    want = torch.nn.functional.silu(sums) + residual.double()
    assert_close(simulate.interpret(generated, (residual, *inputs)), want)


def test_x_that_is_computed_from_a_transpose_is_stored_by_rows():
    """By default Inductor stores in the order in which it loads."""
    case = Case("gptq", 40, 128, 512, f16)

    def make(device):
        torch.manual_seed(0)
        x, *others = make_inputs(case, device)
        return x.t().contiguous(), *others

    def fn(columns, *others):
        return gemm(case)(columns.t() * 2, *others)

    columns, *others = make("cpu")
    generated = generate_gluon(fn, make, "64x128x64_w4_s4_g8")
    want = reference(case, (columns.t() * 2, *others))
    assert_close(simulate.interpret(generated, (columns, *others)), want)


def test_one_hot_rows_give_the_weight_bit_for_bit():
    def generated_by(fn, make):
        return generate_gluon(fn, make, "256x64x64_w4_s4_g8")

    for got, want in one_hot_rows(Case("gptq", 256, 64, 256, f16), generated_by):
        assert torch.equal(got, want)


def test_a_cta_without_a_part_copies_nothing(monkeypatch):
    """A symbolic M: as many CTAs share one tile as 13 of them."""
    case, rows, copied = Case("gptq", 832, 128, 256, f16), 40, []
    monkeypatch.setattr(WeightOnlyMMSm90, "shares_tiles", lambda *problem: True)

    def make(device):
        inputs = make_inputs(case, device)
        torch._dynamo.mark_dynamic(inputs[0], 0)
        return inputs

    def copy(buffer, pointer, mask=None):
        copied.append(buffer)
        interpreter_copy(buffer, pointer, mask)

    interpreter_copy = interpreter._copy
    monkeypatch.setattr(interpreter, "_copy", copy)
    generated = generate_gluon(gemm(case), make, "64x128x64_w4_s4_g8")
    x, *others = make_inputs(case, "cpu")
    want = reference(case, (x[:rows], *others))
    assert_close(simulate.interpret(generated, (x[:rows], *others)), want)
    assert len(copied) == 2 * 4  # of x and W, in four K iterations
