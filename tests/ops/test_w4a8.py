"""The reference of ``inductor_quant::w4a8``, and what the op refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import w4a8, w8a8
from inductor_quant.spec.weight_format import DequantOp, Field
from tests.support.gemms.formats import form
from tests.support.gemms.w4a8 import (
    A_ZERO,
    NAMES,
    Case,
    assert_close,
    gemm,
    integers,
    make_inputs,
    reference,
)

f32 = torch.float32


@pytest.mark.parametrize("zero", ["", "const", "int", "float", "tensor"])
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_plain_product(name, groups, zero):
    torch.manual_seed(0)
    case = Case(name, 5, 24, 96, f32, groups=groups, zero=zero)
    inputs = make_inputs(case, "cpu")
    assert_close(gemm(case)(*inputs), reference(case, inputs))


@pytest.mark.parametrize("times", [1, 16])
@pytest.mark.parametrize("name", ["int4_words", "nibble_pairs"])
def test_without_groups_it_is_w8a8_of_the_integers_bit_for_bit(name, times):
    torch.manual_seed(0)
    case = Case(name, 7, 40, 128, groups=False, times=times, zero="const")
    a, a_scale, b_scale, bias, _, _, *weight = make_inputs(case, "cpu")
    q = integers(case, weight)
    assert torch.equal(q, q.to(torch.int8).double())
    want = w8a8.op(
        *(a, q.to(torch.int8), a_scale, b_scale, bias), a_zero=A_ZERO, out_dtype=case.out_dtype
    )
    assert torch.equal(gemm(case)(a, a_scale, b_scale, bias, None, None, *weight), want)


def test_the_largest_sums_are_exact():
    """2**14 products of -128 and -8: 2**24."""
    k, n = 1 << 14, 8
    case = Case("int4_words", 2, n, k, f32, scales=("none", "none"), bias=False)
    a = torch.full((2, k), -128, dtype=torch.int8)
    words = torch.full((k // 8, n), 0x88888888 - (1 << 32), dtype=torch.int64).to(torch.int32)
    got = gemm(case)(a, None, None, None, None, None, words)
    assert torch.equal(got, torch.full((2, n), float(k * 1024)))


def test_sums_of_the_weight_may_be_given():
    for groups in (False, True):
        case = Case("nibble_pairs", 3, 16, 64, f32, groups=groups, zero="int", sums=True)
        inputs = make_inputs(case, "cpu")
        assert_close(gemm(case)(*inputs), reference(case, inputs))
        doubled = gemm(case)(*inputs[:5], 2 * inputs[5], *inputs[6:])
        assert not torch.allclose(doubled, gemm(case)(*inputs))


PAIRS = Case("nibble_pairs", 2, 16, 64)
GROUP_SCALE = PAIRS.format.dequant_ops[-1]
BAD = {
    "a whole byte": lambda f: dataclasses.replace(
        f, element=dataclasses.replace(f.element, width=8, offset=form()), dequant_ops=()
    ),
    "no int8": lambda f: dataclasses.replace(f, dequant_ops=(DequantOp("sub", 200.0),)),
    "a fraction": lambda f: dataclasses.replace(f, dequant_ops=(DequantOp("sub", 7.5),)),
    "a zero point of 8 bits": lambda f: dataclasses.replace(
        f, dequant_ops=(DequantOp("sub", GROUP_SCALE.operand), GROUP_SCALE)
    ),
    "a scale of channels": lambda f: dataclasses.replace(
        f, dequant_ops=(DequantOp("mul", Field(1, (form(("n0", 1)), form()))),)
    ),
    "two scales": lambda f: dataclasses.replace(f, dequant_ops=(GROUP_SCALE, GROUP_SCALE)),
    "an offset behind the scale": lambda f: dataclasses.replace(
        f, dequant_ops=(GROUP_SCALE, DequantOp("sub", 1.0))
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_other_formats_are_refused(name):
    a, a_scale, b_scale, bias, _, _, *weight = make_inputs(PAIRS, "cpu")
    format = BAD[name](PAIRS.format)
    used = {field.source for field in format.fields()}
    with pytest.raises(SpecError, match="w4a8"):
        w4a8.op(
            *(a, [weight[i] for i in sorted(used)], a_scale, b_scale, bias),
            format=format.encode(),
            out_dtype=f32,
        )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"a": torch.zeros(2, 64)}, "int8"),
        ({"a": torch.zeros(2, 32, dtype=torch.int8)}, "int8"),
        ({"a_scale": torch.ones(3, 1)}, "a_scale"),
        ({"b_scale": torch.ones(1, 15)}, "b_scale"),
        ({"b_sum": torch.ones(1, 16)}, "b_sum"),
        ({"a_zero": 300}, "a_zero"),
        ({"format": "[]"}, "format"),
        ({"out_dtype": torch.int32}, "returns"),
    ],
)
def test_other_operands_are_refused(change, what):
    a, a_scale, b_scale, bias, _, _, *weight = make_inputs(PAIRS, "cpu")
    arguments = {"a": a, "weight": weight, "a_scale": a_scale, "b_scale": b_scale, "bias": bias}
    options = {"format": PAIRS.format.encode(), "out_dtype": f32}
    with pytest.raises(SpecError, match=what):
        w4a8.op(**arguments | options | change)
