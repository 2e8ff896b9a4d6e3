"""Numerics of the ``scaled_experts`` kernels, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from tests.support.gemms.generated import generate
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs, reference
from tests.support.sampling import sampled

pytestmark = pytest.mark.interp

e4m3, i8 = torch.float8_e4m3fn, torch.int8
# empty experts at both ends and between; more than a tile; one with all rows; one row each (fewer
# rows than tiles); none
COUNTS = ((0, 3, 0, 35, 1, 0), (0, 0, 40), (1, 1, 1, 1, 1), (0, 0))


def check(case, config):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device), config)
    assert ["experts" in name for name in generated.kernels] == [True] * (case.rows > 0)
    got = simulate.interpret(generated, inputs)
    want = reference(case, inputs)
    if any(case.counts):
        assert (got - want).abs().max() <= 4e-3 * want.abs().max()
    assert got.shape[0] == case.rows
    assert not got[sum(case.counts) :].any()
    return generated


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("counts", "is_sorted", "config"),
    sampled(
        [
            (counts, is_sorted, config)
            for counts in COUNTS
            for is_sorted in (True, False)
            for config in (
                "mm 16x64x64_w4_s3_g4",
                "mm 64x64x64_w4_s3_g8",
                "int8_mm 16x32x64_w4_s3_g8",
            )
        ],
        7,
    ),
)
def test_rows_find_their_expert(counts, is_sorted, config):
    dtype = i8 if "int8" in config else e4m3
    block = None if dtype == i8 or "16x" in config else (64, 32)
    case = Case(counts, 72, 160, dtype, block, 3 * is_sorted, is_sorted, k_major=is_sorted)
    check(case, f"scaled_experts_{config}")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "gather",
    [
        {"repeats": 2, "is_sorted": False},
        {"has_rows": True, "left_over": 2},
        {"has_rows": True, "repeats": 3, "left_over": 3},
        {"has_rows": True, "is_sorted": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "block", "config"),
    [
        (e4m3, (64, 32), "mm 16x64x64_w4_s3_g4"),
        (e4m3, None, "mm 16x64x64_w4_s3_g4"),
        (i8, None, "int8_mm 16x32x64_w4_s3_g8"),
    ],
    ids=str,
)
def test_rows_are_read_where_they_are(dtype, block, config, gather):
    check(Case((0, 3, 0, 18, 1), 72, 160, dtype, block, **gather), f"scaled_experts_{config}")


@pytest.mark.slow
def test_one_compilation_serves_any_number_of_rows():
    first = Case((0, 3, 5), 72, 128)

    def make(device):
        a, b, offsets, *scales = make_inputs(first, device)
        torch._dynamo.mark_dynamic(a, 0)
        torch._dynamo.mark_dynamic(scales[0], 0)
        return a, b, offsets, *scales

    torch.manual_seed(0)
    generated = generate(gemm(first), make, "scaled_experts_mm 16x64x64_w4_s3_g4")
    for counts, left_over in (((0, 0, 1), 0), ((9, 0, 30), 4), ((0, 0, 0), 2)):
        case = Case(counts, 72, 128, left_over=left_over)
        inputs = make_inputs(case, "cpu")
        got = simulate.interpret(generated, inputs)
        want = reference(case, inputs)
        assert (got - want).abs().max() <= 4e-3 * want.abs().max()
