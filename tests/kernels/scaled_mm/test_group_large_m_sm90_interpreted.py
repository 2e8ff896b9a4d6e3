"""Numerics of the kernels for groups and many rows, run by Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.scaled_mm.group_large_m_sm90 import kernel as group_large_m_sm90
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.ops.w4a8 import op as w4a8_op
from tests.support.gemms import formats, fp8, w4a8
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import Case, assert_close, gemm, make_inputs, reference

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]


@pytest.fixture(autouse=True)
def any_size_and_a_small_chip(monkeypatch):
    """A CTA has several tiles."""
    monkeypatch.setattr(group_large_m_sm90, "MIN_M", 0)
    monkeypatch.setattr(group_large_m_sm90, "MIN_FILL", 0)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=2)
    monkeypatch.setitem(simulate.GPUS, 90, small)


def interpreted(fn, make, rows, family="w8a8"):
    config = next(each for each in group_large_m_sm90.CONFIGS if each.block_m == rows)
    generated = generate(fn, make, f"{family}_group_large_m_sm90 {config}")
    assert any("gl.warp_specialize" in source for source in generated.kernels.values())
    inputs = make("cpu")
    return simulate.interpret(generated, inputs), inputs


@pytest.mark.parametrize(
    ("rows", "case"),
    [
        (256, Case(300, 200, 640, group=128)),
        (128, Case(140, 256, 768, group=256, scale_dtype=torch.bfloat16, w_layout="padded")),
        (256, Case(1, 136, 384, a_scale="none", out_dtype=torch.float16, bias=False, group=128)),
    ],
    ids=str,
)
def test_every_element(rows, case):
    """M and N end within a tile; odd and even numbers of steps, more than stages."""
    torch.manual_seed(0)
    got, inputs = interpreted(gemm(case), functools.partial(make_inputs, case), rows)
    assert_close(got, reference(inputs))


@pytest.mark.parametrize(
    ("rows", "case"),
    [
        (256, fp8.Case(300, 200, 640, group=128)),
        (
            128,
            fp8.Case(140, 256, 768, group=256, scale_dtype=torch.bfloat16, w_dtype=fp8.e5m2),
        ),
        (256, fp8.Case(40, 136, 384, a_scale="none", bias=False, group=128)),
    ],
    ids=str,
)
def test_every_element_of_fp8(rows, case):
    torch.manual_seed(0)
    make = functools.partial(fp8.make_inputs, case)
    got, inputs = interpreted(fp8.gemm(case), make, rows, "fp8")
    assert_close(got, fp8.reference(case, inputs))


def test_an_epilogue_with_a_residual():
    torch.manual_seed(0)
    case = Case(140, 200, 256, group=128)

    def make(device):
        residual = torch.empty(case.m, case.n, dtype=torch.bfloat16, device=device)
        return residual.fill_(0.5) if device == "cpu" else residual, *make_inputs(case, device)

    got, inputs = interpreted(lambda r, *x: F.silu(gemm(case)(*x)) + r, make, 256)
    assert_close(got, F.silu(reference(inputs[1:])) + 0.5, slack=2)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("w8a8", w4a8.Case("nibble_pairs", 140, 136, 256)),
        ("w8a8", w4a8.Case("gptq", 140, 136, 256, scales=("token", "none"))),
        ("fp8", w4a8.Case("nibble_pairs", 140, 136, 256, a_dtype=fp8.e4m3)),
        # a zero point of each group: from -15 to 15
        ("fp8", w4a8.Case("awq", 140, 136, 256, scales=("none", "none"), a_dtype=fp8.e4m3)),
    ],
    ids=str,
)
def test_an_int4_weight_of_groups_is_written_once(family, case, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(formats, "GROUP", 128)
    for name in ("MAX_M_UNPACKED", "MAX_M_AS_FLOATS", "MIN_K_WRITTEN"):
        monkeypatch.setattr(rules, name, 0)
    generated = w4a8.generate_case(case)
    sources = " ".join(generated.kernels.values())
    written = "weight_only_dequantize" in sources
    assert (f"{family}_group_large_m_sm90" in sources, written) == (True, True)
    inputs = w4a8.make_inputs(case, "cpu")
    got = simulate.interpret(generated, inputs)
    assert_close(got, w4a8.reference(case, inputs), slack=2)


def test_a_factor_of_an_e4m3_product_goes_to_the_scales_of_groups(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(formats, "GROUP", 128)
    for name in ("MAX_M_UNPACKED", "MAX_M_AS_FLOATS", "MIN_K_WRITTEN"):
        monkeypatch.setattr(rules, name, 0)
    case = w4a8.Case("nibble_pairs", 140, 136, 256, bias=False, a_dtype=fp8.e4m3)
    text = case.format.encode()

    def fn(a, a_scale, b_scale, bias, zero, sums, *weight):
        given = a, list(weight), a_scale, b_scale, None
        return w4a8_op(*given, format=text, alpha=0.375, out_dtype=torch.bfloat16)

    generated = generate(fn, functools.partial(w4a8.make_inputs, case))
    assert "fp8_group_large_m_sm90" in " ".join(generated.kernels.values())
    inputs = w4a8.make_inputs(case, "cpu")
    got = simulate.interpret(generated, inputs)
    assert_close(got, w4a8.reference(case, inputs) * 0.375, slack=2)
