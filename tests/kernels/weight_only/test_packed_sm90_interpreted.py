"""Numerics of ``weight_only_medium_m_sm90`` and ``..._large_m_sm90`` in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from tests.support.gemms import formats
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    gemm,
    make_inputs,
    one_hot_rows,
    reference,
)

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

bf16, f16 = torch.bfloat16, torch.float16
COPIES, TMA = "weight_only_medium_m_sm90", "weight_only_large_m_sm90"


@pytest.fixture(autouse=True)
def large_groups_and_a_small_chip(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=3)
    monkeypatch.setitem(simulate.GPUS, 90, small)  # so that a CTA has several tiles


def generate_gluon(fn, make, config, kernel=COPIES):
    generated = generate(fn, make, f"{kernel} {config}")
    mark = "gl.warp_specialize" if kernel == TMA else "gl.inline_asm"
    assert any(mark in source for source in generated.kernels.values())
    return generated


@pytest.mark.parametrize(
    ("case", "kernel", "config"),
    [
        (Case("int4_words", 40, 128, 512, bias=True), COPIES, "64x64x64_w4_s4_g8"),
        (Case("gptq", 70, 128, 512, f16, bias=True), COPIES, "64x128x64_w4_s4_g8"),
        (Case("gptq", 17, 128, 1024, f16, column_scale="channel"), COPIES, "32x64x128_w4_s4_g8_k2"),
        (Case("gptq", 100, 128, 512, f16), COPIES, "128x128x64_w8_s3_g8"),
        (Case("gptq", 260, 256, 128, f16, bias=True), TMA, "256x128x64_w8_s4_g8"),
        (Case("gptq", 130, 128, 512, f16, column_scale="channel"), TMA, "256x64x64_w4_s3_g8_k2"),
        (Case("gptq", 140, 128, 512, f16, bias=True), TMA, "128x64x128_w8_s4_g8"),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(case, kernel, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate_gluon(gemm(case), lambda device: make_inputs(case, device), config, kernel)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


def test_an_epilogue_is_in_the_kernel():
    case = Case("gptq", 40, 128, 512, f16, bias=True)

    def make(device):
        torch.manual_seed(0)
        return torch.randn(40, 128, device=device).to(f16), *make_inputs(case, device)

    def fn(residual, *inputs):
        return torch.nn.functional.silu(gemm(case)(*inputs)) + residual

    residual, *inputs = make("cpu")
    generated = generate_gluon(fn, make, "64x128x64_w4_s4_g8")
    assert len(generated.kernels) == 1
    want = torch.nn.functional.silu(reference(case, tuple(inputs))) + residual.double()
    assert_close(simulate.interpret(generated, (residual, *inputs)), want)


def test_x_that_is_computed_from_a_transpose_is_stored_by_rows():
    """By default Inductor stores in the order in which it loads."""
    case = Case("gptq", 40, 128, 512, f16)

    def make(device):
        torch.manual_seed(0)
        x, *others = make_inputs(case, device)
        return x.t().contiguous(), *others

    def fn(columns, *others):
        return gemm(case)(columns.t() * 2, *others)

    columns, *others = make("cpu")
    generated = generate_gluon(fn, make, "64x128x64_w4_s4_g8")
    want = reference(case, (columns.t() * 2, *others))
    assert_close(simulate.interpret(generated, (columns, *others)), want)


@pytest.mark.parametrize(
    ("kernel", "m", "config", "dtype"),
    [(COPIES, 64, "64x64x64_w4_s4_g8", f16), (TMA, 256, "256x64x64_w4_s4_g8", bf16)],
)
def test_one_hot_rows_give_the_weight_bit_for_bit(kernel, m, config, dtype, monkeypatch):
    monkeypatch.setattr(formats, "f16", dtype)  # of scales

    def generated_by(fn, make):
        return generate_gluon(fn, make, config, kernel)

    for got, want in one_hot_rows(Case("gptq", m, 64, 256, dtype), generated_by):
        assert torch.equal(got, want)
