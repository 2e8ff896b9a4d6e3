"""The decode kernels that quantize x, on a GPU: every element against fp64."""

from __future__ import annotations

import pytest
import torch

import inductor_quant
from inductor_quant.ops.fusion import quantized_linear
from tests.support.gemms.quantizing import (
    E4M3,
    FLOAT_NARROW,
    FLOAT_PLAIN,
    FLOAT_ROUNDED,
    PLAIN,
    ROUNDED,
    Case,
)
from tests.support.gemms.w8a8 import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("hopper")]
KERNEL = "w8a8_decode_quantize"


def run(fn, *inputs, **options):
    options = {"on_error": "raise"} | options
    options = {f"inductor_quant.{name}": value for name, value in options.items()}
    with inductor_quant.collect() as report, torch.no_grad():
        compiled = torch.compile(fn, backend="inductor_quant", options=options, dynamic=False)
        got = compiled(*inputs)
    return got, [choice.chosen.partition(" ")[0] for choice in report.kernels]


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 4096, 4096),
        Case(1, 6144, 4096),  # few registers
        Case(1, 4096, 14336, scale_ops=PLAIN),
        Case(1, 4096, 11008, scale_ops=ROUNDED),
        Case(1, 1024, 4096, dtype=torch.float16),
        Case(1, 8192, 8192, dtype=torch.float32),
        Case(2, 6144, 4096, scale_ops=ROUNDED, low=-127),  # x is loaded twice
        Case(2, 4096, 7168),
        Case(2, 33, 128, dtype=torch.float16, has_bias=False),
        Case(3, 4096, 1024, distance=8),
        Case(4, 4099, 1152, scale_ops=ROUNDED, dtype=torch.float16),
        Case(4, 2048, 2048, scale_ops=("to f32", "div 119.0")),  # beyond -128 ... 127
        Case(1, 4096, 4096, scale_ops=None),
        Case(2, 6144, 4096, scale_ops=None, low=-127),
        Case(4, 2048, 2048, scale_ops=None, per_token=True),
        Case(1, 6144, 4096, FLOAT_ROUNDED, element=E4M3),  # few registers
        Case(1, 4096, 14336, FLOAT_PLAIN, element=E4M3),
        Case(2, 6144, 4096, FLOAT_ROUNDED, element=E4M3),  # x is loaded twice
        Case(3, 4099, 1152, FLOAT_NARROW, element=E4M3, distance=8),
        Case(4, 2048, 2048, FLOAT_PLAIN, element=E4M3, dtype=torch.float16),
        Case(4, 2048, 2048, None, per_token=True, element=E4M3),
    ],
    ids=str,
)
def test_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = case.inputs("cuda")
    got, kernels = run(case.call(), *inputs)
    assert kernels == [case.kernel]
    assert_close(got, case.meaning(inputs), case.dtype)


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("scale_ops", [FLOAT_PLAIN, FLOAT_ROUNDED, FLOAT_NARROW])
def test_e4m3_has_the_bits_of_eager_mode(scale_ops, m):
    """The weight is the identity, so the result shows every quantized value."""
    torch.manual_seed(0)
    case = Case(m, 2048, 2048, scale_ops, has_bias=False, element=E4M3)
    x, *_ = case.inputs("cuda")
    # Some quotients are halfway between two numbers, where a product with the reciprocal is not.
    x[0, 1:257] = torch.arange(256, device="cuda") / 512
    x[0, 0] = 196
    weight = torch.eye(2048, device="cuda").to(E4M3)
    x = x.clamp(-196, 196)
    got, kernels = run(case.call(), x, weight, None, torch.ones(1, 2048, device="cuda"), None)
    assert kernels == ["fp8_decode_quantize"]
    # On the CPU: in eager mode a GPU multiplies by the reciprocal of 448.
    a, scale = quantized_linear.quantized(x.cpu(), None, case.steps, -128, 127, E4M3)
    assert torch.equal(got.cpu(), (a.float() * scale.float()).to(got.dtype))


@pytest.mark.parametrize("config", ["8x16x4096_w16_s1_g8", "8x16x512_w4_s1_g8"])
def test_pinned_configurations(config):
    torch.manual_seed(0)
    case = Case(2, 1000, 1536, scale_ops=ROUNDED)
    inputs = case.inputs("cuda")
    got, kernels = run(case.call(), *inputs, configs=(f"{KERNEL} {config}",))
    assert kernels == [KERNEL]
    assert_close(got, case.meaning(inputs), case.dtype)


def layer(x, w, b_scale, bias):
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    a = (x / scale).round().clamp(-128, 127).to(torch.int8)
    return (torch._int_mm(a, w.t()).float() * scale * b_scale + bias).to(x.dtype)


@pytest.mark.parametrize("m", [1, 4])
def test_layer_with_an_epilogue(m):
    torch.manual_seed(0)
    x, w, _, b_scale, bias = Case(m, 2048, 2048).inputs("cuda")
    residual = torch.randn(m, 2048, device="cuda", dtype=torch.bfloat16)

    def fn(x, residual, *given):
        return torch.nn.functional.silu(layer(x, *given)) + residual

    got, kernels = run(fn, x, residual, w, b_scale, bias)
    assert kernels == [KERNEL]
    apart, kernels = run(fn, x, residual, w, b_scale, bias, fuse_quantization=False)
    assert kernels == ["w8a8_decode"]
    # The scale's last bit: Inductor multiplies by 1 / 127.
    assert (got != apart).float().mean() < 0.02
    torch.testing.assert_close(got, apart, rtol=0.02, atol=0.5)


def test_rows_that_are_not_finite():
    x, w, _, b_scale, bias = Case(4, 256, 512, has_bias=False).inputs("cuda")
    bias = torch.zeros(256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    x[0], x[1, 3], x[2, 7] = 0, torch.nan, torch.inf
    got, kernels = run(layer, x, w, b_scale, bias)
    apart, _ = run(layer, x, w, b_scale, bias, fuse_quantization=False)
    assert kernels == [KERNEL]
    torch.testing.assert_close(got[:3], apart[:3], rtol=0, atol=0, equal_nan=True)
    assert got[0].eq(0).all()
    assert got[1].isnan().all()
    assert got[2].isnan().all()
    assert got[3].isfinite().all()
