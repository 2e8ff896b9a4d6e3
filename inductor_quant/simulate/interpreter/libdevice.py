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

from .floats import Array


def _tgamma(x: torch.Tensor) -> torch.Tensor:
    odd_interval = (x < 0) & (torch.floor(x) % 2 != 0)
    return torch.where(odd_interval, -1.0, 1.0) * torch.exp(torch.lgamma(x))


def _ilogb(x: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(x).exponent.to(torch.float64) - 1
    return torch.where(x == 0, float(torch.iinfo(torch.int32).min), exponent)


# Names of torch's own.
_NAMES = """acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp
    exp2 expm1 floor fmod hypot ldexp lgamma log log10 log1p log2 pow rsqrt sin sinh sqrt tan tanh
    trunc"""
_OTHER_NAMES: dict[str, Callable[..., torch.Tensor]] = {
    "abs fabs llabs": torch.abs,
    "cbrt": lambda x: torch.from_numpy(np.cbrt(x.numpy())),
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "dadd_rn fadd_rn": torch.add,
    "ddiv_rn fdiv_rn fast_fdividef": torch.div,
    "dmul_rn fmul_rn": torch.mul,
    "drcp_rn frcp_rn": torch.reciprocal,
    "dsqrt_rn fsqrt_rn": torch.sqrt,
    "dsub_rn fsub_rn": torch.sub,
    "erfcx": torch.special.erfcx,
    "exp10": lambda x: torch.pow(10.0, x),
    "fast_expf": torch.exp,
    "fast_log2f": torch.log2,
    "fast_logf": torch.log,
    "fdim": lambda x, y: torch.clamp(x - y, min=0.0),
    "finitef isfinited": torch.isfinite,
    "fma fma_rn fmaf_rn": lambda x, y, z: x * y + z,
    "frsqrt_rn": torch.rsqrt,
    "ilogb": _ilogb,
    "isinfd isinff": torch.isinf,
    "isnand isnanf": torch.isnan,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "normcdf": torch.special.ndtr,
    "powi fast_powf": torch.pow,
    "rint nearbyint llrint": torch.round,
    "round llround": lambda x: torch.copysign(torch.floor(torch.abs(x) + 0.5), x),
    "saturate": lambda x: torch.nan_to_num(x.clamp(0.0, 1.0), nan=0.0),
    "signbitd signbitf": torch.signbit,
    "tgamma": _tgamma,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
}
# The function on float64 tensors, by the name of the double precision symbol without "__nv_".
_FUNCTIONS = {name: getattr(torch, name) for name in _NAMES.split()}
_FUNCTIONS |= {name: function for names, function in _OTHER_NAMES.items() for name in names.split()}


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
