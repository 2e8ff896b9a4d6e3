"""``inductor_quant::scaled_experts`` in eager mode: against fp64, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import scaled_experts
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs, reference

e4m3, i8 = torch.float8_e4m3fn, torch.int8
# empty experts at both ends and between, one with all rows, none
COUNTS = ((3, 0, 20, 1), (0, 0, 0, 17), (0, 5, 0, 0), (0, 0, 0, 0))


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (16, 24)), (e4m3, None), (i8, None)])
@pytest.mark.parametrize("counts", COUNTS)
def test_each_row_is_multiplied_by_the_weight_of_its_expert(counts, dtype, block, is_sorted):
    torch.manual_seed(0)
    case = Case(counts, 40, 72, dtype, block, 3 * is_sorted, is_sorted, out_dtype=torch.float32)
    inputs = make_inputs(case, "cpu")
    got = gemm(case)(*inputs)
    torch.testing.assert_close(got, reference(case, inputs).float())
    assert not got[sum(counts) :].any()


@pytest.mark.parametrize("dtype", [e4m3, i8])
@pytest.mark.parametrize(
    "gather",
    [{"repeats": 2}, {"has_rows": True}, {"has_rows": True, "repeats": 3, "is_sorted": False}],
    ids=str,
)
def test_rows_may_repeat_and_be_chosen(gather, dtype):
    torch.manual_seed(0)
    block = (16, 24) if dtype == e4m3 else None
    case = Case((3, 0, 4, 1), 40, 72, dtype, block, out_dtype=torch.float32, **gather)
    inputs = make_inputs(case, "cpu")
    torch.testing.assert_close(gemm(case)(*inputs), reference(case, inputs).float())


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 3), 24, 32, e4m3, (32, 8), scale_dtype=torch.float8_e8m0fnu),
        Case((2, 3), 24, 32, e4m3, k_major=False, scale_dtype=torch.bfloat16),
        Case((2, 3), 24, 32, i8, has_scales=False),
    ],
    ids=str,
)
def test_layouts_and_types(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    want = reference(case, inputs).to(case.out_dtype)
    torch.testing.assert_close(gemm(case)(*inputs), want)


def test_the_fake_has_the_shape_and_dtype_of_the_result():
    case = Case((2, 3), 40, 64, i8)
    a, b, offsets, *scales = make_inputs(case, "cpu")
    torch.library.opcheck(
        scaled_experts.op,
        (a, b, *scales, offsets, None),
        case.kwargs,
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"a": torch.zeros(5, 63).to(e4m3)},
        {"a": torch.zeros(5, 64, dtype=i8)},
        {"b": torch.zeros(64, 40).to(e4m3)},
        {"offsets": None},
        {"ids": torch.zeros(5, dtype=torch.int64)},
        {"offsets": torch.zeros(3, dtype=torch.int32)},
        {"a_scale": torch.ones(5, 1)},
        {"b_scale": torch.ones(2, 2, 3)},
        {"a_scale": None},
        {"block_k": 0},
        {"block_n": 0},
        {"out_dtype": i8},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_other_arguments_are_refused(changes):
    case = Case((2, 3), 40, 64, block=(32, 32))
    a, b, offsets, a_scale, b_scale = make_inputs(case, "cpu")
    given = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "offsets": offsets}
    given |= {"ids": None} | case.kwargs
    scaled_experts.op(**given)
    with pytest.raises(SpecError):
        scaled_experts.op(**(given | changes))


def test_int8_has_no_blocks_and_no_sums_that_overflow():
    case = Case((2, 3), 8, 64, i8)
    a, b, offsets, *scales = make_inputs(case, "cpu")
    with pytest.raises(SpecError, match="blocks"):
        scaled_experts.op(a, b, *scales, offsets, None, **(case.kwargs | {"block_k": 64}))
    long = dataclasses.replace(case, k=131072)
    with pytest.raises(SpecError, match="overflow"):
        gemm(long)(*make_inputs(long, "cpu"))
