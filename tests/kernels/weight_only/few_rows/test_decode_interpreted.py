"""Numerics of ``weight_only_decode`` in Triton's interpreter."""

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
KERNEL = "weight_only_decode"
# Resident x, two slices per warp; several K iterations, two blocks of columns.
RESIDENT, ITERATED = "8x32x512_w2_s1_g8", "8x64x256_w2_s1_g8"


def run(fn, make, inputs, config):
    generated = generate(fn, make, f"{KERNEL} {config}")
    assert any("mma_v2" in source for source in generated.kernels.values())
    launched = [name for name in generated.kernels if name.startswith("triton_tem")]
    return simulate.interpret(generated, inputs), launched


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("gptq", 5, 64, 512, bias=True), RESIDENT),
        (Case("gptq", 3, 64, 512, f16, layout="every_second"), ITERATED),
        (Case("gptq", 13, 64, 1024, f16, column_scale="channel"), "16x64x512_w4_s1_g8"),
        (Case("gptq", 16, 64, 1024, column_scale="tensor"), "16x32x512_w2_s1_g8_k2"),
        (
            Case("gptq", 9, 64, 1792, f16),
            "16x32x512_w4_s1_g8_k2",
        ),  # last iteration: three warps
        (Case("gptq", 2, 64, 640), "8x32x2048_w8_s1_g8"),  # K is less than one iteration
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
    case = Case("gptq", 5, 0, 512, column_scale="channel", bias=True)
    group = PackedLayout(case, (64, 128, 64))
    inputs = group.make_inputs("cpu")
    got, launched = run(group.grouped, group.make_inputs, inputs, f"{ITERATED}_k2")
    assert len(launched) == 1
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert_close(result, want)


def test_one_hot_rows_give_the_weight_bit_for_bit():
    def generated_by(fn, make):
        return generate(fn, make, f"{KERNEL} {RESIDENT}")

    for got, want in one_hot_rows(Case("gptq", 8, 64, 512, f16), generated_by, 15):
        assert torch.equal(got, want)


def test_an_epilogue_is_in_the_kernel():
    case = Case("gptq", 5, 64, 512, bias=True)

    def make(device):
        torch.manual_seed(0)
        return torch.randn(5, 64, device=device).to(bf16), *make_inputs(case, device)

    def fn(residual, *inputs):
        return torch.nn.functional.silu(gemm(case)(*inputs)) + residual

    residual, *inputs = make("cpu")
    generated = generate(fn, make, f"{KERNEL} {RESIDENT}")
    assert len(generated.kernels) == 1
    want = torch.nn.functional.silu(exact(case, tuple(inputs))) + residual.double()
    assert_close(simulate.interpret(generated, (residual, *inputs)), want)
