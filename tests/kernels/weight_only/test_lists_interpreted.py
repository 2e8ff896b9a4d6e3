"""Numerics of groups that a tensor lists for each k (GPTQ's act-order) in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.weight_only.mm_sm90 import cost
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field
from tests.kernels.weight_only.test_digits_interpreted import DIRECT, MM, generated_by
from tests.support.gemms import formats
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
ACT_ORDER = formats.FORMATS["act_order"]
IN_TILE_ORDER = "TILE_ORDER : tl.constexpr = True"


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("act_order", 17, 64, 256, f16, bias=True), "32x64x64_w4_s4_g8"),
        # four columns a thread; a turn goes beyond K, a tile beyond N
        (Case("act_order", 70, 160, 320, f16), "64x128x64_w4_s4_g8"),
        (Case("act_order", 40, 128, 512), "64x128x64_w4_s4_g8_k2"),  # scales in two parts
        (Case("act_order", 33, 128, 512, f16, column_scale="channel"), "64x128x128_w8_s4_g8"),
        # stages that are filled four times, tiles that CTAs share
        (Case("act_order", 50, 64, 1024, f16), "64x64x64_w4_s4_g8"),
        (Case("act_order", 100, 256, 256, f16), "128x128x64_w8_s4_g8"),
        # scales and zero points that all columns of a tile share, and of two iterations at a time
        (Case("groups_of_n", 20, 256, 512), "32x64x128_w4_s4_g8"),
        (Case("groups_of_n", 40, 192, 512, f16), "64x64x64_w4_s8_g8"),
        (Case("groups_of_n", 33, 128, 320, bias=True), "64x64x64_w4_s4_g8"),
        (Case("groups_of_n", 20, 256, 1024), "32x64x64_w4_s8_g8_k2"),
    ],
    ids=str,
)
def test_products_are_close_to_fp64(case, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64 if case.name == "groups_of_n" else formats.GROUP)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("groups_of_n", 40, 192, 512, bias=True), "64x64x64_w4_s8_g8"),
        (Case("groups_of_n", 20, 256, 1024, f16), "32x64x64_w4_s8_g8_k2"),  # CTAs exchange sums
        (Case("groups_of_n", 20, 128, 1024, column_scale="channel"), "32x64x64_w4_s8_g8_k8"),
        (Case("groups_of_n", 100, 320, 256), "64x64x64_w4_s8_g8"),  # two tiles of rows
    ],
    ids=str,
)
def test_tiles_of_columns_that_are_far_apart_are_stored_in_their_order(case, config, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    monkeypatch.setattr(cost, "TILE_ORDER_CYCLES", 0)  # else of larger outputs
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    assert len(generated.kernels) == 2
    assert any(IN_TILE_ORDER in source for source in generated.kernels.values())
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


def test_a_residual_and_a_norm_of_tiles_in_their_order(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    monkeypatch.setattr(cost, "TILE_ORDER_CYCLES", 0)
    case = Case("groups_of_n", 64, 256, 512)

    def make(device):
        residual = torch.ones(case.m, case.n, dtype=bf16, device=device)
        return residual, *make_inputs(case, device)

    def fn(residual, *inputs):
        hidden = gemm(case)(*inputs) + residual
        return torch.nn.functional.rms_norm(hidden, (case.n,)), hidden

    torch.manual_seed(0)
    inputs = make("cpu")
    generated = generated_by(MM, fn, make, "64x64x64_w4_s8_g8")
    assert len(generated.kernels) == 2
    assert any(IN_TILE_ORDER in source for source in generated.kernels.values())
    for got, want in zip(simulate.interpret(generated, inputs), fn(*inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


GROUPS = 8


@pytest.mark.parametrize("kernel", [DIRECT, MM])
@pytest.mark.parametrize(
    "of_k",
    [
        lambda k: torch.full_like(k, 5),
        lambda k: GROUPS - 1 - k // formats.GROUP,
        lambda k: k % GROUPS,
        lambda k: torch.where(k % 3 == 0, 2, -1),
    ],
    ids=["one", "falling", "in_turn", "two"],
)
def test_groups_may_come_in_any_order(kernel, of_k):
    torch.manual_seed(0)
    case = Case("act_order", 20, 64, GROUPS * formats.GROUP, f16)
    inputs = make_inputs(case, "cpu")
    g_idx = inputs[-1]
    g_idx.copy_(of_k(torch.arange(len(g_idx))))
    config = "32x64x64_w4_s4_g8" if kernel == MM else "32x32x64_w2_s1_g8"
    generated = generated_by(kernel, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


def test_positions_outside_are_the_ends():
    """Autotuning runs on arbitrary values: the nearest position is read, not what is beyond."""
    torch.manual_seed(0)
    case = Case("act_order", 20, 64, GROUPS * formats.GROUP, f16)
    inputs = make_inputs(case, "cpu")
    g_idx = inputs[-1]
    g_idx[::2], g_idx[1::2] = GROUPS + 100_000, -GROUPS - 100_000
    generated = generated_by(
        MM, gemm(case), lambda device: make_inputs(case, device), "32x64x64_w4_s4_g8"
    )
    found = simulate.interpret(generated, inputs)
    g_idx[::2], g_idx[1::2] = GROUPS - 1, 0
    assert_close(found, reference(case, inputs))


def listed(zero, scales):
    """The format of act-order with other zero points and scales."""

    def build(k, n):
        packed = ACT_ORDER(k, n)
        sub, mul = packed.format.dequant_ops
        group, tensors = sub.operand.index[0], list(packed.tensors)
        tensors[2] = ("scale", tensors[2][1], scales)
        if zero == "int64":
            tensors[3] = ("group", (k,), torch.int64)
        if zero == "plain":  # from 1 to 16
            sub = dataclasses.replace(sub, operand=dataclasses.replace(sub.operand, wrap=False))
        elif zero == "constant":  # the list takes the place of the zero points
            [(g_idx, _)] = group.fields
            group = dataclasses.replace(group, fields=((dataclasses.replace(g_idx, source=1), 1),))
            scale = dataclasses.replace(mul.operand, index=(group, mul.operand.index[1]))
            sub, mul = DequantOp("sub", 8.0), DequantOp("mul", scale)
            tensors[1:] = [tensors[3], tensors[2]]
        elif zero == "alone":  # in a word
            alone = {"index": (group, mul.operand.index[1]), "offset": AffineIndex(8)}
            sub = dataclasses.replace(sub, operand=dataclasses.replace(sub.operand, **alone))
            tensors[1] = ("bits", (k // formats.GROUP, n), torch.int32)
        elif zero == "floats":
            tensors[1] = ("float", (k // formats.GROUP, n), f16)
            sub = DequantOp("sub", Field(1, (group, mul.operand.index[1])))
        format = dataclasses.replace(packed.format, dequant_ops=(sub, mul))
        return dataclasses.replace(packed, format=format, tensors=tuple(tensors))

    return build


@pytest.mark.parametrize(
    ("kernel", "config", "m"),
    [(DIRECT, "8x32x64_w2_s1_g8", 8), (MM, "32x64x64_w4_s4_g8", 32)],
    ids=["direct", "mm"],
)
@pytest.mark.parametrize(
    ("zero", "scales", "dtype"),
    [
        ("wrapped", f16, f16),
        ("plain", f16, f16),
        ("plain", bf16, bf16),
        ("wrapped", bf16, bf16),
        ("wrapped", f16, bf16),  # in two parts
        ("alone", f16, f16),
        ("int64", f16, f16),
        ("constant", f16, f16),
        ("constant", bf16, bf16),
        ("floats", f16, f16),  # in fp32
        ("plain", torch.float32, bf16),  # likewise
    ],
)
def test_weights_are_exact(kernel, config, m, zero, scales, dtype, monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "act_order", listed(zero, scales))
    case = Case("act_order", m, 64, 128, dtype)

    def generated(fn, make):
        return generated_by(kernel, fn, make, config)

    for got, want in one_hot_rows(case, generated, every=4 if kernel == DIRECT else 1):
        assert torch.equal(got, want)


def test_fields_of_two_lists_have_positions_of_their_own(monkeypatch):

    def build(k, n):
        packed = ACT_ORDER(k, n)
        sub, mul = packed.format.dequant_ops
        group, column = mul.operand.index
        [(g_idx, _)] = group.fields
        other = dataclasses.replace(group, fields=((dataclasses.replace(g_idx, source=4), 1),))
        mul = DequantOp("mul", dataclasses.replace(mul.operand, index=(other, column)))
        tensors = (*packed.tensors, ("group", (k,), torch.int32))
        format = dataclasses.replace(packed.format, dequant_ops=(sub, mul))
        return dataclasses.replace(packed, format=format, tensors=tensors)

    monkeypatch.setitem(formats.FORMATS, "act_order", build)
    torch.manual_seed(0)
    case = Case("act_order", 20, 128, 512, f16)
    inputs = make_inputs(case, "cpu")
    config = "32x128x64_w4_s4_g8"
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))


def other_ops(sub, mul):
    """Ops beside those of HQQ, of which the relay's product is no part."""
    half = DequantOp("mul", 0.5)
    return {
        "product": (sub, mul),
        "twice": (sub, mul, mul),
        "number_first": (DequantOp("sub", 0.5), sub, mul),
        "scaled_first": (half, sub, mul),
        "between": (sub, half, mul),
        "wraps": (sub, mul),
    }


@pytest.mark.parametrize("ops", other_ops(None, None))
def test_zero_points_that_columns_share_are_used_as_they_are_relayed(ops, monkeypatch):
    groups_of_n = formats.FORMATS["groups_of_n"]

    def build(k, n):
        packed = groups_of_n(k, n)
        format, element = packed.format, packed.format.element
        if ops == "wraps":  # then it is in no place of a word
            element = dataclasses.replace(element, wrap=True, add=3)
        changed = other_ops(*format.dequant_ops)[ops]
        format = dataclasses.replace(format, dequant_ops=changed, element=element)
        return dataclasses.replace(packed, format=format)

    monkeypatch.setattr(formats, "GROUP", 64)
    monkeypatch.setitem(formats.FORMATS, "groups_of_n", build)
    case = Case("groups_of_n", 20, 128, 256)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    config = "32x64x64_w4_s4_g8"
    generated = generated_by(MM, gemm(case), lambda device: make_inputs(case, device), config)
    got, want = simulate.interpret(generated, inputs).double(), gemm(case)(*inputs).double()
    assert (got - want).norm() < 6e-3 * want.norm()
