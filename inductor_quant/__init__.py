"""Fused kernels for quantized GEMMs inside ``torch.compile``, without a change to the model.

    torch.compile(model, backend="inductor_quant")   # no import needed; affects this call alone
    inductor_quant.enable()                          # every backend="inductor" compile from now on

Importing this package imports nothing else: names resolve on first use, so that ``import torch``
with ``TORCH_LOGS="+inductor_quant"`` and tools that only read ``__version__`` stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inductor_quant._version import __version__

if TYPE_CHECKING:
    from inductor_quant.backend import disable, enable, enabled
    from inductor_quant.decisions import Match, Rejection, RejectionCode
    from inductor_quant.explanation import Explanation, explain
    from inductor_quant.options import Options
    from inductor_quant.prepack import prepack_
    from inductor_quant.report import Report, collect
    from inductor_quant.spec import OperandSpec, QuantGemmSpec, ScaleSpec

_EXPORTS = {
    "disable": "backend",
    "enable": "backend",
    "enabled": "backend",
    "Match": "decisions",
    "Rejection": "decisions",
    "RejectionCode": "decisions",
    "Options": "options",
    "Explanation": "explanation",
    "explain": "explanation",
    "prepack_": "prepack",
    "Report": "report",
    "collect": "report",
    "OperandSpec": "spec",
    "QuantGemmSpec": "spec",
    "ScaleSpec": "spec",
}
_MODULES = (
    "backend",
    "decisions",
    "errors",
    "explanation",
    "options",
    "patterns",
    "report",
    "simulate",
    "spec",
)

__all__ = [
    "Explanation",
    "Match",
    "OperandSpec",
    "Options",
    "QuantGemmSpec",
    "Rejection",
    "RejectionCode",
    "Report",
    "ScaleSpec",
    "__version__",
    "collect",
    "disable",
    "enable",
    "enabled",
    "explain",
    "prepack_",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_MODULES})
