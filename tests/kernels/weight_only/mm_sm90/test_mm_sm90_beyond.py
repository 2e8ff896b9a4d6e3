"""Tiles of ``weight_only_mm_sm90`` that end beyond K: x and the words are 0 there, scales are those
of the last k."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Weight
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.mm_sm90.loop import boxed, may_end_beyond
from tests.support.gemms import formats
from tests.support.gemms.generated import device, generated_by
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    gemm,
    loadable,
    make_inputs,
    reference,
)

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

bf16, f16 = torch.bfloat16, torch.float16
MM, LONG = WEIGHT_ONLY_MM_SM90.name, GemmConfig(64, 64, 128, 4, 4)


@pytest.mark.interp
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "group", "config"),
    [
        ("int8_channel", 20, 64, 336, 32, "32x64x64_w4_s4_g8"),
        ("int8_channel", 40, 72, 464, 32, "64x64x128_w4_s4_g8"),  # K in four boxes of rows
        ("nibble_pairs", 20, 64, 320, 32, "32x64x128_w4_s4_g8"),
        ("nibble_pairs", 33, 64, 352, 32, "64x64x64_w4_s4_g8"),
        ("nibble_pairs", 16, 64, 1184, 32, "16x64x256_w4_s4_g8"),
        ("nibble_pairs", 20, 64, 704, 32, "32x64x128_w4_s4_g8_k2"),
        ("fp8_row", 20, 64, 336, 32, "32x64x64_w4_s4_g8"),
        ("hqq", 20, 64, 320, 64, "32x64x128_w4_s4_g8"),
        ("gptq", 20, 64, 320, 64, "32x64x128_w4_s4_g8"),
        ("mxfp4", 20, 64, 352, 32, "32x64x64_w4_s4_g8"),
        ("int8_channel", 120, 64, 1104, 32, "128x64x64_w8_s8_g8"),  # two consumers
    ],
)
def test_every_output_is_right(name, m, n, k, group, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    case = Case(name, m, n, k, bf16, bias=True)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.interp
def test_a_cta_that_has_only_the_last_turn_copies_nothing_beyond_k(monkeypatch):
    """A tile of 9 turns in as many CTAs, as few rows of a symbolic M may have: the last turn is one
    iteration, which ends beyond K."""
    kernel, constants = type(WEIGHT_ONLY_MM_SM90), WEIGHT_ONLY_MM_SM90.own_constants
    monkeypatch.setattr(kernel, "shares_tiles", lambda *_: True)
    monkeypatch.setattr(kernel, "scratch", lambda *_: 9 * (32 * 64 + 4 * 2))
    monkeypatch.setattr(
        kernel, "own_constants", lambda _, *given: constants(*given) | {"NUM_CTAS": 9}
    )
    torch.manual_seed(0)
    case = Case("int8_channel", 20, 64, 1040, bf16, bias=True)
    inputs = make_inputs(case, "cpu")
    config = "32x64x64_w4_s4_g8"
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("name", "group", "is_taken"),
    [
        ("int8_channel", 16, True),
        ("nf4", 16, False),  # the first value of a table may be NaN
        ("act_order", 16, False),  # each k has a group of its own
        ("groups_of_n", 64, False),  # and a scale of its own
        ("halves_of_k", 32, False),  # in parts
    ],
)
def test_what_may_end_beyond_k(name, group, is_taken, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    _, problem = loadable(Case(name, 64, 1152, 1088, bf16))
    assert (boxed(problem.weight, LONG) is not None) == is_taken


def test_a_k_that_no_tile_divides_is_taken():
    spec, problem = loadable(Case("int8_channel", 64, 1152, 4304, bf16))
    assert WEIGHT_ONLY_MM_SM90._cost(spec, problem, device(90))


@pytest.mark.parametrize(("name", "is_taken"), [("int8_channel", True), ("fp8_row", False)])
def test_codes_of_the_next_expert_are_not_nan(name, is_taken):
    """Beyond K of an expert are those of the next one, if words are along N."""
    weight = loadable(Case(name, 64, 1152, 1088, bf16))[1].weight
    format = dataclasses.replace(weight.format, e=(4,))
    assert may_end_beyond(Weight(weight.format, weight.tensors), LONG)
    assert may_end_beyond(Weight(format, weight.tensors), LONG) == is_taken


def test_a_tile_is_not_longer_than_k():
    weight = loadable(Case("int8_channel", 64, 1152, 48, bf16))[1].weight
    assert boxed(weight, GemmConfig(64, 64, 64, 4, 8)) is None
