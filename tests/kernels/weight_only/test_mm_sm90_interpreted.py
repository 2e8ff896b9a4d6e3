"""Numerics of ``weight_only_mm_sm90`` in Triton's interpreter."""

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
KERNEL = "weight_only_mm_sm90"


def generate_mm(fn, make, config):
    generated = generate(fn, make, f"{KERNEL} {config}")
    assert any("x_stages" in source for source in generated.kernels.values())
    return generated


@pytest.mark.parametrize(
    ("case", "config"),
    [
        # groups of 32: two scales of 16 bits in a tile
        (Case("gptq", 17, 64, 256, f16, bias=True), "32x64x64_w4_s4_g8"),
        (Case("gptq", 20, 64, 256, bf16), "32x64x64_w4_s4_g8_k2"),  # scales of another dtype
        (Case("awq", 70, 96, 256, f16, column_scale="channel"), "64x64x64_w4_s4_g8_k2"),  # 96 of N
        (Case("nibble_pairs", 20, 128, 256, bias=True), "32x128x64_w8_s4_g8"),
        (Case("hqq", 30, 128, 256), "32x64x64_w4_s4_g8"),
        (Case("int8_group", 25, 64, 256), "32x64x64_w4_s3_g8"),
        (Case("int8_zero_channel", 33, 64, 128), "64x64x64_w4_s4_g8"),
        (Case("int8_channel", 50, 64, 128, f16), "64x64x64_w4_s4_g8"),
        (Case("nf4", 20, 64, 128), "32x64x64_w4_s4_g8"),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate_mm(gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gptq", f16), ("awq", bf16), ("nibble_pairs", bf16), ("int8_group", f16), ("nf4", bf16)],
)
def test_one_hot_rows_give_the_weight_bit_for_bit(name, dtype, monkeypatch):
    """All codes, in 16 bits (scales of x's dtype) and in fp32."""
    monkeypatch.setattr(formats, "f16", dtype)
    torch.manual_seed(0)
    case = Case(name, 32, 64, 128, dtype)
    _, _, _, *weight = make_inputs(case, "cpu")
    text = case.packed.format.encode()
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)

    def fn(x, *weight):
        return weight_only.op(x, list(weight), None, None, format=text, out_dtype=dtype)

    def make(device):
        x, _, _, *weight = make_inputs(case, device)
        return x, *weight

    generated = generate_mm(fn, make, "32x64x64_w4_s4_g8")
    for rows in torch.eye(128).to(dtype).split(32):
        assert torch.equal(simulate.interpret(generated, (rows, *weight)), want[rows.argmax(1)])


def test_words_sliced_from_a_wider_tensor():
    """As of q, k and v: the rows of the matrix are further apart than they are long."""
    case = Case("gptq", 20, 64, 256, f16)

    def make(device):
        torch.manual_seed(0)
        x, scale, bias, bits, *rest = make_inputs(case, device)
        wide = torch.ones(bits.shape[0], 3 * 64, dtype=bits.dtype, device=device)
        wide[:, 64:128] = bits
        return x, scale, bias, wide[:, 64:128], *rest

    inputs = make("cpu")
    generated = generate_mm(gemm(case), make, "32x64x64_w4_s4_g8")
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))
