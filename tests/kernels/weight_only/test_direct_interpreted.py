"""Numerics of ``weight_only_direct`` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.ops import weight_only
from tests.support.gemms import formats
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import Case, assert_close, gemm, make_inputs, reference

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

bf16, f16 = torch.bfloat16, torch.float16
KERNEL = "weight_only_direct"


def generate_direct(fn, make, config):
    generated = generate(fn, make, f"{KERNEL} {config}")
    assert any("partials" in source for source in generated.kernels.values())
    return generated


@pytest.mark.parametrize(
    ("case", "config"),
    [
        # groups of 32: two scales of 16 bits in a tile
        (Case("gptq", 7, 64, 128, f16, bias=True), "8x32x64_w2_s1_g8"),
        (Case("gptq", 16, 64, 256, bf16), "16x32x256_w2_s1_g8"),  # scales of another dtype
        (Case("awq", 13, 96, 256, f16, column_scale="channel"), "16x64x128_w2_s1_g8_k2"),  # 96 of N
        (Case("nibble_pairs", 8, 128, 256, bias=True), "8x32x128_w1_s1_g8"),
        (Case("hqq", 3, 128, 128), "8x32x128_w2_s1_g8"),
        (Case("int8_group", 5, 64, 256), "8x32x64_w1_s1_g8_k2"),
        (Case("hqq", 9, 64, 128), "16x32x128_w2_s1_g8"),
        (Case("int8_zero_channel", 8, 64, 128), "8x32x64_w1_s1_g8"),
        (Case("int8_folded", 8, 64, 128, f16), "8x16x128_w1_s1_g8"),
        (Case("nf4", 16, 64, 128), "16x32x128_w2_s1_g8"),
        # 5 slices of K for 2 warps of 2 CTAs: some have none
        (Case("gptq", 3, 64, 320, f16), "8x32x128_w2_s1_g8_k2"),
        (Case("int8_group", 3, 32, 192), "8x16x128_w2_s1_g8"),
        (Case("uint2", 2, 128, 128), "8x128x64_w4_s1_g8"),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate_direct(gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gptq", bf16), ("awq", f16), ("nibble_pairs", f16), ("int8_group", bf16), ("nf4", f16)],
)
def test_one_hot_rows_give_the_weight_bit_for_bit(name, dtype, monkeypatch):
    """All codes, in 16 bits (scales of x's dtype) and in fp32."""
    monkeypatch.setattr(formats, "f16", dtype)
    torch.manual_seed(0)
    case = Case(name, 16, 64, 128, dtype)
    _, _, _, *weight = make_inputs(case, "cpu")
    text = case.packed.format.encode()
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)

    def fn(x, *weight):
        return weight_only.op(x, list(weight), None, None, format=text, out_dtype=dtype)

    def make(device):
        x, _, _, *weight = make_inputs(case, device)
        return x, *weight

    generated = generate_direct(fn, make, "16x64x64_w1_s1_g8")
    for rows in torch.eye(128).to(dtype).split(16):
        assert torch.equal(simulate.interpret(generated, (rows, *weight)), want[rows.argmax(1)])
