"""Numerics of ``weight_only_direct`` and ``weight_only_mm_sm90`` in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.ops import weight_only
from inductor_quant.ops.dequantize import EXPONENTS
from inductor_quant.simulate.interpreter import gluon as interpreter
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat
from tests.support.gemms import formats
from tests.support.gemms.apart import bit_by_bit
from tests.support.gemms.generated import generated_by
from tests.support.gemms.packed import form
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    exact,
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
DIRECT, MM = "weight_only_direct", "weight_only_mm_sm90"
NAMES = ("gptq", "awq", "nibble_pairs", "int8_group", "nf4")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kernel", "case", "config"),
    [
        # groups of 32: two scales of 16 bits in a tile
        (DIRECT, Case("gptq", 7, 64, 128, f16, bias=True), "8x32x64_w2_s1_g8"),
        (DIRECT, Case("gptq", 16, 64, 256, bf16), "16x32x256_w2_s1_g8"),  # scales of another dtype
        (DIRECT, Case("awq", 13, 96, 256, f16, column_scale="channel"), "16x64x128_w2_s1_g8_k2"),
        (DIRECT, Case("nibble_pairs", 8, 128, 256, bias=True), "8x32x128_w1_s1_g8"),
        (DIRECT, Case("hqq", 3, 128, 128), "8x32x128_w2_s1_g8"),
        (DIRECT, Case("int8_group", 5, 64, 256), "8x32x64_w1_s1_g8_k2"),
        (DIRECT, Case("hqq", 9, 64, 128), "16x32x128_w2_s1_g8"),
        (DIRECT, Case("int8_zero_channel", 8, 64, 128), "8x32x64_w1_s1_g8"),
        (DIRECT, Case("int8_folded", 8, 64, 128, f16), "8x16x128_w1_s1_g8"),
        (
            DIRECT,
            Case("int8_shuffled", 8, 128, 128),
            "8x32x128_w2_s1_g8",
        ),  # a tile has half a table
        (DIRECT, Case("nf4", 16, 64, 128), "16x32x128_w2_s1_g8"),
        (DIRECT, Case("mxfp4", 9, 64, 128, bias=True), "16x32x128_w2_s1_g8"),
        (DIRECT, Case("mxfp4", 7, 64, 256, f16), "8x32x128_w2_s1_g8_k2"),  # in fp32
        (DIRECT, Case("nvfp4", 5, 64, 128), "8x32x128_w2_s1_g8"),
        # K in another order
        (DIRECT, Case("halves_of_k", 5, 64, 256), "8x32x128_w2_s1_g8"),
        # the group of each k is listed
        (DIRECT, Case("act_order", 5, 96, 256, f16, bias=True), "8x64x64_w2_s1_g8"),
        (DIRECT, Case("act_order", 16, 64, 320, f16, column_scale="channel"), "16x32x64_w2_s1_g8"),
        (DIRECT, Case("act_order", 9, 64, 320), "16x32x128_w2_s1_g8_k2"),  # scales in two parts
        (DIRECT, Case("act_order", 20, 64, 256, f16), "32x32x64_w2_s1_g8"),
        # of several fields
        (DIRECT, Case("shards", 7, 48, 512, bias=True), "8x16x128_w2_s1_g8"),
        (DIRECT, Case("shards", 13, 64, 1024, f16), "16x32x128_w4_s1_g8_k2"),
        (DIRECT, Case("shards", 40, 32, 512), "64x16x128_w2_s1_g8"),
        (DIRECT, Case("crossing", 5, 64, 256, f16), "8x32x128_w2_s1_g8"),
        (DIRECT, Case("crossing", 13, 96, 320, bias=True), "16x16x128_w2_s1_g8_k2"),
        (DIRECT, Case("halves_of_k", 16, 64, 320, f16, bias=True), "16x32x128_w2_s1_g8"),
        (MM, Case("mxfp4", 20, 64, 192), "32x64x64_w4_s4_g8"),
        (MM, Case("mxfp4", 20, 64, 192, f16, bias=True), "32x64x64_w4_s4_g8"),
        (MM, Case("nvfp4", 40, 64, 128), "64x64x64_w4_s4_g8"),
        # 5 slices of K for 2 warps of 2 CTAs: some have none
        (DIRECT, Case("gptq", 3, 64, 320, f16), "8x32x128_w2_s1_g8_k2"),
        # a turn of two iterations, and one and two behind it
        (DIRECT, Case("nibble_pairs", 3, 64, 384), "8x32x128_w1_s1_g8"),
        (DIRECT, Case("nibble_pairs", 5, 64, 960, bias=True), "8x32x128_w2_s1_g8_k2"),
        # sums are scaled
        (DIRECT, Case("fp8_block", 3, 256, 640), "8x32x128_w2_s1_g8"),
        (DIRECT, Case("int8_group", 3, 32, 192), "8x16x128_w2_s1_g8"),
        (DIRECT, Case("uint2", 2, 128, 128), "8x128x64_w4_s1_g8"),
        (DIRECT, Case("hqq", 33, 64, 256, bias=True), "64x16x128_w2_s1_g8"),
        (DIRECT, Case("gptq", 20, 64, 320, f16), "32x32x128_w2_s1_g8_k2"),
        (DIRECT, Case("int8_channel", 57, 48, 128), "64x32x128_w2_s1_g8"),
        (DIRECT, Case("nibble_pairs", 70, 40, 320, bias=True), "32x16x128_w2_s1_g8_k2"),
        (DIRECT, Case("awq", 29, 64, 256, f16, column_scale="channel"), "32x32x128_w2_s1_g8"),
        (MM, Case("gptq", 17, 64, 256, f16, bias=True), "32x64x64_w4_s4_g8"),
        (MM, Case("gptq", 20, 64, 256, bf16), "32x64x64_w4_s4_g8_k2"),  # scales of another dtype
        (
            MM,
            Case("awq", 70, 96, 256, f16, column_scale="channel"),
            "64x64x64_w4_s4_g8_k2",
        ),  # 96 of N
        (MM, Case("nibble_pairs", 20, 128, 256, bias=True), "32x128x64_w8_s4_g8"),
        (MM, Case("hqq", 30, 128, 320), "32x64x64_w4_s4_g8"),  # a turn goes beyond K
        (MM, Case("int8_group", 25, 64, 256), "32x64x64_w4_s3_g8"),
        (MM, Case("int8_zero_channel", 33, 64, 128), "64x64x64_w4_s4_g8"),
        (MM, Case("int8_channel", 50, 64, 128, f16), "64x64x64_w4_s4_g8"),
        # four turns in two rounds of the stages; the sums are multiplied
        (MM, Case("int8_channel", 20, 64, 1024), "32x64x64_w4_s8_g8"),
        (MM, Case("nf4", 20, 64, 192), "32x64x64_w4_s4_g8"),
        (MM, Case("fp8_row", 20, 64, 192), "32x64x64_w4_s4_g8"),
        (MM, Case("fp8_block", 20, 128, 128, f16), "32x64x64_w4_s4_g8"),
        (MM, Case("e5m2_group", 20, 64, 128), "32x64x64_w4_s4_g8"),
        (MM, Case("fp8_words", 20, 64, 128), "32x64x64_w4_s4_g8"),
        # x in parts: a tile of K is of both halves
        (MM, Case("halves_of_k", 20, 64, 256), "32x64x64_w4_s4_g8"),
        (MM, Case("quarters_of_k", 20, 64, 512), "32x64x128_w4_s4_g8"),
        (MM, Case("halves_of_k", 40, 96, 640, f16, bias=True), "64x64x128_w4_s4_g8_k2"),
        (MM, Case("halves_of_k", 20, 64, 192), "32x64x64_w4_s4_g8"),  # a turn goes beyond K
        # four turns in three slices
        (MM, Case("gptq", 20, 192, 512, f16, bias=True), "32x64x64_w4_s4_g8_k3"),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(kernel, case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(kernel, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("nibble_pairs", 3, 96, 320, bias=True), "8x32x128_w2_s1_g8"),
        (Case("gptq", 8, 64, 256, f16), "8x32x64_w1_s1_g8_k2"),  # packed zero points
        (Case("gptq", 5, 40, 128), "8x16x128_w2_s1_g8"),  # scales of another dtype
        (Case("awq", 1, 64, 128, f16, column_scale="channel"), "8x64x64_w1_s1_g8"),
        (Case("nibble_pairs", 2, 24, 192, f16), "8x16x128_w2_s1_g8"),
    ],
    ids=str,
)
def test_sums_of_scaled_tiles_are_close_to_fp64(case, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(DIRECT, gemm(case), lambda device: make_inputs(case, device), config)
    assert any("acc + tile_sums" in source for source in generated.kernels.values())
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(("dtype", "group"), [(bf16, 64), (f16, 64), (bf16, 32)])
def test_tiles_in_halves_are_close_to_fp64(dtype, group, monkeypatch):
    """7 slices of K for 2 warps of 2 CTAs: some have fewer. In groups of 32 each half has scales of
    its own."""
    monkeypatch.setattr(formats, "GROUP", group)
    torch.manual_seed(0)
    case = Case("awq", 13, 96, 448, dtype, bias=True)
    inputs = make_inputs(case, "cpu")
    config = "16x64x128_w2_s1_g8_k2"
    generated = generated_by(DIRECT, gemm(case), lambda device: make_inputs(case, device), config)
    assert any("x_second" in source for source in generated.kernels.values())
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("case", "config", "zeros"),
    [
        (Case("hqq", 3, 128, 128, bias=True), "8x32x128_w2_s1_g8", bf16),
        # fewer slices than warps, partials
        (Case("hqq", 13, 96, 320, bias=True), "16x32x128_w2_s1_g8_k2", bf16),
        (Case("hqq", 8, 128, 128, f16, bias=True), "8x64x64_w1_s1_g8", bf16),
        (Case("hqq", 5, 64, 128), "8x16x64_w1_s1_g8", torch.float32),
    ],
)
def test_scales_of_groups_are_applied_to_sums(case, config, zeros, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    monkeypatch.setattr(formats, "bf16", zeros)  # and scales
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(DIRECT, gemm(case), lambda device: make_inputs(case, device), config)
    assert any("acc = acc + tile_sums *" in source for source in generated.kernels.values())
    assert_close(simulate.interpret(generated, inputs), exact(case, inputs))


def test_codes_beyond_k_are_not_multiplied():
    """The loop's last turn goes beyond K = 192, where the words of the next column begin."""
    torch.manual_seed(0)
    case = Case("fp8_row", 20, 64, 192)
    inputs = make_inputs(case, "cpu")
    weight = next(t for t in inputs if t is not None and t.dtype == torch.float8_e4m3fn)
    weight.view(torch.uint8)[1::2, :64] = 0x7F  # NaN
    config = "32x64x64_w4_s4_g8"
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    is_nan = torch.isnan(simulate.interpret(generated, inputs).float())
    assert is_nan[:, 1::2].all()
    assert not is_nan[:, ::2].any()


@pytest.mark.parametrize(
    ("kernel", "config"),
    [(DIRECT, "16x32x64_w2_s1_g8"), (MM, "32x64x64_w4_s4_g8")],
    ids=[DIRECT, MM],
)
def test_what_each_column_has_is_prefetched(kernel, config, monkeypatch):
    """Scales of two kinds and the bias, of 80 columns, in three tiles or two, and nothing else."""
    addresses = set()
    monkeypatch.setattr(
        interpreter, "_prefetch", lambda at: addresses.update(at.handle.data.ravel().tolist())
    )
    m = 16 if kernel == DIRECT else 20
    case = Case("fp8_row", m, 80, 256, column_scale="channel", bias=True)
    _, column_scale, bias, codes, scales = inputs = make_inputs(case, "cpu")
    generated = generated_by(kernel, gemm(case), lambda device: make_inputs(case, device), config)
    simulate.interpret(generated, inputs)
    columns = {
        tensor.data_ptr() + i * tensor.element_size()
        for tensor in (column_scale, bias, scales)
        for i in range(80)
    }
    words = range(codes.data_ptr(), codes.data_ptr() + codes.nbytes)  # "direct" prefetches those
    assert {address for address in addresses if address not in words} == columns


@pytest.mark.parametrize(
    ("kernel", "config", "dtypes"),
    [
        (DIRECT, "16x64x64_w1_s1_g8", (bf16, f16, f16, bf16, f16)),
        (DIRECT, "8x64x64_w1_s1_g8", (f16, bf16, bf16, f16, bf16)),
        (MM, "32x64x64_w4_s4_g8", (f16, bf16, bf16, f16, bf16)),
    ],
    ids=[DIRECT, f"{DIRECT}-8", MM],
)
@pytest.mark.parametrize("which", range(len(NAMES)), ids=NAMES)
def test_one_hot_rows_give_the_weight_bit_for_bit(kernel, config, dtypes, which, monkeypatch):
    """Every third block of K, in 16 bits (scales of x's dtype) and in fp32."""
    name, dtype, m = NAMES[which], dtypes[which], int(config.partition("x")[0])
    monkeypatch.setattr(formats, "f16", dtype)

    def by_kernel(fn, make):
        return generated_by(kernel, fn, make, config)

    for got, want in one_hot_rows(Case(name, m, 64, 128, dtype), by_kernel, 3):
        assert torch.equal(got, want)


def product(kernel, config, format, rows, *weight):
    """(the generated kernels, ``rows`` times the weight)."""
    text = format.encode()

    def fn(x, *weight):
        return weight_only.op(x, list(weight), None, None, format=text, out_dtype=x.dtype)

    def make(device):
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in (rows, *weight))

    generated = generated_by(kernel, fn, make, config)
    return generated, simulate.interpret(generated, (rows, *weight))


BY_EITHER = pytest.mark.parametrize(
    ("kernel", "config"), [(DIRECT, "16x64x64_w1_s1_g8"), (MM, "32x64x64_w4_s4_g8")]
)


@BY_EITHER
@pytest.mark.parametrize("kind", [*EXPONENTS, "e4m3"])
def test_scales_of_eight_bits_give_the_weight_bit_for_bit(kind, kernel, config):
    """Of every code; products of a table's values in 16 bits."""
    torch.manual_seed(0)
    m = int(config.partition("x")[0])
    case = Case("mxfp4", m, 512, 128, bf16)
    words, table, scales = make_inputs(case, "cpu")[3:]
    scales = torch.arange(256, dtype=torch.uint8).repeat(scales.numel() // 256).view(scales.shape)
    scale = dataclasses.replace(case.packed.format.dequant_ops[0].operand, float8=kind)
    format = dataclasses.replace(case.packed.format, dequant_ops=(DequantOp("mul", scale),))
    weight = (words, table, scales)
    _, got = product(kernel, config, format, torch.eye(128, dtype=bf16)[:m], *weight)
    want = weight_only.dequantize(format, weight).to(bf16)
    finite = want.isfinite().all(0)  # else 0 * inf spoils a column
    assert finite.sum() >= 496
    assert torch.equal(got[:, finite], want[:m, finite])
    assert not got[:, ~finite].isfinite().all(0).any()


@BY_EITHER
@pytest.mark.parametrize("words", [torch.uint8, torch.int64])
def test_large_powers_of_integers_do_not_overflow(words, kernel, config):
    """Powers from 2**110 on times 4 bits; exponents in wide words."""
    torch.manual_seed(0)
    m = int(config.partition("x")[0])
    case = Case("nibble_pairs", m, 64, 128, bf16)
    packed, scales = make_inputs(case, "cpu")[3:]
    code = (110 + 127 + torch.arange(14)).repeat(64)[: scales.numel()].view(scales.shape)
    scale = dataclasses.replace(case.packed.format.dequant_ops[0].operand, width=8, float8="e8m0")
    format = dataclasses.replace(case.packed.format, dequant_ops=(DequantOp("mul", scale),))
    weight = packed, code.to(words)
    _, got = product(kernel, config, format, torch.eye(128, dtype=bf16)[:m], *weight)
    want = weight_only.dequantize(format, weight).to(bf16)[:m]
    assert want.isfinite().all()
    assert torch.equal(got, want)


@BY_EITHER
@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize(("name", "is_narrow"), [("int8", True), ("uint8", False)])
def test_zero_points_of_eight_bits_give_the_weight_bit_for_bit(
    name, is_narrow, dtype, kernel, config
):
    """In 16 bits if their differences to all codes are at most 256."""
    torch.manual_seed(0)
    m = int(config.partition("x")[0])
    case = Case("int8_group", m, 256, 128, bf16)
    format, (words, zeros, scales) = case.packed.format, make_inputs(case, "cpu")[3:]
    words = words.view(torch.uint8) if name == "uint8" else words
    zeros = torch.arange(-128, 128).repeat(zeros.numel() // 256).view(zeros.shape).to(torch.int8)
    weight, rows = (words, zeros, scales.to(dtype)), torch.eye(128, dtype=dtype)[64 - m : 64]
    generated, got = product(kernel, config, format, rows, *weight)
    assert is_narrow == any("x2 $0, t, $12" in source for source in generated.kernels.values())
    assert torch.equal(got, weight_only.dequantize(format, weight).to(dtype)[64 - m : 64])


@pytest.mark.parametrize(
    ("name", "zero", "is_folded"),
    [
        ("nibble_pairs", None, True),  # 8 of the field
        ("nibble_pairs", 8.0, False),  # 16 of a field of 4 bits
        ("nibble_pairs", -8.0, True),  # none
        ("nibble_pairs", -4.0, True),
        ("nibble_pairs", -5.0, False),  # 3
        ("int8_group", None, True),  # 128
    ],
)
@pytest.mark.parametrize("config", ["32x64x64_w4_s4_g8", "32x64x64_w4_s8_g8"])
def test_a_number_is_subtracted_with_the_product_bit_for_bit(name, zero, is_folded, config):
    """Scales from 2**-70 to 2**42 of both signs; words one by one, and two tiles in a box."""
    torch.manual_seed(0)
    case = Case(name, 32, 256, 256, bf16)
    format, weight = case.packed.format, make_inputs(case, "cpu")[3:]
    weight = (weight[0], weight[-1])
    operand = dataclasses.replace(format.dequant_ops[-1].operand, source=1)
    ops = [] if zero is None else [DequantOp("sub", zero)]
    format = dataclasses.replace(format, dequant_ops=(*ops, DequantOp("mul", operand)))
    powers = torch.randint(-70, 42, weight[1].shape)
    scales = torch.ldexp(1 + torch.rand(powers.shape), powers) * (1 - 2 * (powers & 1))
    weight = (weight[0], scales.to(bf16))
    want = weight_only.dequantize(format, weight).to(bf16)
    for first in (0, 224):
        rows = torch.eye(256, dtype=bf16)[first : first + 32]
        generated, got = product(MM, config, format, rows, *weight)
        assert torch.equal(got, want[first : first + 32])
    assert is_folded == any("x2 $0, t, $9, $10" in text for text in generated.kernels.values())


def test_bytes_that_are_16_bits_apart_give_the_weight_bit_for_bit():
    """In the order 0, 2, 1, 3 of a word."""
    torch.manual_seed(0)
    at = form(("n0", 1)), form(("k0", 16), ("k1", 1))
    scale = Field(1, (form(("n0", 1)), form(("k0", 1))))
    format = WeightFormat(
        *((4, 16, 2, 2), (64,), Field(0, at, form(("k3", 16), ("k2", 8)), 8)),
        (DequantOp("sub", 128.0), DequantOp("mul", scale)),
    )
    words = torch.randint(-(2**31), 2**31 - 1, (64, 64), dtype=torch.int32)
    weight = words, (torch.rand(64, 4) + 0.5).to(bf16)
    want = weight_only.dequantize(format, weight).to(bf16)
    rows = torch.eye(256, dtype=bf16)[32:64]
    _, got = product(MM, "32x64x64_w4_s4_g8", format, rows, *weight)
    assert torch.equal(got, want[32:64])


@pytest.mark.parametrize("add", [0, -4])
def test_joined_numbers_give_the_weight_bit_for_bit(add):
    """Rows of K of the first warps and of the last, in two slices."""
    torch.manual_seed(0)
    case = Case("shards", 16, 32, 512, bf16)
    format, weight = case.packed.format, make_inputs(case, "cpu")[3:]
    element = dataclasses.replace(format.element, add=add)
    format = dataclasses.replace(format, element=element)
    want = weight_only.dequantize(format, weight).to(bf16)
    for start in (0, 16, 240, 496):
        rows = torch.zeros(16, 512, dtype=bf16)
        rows[torch.arange(16), start + torch.arange(16)] = 1
        _, got = product(DIRECT, "16x16x256_w4_s1_g8_k2", format, rows, *weight)
        assert torch.equal(got, want[start : start + 16])


@BY_EITHER
def test_words_of_one_value_give_the_weight_bit_for_bit(kernel, config):
    """Its place is a constant, in fp16 and in fp32; that of a zero point, too."""
    torch.manual_seed(0)
    m = int(config.partition("x")[0])
    words = Field(0, (form(("k0", 64), ("k1", 1)), form(("n0", 1))), width=4)
    zero = Field(1, (form(("k0", 1)), form(("n0", 1))), width=4, add=1)
    scale = DequantOp("mul", dataclasses.replace(zero, source=2, width=0, add=0))
    weight = [torch.randint(-(2**31), 2**31, (rows, 64)).int() for rows in (128, 2)]
    for dtype in (f16, torch.float32):
        format = WeightFormat((2, 64), (64,), words, (DequantOp("sub", zero), scale))
        given = (*weight, torch.rand(2, 64).to(dtype))
        rows = torch.eye(128, dtype=f16)[64 - m // 2 : 64 + m // 2]
        _, got = product(kernel, config, format, rows, *given)
        assert torch.equal(got, rows @ weight_only.dequantize(format, given).to(f16))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bits", [2, 5, 6, 7, 8])
def test_numbers_of_a_run_give_the_weight_bit_for_bit(bits):
    torch.manual_seed(0)
    words = form(("k0", bits)), form(("n0", 1))
    format = WeightFormat((4, 32), (32,), bit_by_bit(0, words, 0, "k1", bits))
    weight = torch.randint(-(2**31), 2**31, (4 * bits, 32)).int()
    want = weight_only.dequantize(format, (weight,)).to(bf16)
    for rows in torch.eye(128, dtype=bf16).split(16)[::3]:
        _, got = product(DIRECT, "16x32x128_w2_s1_g8", format, rows, weight)
        assert torch.equal(got, rows @ want)


@pytest.mark.parametrize("name", ["gptq", "awq"])
@BY_EITHER
def test_products_with_scales_of_fp16_are_rounded_to_bf16_once(name, kernel, config):
    """Scales of all exponents, in two parts."""
    torch.manual_seed(0)
    m = int(config.partition("x")[0])
    case = Case(name, m, 1024, 128, bf16)
    *weight, scales = make_inputs(case, "cpu")[3:]
    scales = (7 * torch.arange(scales.numel(), dtype=torch.int16)).view(f16).view(scales.shape)
    generated = generated_by(kernel, gemm(case), lambda device: make_inputs(case, device), config)
    assert any("fma.rn.bf16x2 u, t, " in source for source in generated.kernels.values())
    want = weight_only.dequantize(case.packed.format, [*weight, scales]).to(bf16)
    rows = slice(64 - m // 2, 64 + m // 2)  # of two groups
    inputs = (torch.eye(128, dtype=bf16)[rows], None, None, *weight, scales)
    assert torch.equal(simulate.interpret(generated, inputs), want[rows])


@pytest.mark.parametrize("scales", [torch.float32, bf16, f16])
def test_every_code_of_a_table_gives_its_weight_bit_for_bit(scales, monkeypatch):
    """Tables of each group are rounded from fp32; with scales of x's dtype all have the same."""
    monkeypatch.setattr(formats, "f32", scales)
    torch.manual_seed(0)
    dtype = f16 if scales == f16 else bf16
    case = Case("nf4", 16, 64, 128, dtype)
    weight = make_inputs(case, "cpu")[3:]
    assert len(torch.stack([weight[0] & 15, weight[0] >> 4])[:, :1024].unique()) == 16
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)
    config = "16x32x128_w2_s1_g8"
    generated = generated_by(DIRECT, gemm(case), lambda device: make_inputs(case, device), config)
    assert any("plane7" in source for source in generated.kernels.values())
    rows = torch.eye(128).to(dtype)[:16]
    got = simulate.interpret(generated, (rows, None, None, *weight))
    assert torch.equal(got, want[:16])


def test_words_sliced_from_a_wider_tensor():
    """As of q, k and v: the rows of the matrix are further apart than they are long."""
    case = Case("gptq", 20, 64, 256, f16)

    def make(device):
        torch.manual_seed(0)
        x, scale, bias, bits, *rest = make_inputs(case, device)
        wide = torch.ones(bits.shape[0], 3 * 64, dtype=bits.dtype, device=device)
        wide[:, 64:128] = bits
        return x, scale, bias, wide[:, 64:128], *rest

    inputs = make("cpu")
    generated = generated_by(MM, gemm(case), make, "32x64x64_w4_s4_g8")
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))
