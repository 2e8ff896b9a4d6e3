"""Numerics of ``w4a8_mm`` in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.codegen.unpack_ptx import (
    round_bytes,
    subtract_bytes,
    unpack_halves,
    wrap_bytes,
)
from inductor_quant.simulate.interpreter import ptx
from tests.support.gemms import formats
from tests.support.gemms.generated import generate
from tests.support.gemms.w4a8 import Case, assert_close, gemm, generate_case, make_inputs, reference

pytestmark = pytest.mark.interp

f32, e4m3 = torch.float32, torch.float8_e4m3fn
NAME = "w4a8_mm"


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)


def generated_by(case, config, arch=80):
    generated = generate_case(case, f"{NAME} {config}", arch=arch)
    [chosen, *_] = [choices[0].name for choices in generated.choices]
    assert f"inductor_quant_{NAME}_" in chosen
    return generated


# No M or N is a multiple of a tile; K is not one where groups allow it.
@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("nibble_pairs", 37, 45, 192, zero="float", sums=True), "16x32x64_w4_s3_g8"),
        (Case("gptq", 1, 40, 128), "16x32x32_w4_s3_g8"),  # zero points that are data
        (Case("awq", 21, 40, 128, zero="int", sums=True), "16x32x64_w4_s3_g8"),
        (Case("int4_words", 5, 33, 192, zero="const", sums=True), "16x16x128_w2_s3_g8"),
        (Case("shift_table", 7, 30, 192, zero="tensor", sums=True), "16x16x128_w2_s3_g8"),
        (Case("nibble_pairs", 1, 1, 64, bias=False), "16x16x64_w2_s3_g8"),
        (Case("nibble_pairs", 3, 33, 320, zero="int", sums=True), "16x32x64_w4_s3_g8_k2"),
        (Case("int4_words", 9, 20, 192, zero="int", sums=True), "16x16x32_w2_s3_g8_k4"),
        (Case("nibble_pairs", 9, 33, 192, times=3), "16x32x64_w4_s3_g8"),
        (Case("int4_words", 9, 33, 192, times=16), "16x32x64_w4_s3_g8"),
        # a thread that has no two halves of a byte
        (Case("awq", 9, 40, 128), "16x16x32_w2_s3_g8"),
        (Case("nibble_pairs", 9, 33, 128, layout="every_second"), "16x32x64_w4_s3_g8"),
        (Case("gptq", 9, 40, 128, layout="columns"), "16x32x64_w4_s3_g8"),
        (
            Case("nibble_pairs", 5, 35, 64, scales=("tensor", "none"), bias=False),
            "16x32x64_w4_s3_g8",
        ),
        (
            Case("nibble_pairs", 5, 35, 64, groups=False, scales=("none", "tensor")),
            "16x16x32_w2_s2_g8",
        ),
        (Case("nibble_pairs", 20, 35, 192, a_dtype=e4m3), "16x32x64_w4_s3_g8"),
        (Case("int4_words", 20, 35, 192, times=2, a_dtype=e4m3), "16x32x128_w4_s3_g8"),
        (Case("nibble_pairs", 20, 35, 192, a_dtype=e4m3), "16x32x64_w4_s3_g8_k2"),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(case, config, arch=90 if case.a_dtype == e4m3 else 80)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))
    if case.a_dtype == e4m3:  # decoded to bf16
        generated = generated_by(case, config)
        assert "tl.bfloat16" in str([*generated.kernels.values()])
        assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("nibble_pairs", 19, 45, 128, groups=False), "16x32x64_w4_s3_g8"),
        (Case("nibble_pairs", 19, 45, 128, groups=False, times=5), "16x32x64_w4_s3_g8"),
        (Case("gptq", 1, 40, 128, groups=False), "16x32x64_w4_s3_g8"),
        (Case("awq", 19, 40, 128, groups=False), "16x32x64_w4_s3_g8"),
        (Case("int4_words", 19, 45, 192), "16x32x128_w4_s3_g8"),
        (Case("shift_table", 19, 45, 192), "16x32x128_w4_s3_g8_k2"),
        *(
            (Case(name, 7, 40, 192, to_int8=kind), "16x32x64_w4_s3_g8")
            for name in ("nibble_pairs", "gptq", "awq")
            for kind in ("round", "wrap")
        ),
        (Case("nibble_pairs", 7, 40, 192, to_int8="round"), "16x32x128_w4_s3_g8"),  # two groups
        (Case("gptq", 7, 40, 192, to_int8="wrap", layout="every_second"), "16x32x64_w4_s3_g8_k2"),
    ],
    ids=str,
)
def test_sums_of_integers_are_exact_bit_for_bit(case, config):
    torch.manual_seed(0)
    case = dataclasses.replace(case, out_dtype=f32, scales=("none", "none"), bias=False)
    inputs = make_inputs(case, "cpu")
    got = simulate.interpret(generated_by(case, config), inputs)
    assert torch.equal(got, gemm(case)(*inputs))
    assert torch.equal(got.double(), reference(case, inputs))


@pytest.mark.parametrize("name", ["nibble_pairs", "shift_table"])
def test_rows_of_the_activation_may_begin_anywhere(name):
    """A is stored by columns, and is every second column of a larger matrix."""
    torch.manual_seed(0)
    case = Case(name, 11, 30, 192)
    a, *others = make_inputs(case, "cpu")
    op = gemm(case)

    def fn(wide, *inputs):
        return op(wide.t()[:, ::2], *inputs)

    def make(device):
        wide = torch.zeros(2 * a.shape[1], 13, dtype=a.dtype, device=device)
        return wide[:, 1:12], *make_inputs(case, device)[1:]

    wide = torch.full((2 * a.shape[1], 13), 99, dtype=a.dtype)
    wide[::2, 1:12] = a.t()
    generated = generate(fn, make, f"{NAME} 16x32x64_w4_s3_g8", arch=80)
    assert len(generated.kernels) == 1
    got = simulate.interpret(generated, (wide[:, 1:12], *others))
    assert_close(got, reference(case, (a, *others)))


@pytest.mark.parametrize("is_flipped", [False, True])
@pytest.mark.parametrize("bias", [-8, 0, 5, -128, 112])
def test_both_halves_of_all_bytes(is_flipped, bias):
    asm = unpack_halves(is_flipped=is_flipped, bias=bias)
    every = np.arange(256)
    given = [every.astype(np.uint8).view(np.int8)]
    low, high = (each.view(np.int8) for each in ptx.run(asm.text, given, [np.int8] * 2, asm.pack))
    flip = 8 * is_flipped
    assert (low == ((every & 15) ^ flip) + bias).all()
    assert (high == ((every >> 4) ^ flip) + bias).all()


def test_arithmetic_on_four_bytes_is_that_of_each():
    rng = np.random.default_rng(0)
    codes = np.arange(4096) % 16
    q = codes.astype(np.int8)
    zero = rng.integers(0, 129, 4096)
    [got] = ptx.run(subtract_bytes().text, [q, zero.astype(np.uint8).view(np.int8)], [np.int8], 4)
    assert (got.view(np.int8) == codes - zero).all()
    scale, summand = (rng.integers(-5000, 5000, 4096).astype(np.int32) for _ in range(2))
    [got] = ptx.run(wrap_bytes().text, [q, scale, summand], [np.int8], 4)
    assert (got.view(np.int8) == (codes * scale + summand).astype(np.int8)).all()
    zero = rng.integers(0, 17, 4096)
    factor = (rng.random(4096) * 30 - 15).astype(np.float16)
    given = [q, (1024 + zero).astype(np.float16), factor]
    [got] = ptx.run(round_bytes().text, given, [np.int8], 4)
    want = np.rint((codes - zero).astype(np.float32) * factor.astype(np.float32))
    assert (got.view(np.int8) == want.clip(-128, 127)).all()
