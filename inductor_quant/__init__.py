"""Fused kernels for quantized GEMMs inside ``torch.compile``, without a change to the model.

    torch.compile(model, backend="inductor_quant")   # no import needed; affects this call alone
    inductor_quant.enable()                          # every backend="inductor" compile from now on

Importing this package imports nothing else. Names resolve on first use, which keeps ``import
torch`` with ``TORCH_LOGS="+inductor_quant"`` and tools that only read ``__version__`` quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inductor_quant._version import __version__

if TYPE_CHECKING:
    from inductor_quant.backend import disable, enable, enabled
    from inductor_quant.options import Options
    from inductor_quant.prepack import prepack_
    from inductor_quant.prepare import Preparation, prepare_
    from inductor_quant.report.events import Report, collect
    from inductor_quant.report.explain import Explanation, explain
    from inductor_quant.spec.decisions import Match, Rejection, RejectionCode
    from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec, ScaleSpec

_EXPORTS = {
    "disable": "backend",
    "enable": "backend",
    "enabled": "backend",
    "Match": "spec.decisions",
    "Rejection": "spec.decisions",
    "RejectionCode": "spec.decisions",
    "Options": "options",
    "Explanation": "report.explain",
    "explain": "report.explain",
    "prepack_": "prepack",
    "prepare_": "prepare",
    "Preparation": "prepare",
    "Report": "report.events",
    "collect": "report.events",
    "OperandSpec": "spec.gemm",
    "QuantGemmSpec": "spec.gemm",
    "ScaleSpec": "spec.gemm",
}
_MODULES = (
    "backend",
    "errors",
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
    "Preparation",
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
    "prepare_",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_MODULES})
