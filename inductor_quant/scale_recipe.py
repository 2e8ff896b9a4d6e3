"""How the scale of a row is computed from its largest absolute value: a few steps, in order.

As text, which an op takes: ``["to f32", "clamp_min 1e-05", "div 127.0"]``. Each step has the
type of the value that it is given, and rounds to it, as the same op does in eager mode.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from inductor_quant.errors import SpecError
from inductor_quant.spec import dtype_name

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NORMAL = torch.finfo(torch.float32)
_DTYPES = {dtype_name(dtype): dtype for dtype in FLOATS}
KINDS = ("add", "clamp_min", "div", "mul")


@dataclasses.dataclass(frozen=True)
class Step:
    """One of ``KINDS``, with a number that ``holds``; or "to", a cast to ``dtype``."""

    kind: str
    number: float = 0.0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.kind} {dtype_name(self.dtype) if self.kind == 'to' else repr(self.number)}"


def holds(number: float) -> bool:
    """Whether it is 0 or a normal number of fp32: as text, others are fp64 to Triton."""
    return number == 0 or _NORMAL.tiny <= abs(number) <= _NORMAL.max


def parse(text: str) -> Step:
    """The step that ``str`` gave. Raises SpecError for other text."""
    kind, _, operand = text.partition(" ")
    if kind == "to" and operand in _DTYPES:
        return Step(kind, dtype=_DTYPES[operand])
    try:
        number = float(operand)
    except ValueError:
        number = math.nan
    if kind not in KINDS or not holds(number):
        raise SpecError(
            f"{text!r} is no step from a row's largest value to its scale; one reads "
            f"'div 127.0', with {', '.join(KINDS)} and a normal number, or 'to f32'"
        )
    return Step(kind, number)
