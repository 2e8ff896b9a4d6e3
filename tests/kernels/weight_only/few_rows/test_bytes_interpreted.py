"""Numerics of ``weight_only_bytes`` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.weight_only.bytes import kernel as bytes_kernel
from inductor_quant.ops import weight_only
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat
from tests.support.gemms.formats import form
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import Case, assert_close, exact, gemm, make_inputs

pytestmark = [pytest.mark.interp, pytest.mark.usefixtures("large_groups")]

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
i8, u8, e4m3, e5m2 = torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = ("int8_channel", "int8_group", "int8_folded", "fp8_row", "fp8_block", "hqq")
CONFIGS = ("8x64x128_w2_s3_g8", "64x64x64_w4_s3_g8_k2")


def run(fn, make, inputs, config=None):
    pinned = () if config is None else (f"weight_only_bytes {config}",)
    generated = generate(fn, make, *pinned)
    assert any("w_offsets = bytes_n" in source for source in generated.kernels.values())
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        *((Case(name, 5, 128, 256, bias=True), CONFIGS[0]) for name in FORMATS),
        *((Case(name, 5, 128, 256, f16, bias=True), CONFIGS[1]) for name in FORMATS[::2]),
        (Case("hqq", 20, 128, 256, f16, column_scale="channel"), "32x64x32_w2_s4_g8"),
        (Case("int8_channel", 1, 256, 1024, layout="every_second", out_dtype=f32), None),
        # tiles end beyond N, the last slice beyond K
        (Case("int8_channel", 5, 72, 208, bias=True), "8x64x128_w2_s3_g8"),
        (Case("fp8_row", 70, 72, 208, f16, bias=True), "64x64x64_w4_s3_g8_k2"),
        (Case("int8_channel", 3, 72, 144), "8x16x128_w1_s3_g8_k4"),  # the last two have nothing
    ],
    ids=str,
)
def test_result_is_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    if case.layout == "every_second":  # of x and scales; the bytes stay contiguous
        inputs = (*inputs[:3], *(t.contiguous() for t in inputs[3:]))

    def make(device):
        return tuple(
            None
            if t is None
            else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
            for t in inputs
        )

    got = run(gemm(case), make, inputs, config)
    assert_close(got, exact(case, inputs))


def every_byte(dtype):
    """[64, 256]: every byte in every row, at a different k."""
    rows = [torch.arange(256).roll(17 * row) for row in range(64)]
    return torch.stack(rows).to(u8).view(dtype)


def plain(dtype):
    element = Field(0, (form(("n0", 1)), form(("k0", 1))))
    return WeightFormat((256,), (64,), element), every_byte(dtype)


def packed_words():
    """Four unsigned bytes along K in an int32 [N, K / 4]; 128 is zero."""
    element = Field(0, (form(("n0", 1)), form(("k0", 1))), form(("k1", 8)), 8, add=-128)
    return WeightFormat((64, 4), (64,), element), every_byte(u8).view(torch.int32)


def halves():
    """uint4, the first half of N in the high bits."""
    element = Field(0, (form(("n1", 1)), form(("k0", 1))), form(("n0", -4), const=4), 4)
    return WeightFormat((256,), (2, 64), element), every_byte(u8)


def product(format, weight, dtype, rows):
    """The kernel's results for blocks of 16 ``rows``."""
    text = format.encode()

    def fn(x, weight):
        return weight_only.op(x, [weight], None, None, format=text, out_dtype=dtype)

    def make(device):
        x = torch.empty(16, 256, dtype=dtype, device=device)
        return x, torch.empty(weight.shape, dtype=weight.dtype, device=device)

    generated = generate(fn, make, "weight_only_bytes 16x64x64_w4_s3_g8")
    assert any("w_offsets = bytes_n" in source for source in generated.kernels.values())
    return [simulate.interpret(generated, (part, weight)) for part in rows.split(16)]


def quarters():
    """int2 plus 1, times a scale per group; a byte holds four quarters of N, at bits 0, 6, 2, 4."""
    row = form(("n1", 1))
    offset = AffineIndex(tables=(("n0", (0, 6, 2, 4)),))
    element = Field(0, (row, form(("k0", 128), ("k1", 1))), offset, 2, True, add=-1)
    scale = DequantOp("mul", Field(1, (form(("n0", 64), ("n1", 1)), form(("k0", 1)))))
    return WeightFormat((2, 128), (4, 64), element, (scale,))


@pytest.mark.parametrize("config", ["8x64x128_w1_s3_g8_k2", "64x128x64_w4_s3_g8"])
def test_quarters_of_n_in_a_byte(config, monkeypatch):
    monkeypatch.setattr(bytes_kernel, "MIN_WIDTH", 2)
    torch.manual_seed(0)
    format = quarters()
    bytes = torch.randint(0, 256, (64, 256), dtype=u8)
    weight = [bytes, torch.rand(256, 2) + 0.5]
    x = torch.randn(7, 256).to(bf16)
    bias = torch.randn(256)
    text = format.encode()

    def fn(x, bias, *weight):
        return weight_only.op(x, list(weight), None, bias, format=text, out_dtype=f32)

    def make(device):
        tensors = (x, bias, *weight)
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors)

    got = run(fn, make, (x, bias, *weight), config)
    want = x.double() @ weight_only.dequantize(format, weight).double() + bias
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-3)  # 128 beside 2 bits


MAKE = {"words": packed_words, "halves": halves}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, bf16) for kind in (i8, u8, e4m3, e5m2, *MAKE)), (i8, f16), (e4m3, f16)],
    ids=str,
)
def test_one_hot_rows_give_the_weight_bit_for_bit(kind, dtype):
    """Every finite byte, at a quarter of the k."""
    format, weight = MAKE.get(kind, lambda: plain(kind))()
    if kind in (e4m3, e5m2):
        weight.view(u8)[~weight.float().isfinite()] = 0
    want = weight_only.dequantize(format, [weight]).to(dtype)
    if kind == "words":
        assert torch.equal(want, (every_byte(u8).double() - 128).t().to(dtype))
    taken = torch.arange(256).reshape(4, 4, 16)[:, 1].flatten()
    parts = product(format, weight, dtype, torch.eye(256)[taken].to(dtype))
    assert torch.equal(torch.cat(parts), want[taken])


@pytest.mark.parametrize("kind", [e4m3, e5m2], ids=str)
def test_what_is_not_finite_stays(kind):
    format, weight = plain(kind)
    bytes = weight.view(u8)
    bytes[:] = 0
    special = [b for b in range(256) if not torch.tensor(b, dtype=u8).view(kind).float().isfinite()]
    for row, byte in enumerate(special):
        bytes[row, 3] = byte
    [got] = product(format, weight, bf16, torch.ones(16, 256, dtype=bf16))
    want = weight.float().sum(1).expand(16, 64)
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)
