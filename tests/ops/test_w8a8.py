"""The canonical op by itself: eager reference, fake, and the errors for what is no such GEMM."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import w8a8
from tests.support.gemms.w8a8 import Case, assert_close, make_inputs, reference


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
    a = torch.full((1, w8a8.max_k("", "")), -128, dtype=torch.int8)
    got = w8a8.op(a, a.t(), None, None, None, out_dtype=torch.float32)
    assert got.item() == w8a8.max_k("", "") * 2**14
    assert w8a8.max_k("", "") * 2**14 <= 2**31 - 1 < (w8a8.max_k("", "") + 1) * 2**14


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
            "a": torch.zeros(1, w8a8.max_k("", "") + 1, dtype=torch.int8),
            "b": torch.zeros(w8a8.max_k("", "") + 1, 1, dtype=torch.int8),
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


# ------------------------------------------------------------------------------------------
# zero points


i8, f32 = torch.int8, torch.float32
ZEROS = {
    "int": (i8, None, 0),
    "const": (None, None, -77),
    "float": (f32, None, 0),
    "both int": (i8, i8, 0),
    "const and int": (None, i8, 9),
    "float and int": (f32, i8, 0),
    "int and float": (i8, f32, 0),
    "of b alone": (None, i8, 0),
}


def with_zeros(kinds, m=9, n=12, k=16):
    """Arguments of the op, and what they mean in fp64."""
    a_dtype, b_dtype, number = kinds
    a, w, a_scale, b_scale, bias = make_inputs(Case(m, n, k), "cpu")
    b_scale = b_scale.reshape(1, -1)
    za = None if a_dtype is None else torch.randint(-128, 128, (m, 1)).to(a_dtype)
    zb = None if b_dtype is None else torch.randint(-128, 128, (1, n)).to(b_dtype)
    left = a.double() - (number if za is None else za.double())
    right = w.double().t() - (0 if zb is None else zb.double())
    want = (left @ right) * a_scale.double() * b_scale.double() + bias.double()
    return (a, w.t(), a_scale, b_scale, bias, za, zb), {"a_zero": number}, want


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kinds", ZEROS.values(), ids=ZEROS.keys())
def test_zero_points_are_subtracted(kinds):
    arguments, numbers, want = with_zeros(kinds)
    assert_close(w8a8.op(*arguments, **numbers, out_dtype=f32), want)
    torch.library.opcheck(w8a8.op, arguments, {**numbers, "out_dtype": torch.bfloat16})


@pytest.mark.slow  # a C++ kernel, as the one above
@pytest.mark.parametrize("name", ["int", "float and int", "of b alone"])
def test_zero_points_compile_on_cpu_without_a_kernel_of_ours(name):
    import inductor_quant.backend  # noqa: F401  registers the lowering

    arguments, numbers, want = with_zeros(ZEROS[name])

    def fn(*arguments):
        return w8a8.op(*arguments, **numbers, out_dtype=f32)

    assert_close(torch.compile(fn)(*arguments), want)


def test_given_sums_stand_for_those_of_the_columns():
    (a, b, *_, za, _), _, _ = with_zeros(ZEROS["int"])
    sums = torch.randint(-999, 999, (1, 12)).int()
    got = w8a8.op(a, b, None, None, None, za, None, sums, out_dtype=f32)
    assert torch.equal(got.double(), a.double() @ b.double() - za.double() * sums.double())


def test_given_sums_of_any_size_are_subtracted_modulo_2_to_the_32():
    (a, b, *_, za, _), _, _ = with_zeros(ZEROS["int"])
    sums = torch.full((1, 12), 2**30, dtype=torch.int32)
    got = w8a8.op(a, b, None, None, None, za, None, sums, out_dtype=f32)
    assert torch.equal(got, (a.int() @ b.int() - za.int() * sums).float())


def test_the_longest_k_at_full_range_with_zero_points():
    for a_zero, b_zero, k in (("int", "", 65793), ("const", "int", 33025), ("float", "", 131071)):
        assert w8a8.max_k(a_zero, b_zero) == k
    k = w8a8.max_k("int", "int")
    a, zero = torch.full((1, k), -128, dtype=i8), torch.full((1, 1), 127, dtype=i8)
    got = w8a8.op(a, a.t(), None, None, None, zero, zero, out_dtype=f32)
    assert got.item() == torch.tensor(k * 255.0**2).item()
    a = torch.zeros(1, k + 1, dtype=i8)
    with pytest.raises(SpecError, match="overflow"):
        w8a8.op(a, a.t(), None, None, None, zero, zero, out_dtype=f32)


@pytest.mark.parametrize(
    ("zeros", "message"),
    [
        ({"a_zero_point": torch.zeros(1, 6)}, "[4, 1] or [1, 1]"),
        ({"a_zero_point": torch.zeros(4, 1).int()}, "int32"),
        ({"b_zero_point": torch.zeros(6, 1)}, "[1, 6] or [1, 1]"),
        ({"b_sum": torch.zeros(1, 6), "a_zero": 1, "b_zero_point": torch.zeros(1, 1)}, "none of b"),
        ({"b_sum": torch.zeros(1, 6)}, "goes with"),
        ({"b_sum": torch.zeros(1, 1), "a_zero": 1}, "[1, 6]"),
        ({"a_zero": 128}, "-128 ... 127"),
        ({"a_zero": 1, "a_zero_point": torch.zeros(4, 1)}, "a_zero=1"),
    ],
)
def test_what_is_no_zero_point_is_refused(zeros, message):
    a, b = torch.zeros(4, 8, dtype=i8), torch.zeros(8, 6, dtype=i8)
    with pytest.raises(SpecError) as error:
        w8a8.op(a, b, None, None, None, **zeros, out_dtype=f32)
    assert message in str(error.value)


def test_scales_of_groups_are_the_sum_of_the_groups_products():
    torch.manual_seed(0)
    a, b = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((5, 96), (96, 7)))
    sa, sb, bias = torch.rand(5, 3), torch.rand(3, 7), torch.randn(7)
    got = w8a8.op(a, b, sa, sb, bias, alpha=0.5, out_dtype=torch.float32)
    want = sum(
        (a[:, g].double() @ b[g].double()) * sa[:, i : i + 1] * sb[i]
        for i, g in enumerate((slice(0, 32), slice(32, 64), slice(64, 96)))
    )
    torch.testing.assert_close(got, (want * 0.5 + bias).float(), rtol=1e-6, atol=1e-3)
    spec = w8a8.spec_of(a, b, sa, sb, bias, out_dtype=torch.float32)
    assert str(spec) == "(a=i8/1x32:f32, b=i8/32x1:f32, out=f32+bias)"
    assert spec.group_size == 32


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "zero", "said"),
    [
        ((5, 1), (5, 7), None, "no multiple"),
        ((5, 2), (3, 7), None, r"a_scale is \[5, 2\]"),
        ((5, 1), (3, 7), torch.zeros(5, 1), "zero points"),
    ],
)
def test_groups_that_do_not_fit_are_refused(a_shape, b_shape, zero, said):
    a, b = torch.zeros(5, 96, dtype=torch.int8), torch.zeros(96, 7, dtype=torch.int8)
    scales = torch.ones(a_shape), torch.ones(b_shape)
    with pytest.raises(SpecError, match=said):
        w8a8.op(a, b, *scales, None, zero, out_dtype=torch.float32)
