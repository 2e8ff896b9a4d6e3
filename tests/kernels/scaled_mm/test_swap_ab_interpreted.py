"""Numerics of int8 tiles that are computed as their transpose, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from tests.support.gemms import w8a8 as gemms
from tests.support.gemms.generated import generate

pytestmark = pytest.mark.interp


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (gemms.Case(24, 200, 320), "16x64x128_w4_s6_g8"),
        (gemms.Case(70, 130, 256, b_scale="tensor"), "32x128x128_w4_s6_g8"),
        (gemms.Case(33, 72, 900, out_dtype=torch.float32, bias=False), "64x64x256_w4_s4_g8"),
    ],
    ids=str,
)
def test_values_are_those_of_fp64(case, config):
    torch.manual_seed(0)
    inputs = gemms.make_inputs(case, "cpu")
    generated = generate(
        gemms.gemm(case),
        lambda device: gemms.make_inputs(case, device),
        f"w8a8_swap_ab {config}",
    )
    assert any(".T, a.T" in source for source in generated.kernels.values())
    gemms.assert_close(simulate.interpret(generated, inputs), gemms.reference(inputs))
