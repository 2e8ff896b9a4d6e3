"""Numerics of the weight_only kernel for few rows, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.ops import weight_only
from inductor_quant.weight_format import Field, Form, Step, WeightFormat
from tests.support import formats
from tests.support.formats import form
from tests.support.generated import generate
from tests.support.weight_only import Case, assert_close, exact, gemm, make_inputs

pytestmark = pytest.mark.interp

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = ("gptq", "awq", "nibble_pairs", "int4_words", "uint2")
CONFIGS = (
    "8x128x128_w2_s3_g8",
    "8x256x128_w2_s3_g8_k2",
    "16x128x64_w1_s3_g8_k4",
    "16x64x128_w1_s2_g8",
    "32x64x64_w1_s3_g8_k8",
)


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    """Groups as producers have them: a block of K lies within one."""
    monkeypatch.setattr(formats, "GROUP", 128)


def run(fn, make, inputs, config=None):
    pinned = () if config is None else (f"weight_only_few_rows {config}",)
    generated = generate(fn, make, *pinned)
    assert any("inline_asm" in source for source in generated.kernels.values())
    return simulate.interpret(generated, inputs)


def run_case(case, config=None):
    """fp32 sums hold ``base + field``: a few bits are lost to the base, 128 or 1024, beside fields
    of 4 bits. How many depends on the order in which NumPy's library adds, which is another on
    another CPU: with AVX2 alone the largest errors are 4.6e-6 and 1.0e-4."""
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got = run(gemm(case), lambda device: make_inputs(case, device), inputs, config)
    assert_close(
        got, exact(case, inputs), slack={bf16: 16, f16: 256}[case.dtype] if got.dtype == f32 else 1
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_format_in_every_kind_of_tile(name, config):
    run_case(Case(name, 5, 256, 512, bias=True), config)


@pytest.mark.parametrize(
    "case",
    [
        *(Case("gptq", m, 256, 1024, bias=True, column_scale="channel") for m in (1, 8, 9, 16, 32)),
        *(Case(name, 3, 256, 512, f16) for name in FORMATS),
        *(Case("awq", 3, 256, 512, dtype, out_dtype=f32) for dtype in (bf16, f16)),
        *(Case(name, 3, 256, 512, layout="columns") for name in FORMATS),
        *(Case(name, 3, 256, 512, layout="every_second") for name in FORMATS),
        Case("gptq", 3, 256, 512, column_scale="tensor"),
    ],
    ids=str,
)
def test_the_first_configuration_is_right(case):
    run_case(case)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "config"), [(bf16, CONFIGS[0]), (f16, CONFIGS[2])])
def test_one_hot_rows_give_the_weight_bit_for_bit(name, dtype, config):
    """Every k alone, in blocks of 16 rows: sums of one product, scaled in fp32, rounded once."""
    torch.manual_seed(0)
    case = Case(name, 256, 128, 256, dtype)
    _, _, _, *weight = make_inputs(case, "cpu")
    text = case.packed.format.encode()
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)

    def fn(x, *weight):
        return weight_only.op(x, list(weight), None, None, format=text, out_dtype=dtype)

    def make(device):
        x, _, _, *weight = make_inputs(Case(name, 16, 128, 256, dtype), device)
        return x, *weight

    generated = generate(fn, make, f"weight_only_few_rows {config}")
    assert any("inline_asm" in source for source in generated.kernels.values())
    for rows in torch.eye(256).to(dtype).split(16):
        got = simulate.interpret(generated, (rows, *weight))
        assert torch.equal(got, want[rows.argmax(1)])


def test_signed_fields_an_addend_and_steps_in_any_order():
    """Words of int32 [N, K/8], numbers -8 to 7 plus 3; times a scale, less a folded zero, over a
    constant."""
    element = Field(
        0,
        (form(("n0", 1)), form(("k0", 16), ("k1", 1))),
        Form(tables=(("k2", (28, 0, 24, 4, 20, 8, 16, 12)),)),
        4,
        True,
        3,
    )
    grouped = (form(("k0", 1)), form(("n0", 1)))
    steps = (
        Step("mul", Field(1, grouped)),
        Step("sub", Field(2, grouped)),
        Step("div", 3.0),
        Step("add", 0.5),
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
