"""Floating point formats as Triton's interpreter stores them, converted as by the hardware.

The interpreter keeps bfloat16 in uint16 and 8-bit floats in uint8. Conversions use torch: they
round to nearest, ties to even; those to 8 bits saturate, as ``cvt.satfinite`` of PTX.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

Array = npt.NDArray[Any]

_TORCH_DTYPES: dict[Any, torch.dtype] = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}


def is_known(dtype: Any) -> bool:
    """Whether torch has the float format ``dtype``."""
    return dtype in _TORCH_DTYPES


def is_stored_as_bits(dtype: Any) -> bool:
    """Whether the interpreter holds ``dtype`` in integers, because numpy has no such type."""
    return dtype == tl.bfloat16 or _is_float8(dtype)


def decode(data: Array, dtype: Any) -> Array:
    """The values of ``data``, stored as ``dtype``: in float32, exactly, for the formats stored as
    bits, else ``data`` itself."""
    if not is_stored_as_bits(dtype):
        return data
    decoded: Array = _as_torch(data, dtype).to(torch.float32).numpy()
    return decoded


def encode(values: Array, dtype: Any) -> Array:
    """``values`` rounded to ``dtype``, in the interpreter's storage for it."""
    storage = triton_interpreter._get_np_dtype(dtype)
    if not is_stored_as_bits(dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(storage)
    compute = np.float64 if values.dtype == np.float64 else np.float32
    floats = torch.from_numpy(np.array(values, compute, order="C", ndmin=1))
    torch_dtype = _TORCH_DTYPES[dtype]
    if _is_float8(dtype):
        largest = torch.finfo(torch_dtype).max
        floats = floats.clamp(-largest, largest)
    bits = floats.to(torch_dtype).view(torch.uint8)
    encoded: Array = bits.numpy().view(storage).reshape(np.shape(values))
    return encoded


def _is_float8(dtype: Any) -> bool:
    return is_known(dtype) and dtype.primitive_bitwidth == 8


def _as_torch(data: Array, dtype: Any) -> torch.Tensor:
    """A copy of ``data`` under its torch dtype; copying drops the zero strides of broadcasts."""
    copied = np.array(data, order="C", ndmin=1)
    as_bytes = torch.from_numpy(copied.view(np.uint8))
    return as_bytes.view(_TORCH_DTYPES[dtype]).reshape(np.shape(data))
