"""Triton's interpreter, corrected to compute what the hardware does.

With TRITON_INTERPRET=1 in the environment before triton is imported, ``@triton.jit`` functions run
in Python on numpy arrays. ``install`` corrects the interpreter for the whole process.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from . import libdevice
from .builder import AsmEmulation, Builder, asm_emulations
from .reduce import HalvingReduceOps


def is_interpreting() -> bool:
    """Whether ``@triton.jit`` makes functions for the interpreter."""
    return bool(triton.knobs.runtime.interpret)


def install() -> None:
    """Correct the interpreter; a second call does nothing.

    - libdevice functions (computed in float64 and rounded)
    - bfloat16 constants, arithmetic and ``tl.dot``
    - ``tl.dot`` of 8-bit floats; fast, exact ``tl.dot`` of int8
    - conversions round to nearest even; those to 8-bit floats keep NaN and saturate
    - comparisons have type int1
    - ``tl.reduce`` with a combine function by halves
    - ``tl.inline_asm_elementwise``, for assembly given to ``register_asm_emulation``
    - scalars as Python indices with Triton 3.6 and numpy 2.4

    Raises RuntimeError if TRITON_INTERPRET was not set before triton was imported.
    """
    # Triton's own functions, such as tl.cdiv, were made when it was imported.
    made_for_interpreter = isinstance(tl.cdiv, triton_interpreter.InterpretedFunction)
    if not (is_interpreting() and made_for_interpreter):
        raise RuntimeError(
            "kernels are not interpreted in this process: set TRITON_INTERPRET=1 in the "
            "environment before triton (or torch) is imported"
        )
    builder = triton_interpreter.interpreter_builder
    if isinstance(builder, Builder):
        return
    builder.__class__ = Builder
    # Half of the time goes into checks for overflow whose result is dropped without ``debug``.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    triton_interpreter.ReduceOps = HalvingReduceOps
    libdevice.install()
    _patch_language()


def register_asm_emulation(asm: str, fn: AsmEmulation) -> None:
    """Define what ``tl.inline_asm_elementwise(asm, ...)`` computes.

    ``fn`` takes the operands as numpy arrays of one shape (bfloat16 as uint16, 8-bit floats as
    uint8), whole blocks for any ``pack``, and returns an array for each result: one, or a tuple.
    """
    asm_emulations[asm.strip()] = fn


def _patch_language() -> None:
    """Make ``tl`` the language of the interpreter permanently.

    Upstream does so for every kernel and again for every call of a device function. That takes half
    of the time, and the latter is never undone.
    """
    everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    triton_interpreter._patch_lang(everything)
    nothing_to_undo = triton_interpreter._LangPatchScope()
    triton_interpreter._patch_lang = lambda fn: nothing_to_undo
    # Triton 3.6 calls int() on an array of one element, which numpy 2.4 refuses.
    tl.tensor.__index__ = _as_index


def _as_index(tensor: Any) -> int:
    return int(np.asarray(tensor.handle.data).item())
