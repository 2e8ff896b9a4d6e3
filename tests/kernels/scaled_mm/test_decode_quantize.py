"""The decode kernels that quantize x: when it applies, where it is chosen, what it compiles to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.decode import kernel as decode
from inductor_quant.kernels.shared.row_quantization import RowQuantization
from inductor_quant.ops import w8a8
from inductor_quant.report.events import collect
from inductor_quant.spec.gemm import ScaleSpec
from tests.support import in_flight
from tests.support.gemms.generated import generate
from tests.support.gemms.quantizing import E4M3, FLOAT_PLAIN, FLOAT_ROUNDED, ROUNDED, Case
from tests.support.sampling import sampled

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
PROBLEM = Problem(m=1, n=4096, k=4096, has_aligned_rows=True, quantized_bytes=2)
TENSOR, CHANNEL = ScaleSpec(torch.float32, (-1, -1)), ScaleSpec(torch.float32, (-1, 1))
SPEC = w8a8.make_spec(a_scale=TENSOR, b_scale=CHANNEL, out_dtype=torch.bfloat16, bias=True)
KERNEL = "w8a8_decode_quantize"
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.mark.parametrize(
    ("m", "n", "k", "is_taken"),
    [
        (1, 8192, 4096, True),
        (2, 14336, 4096, True),
        (3, 4096, 4096, True),
        (4, 4096, 4096, True),
        (4, 6144, 4096, False),
        (5, 1024, 1024, False),
        (1, 28672, 4096, True),
        (1, 57344, 8192, False),
        (2, 28672, 4096, False),
    ],
)
def test_small_m_and_weights_only(m, n, k, is_taken):
    problem = dataclasses.replace(PROBLEM, m=m, n=n, k=k)
    assert (decode.W8A8_DECODE_QUANTIZE.rejection(SPEC, problem, H200) is None) == is_taken


def test_x_that_is_too_long_for_a_configuration():
    problem = dataclasses.replace(PROBLEM, m=2, n=1024, k=14336)
    kernel = decode.W8A8_DECODE_QUANTIZE
    legal = [
        config
        for config in kernel.configs(SPEC, problem, H200)
        if kernel.config_rejection(SPEC, problem, config, H200) is None
    ]
    assert {config.num_warps for config in legal} == {16}
    wide = dataclasses.replace(problem, quantized_bytes=4)
    assert kernel.config_rejection(SPEC, wide, legal[0], H200) is not None


@pytest.mark.parametrize(
    ("scale_ops", "want"),
    [
        (["to f32", "div 127.0"], ["scale = gl.div_rn(scale, 127.0)"]),
        (
            ["mul 0.0078125", "to f32", "add 1e-06"],
            [
                "scale = (scale * 0.0078125).to(gl.bfloat16).to(gl.float32)",
                "scale = scale + 1e-06",
            ],
        ),
        (["to f16", "to f32"], ["scale = (scale).to(gl.float16).to(gl.float32)"]),
        ([], []),
        (
            ["if_zero 0.5"],
            ["scale = (gl.where(scale == 0.0, 0.5, scale)).to(gl.bfloat16).to(gl.float32)"],
        ),
    ],
)
def test_statements_round_as_the_steps_do(scale_ops, want):
    assert (
        list(RowQuantization(torch.bfloat16, scale_ops, -128, 127, torch.int8).statements()) == want
    )


@pytest.mark.one_in(4)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("case", "registers"),
    sampled(
        [
            (Case(1, 6144, 4096, scale_ops=ROUNDED), 80),
            (Case(2, 6144, 4096), 80),
            (Case(1, 8192, 8192, dtype=torch.float32), 128),
            (Case(2, 8192, 8192), 128),
            (Case(4, 4096, 4096), 128),
            (Case(1, 4096, 14336), 128),
            (Case(2, 6144, 4096, FLOAT_PLAIN, element=E4M3), 80),
            (Case(1, 4096, 14336, FLOAT_ROUNDED, element=E4M3), 128),
        ]
    ),
    ids=str,
)
def test_nothing_spills(case, registers):
    with collect() as report:
        generated = generate(case.call(), case.inputs)
    assert report.kernels[0].chosen.startswith(case.kernel)
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    # Two words on Triton 3.9, written before the loop and read behind it.
    most = 8 if TRITON >= (3, 9) and registers == 80 else 0
    assert compiled.spill_stores <= most
    assert compiled.spill_loads <= most
    assert in_flight.spilled_in_loops(in_flight.machine_code(compiled.ptx)) == []
    assert f".maxnreg {registers}" in compiled.ptx


def layer(x, w, b_scale, bias):
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    a = (x / scale).round().clamp(-128, 127).to(torch.int8)
    return (torch._int_mm(a, w.t()).float() * scale * b_scale + bias).to(x.dtype)


def make(device, m=2):
    x, w, _, b_scale, bias = Case(m, 512, 1024).inputs(device)
    return x, w, b_scale, bias


def float_layer(x, w, b_scale, bias):
    """As torchao."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).float()
    a = (x.float() / scale).clamp(-448, 448).to(E4M3)
    w = w.view(E4M3).t()
    return torch._scaled_mm(a, w, scale, b_scale, bias, out_dtype=x.dtype, use_fast_accum=True)


def stored_scale(x, w, b_scale, bias, scale):
    a = (x.float() / scale).round().clamp(-128, 127).to(torch.int8)
    return (torch._int_mm(a, w.t()).float() * scale * b_scale + bias).to(x.dtype)


def activated(x, *given):
    return layer(torch.nn.functional.silu(x), *given)


def normalized(x, *given):
    return layer(torch.nn.functional.rms_norm(x, (1024,)), *given)


def of_a_product(x, *given):
    return layer(x @ torch.eye(1024, dtype=x.dtype, device=x.device), *given)


def chosen(fn, **options):
    with collect() as report:
        generated = generate(fn, make, **options)
    return [choice.chosen.partition(" ")[0] for choice in report.kernels], generated.kernels


@needs_gluon
@pytest.mark.parametrize("fn", [layer, of_a_product])
def test_an_activation_in_memory_is_quantized_by_the_gemm(fn):
    found, kernels = chosen(fn)
    assert found == [KERNEL]
    assert sum("cvt.rni.sat.s8" in source for source in kernels.values()) == 1


@pytest.mark.parametrize("fn", [activated, normalized])
def test_a_kernel_that_computes_the_activation_quantizes_it(fn):
    found, kernels = chosen(fn)
    assert found == ["w8a8_decode" if gluon.available() else "w8a8_mm"]
    assert len(kernels) == 2
    [quantizing] = [source for source in kernels.values() if "cvt.rni.sat.s8" in source]
    assert "rsqrt(" in quantizing or "exp(" in quantizing


@needs_gluon
@pytest.mark.parametrize("m", [1, 4])
def test_an_activation_is_quantized_to_e4m3_by_the_gemm(m):
    """One row too, whose scale is one of the tensor."""
    with collect() as report:
        generated = generate(float_layer, lambda device: make(device, m))
    assert [choice.chosen.partition(" ")[0] for choice in report.kernels] == ["fp8_decode_quantize"]
    [source] = generated.kernels.values()
    assert "gl.div_rn(x0.to(gl.float32), scale[:, None])" in source  # beyond the product's bounds
    assert "gl.fma(gl.fma(near, minus_scale, real), inv_scale, near)" in source


@pytest.mark.parametrize("bits", [8, 11], ids=["bf16", "fp16"])
def test_a_product_and_its_correction_are_the_rounded_quotient(bits):
    """Every significand of x by some of the scale. All 2**23 were tried once, in C."""
    source = np.random.default_rng(bits)
    scale = source.integers(0, 1 << 23, 2000)
    scale[:64] = [*range(32), *range((1 << 23) - 32, 1 << 23)]
    scale = (1 + scale / (1 << 23)).astype(np.float32)
    x = (1 + np.arange(1 << (bits - 1)) / (1 << (bits - 1))).astype(np.float32)[:, None]
    inverse = np.float32(1) / scale

    def fma(a, b, c):
        """Rounded once: the sum in fp64, to odd where it is inexact, is rounded to fp32."""
        product, c = a.astype(np.float64) * b, c.astype(np.float64)
        total = product + c
        above = total - c
        lost = (c - (total - above)) + (product - above)
        is_even = total.view(np.int64) % 2 == 0
        nudged = np.nextafter(total, np.copysign(np.inf, lost))
        return np.where((lost != 0) & is_even, nudged, total).astype(np.float32)

    near = x * inverse
    assert (near != x / scale).mean() > 0.1
    assert np.array_equal(fma(fma(near, -scale, x), inverse, near), x / scale)


@needs_gluon
def test_a_gemm_with_a_known_output_scale_stores_int8():
    """The first GEMM quantizes as it stores, for free."""

    def make_more(device):
        return *make(device), torch.empty(1, device=device)

    def twice(x, w, b_scale, bias, scale):
        first = stored_scale(x, w, b_scale, bias, scale)
        return stored_scale(first, w.reshape(1024, 512)[:512], b_scale, bias, scale)

    with collect() as report:
        generated = generate(twice, make_more)
    found = [choice.chosen.partition(" ")[0] for choice in report.kernels]
    assert found == [KERNEL, "w8a8_decode"]
    first, _ = generated.kernels.values()
    assert "'out_ptr1': '*i8'" in first or "'out_ptr0': '*i8'" in first
    assert len(generated.kernels) == 2


@needs_gluon
def test_gate_and_up_stay_one_launch():
    """A row reduction follows, which is fused into no GEMM."""

    def mlp(x, gate, up, down, column_scale, bias):
        parts = [layer(x, w, column_scale, bias) for w in (gate, up)]
        return layer(torch.nn.functional.silu(parts[0]) * parts[1], down, column_scale, bias)

    def make_all(device):
        weight = [torch.empty(1024, 1024, dtype=torch.int8, device=device) for _ in "gud"]
        row = torch.empty(2, 1024, dtype=torch.bfloat16, device=device)
        return row, *weight, torch.empty(1, 1024, device=device), row[0]

    with collect() as report:
        generated = generate(mlp, make_all)
    assert [choice.is_horizontal for choice in report.kernels] == [True, True, False]
    assert len(generated.kernels) == 4


@pytest.mark.parametrize(
    "options",
    [{"arch": 80}, {"arch": 100}, {"configs": "w8a8_mm 64x64x128_w4_s4_g8"}],
    ids=str,
)
def test_other_devices_and_pins_quantize_apart(options):
    config = options.pop("configs", None)
    with collect() as report:
        generated = generate(layer, make, *([config] if config else []), **options)
    assert [choice.chosen.partition(" ")[0] for choice in report.kernels] == ["w8a8_mm"]
    assert len(generated.kernels) == 2
