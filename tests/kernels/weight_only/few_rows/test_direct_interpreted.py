"""Numerics of ``weight_only_direct`` where it does not apply an operand to each value of W, and of
words that it does not read as such, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from tests.support.gemms import formats
from tests.support.gemms.generated import generated_by
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    exact,
    gemm,
    make_inputs,
    reference,
)

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

bf16, f32 = torch.bfloat16, torch.float32
DIRECT = "weight_only_direct"


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("groups_of_n", 5, 256, 320, bias=True), "8x16x64_w4_s1_g8"),
        (Case("groups_of_n", 13, 256, 640), "16x32x128_w2_s1_g8_k2"),
        (Case("groups_of_n", 8, 96, 192), "8x32x64_w1_s1_g8"),
    ],
    ids=str,
)
def test_where_x_is_scaled_it_is_rounded_instead_of_w(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(DIRECT, gemm(case), lambda device: make_inputs(case, device), config)
    assert any("x_sums" in source for source in generated.kernels.values())
    assert_close(simulate.interpret(generated, inputs), exact(case, inputs))


@pytest.mark.parametrize("stored", [bf16, f32])  # values and scales; fp32 is looked up as such
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (5, 64, 1536, "8x16x1024_w8_s1_g8"),
        (8, 40, 1088, "8x32x512_w8_s1_g8"),
        (1, 64, 2048, "8x16x1024_w16_s1_g8_k2"),
    ],
)
def test_tables_in_pairs(m, n, k, config, stored, monkeypatch):
    monkeypatch.setattr(formats, "f32", stored)
    torch.manual_seed(0)
    case = Case("nf4", m, n, k)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(DIRECT, gemm(case), lambda device: make_inputs(case, device), config)
    assert any("ld.shared" in source for source in generated.kernels.values())
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize("n", [34, 36])
def test_bytes_along_n_need_not_be_words(n):
    """34 is no multiple of the four bytes of a word; five iterations."""
    torch.manual_seed(0)

    def make(device):
        nibbles = torch.randint(0, 256, (320, n), dtype=torch.uint8, device=device)
        return torch.randn(3, 640, dtype=bf16, device=device), nibbles

    def linear(x, nibbles):
        q = torch.stack([nibbles & 15, nibbles >> 4], 1).flatten(0, 1).to(torch.int8) - 8
        return x @ q.to(bf16)

    generated = generated_by(DIRECT, linear, make, "8x32x128_w1_s1_g8")
    x, nibbles = make("cpu")
    want = x.double() @ linear(torch.eye(640, dtype=bf16), nibbles).double()
    assert_close(simulate.interpret(generated, (x, nibbles)), want)
