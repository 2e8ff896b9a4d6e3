"""Numerics of fp8_large_m_sm90 and fp8_block_large_m_sm90, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from tests.support.gemms.fp8 import Case, gemm, make_inputs, reference
from tests.support.gemms.generated import generate
from tests.support.gemms.large_m import at_any_size
from tests.support.gemms.w8a8 import assert_close
from tests.support.sampling import sampled

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]
BLOCK = (128, 128)


@pytest.fixture(autouse=True)
def any_size_and_a_small_chip(monkeypatch):
    at_any_size(monkeypatch, sms=2)


@pytest.mark.parametrize(
    ("case", "columns"),
    sampled(
        [
            # M, N and K end within a tile; with 192 columns two tiles share a block of scales
            (Case(140, 400, 1024, block=BLOCK), 192),
            (Case(140, 264, 656, block=BLOCK, bias=False), 256),
            (Case(140, 264, 528, block=BLOCK, a_scales="m"), 128),
            (Case(140, 200, 528), 96),
            (Case(140, 136, 272, fast_accum=True), 64),
            (Case(140, 264, 272, a_scale="tensor"), 256),
        ]
    ),
    ids=str,
)
def test_results_are_close_to_fp64(case, columns):
    torch.manual_seed(0)
    family = "fp8_block_large_m_sm90" if case.block else "fp8_large_m_sm90"
    generated = generate(
        gemm(case),
        lambda device: make_inputs(case, device),
        f"{family} {large_m_sm90.tile(columns, group_m=8)}",
    )
    assert any("gl.warp_specialize" in source for source in generated.kernels.values())
    inputs = make_inputs(case, "cpu")
    got = simulate.interpret(generated, inputs)
    assert_close(got, reference(case, inputs), case.out_dtype, slack=2)
