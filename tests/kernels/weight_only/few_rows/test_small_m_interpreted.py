"""Numerics of ``weight_only_small_m`` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.weight_only.small_m.kernel import WEIGHT_ONLY_SMALL_M
from inductor_quant.ops import weight_only
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat
from tests.support.gemms.formats import form
from tests.support.gemms.generated import device, generate
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    described,
    exact,
    gemm,
    make_inputs,
    one_hot_rows,
)
from tests.support.sampling import sampled

pytestmark = [pytest.mark.interp, pytest.mark.usefixtures("large_groups")]

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = ("gptq", "awq", "nibble_pairs", "int4_words", "uint2")
CONFIGS = (
    "8x128x128_w2_s3_g8",
    "8x256x128_w2_s3_g8_k2",
    "16x128x64_w1_s3_g8_k4",
    "16x64x128_w1_s2_g8",
    "32x64x64_w1_s3_g8_k8",
)


def run(fn, make, inputs, config):
    pinned = () if config is None else (f"weight_only_small_m {config}",)
    generated = generate(fn, make, *pinned)
    assert any("inline_asm" in source for source in generated.kernels.values())
    return simulate.interpret(generated, inputs)


def run_case(case, config):
    """fp32 sums of ``base + field`` lose a few bits to the base (128 or 1024). How many depends on
    the order of NumPy's sums, hence on the CPU: up to 4.6e-6 and 1.0e-4 with AVX2."""
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got = run(gemm(case), lambda device: make_inputs(case, device), inputs, config)
    assert_close(
        got, exact(case, inputs), slack={bf16: 16, f16: 256}[case.dtype] if got.dtype == f32 else 1
    )


@pytest.mark.parametrize(
    ("name", "config"),
    sampled(
        (n, c) for i, n in enumerate(FORMATS) for j, c in enumerate(CONFIGS) if (i + j) % 2 == 0
    ),
)
def test_every_format_in_every_kind_of_tile(name, config):
    m = 25 if config.startswith("32x") else 5
    run_case(Case(name, m, 256, 512, bias=True), config)


@pytest.mark.parametrize(
    "case",
    sampled(
        [
            *(Case("gptq", m, 256, 1024, bias=True, column_scale="channel") for m in (1, 8, 9, 16)),
            *(Case(name, 3, 256, 512, f16) for name in FORMATS),
            *(Case("awq", 3, 256, 512, dtype, out_dtype=f32) for dtype in (bf16, f16)),
            *(Case(name, 3, 256, 512, layout="columns") for name in FORMATS[:3]),
            *(Case(name, 3, 256, 512, layout="every_second") for name in FORMATS[2:]),
            Case("gptq", 3, 256, 512, column_scale="tensor"),
        ]
    ),
    ids=str,
)
def test_the_first_configuration_is_right(case):
    spec, problem = described(case)
    config, *_ = map(str, WEIGHT_ONLY_SMALL_M.configs(spec, problem, device(90)))
    run_case(case, config if case.layout == "rows" else None)  # else no other kernel takes it


@pytest.mark.parametrize(
    ("name", "dtype", "config"),
    [*((name, bf16, CONFIGS[0]) for name in FORMATS), ("gptq", f16, CONFIGS[2])],
)
def test_one_hot_rows_give_the_weight_bit_for_bit(name, dtype, config):
    """Each k alone, in every third block of 16: one product, scaled in fp32, rounded once."""

    def generated_by(fn, make):
        generated = generate(fn, make, f"weight_only_small_m {config}")
        assert any("inline_asm" in source for source in generated.kernels.values())
        return generated

    for got, want in one_hot_rows(Case(name, 16, 128, 256, dtype), generated_by, 3):
        assert torch.equal(got, want)


def test_signed_fields_an_addend_and_ops_in_any_order():
    """int32 [N, K/8] of int4 plus 3; times a scale, minus a folded zero point, over a constant."""
    element = Field(
        0,
        (form(("n0", 1)), form(("k0", 16), ("k1", 1))),
        AffineIndex(tables=(("k2", (28, 0, 24, 4, 20, 8, 16, 12)),)),
        4,
        True,
        3,
    )
    grouped = (form(("k0", 1)), form(("n0", 1)))
    steps = (
        DequantOp("mul", Field(1, grouped)),
        DequantOp("sub", Field(2, grouped)),
        DequantOp("div", 3.0),
        DequantOp("add", 0.5),
    )
    format = WeightFormat((2, 16, 8), (128,), element, steps)
    torch.manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (128, 32), dtype=torch.int64).to(torch.int32)
    weight = [words, torch.rand(2, 128), torch.randn(2, 128)]
    x = torch.randn(7, 256).to(bf16)
    text = format.encode()

    def fn(x, *weight):
        return weight_only.op(x, list(weight), None, None, format=text, out_dtype=f32)

    def make(device):
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in (x, *weight))

    got = run(fn, make, (x, *weight), CONFIGS[0])
    want = x.double() @ weight_only.dequantize(format, weight).double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
