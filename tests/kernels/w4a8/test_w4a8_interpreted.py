"""Numerics of ``w4a8_direct``, ``w4a8_mm_sm90`` and of no kernel in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.codegen.unpack_ptx import Quad, unpack_quad
from inductor_quant.kernels.w4a8.mm_sm90 import kernel as mm_sm90
from inductor_quant.simulate.interpreter import ptx
from tests.support.gemms import formats
from tests.support.gemms.w4a8 import Case, assert_close, gemm, generate_case, make_inputs, reference

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

f32, e4m3 = torch.float32, torch.float8_e4m3fn
DIRECT, MM = "w4a8_direct", "w4a8_mm_sm90"
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def generated_by(kernel, case, config):
    generated = generate_case(case, f"{kernel} {config}")
    [chosen, *_] = [choices[0].name for choices in generated.choices]
    assert f"inductor_quant_{kernel}_" in chosen
    return generated


@pytest.mark.parametrize(
    ("kernel", "case", "config"),
    [
        (DIRECT, Case("nibble_pairs", 7, 40, 256, zero="float", sums=True), "8x32x64_w2_s1_g8"),
        # zero points are data
        (DIRECT, Case("gptq", 5, 64, 128, groups=False), "8x32x32_w1_s1_g8"),
        # nibbles of four words
        (DIRECT, Case("awq", 13, 64, 256, groups=False), "16x64x128_w4_s1_g8"),
        (DIRECT, Case("int4_words", 4, 64, 256, zero="int", sums=True), "8x32x128_w2_s1_g8_k2"),
        # 3 slices of K for 2 warps of 2 CTAs
        (DIRECT, Case("nibble_pairs", 3, 32, 384), "8x32x256_w2_s1_g8"),
        (DIRECT, Case("nibble_pairs", 19, 40, 256), "32x16x256_w2_s1_g8"),
        pytest.param(
            *(DIRECT, Case("int4_words", 31, 64, 256, groups=False), "32x32x256_w2_s1_g8"),
            marks=slow,
        ),
        (MM, Case("nibble_pairs", 40, 64, 640), "64x64x128_w4_s4_g8"),  # a turn goes beyond K
        (MM, Case("nibble_pairs", 40, 64, 512, a_dtype=e4m3), "64x64x128_w4_s4_g8"),
        pytest.param(
            *(MM, Case("int4_words", 40, 64, 256, times=2, a_dtype=e4m3), "64x64x64_w4_s4_g8"),
            marks=slow,
        ),
        (MM, Case("int4_words", 20, 64, 384, zero="const", sums=True), "32x64x128_w4_s4_g8"),
        pytest.param(
            MM, Case("gptq", 70, 128, 256, groups=False), "64x128x64_w8_s4_g8_k2", marks=slow
        ),
        pytest.param(
            DIRECT,
            Case("int4_words", 4, 64, 128, scales=("tensor", "none"), bias=False, times=16),
            "8x32x128_w1_s1_g8",
            marks=slow,
        ),
        pytest.param(MM, Case("awq", 17, 64, 256, groups=False), "32x64x64_w4_s4_g8", marks=slow),
        pytest.param(
            MM,
            Case("int4_words", 70, 96, 256, times=3, zero="tensor", sums=True),
            "64x64x64_w4_s4_g8_k2",
            marks=slow,
        ),
        pytest.param(
            MM,
            Case("nibble_pairs", 64, 64, 512, zero="int", sums=True),
            "64x64x64_w4_s4_g8_k2",
            marks=slow,
        ),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(kernel, case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(kernel, case, config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@slow
@pytest.mark.parametrize("groups", [False, True])
def test_tiles_that_ctas_share_are_close_to_fp64(groups, monkeypatch):
    """Three tiles on one SM."""
    torch.manual_seed(0)
    chip = dataclasses.replace(simulate.GPUS[90], num_sms=1)
    monkeypatch.setitem(simulate.GPUS, 90, chip)
    monkeypatch.setattr(mm_sm90, "SHARED_CYCLES", -1e9)
    case = Case("nibble_pairs", 40, 192, 1024, groups=groups)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(MM, case, "64x64x128_w4_s6_g8")
    assert any("SCRATCH" in source for source in generated.kernels.values())
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("kernel", "case", "config"),
    [
        (DIRECT, Case("nibble_pairs", 5, 64, 256, to_int8="round"), "8x32x128_w2_s1_g8"),
        (MM, Case("nibble_pairs", 40, 64, 512, to_int8="wrap"), "64x64x128_w4_s4_g8"),
        # nibbles of four words, zero points that are data
        (DIRECT, Case("gptq", 5, 64, 128, to_int8="wrap"), "8x32x32_w1_s1_g8"),
        pytest.param(
            MM, Case("gptq", 40, 64, 512, to_int8="round"), "64x64x128_w4_s4_g8", marks=slow
        ),
        pytest.param(
            MM, Case("awq", 20, 64, 256, to_int8="round"), "32x64x64_w4_s4_g8", marks=slow
        ),
    ],
    ids=str,
)
def test_what_is_made_int8_is_exact(kernel, case, config):
    torch.manual_seed(0)
    case = dataclasses.replace(case, out_dtype=f32, scales=("none", "none"), bias=False)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(kernel, case, config)
    assert torch.equal(simulate.interpret(generated, inputs), gemm(case)(*inputs))


def test_all_codes_and_scales_of_qqq_are_rounded_as_in_fp32():
    """In range, at its edge (127.5, -128.5) and beyond, where torch's spelling clamps."""
    scales = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    scales = scales[scales.view(torch.float16).isfinite()]
    twice = (scales.int() & 0xFFFF) * 0x00010001
    asm = unpack_quad(Quad(is_high=False, is_flipped=False, becomes="round"))
    for first in range(0, 16, 4):
        word = sum(first + i << 4 * i for i in range(4))
        given = [torch.full_like(twice, number) for number in (word, 0x5140, 0x64086408)]
        given = [t[:, None].expand(-1, 4).contiguous().numpy() for t in (*given, twice)]
        [got] = ptx.run(asm.text, given, [np.int8], 4)
        codes = torch.arange(first, first + 4.0) - 8
        want = (codes * scales.view(torch.float16).float()[:, None]).round().clamp(-128, 127)
        assert torch.equal(torch.from_numpy(got.view(np.int8)).float(), want)


@pytest.mark.parametrize("is_signed", [False, True])
def test_all_codes_are_their_integers_in_e4m3(is_signed):
    asm = unpack_quad(Quad(is_high=False, is_flipped=is_signed, becomes="e4m3"))
    for first in range(0, 16, 4):
        word = sum(first + i << 4 * i for i in range(4))
        given = [np.full(4, number, np.int32) for number in (word, 0x5140)]
        [got] = ptx.run(asm.text, given, [np.int8], 4)
        codes = torch.arange(first, first + 4.0)
        want = codes - 16 * (codes >= 8) if is_signed else codes - 8
        assert torch.equal(torch.from_numpy(got.view(np.int8)).view(e4m3).float() * 512, want)


@pytest.mark.parametrize(
    ("kernel", "name", "config"),
    [
        (DIRECT, "nibble_pairs", "16x64x64_w1_s1_g8"),
        (MM, "int4_words", "32x64x64_w4_s4_g8"),
        pytest.param(DIRECT, "gptq", "16x64x64_w1_s1_g8", marks=slow),
        pytest.param(DIRECT, "awq", "16x64x64_w1_s1_g8", marks=slow),
        pytest.param(MM, "gptq", "32x64x64_w4_s4_g8", marks=slow),
        pytest.param(MM, "awq", "32x64x64_w4_s4_g8", marks=slow),
    ],
)
def test_rows_of_one_number_give_the_integers_bit_for_bit(kernel, name, config):
    torch.manual_seed(0)
    m = int(config.partition("x")[0])
    case = Case(name, m, 64, 128, f32, groups=False, scales=("none", "none"), bias=False)
    weight = make_inputs(case, "cpu")[6:]
    generated = generated_by(kernel, case, config)
    at = torch.arange(128 - m, 128)
    a = torch.zeros(m, 128, dtype=torch.int8)
    a[torch.arange(m), at] = -128
    arguments = (a, None, None, None, None, None, *weight)
    assert torch.equal(simulate.interpret(generated, arguments), gemm(case)(*arguments))


@pytest.mark.parametrize(
    "case",
    [
        Case("nibble_pairs", 40, 64, 128, layout="every_second", groups=False),  # as w8a8
        Case("gptq", 12, 64, 128, zero="float"),  # as weight_only
        pytest.param(Case("shift_table", 7, 64, 128, zero="int"), marks=slow),
        pytest.param(Case("nibble_pairs", 70, 64, 256, layout="every_second"), marks=slow),
        # zero points without sums of the weight
        Case("int4_words", 40, 64, 128, zero="int"),
        pytest.param(Case("nibble_pairs", 5, 64, 256, zero="const"), marks=slow),
        pytest.param(Case("nibble_pairs", 150, 64, 256, groups=False, zero="float"), marks=slow),
    ],
    ids=str,
)
def test_what_no_kernel_takes_is_right(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate_case(case)
    assert not any("w4a8_" in choices[0].name for choices in generated.choices)
    # with groups the scaled weight is rounded to bf16, as by weight_only
    slack = 2.0 if case.format != dataclasses.replace(case, groups=False).format else 1.0
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs), slack=slack)
