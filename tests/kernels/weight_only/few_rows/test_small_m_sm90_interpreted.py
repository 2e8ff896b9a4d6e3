"""Numerics of ``weight_only_small_m_sm90`` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from tests.support.gemms.generated import generate
from tests.support.gemms.horizontal import PackedLayout
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    exact,
    gemm,
    make_inputs,
    one_hot_rows,
)

pytestmark = [
    pytest.mark.usefixtures("large_groups"),
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

bf16, f16 = torch.bfloat16, torch.float16
KERNEL = "weight_only_small_m_sm90"
CONFIG = "16x64x256_w4_s2_g8"


def run(fn, make, inputs, config):
    generated = generate(fn, make, f"{KERNEL} {config}")
    assert any("warpgroup_mma" in source for source in generated.kernels.values())
    launched = [name for name in generated.kernels if name.startswith("triton_tem")]
    return simulate.interpret(generated, inputs), launched


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("gptq", 16, 128, 1024, bias=True), "16x64x256_w4_s2_g8"),
        (Case("gptq", 13, 128, 1024, f16, column_scale="channel"), "16x128x128_w8_s4_g8"),
        (Case("gptq", 9, 128, 512, column_scale="tensor"), "16x128x256_w8_s2_g8"),
        (Case("gptq", 21, 64, 512), "32x64x128_w4_s2_g8"),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got, _ = run(gemm(case), lambda device: make_inputs(case, device), inputs, config)
    assert_close(got, exact(case, inputs))


def test_gemms_in_one_launch():
    torch.manual_seed(0)
    case = Case("gptq", 10, 0, 512, column_scale="channel", bias=True)
    group = PackedLayout(case, (64, 128, 64))
    inputs = group.make_inputs("cpu")
    got, launched = run(group.grouped, group.make_inputs, inputs, CONFIG)
    assert len(launched) == 1
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert_close(result, want)


def test_one_hot_rows_give_the_weight_bit_for_bit():
    def generated_by(fn, make):
        return generate(fn, make, f"{KERNEL} {CONFIG}")

    for got, want in one_hot_rows(Case("gptq", 16, 64, 512, f16), generated_by, 7):
        assert torch.equal(got, want)
