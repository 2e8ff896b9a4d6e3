"""The canonical FP8 ops by themselves: eager reference, fake, and the errors for what they are
not."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import fp8, fp8_block
from tests.support.gemms.fp8 import Case, e4m3, e5m2, e8m0, gemm, make_inputs, reference
from tests.support.gemms.w8a8 import assert_close

CASES = [
    *(Case(33, 57, 100, out_dtype=t) for t in (torch.bfloat16, torch.float16, torch.float32)),
    Case(5, 9, 64, a_scale="tensor", b_scale="tensor", bias=False),
    Case(5, 9, 64, a_scale="none", b_scale="none", a_dtype=e5m2, out_dtype=torch.float32),
    Case(5, 40, 96, group=32, scale_dtype=torch.bfloat16),
    Case(5, 40, 96, group=48, a_scale="none", w_dtype=e5m2, bias=False),
    *(Case(33, 300, 300, block=(b, b)) for b in (128, 64, 32)),
    Case(5, 40, 96, block=(32, 1), scale_dtype=torch.bfloat16),
    Case(5, 40, 100, block=(32, 16), scale_dtype=e8m0, a_scales="m", w_dtype=e5m2),
    Case(1, 1, 1, block=(128, 128)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got = gemm(case)(*inputs)
    assert got.dtype == case.out_dtype
    assert got.is_contiguous()
    assert_close(got, reference(case, inputs))


def test_a_zero_block_contributes_nothing():
    case = Case(4, 8, 256, block=(128, 128), bias=False)
    a, w, a_scale, b_scale, _ = make_inputs(case, "cpu")
    a.view(torch.uint8)[:, :128] = 0
    a_scale[:, 0] = 0
    got = gemm(case)(a, w, a_scale, b_scale, None)
    assert torch.isfinite(got).all()
    assert_close(got, reference(case, (a, w, a_scale, b_scale, None)))


def test_nan_and_infinity_travel():
    case = Case(3, 4, 64, a_dtype=e5m2, bias=False)
    a, w, a_scale, b_scale, _ = make_inputs(case, "cpu")
    a.view(torch.uint8)[0, 5] = 0x7C  # infinity in e5m2
    w.view(torch.uint8)[1, 7] = 0x7F  # NaN in e4m3
    w.view(torch.uint8)[:, 5].clamp_(1, 0x7E)
    got = gemm(case)(a, w, a_scale, b_scale, None)
    assert got[0, 0].isinf()
    assert got[:, 1].isnan().all()
    assert got[1:, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("case", [Case(8, 12, 16), Case(8, 12, 64, block=(32, 8))], ids=str)
def test_the_fake_agrees_and_aot_eager_runs_the_op(case):
    inputs = make_inputs(case, "cpu")
    got = torch.compile(gemm(case), backend="aot_eager")(*inputs)
    assert torch.equal(got, gemm(case)(*inputs))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(33, 48, 64),
        Case(33, 50, 70, block=(32, 16)),
        Case(33, 48, 64, group=32),
        Case(33, 48, 64, group=32, a_scale="none"),
    ],
    ids=str,
)
def test_the_op_compiles_on_cpu_without_a_kernel_of_ours(case):
    """Called directly, not by a rewrite: Inductor's C++ backend runs the unfused lowering."""
    import inductor_quant.backend  # noqa: F401  registers the lowering

    inputs = make_inputs(case, "cpu")
    assert_close(torch.compile(gemm(case))(*inputs), reference(case, inputs))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


FNUZ = torch.float8_e4m3fnuz
BAD = {
    "a of another bias": ({"a": zeros(4, 64, dtype=FNUZ)}, {}, "float8_e4m3fnuz"),
    "b of another bias": ({"b": zeros(64, 6, dtype=FNUZ)}, {}, "float8_e4m3fnuz"),
    "K differs": ({"a": zeros(4, 9, dtype=e4m3)}, {}, "[K, N]"),
    "a_scale is a row": ({"a_scale": zeros(1, 4)}, {}, "[4, 1] or [1, 1]"),
    "b_scale is 1-D": ({"b_scale": zeros(6)}, {}, "[1, 6] or [1, 1]"),
    "b_scale has no group": ({"b_scale": zeros(0, 6)}, {}, "[1, 6] or [1, 1]"),
    "b_scale of groups of no size": ({"b_scale": zeros(5, 6)}, {}, "K=64 is no multiple of the 5"),
    "a_scale is fp64": ({"a_scale": zeros(4, 1, dtype=torch.float64)}, {}, "float64"),
    "bias is a matrix": ({"bias": zeros(1, 6)}, {}, "[6]"),
    "an integer result": ({}, {"out_dtype": torch.int32}, "int32"),
}
BAD_BLOCK = {
    "a_scale of half as many blocks": ({"a_scale": zeros(4, 1)}, {}, "[4, 2]"),
    "b_scale transposed": ({"b_scale": zeros(3, 2)}, {}, "[2, 3]"),
    "no block": ({}, {"block_k": 0}, "positive"),
    "a of another bias": ({"a": zeros(4, 64, dtype=FNUZ)}, {}, "float8_e4m3fnuz"),
    "b_scale is e4m3": ({"b_scale": zeros(2, 3, dtype=e4m3)}, {}, "float8_e4m3fn"),
}
GOOD = {"a": zeros(4, 64, dtype=e4m3), "b": zeros(64, 6, dtype=e4m3)}


@pytest.mark.parametrize(("change", "options", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_such_gemm_is_refused_with_what_is_needed(change, options, message):
    arguments = {**GOOD, "a_scale": None, "b_scale": None, "bias": None, **change}
    for function in (fp8.op, fp8.fake):
        with pytest.raises(SpecError) as error:
            function(*arguments.values(), **{"out_dtype": torch.bfloat16, **options})
        assert message in str(error.value)


@pytest.mark.parametrize(("change", "options", "message"), BAD_BLOCK.values(), ids=BAD_BLOCK.keys())
def test_what_is_no_such_block_gemm_is_refused(change, options, message):
    scales = {"a_scale": zeros(4, 2), "b_scale": zeros(2, 3), "bias": None}
    arguments = {**GOOD, **scales, **change}
    given = {"block_k": 32, "block_n": 2, "out_dtype": torch.bfloat16, **options}
    for function in (fp8_block.op, fp8_block.fake):
        with pytest.raises(SpecError) as error:
            function(*arguments.values(), **given)
        assert message in str(error.value)
