"""libdevice in the corrected interpreter, against torch."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

pytestmark = pytest.mark.interp


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def call_kernel(x, y, out, function: tl.constexpr, arity: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if arity == 1:
        c = function(a)
    elif arity == 2:
        c = function(a, b)
    else:
        c = function(a, b, a)
    tl.store(out + i, c.to(out.dtype.element_ty))


def call(function, arity, x, y=None, dtype=torch.float32) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=dtype)
    call_kernel[(1,)](x, x if y is None else y, out, function, arity, x.numel())
    return out


UNARY_LIBDEVICE = {
    **{
        name: getattr(torch, name)
        for name in (
            *("acos", "asin", "atan", "atanh", "asinh", "ceil", "cos", "cosh", "erf", "erfc"),
            *("erfinv", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p"),
            *("log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
        )
    },
    "abs": torch.abs,
    "nearbyint": torch.round,
    "rint": torch.round,
    "j0": torch.special.bessel_j0,
    "cyl_bessel_i0": torch.special.i0,
    "exp10": lambda x: 10**x,
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3),
    "tgamma": lambda x: torch.tensor([math.gamma(value) for value in x.tolist()]),
}


@pytest.mark.parametrize("name", UNARY_LIBDEVICE)
def test_unary_libdevice_function_is_that_of_torch(name):
    x = torch.rand(64) * 1.9 - 0.95
    expected = UNARY_LIBDEVICE[name](x.double()).float()
    torch.testing.assert_close(
        call(getattr(libdevice, name), 1, x), expected, rtol=1e-6, atol=1e-7, equal_nan=True
    )


BINARY_LIBDEVICE = {
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "div_rn": torch.div,
    "fdim": lambda x, y: (x - y).clamp(min=0),
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "mul_rn": torch.mul,
    "nextafter": torch.nextafter,
    "pow": torch.pow,
}


@pytest.mark.parametrize("name", BINARY_LIBDEVICE)
def test_binary_libdevice_function_is_that_of_torch(name):
    x, y = torch.rand(64) + 0.1, torch.randn(64)
    in_its_precision = name == "nextafter"
    expected = (
        BINARY_LIBDEVICE[name](x, y)
        if in_its_precision
        else BINARY_LIBDEVICE[name](x.double(), y.double()).float()
    )
    assert_same(call(getattr(libdevice, name), 2, x, y), expected)


def test_libdevice_fma_rounds_once():
    x, y = torch.rand(64), torch.rand(64)
    expected = (x.double() * y.double() + x.double()).float()
    assert_same(call(libdevice.fma, 3, x, y), expected)


def test_libdevice_rounds_halves_as_named():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.25, -0.75])
    assert_same(call(libdevice.rint, 1, x), x.round())
    assert_same(call(libdevice.llrint, 1, x, dtype=torch.int64), x.round().long())
    away = torch.tensor([1.0, 2.0, 3.0, -1.0, -2.0, -3.0, 0.0, -1.0])
    assert_same(call(libdevice.round, 1, x), away)


@pytest.mark.parametrize("name", ["isnan", "isinf", "signbit"])
def test_libdevice_predicate_is_that_of_torch(name):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.0])
    expected = getattr(torch, name)(x).to(torch.int32)
    assert_same(call(getattr(libdevice, name), 1, x, dtype=torch.int32).abs(), expected)


def test_libdevice_exponents():
    x = torch.tensor([1.0, 2.0, 3.0, 0.75, 1e-3, 1e30, 0.5, 7.9])
    expected = torch.tensor([math.frexp(value)[1] - 1 for value in x.tolist()], dtype=torch.int32)
    exponents = call(libdevice.ilogb, 1, x, dtype=torch.int32)
    assert_same(exponents, expected)
    assert_same(call(libdevice.ldexp, 2, x, exponents), torch.ldexp(x, exponents))


def test_libdevice_in_double_precision():
    x = torch.rand(16, dtype=torch.float64)
    assert_same(call(libdevice.erf, 1, x, dtype=torch.float64), torch.erf(x))


def test_libdevice_refuses_bf16_as_the_compiler_does():
    x = torch.rand(16).to(torch.bfloat16)
    with pytest.raises(Exception, match="bfloat16"):
        call(libdevice.erf, 1, x)


def test_libdevice_function_without_emulation_says_so():
    with pytest.raises(Exception, match="__nv_normcdfinvf has no emulation"):
        call(libdevice.normcdfinv, 1, torch.rand(16))
