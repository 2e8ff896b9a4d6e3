"""How the scale of a row derives from its absmax: a list of steps, applied in order.

As text, an argument of ``quantized_linear``: ``["to f32", "clamp_min 1e-05", "div 127.0"]``. Each
step computes in its operand's dtype, and rounds to it, as the same op does in eager mode;
``if_zero c`` is ``where(scale == 0, c, scale)``.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from inductor_quant.errors import SpecError
from inductor_quant.spec.gemm import dtype_name

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NORMAL = torch.finfo(torch.float32)
_DTYPES = {dtype_name(dtype): dtype for dtype in FLOATS}
KINDS = ("add", "clamp_min", "div", "if_zero", "mul")


@dataclasses.dataclass(frozen=True)
class ScaleOp:
    """One of ``KINDS`` with a ``number``, or "to", a cast to ``dtype``."""

    kind: str
    number: float = 0.0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.kind} {dtype_name(self.dtype) if self.kind == 'to' else repr(self.number)}"


def holds(number: float) -> bool:
    """Whether a step may have this number: 0 or normal in fp32. Triton reads others as fp64."""
    return number == 0 or _NORMAL.tiny <= abs(number) <= _NORMAL.max


def parse(text: str) -> ScaleOp:
    """The inverse of ``str``. Raises SpecError for other text."""
    kind, _, operand = text.partition(" ")
    if kind == "to" and operand in _DTYPES:
        return ScaleOp(kind, dtype=_DTYPES[operand])
    try:
        number = float(operand)
    except ValueError:
        number = math.nan
    if kind not in KINDS or not holds(number):
        raise SpecError(
            f"{text!r} is no step from a row's absmax to its scale; steps read 'to f32' or "
            f"'div 127.0': one of {', '.join(KINDS)} and a normal fp32 number"
        )
    return ScaleOp(kind, number)
