"""The canonical op by itself: eager reference, fake, and the errors for what is no such GEMM."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import w8a8
from tests.support.numerics import Case, assert_close, make_inputs, reference


def call(inputs, **kwargs):
    a, w, a_scale, b_scale, bias = inputs
    if b_scale is not None:
        b_scale = b_scale.reshape(1, -1)
    if a_scale is not None:
        a_scale = a_scale.reshape(-1, 1)
    return w8a8.op(a, w.t(), a_scale, b_scale, bias, **kwargs)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_eager_result_is_close_to_fp64(out_dtype, bias):
    inputs = make_inputs(Case(33, 57, 100, out_dtype=out_dtype, bias=bias), "cpu")
    assert_close(call(inputs, out_dtype=out_dtype), reference(inputs))


def test_sums_are_exact_at_full_range():
    """The longest K, all products at their largest: 2**31 - 2**14 needs every bit of int32."""
    a = torch.full((1, w8a8.MAX_K), -128, dtype=torch.int8)
    got = w8a8.op(a, a.t(), None, None, None, out_dtype=torch.float32)
    assert got.item() == w8a8.MAX_K * 2**14
    assert w8a8.MAX_K * 2**14 <= 2**31 - 1 < (w8a8.MAX_K + 1) * 2**14


def test_opcheck():
    a, w, a_scale, b_scale, bias = make_inputs(Case(8, 12, 16), "cpu")
    torch.library.opcheck(
        w8a8.op,
        (a, w.t(), a_scale, b_scale.reshape(1, -1), bias),
        {"alpha": 0.5, "out_dtype": torch.bfloat16},
    )


BAD = {
    "a is not int8": ({"a": torch.zeros(4, 8)}, "int8"),
    "K differs": ({"a": torch.zeros(4, 9, dtype=torch.int8)}, "[K, N]"),
    "K overflows": (
        {
            "a": torch.zeros(1, w8a8.MAX_K + 1, dtype=torch.int8),
            "b": torch.zeros(w8a8.MAX_K + 1, 1, dtype=torch.int8),
        },
        "overflow",
    ),
    "a_scale is a row": ({"a_scale": torch.zeros(1, 4)}, "[4, 1] or [1, 1]"),
    "b_scale is 1-D": ({"b_scale": torch.zeros(6)}, "[1, 6] or [1, 1]"),
    "a_scale is fp64": ({"a_scale": torch.zeros(4, 1, dtype=torch.float64)}, "float64"),
    "bias is a matrix": ({"bias": torch.zeros(1, 6)}, "[6]"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_such_gemm_is_refused_with_what_is_needed(change, message):
    arguments = {
        "a": torch.zeros(4, 8, dtype=torch.int8),
        "b": torch.zeros(8, 6, dtype=torch.int8),
        "a_scale": None,
        "b_scale": None,
        "bias": None,
        **change,
    }
    with pytest.raises(SpecError) as error:
        w8a8.op(*arguments.values(), out_dtype=torch.bfloat16)
    assert message in str(error.value)


@pytest.mark.parametrize("which", [key for key in BAD if "int8" not in key and "fp64" not in key])
def test_the_fake_refuses_the_same_shapes(which):
    """Or a compiled call would read past the end of what it was given."""
    if which == "K overflows":
        pytest.skip("a limit of values, not of shapes")
    arguments = {
        "a": torch.zeros(4, 8, dtype=torch.int8),
        "b": torch.zeros(8, 6, dtype=torch.int8),
        "a_scale": None,
        "b_scale": None,
        "bias": None,
        **BAD[which][0],
    }
    with pytest.raises(SpecError):
        w8a8.fake(*arguments.values(), out_dtype=torch.bfloat16)


def test_aot_eager_runs_the_op_without_inductor():
    inputs = make_inputs(Case(8, 12, 16), "cpu")
    run = torch.compile(call, backend="aot_eager")
    got = run(inputs, out_dtype=torch.bfloat16)
    assert torch.equal(got, call(inputs, out_dtype=torch.bfloat16))


def test_the_op_compiles_on_cpu_without_a_kernel_of_ours():
    """Called directly, not by a rewrite: Inductor's C++ backend runs the unfused lowering."""
    import inductor_quant.backend  # noqa: F401  registers the lowering

    inputs = make_inputs(Case(33, 48, 64), "cpu")
    got = torch.compile(call)(inputs, out_dtype=torch.bfloat16)
    assert_close(got, reference(inputs))
