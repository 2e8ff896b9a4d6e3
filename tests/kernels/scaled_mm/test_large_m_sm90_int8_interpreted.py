"""Numerics of w8a8_large_m_sm90, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from tests.support.gemms.generated import generate
from tests.support.gemms.large_m import at_any_size
from tests.support.gemms.w8a8 import Case, assert_close, gemm, make_inputs, reference
from tests.support.gemms.zero_points import Zeros, meaning
from tests.support.sampling import sampled

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]


@pytest.fixture(autouse=True)
def any_size_and_a_small_chip(monkeypatch):
    at_any_size(monkeypatch, sms=2)


def interpreted(fn, make, columns, inputs):
    config = large_m_sm90.tile(columns, group_m=8)
    generated = generate(fn, make, f"w8a8_large_m_sm90 {config}")
    assert any("gl.warp_specialize" in source for source in generated.kernels.values())
    return simulate.interpret(generated, inputs)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("columns", sampled(sorted(large_m_sm90.ELEMENT_COST)))
def test_integers_are_exact_in_every_tile(columns):
    """M, N and K end within a tile; more steps of K than stages."""
    torch.manual_seed(0)
    k = 1200 if columns == 256 else 144
    case = Zeros(140, n=columns + 8, k=k, out_dtype=torch.bfloat16)
    inputs = case.inputs("cpu")
    got = interpreted(case.call(), case.inputs, columns, inputs)
    assert torch.equal(got, meaning(case, inputs).to(torch.bfloat16))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("a", "b"), sampled([("const", torch.bfloat16), ("", torch.int8), (torch.float32, torch.int8)])
)
def test_zero_points_are_exact(a, b):
    torch.manual_seed(0)
    case = Zeros(140, n=100, k=144, a=a, b=b, out_dtype=torch.bfloat16)
    inputs = case.inputs("cpu")
    got = interpreted(case.call(), case.inputs, 96, inputs)
    assert torch.equal(got, meaning(case, inputs).to(torch.bfloat16))


def test_scales_bias_and_an_epilogue():
    case = Case(140, 200, 272)
    inputs = make_inputs(case, "cpu")

    def residual(device):
        return torch.empty(case.m, case.n, dtype=torch.bfloat16, device=device)

    def fn(residual, *inputs):
        return F.silu(gemm(case)(*inputs)) + residual

    def make(device):
        return residual(device), *make_inputs(case, device)

    added = residual("cpu").normal_()
    got = interpreted(fn, make, 192, (added, *inputs))
    assert_close(got, F.silu(reference(inputs)) + added.double(), slack=2)
