"""CUDA's libdevice for Triton's interpreter.

``triton.language.extra.libdevice`` is a module of stubs that the compiler replaces by the
backend's. ``install`` replaces them by the CUDA ones, which check types and call
``Builder.create_extern_elementwise``; ``call`` computes a symbol there, in float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language.extra.cuda.libdevice as cuda_libdevice
import triton.language.extra.libdevice as libdevice
from triton.language.core import is_builtin
from triton.runtime import interpreter as triton_interpreter

from ._floats import Array

# The function on float64 tensors, by the name of the double precision symbol without "__nv_".
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh"),
        *("ceil", "copysign", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1"),
        *("floor", "fmod", "hypot", "ldexp", "lgamma", "log", "log10", "log1p", "log2"),
        *("pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
    )
}


def _emulates(*names: str) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    def register(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        for name in names:
            _FUNCTIONS[name] = function
        return function

    return register


_emulates("fabs", "abs", "llabs")(torch.abs)
_emulates("rint", "nearbyint", "llrint")(torch.round)
_emulates("dadd_rn", "fadd_rn")(torch.add)
_emulates("dsub_rn", "fsub_rn")(torch.sub)
_emulates("dmul_rn", "fmul_rn")(torch.mul)
_emulates("ddiv_rn", "fdiv_rn", "fast_fdividef")(torch.div)
_emulates("dsqrt_rn", "fsqrt_rn")(torch.sqrt)
_emulates("drcp_rn", "frcp_rn")(torch.reciprocal)
_emulates("frsqrt_rn")(torch.rsqrt)
_emulates("isinff", "isinfd")(torch.isinf)
_emulates("isnanf", "isnand")(torch.isnan)
_emulates("signbitf", "signbitd")(torch.signbit)
_emulates("finitef", "isfinited")(torch.isfinite)
_emulates("j0")(torch.special.bessel_j0)
_emulates("j1")(torch.special.bessel_j1)
_emulates("y0")(torch.special.bessel_y0)
_emulates("y1")(torch.special.bessel_y1)
_emulates("cyl_bessel_i0")(torch.special.i0)
_emulates("cyl_bessel_i1")(torch.special.i1)
_emulates("erfcx")(torch.special.erfcx)
_emulates("normcdf")(torch.special.ndtr)
_emulates("powi")(torch.pow)
_emulates("fast_expf")(torch.exp)
_emulates("fast_logf")(torch.log)
_emulates("fast_log2f")(torch.log2)
_emulates("fast_powf")(torch.pow)


@_emulates("exp10")
def _exp10(x: torch.Tensor) -> torch.Tensor:
    return torch.pow(10.0, x)


@_emulates("cbrt")
def _cbrt(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.cbrt(x.numpy()))


@_emulates("tgamma")
def _tgamma(x: torch.Tensor) -> torch.Tensor:
    odd_interval = (x < 0) & (torch.floor(x) % 2 != 0)
    return torch.where(odd_interval, -1.0, 1.0) * torch.exp(torch.lgamma(x))


@_emulates("fma", "fma_rn", "fmaf_rn")
def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x * y + z


@_emulates("fdim")
def _fdim(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x - y, min=0.0)


@_emulates("round", "llround")
def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.copysign(torch.floor(torch.abs(x) + 0.5), x)


@_emulates("saturate")
def _saturate(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x.clamp(0.0, 1.0), nan=0.0)


@_emulates("ilogb")
def _ilogb(x: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(x).exponent.to(torch.float64) - 1
    return torch.where(x == 0, float(torch.iinfo(torch.int32).min), exponent)


def call(symbol: str, arguments: list[Array]) -> Array:
    """Value of the libdevice function ``symbol``, such as ``__nv_erff``, before rounding."""
    name = symbol.removeprefix("__nv_")
    if name.startswith("nextafter"):
        neighbour: Array = np.nextafter(*arguments)  # depends on the precision of its arguments
        return neighbour
    # Most single precision symbols end in "f".
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise NotImplementedError(f"libdevice function {symbol} has no emulation")
    tensors = [torch.from_numpy(np.array(argument, np.float64)) for argument in arguments]
    result: Array = function(*tensors).numpy()
    return result


def install() -> None:
    """Let interpreted kernels call libdevice. This process cannot compile it any more."""
    for name, function in inspect.getmembers(cuda_libdevice, is_builtin):
        interpreted = _with_interpreter_semantic(function)
        setattr(libdevice, name, interpreted)
        setattr(cuda_libdevice, name, interpreted)


def _with_interpreter_semantic(function: Callable[..., Any]) -> Callable[..., Any]:
    def interpreted(*args: Any, _semantic: Any = None) -> Any:
        return function(*args, _semantic=triton_interpreter.interpreter_semantic)

    return interpreted
