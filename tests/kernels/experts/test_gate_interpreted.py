"""Numerics of gates in the epilogues of ``experts`` kernels, in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.experts.mm_sm90 import kernel as mm_sm90
from tests.support.gemms import formats
from tests.support.gemms.experts import Case, gemm, make_inputs, reference
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import assert_close
from tests.support.sampling import sampled

pytestmark = pytest.mark.interp

MM, DIRECT = "experts_mm 32x16x32_w4_s2_g8", "experts_direct 8x32x256_w2_s1_g8"
DIRECT_16 = "experts_direct 16x64x128_w2_s1_g8"
SMALL, TALL = "experts_mm_sm90 32x64x64_w4_s8_g8", "experts_mm_sm90 128x64x64_w4_s4_g8"
WIDE, LONG = "experts_mm_sm90 64x128x64_w8_s8_g8", "experts_mm_sm90 32x128x128_w4_s6_g8"
THIRDS = "experts_mm_sm90 96x128x64_w4_s6_g8"
COUNTS = (0, 3, 0, 18, 1)
GPT_OSS = {"gate": "clamped", "has_bias": True}

# stored columns end within a tile; words along K and along N, zero points, tables, column scales
CASES = [
    *(
        (Case("nibble_pairs", COUNTS, 80, 256, 2, gate=gate), DIRECT)
        for gate in ("silu", "clamped")
    ),
    (Case("gptq", COUNTS, 96, 256, is_sorted=False, gate="every_op"), DIRECT),
    (Case("awq", COUNTS, 192, 256, 2, gate="silu"), DIRECT_16),
    (Case("mxfp4", COUNTS, 80, 256, 2, **GPT_OSS), DIRECT_16),
    (Case("int8_channel", COUNTS, 80, 256, is_sorted=False, **GPT_OSS), DIRECT),
    (Case("nf4", COUNTS, 80, 256, 2, repeats=3, has_rows=True, gate="silu"), DIRECT),
    (Case("int8_group", COUNTS, 40, 96, 2, gate="every_op"), MM),
    (Case("gptq", COUNTS, 48, 96, is_sorted=False, **GPT_OSS), MM),
    (Case("act_order", COUNTS, 48, 96, 2, gate="silu", has_bias=True), MM),
    (Case("fp8_row", COUNTS, 48, 96, 2, dtype=torch.float16, gate="silu"), MM),
    (Case("nibble_pairs", (0, 3, 0, 35, 1), 144, 256, 3, gate="silu"), SMALL),
    (Case("gptq", (0, 3, 0, 35, 1), 160, 256, 3, gate="silu"), SMALL),
    (Case("mxfp4", (70, 0, 64), 272, 320, **GPT_OSS), WIDE),
    (Case("int8_channel", (0, 3, 135, 1), 144, 256, 3, gate="every_op"), TALL),
    (Case("fp8_row", (130, 1), 144, 256, gate="silu", has_bias=True), TALL),
    (Case("nf4", (5, 33, 0), 144, 256, 3, gate="clamped"), SMALL),
    (Case("nibble_pairs", (5, 33, 0), 272, 640, 3, gate="silu"), LONG),
    (Case("nibble_pairs", (5, 97, 0, 65), 272, 320, 3, gate="silu"), THIRDS),
    (Case("gptq", (96, 7), 272, 256, gate="silu", has_bias=True), THIRDS),
]


@pytest.fixture(autouse=True)
def few_rows_and_a_small_chip(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    monkeypatch.setattr(mm_sm90, "MIN_MEAN", 0)
    monkeypatch.setattr(mm_sm90, "MIN_MEAN_COMPUTED", 0)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=2)
    monkeypatch.setitem(simulate.GPUS, 90, small)  # a CTA has several tiles


@pytest.mark.parametrize(("case", "config"), sampled(CASES, 4), ids=str)
def test_one_kernel_stores_what_a_gate_gives(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device), config)
    [text] = generated.kernels.values()
    assert ("arg_GATE_BIAS" in text) == case.has_bias
    assert config.split()[1].split("_")[0].split("x")[0] in text
    got, want = simulate.interpret(generated, inputs), reference(case, inputs)
    assert_close(got, want, slack=4)  # W is rounded to x's dtype
    assert got.shape == (case.rows, case.packed.format.shape[1] // 2)


@pytest.mark.parametrize(
    "case",
    [
        Case("awq", COUNTS, 192, 256, 2, **GPT_OSS),  # a pair is in a word
        Case("awq", (5, 33, 0), 160, 512, 3, gate="silu"),  # of two threads
    ],
    ids=str,
)
def test_what_no_kernel_computes_is_a_kernel_of_its_own(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    config = DIRECT_16 if case.has_bias else SMALL
    generated = generate(gemm(case), lambda device: make_inputs(case, device), config)
    assert ["experts" in name for name in generated.kernels] == [True, True]
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs), slack=4)
