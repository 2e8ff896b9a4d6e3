"""``inductor_quant::experts`` in eager mode: against fp64, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import experts, weight_only
from inductor_quant.ops.dequantize import dequantize
from inductor_quant.spec.gate import Gate
from inductor_quant.spec.weight_format import WeightFormat
from tests.support.gemms.experts import (
    GATES,
    Case,
    gemm,
    make_inputs,
    of_expert,
    reference,
    stacked,
)
from tests.support.gemms.formats import FORMATS
from tests.support.gemms.weight_only import assert_close

bf16, f32 = torch.bfloat16, torch.float32
# empty experts at both ends and between, one with all rows, none
COUNTS = ((3, 0, 20, 1), (0, 0, 0, 17), (0, 5, 0, 0), (0, 0, 0, 0))


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_row_is_multiplied_by_the_weight_of_its_expert(counts, is_sorted):
    torch.manual_seed(0)
    case = Case("int8_group", counts, 40, 64, left_over=3 if is_sorted else 0, is_sorted=is_sorted)
    case = dataclasses.replace(case, dtype=f32)
    inputs = make_inputs(case, "cpu")
    got = gemm(case)(*inputs)
    if any(counts):
        assert_close(got, reference(case, inputs))
    assert got.shape[0] == case.rows
    assert not got[sum(counts) :].any()


# how the rows of the product are rows of x
GATHERED = ({"repeats": 2}, {"has_rows": True}, {"has_rows": True, "repeats": 3})


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("gather", GATHERED, ids=str)
def test_rows_of_x_may_repeat_and_be_chosen(gather, is_sorted):
    torch.manual_seed(0)
    case = Case("int8_group", (3, 0, 4, 1), 40, 64, 2 * is_sorted, is_sorted, f32, **gather)
    inputs = make_inputs(case, "cpu")
    got = gemm(case)(*inputs)
    assert_close(got, reference(case, inputs))
    assert got.shape[0] == case.rows


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_stack_of_any_format(name):
    torch.manual_seed(0)
    case = Case(name, (2, 0, 3), 40, 64, dtype=f32)
    inputs = make_inputs(case, "cpu")
    assert_close(gemm(case)(*inputs), reference(case, inputs))
    format = stacked(case.packed, 3)
    assert WeightFormat.decode(format.encode()) == format
    weight = inputs[2:]
    dense = dequantize(format, weight)
    assert torch.equal(dense[1], dequantize(format, weight, expert=1))
    assert torch.equal(dense[2], dequantize(case.packed.format, of_expert(case, weight, 2)))


def test_the_fake_has_the_shape_and_dtype_of_the_result():
    case = Case("gptq", (2, 3), 40, 64)
    inputs = make_inputs(case, "cpu")
    torch.library.opcheck(
        experts.op,
        (inputs[0], list(inputs[2:]), inputs[1], None),
        {"format": stacked(case.packed, 2).encode(), "out_dtype": bf16},
        test_utils=("test_schema", "test_faketensor"),
    )
    rows = torch.tensor([3, -1, 7, 0, 0, 9])
    torch.library.opcheck(
        experts.op,
        (inputs[0], list(inputs[2:]), inputs[1], None, rows),
        {"format": stacked(case.packed, 2).encode(), "out_dtype": bf16, "repeats": 2},
        test_utils=("test_schema", "test_faketensor"),
    )


def _changed(**changes):
    case = Case("int8_channel", (2, 3), 40, 64)
    x, offsets, *weight = make_inputs(case, "cpu")
    text = stacked(case.packed, 2).encode()
    given = {"x": x, "weight": weight, "offsets": offsets, "ids": None, "format": text}
    given |= {"out_dtype": bf16} | changes
    return experts.op(**given)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(5, 63, dtype=bf16)},
        {"x": torch.zeros(5, 64, dtype=torch.int8)},
        {"offsets": None},
        {"ids": torch.zeros(5, dtype=torch.int64)},
        {"offsets": torch.zeros(3, dtype=torch.int32)},
        {"offsets": torch.zeros(2)},
        {"offsets": None, "ids": torch.zeros(4, dtype=torch.int64)},
        {"offsets": None, "ids": torch.zeros(5, dtype=torch.int64), "repeats": 2},
        {"repeats": 0},
        {"rows": torch.zeros(5)},
        {"rows": torch.zeros(5, 1, dtype=torch.int64)},
        {"out_dtype": torch.int8},
        {"format": Case("int8_channel", (2, 3), 40, 64).packed.format.encode()},
        {"format": "{}"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_other_arguments_are_refused(changes):
    _changed()
    with pytest.raises(SpecError):
        _changed(**changes)


# ------------------------------------------------------------------------------------------
# gates


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_a_gate_joins_two_columns(gate, has_bias, is_sorted):
    torch.manual_seed(0)
    options = {"gate": gate, "has_bias": has_bias, "is_sorted": is_sorted}
    case = Case("int8_group", (3, 0, 4, 1), 40, 64, 2 * is_sorted, dtype=f32, **options)
    inputs = make_inputs(case, "cpu")
    got = gemm(case)(*inputs)
    assert got.shape == (case.rows, 20)
    assert got.is_contiguous()
    assert_close(got, reference(case, inputs), slack=10)


SILU = GATES["silu"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": "silu"},
        {"gate": '[false,[["cos",0]]]'},
        {"gate": '[false,[["exp",2]]]'},
        {"gate": '[false,[["exp",0,1]]]'},
        {"gate": "[false,[]]"},
        {"bias": torch.zeros(2, 40)},
        {"bias": torch.zeros(2, 20), "bias_rows": torch.zeros(5, dtype=torch.int64)},
        {"bias": torch.zeros(2, 40), "bias_rows": torch.zeros(4, dtype=torch.int64)},
        {"bias": torch.zeros(2, 40), "bias_rows": torch.zeros(5)},
        {"gate": "", "bias": torch.zeros(2, 40), "bias_rows": torch.zeros(5, dtype=torch.int64)},
    ],
    ids=str,
)
def test_other_gates_are_refused(changes):
    case = Case("int8_channel", (2, 3), 40, 64)
    x, offsets, *weight = make_inputs(case, "cpu")
    options = {"format": stacked(case.packed, 2).encode(), "out_dtype": bf16}
    assert experts.op(x, weight, offsets, None, gate=SILU.encode(), **options).shape == (5, 20)
    with pytest.raises(SpecError):
        experts.op(x, weight, offsets, None, **{"gate": SILU.encode()} | options | changes)


def test_a_gate_is_a_text_and_a_formula():
    for gate, _ in GATES.values():
        assert Gate.decode(gate.encode()) == gate
    assert str(SILU) == "(a / (exp(-a) + 1)) * b"
    clamped = "(min(max(b, -7), 7) + 1) * (min(a, 7) * sigmoid(min(a, 7) * 1.702))"
    assert str(GATES["clamped"][0]) == clamped


def test_weight_only_takes_no_stack():
    case = Case("int8_channel", (2, 3), 40, 64)
    x, _, *weight = make_inputs(case, "cpu")
    text = stacked(case.packed, 2).encode()
    with pytest.raises(SpecError, match="stack"):
        weight_only.op(x, weight, None, None, format=text, out_dtype=bf16)
