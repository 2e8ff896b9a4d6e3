"""Numerics of ``experts_mm_sm90``, run by Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.experts.mm_sm90 import kernel as mm_sm90
from tests.kernels.experts.test_experts_interpreted import check
from tests.support.gemms import formats
from tests.support.gemms.experts import Case, gemm, make_inputs, reference
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import assert_close
from tests.support.sampling import sampled

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]


@pytest.fixture(autouse=True)
def few_rows_and_a_small_chip(monkeypatch):
    monkeypatch.setattr(mm_sm90, "MIN_MEAN", 0)
    monkeypatch.setattr(mm_sm90, "MIN_MEAN_COMPUTED", 0)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=2)
    monkeypatch.setitem(simulate.GPUS, 90, small)  # a CTA has several tiles


SMALL, TALL = "experts_mm_sm90 32x64x64_w4_s8_g8", "experts_mm_sm90 128x64x64_w4_s4_g8"
WIDE, LARGE = "experts_mm_sm90 64x128x64_w8_s8_g8", "experts_mm_sm90 256x64x64_w4_s4_g8"
# Products of 64 and of 32 rows, or of the first 64 alone.
THIRDS, WIDE_THIRDS = "experts_mm_sm90 96x64x64_w4_s6_g8", "experts_mm_sm90 96x128x64_w4_s4_g8"
# Of K; two iterations at a time, and one.
LONG, LONG_BYTES = "experts_mm_sm90 32x128x128_w4_s6_g8", "experts_mm_sm90 32x128x128_w4_s4_g8"
# N ends within a tile; empty experts at both ends and between; rows of no expert, more than a tile;
# one expert with all rows; no expert with rows; formats along K and N, with zero points and tables
CASES = [
    (Case("gptq", (0, 3, 0, 35, 1, 0), 72, 256, left_over=3), SMALL),
    (Case("int8_channel", (0, 3, 0, 135, 1, 0), 136, 256, left_over=3), TALL),
    (Case("mxfp4", (70, 0, 64), 136, 320), WIDE),  # a turn goes beyond K
    (Case("nibble_pairs", (0, 0, 300), 72, 256), LARGE),
    (Case("mxfp4", (5, 0, 33), 72, 768), SMALL),  # scales are loaded later in a turn
    (Case("looked_up", (5, 0, 33), 72, 768), SMALL),
    (Case("awq", (5, 33, 0), 160, 512, left_over=70), SMALL),
    (Case("nf4", (0, 0), 72, 256, left_over=40), SMALL),
    (Case("fp8_row", (130, 1), 72, 256, dtype=torch.float16), TALL),
    (Case("nibble_pairs", (5, 0, 33), 136, 640, left_over=3), LONG),  # a turn goes beyond K
    (Case("int8_channel", (5, 0, 33), 136, 640, left_over=3), LONG_BYTES),
    (Case("nibble_pairs", (65, 0, 31, 97), 136, 256, left_over=40), THIRDS),
    (Case("gptq", (96, 33, 0, 130, 64), 136, 320, left_over=100), THIRDS),
    (Case("mxfp4", (70, 0, 95), 136, 320), WIDE_THIRDS),
    (Case("int8_channel", (0, 3, 0, 135, 1, 0), 136, 256, left_over=3), THIRDS),
]


@pytest.mark.parametrize(("case", "config"), sampled(CASES, 3), ids=str)
def test_rows_of_an_expert_are_close_to_fp64(case, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    check(case, config)


@pytest.mark.parametrize(
    ("name", "config", "gate"),
    sampled(
        [
            ("nibble_pairs", THIRDS, ""),
            ("nibble_pairs", TALL, "silu"),
            ("nibble_pairs", WIDE, "clamped"),
            ("mxfp4", WIDE, ""),
            ("nibble_pairs", SMALL, ""),  # few rows: in the order of memory
        ],
        2,
    ),
)
def test_rows_that_are_gathered_before_are_in_the_order_of_lanes(name, config, gate, monkeypatch):
    """What gathers them writes them so."""
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case(name, (70, 0, 7), 144, 128, 5, repeats=3, has_rows=True, gate=gate)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device), config)
    *copies, kernel = generated.kernels.values()
    assert [f"BLOCK_M : tl.constexpr = {config.split()[1].split('x')[0]}" in kernel] == [True]
    # What is next to a value was so many values beside it.
    apart = {"nibble_pairs": 4, "mxfp4": 8}[name]
    is_in_order = any(re.search(rf"\b{apart}\*x\d", text) for text in copies)
    assert len(copies) == 1
    assert is_in_order == (config != SMALL)
    got = simulate.interpret(generated, inputs)
    assert_close(got, reference(case, inputs), slack=4)
    assert not got[sum(case.counts) :].any()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [129, 128, 33])
def test_tiles_of_many_experts_are_found(count):
    """Of which a warp looks at 32 together, or at 128, with one and several a lane."""
    counts = [
        (0, 2, 0, 1, 40)[expert * 7 % 5] if expert % 11 == 0 else 0 for expert in range(count)
    ]
    counts[-1] = 3
    check(Case("int8_channel", tuple(counts), 72, 128, left_over=5), SMALL)


def test_rows_without_an_expert_are_0_whatever_the_scales_of_the_last_one():
    case = Case("int8_channel", (20, 0), 72, 256, left_over=7)
    inputs = make_inputs(case, "cpu")
    inputs[-1][-1] = math.nan
    generated = generate(gemm(case), lambda device: make_inputs(case, device), SMALL)
    got = simulate.interpret(generated, inputs)
    assert_close(got[:20], reference(case, inputs)[:20], slack=4)
    assert not got[20:].any()


@pytest.mark.parametrize("offsets", [(-5, 2, 900), (7, 3, 1), (2**31 - 1, -(2**31), 5)])
def test_arbitrary_offsets_leave_the_rows_they_miss(offsets, monkeypatch):
    """Autotuning runs on them: nothing beyond the tensors is read or written."""
    monkeypatch.setattr(formats, "GROUP", 128)
    case = Case("nibble_pairs", (2, 3, 5), 72, 256)
    x, _, *weight = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device), SMALL)
    wide = torch.full((30, 256), float("nan"), dtype=torch.bfloat16)
    wide[10:20] = x
    route = torch.tensor(offsets, dtype=torch.int32)
    got = simulate.interpret(generated, (wide[10:20], route, *weight))
    assert got.shape == (10, 72)


def test_one_compilation_serves_any_number_of_rows(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    torch.manual_seed(0)
    first = Case("nibble_pairs", (0, 3, 5), 72, 256)

    def make(device):
        x, offsets, *weight = make_inputs(first, device)
        torch._dynamo.mark_dynamic(x, 0)
        return x, offsets, *weight

    generated = generate(gemm(first), make, SMALL)
    assert any("gl.warp_specialize" in source for source in generated.kernels.values())
    for counts, left_over in (((0, 0, 1), 0), ((9, 0, 60), 4), ((0, 0, 0), 2), ((0, 0, 0), 0)):
        case = Case("nibble_pairs", counts, 72, 256, left_over)
        inputs = make_inputs(case, "cpu")
        got = simulate.interpret(generated, inputs)
        assert got.shape == (sum(counts) + left_over, 72)
        if any(counts):
            assert_close(got, reference(case, inputs), slack=4)
        assert not got[sum(counts) :].any()
