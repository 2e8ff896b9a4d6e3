"""The exceptions of this package. "Not a match" is never one: see ``spec/decisions.py``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class InductorQuantError(RuntimeError):
    """Base of every error that this package raises."""


class UnsupportedTorchError(InductorQuantError):
    """The installed torch lacks something that we need (raised with ``on_error="raise"``)."""

    def __init__(self, torch_version: str, supported: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        listed = "\n  ".join(problems)
        super().__init__(
            f"inductor_quant does not know torch {torch_version} (it supports {supported}):\n"
            f"  {listed}\n"
            "Compilation goes on without the plugin. Install a supported torch, or run "
            "`python -m inductor_quant._compat` and report what it prints."
        )


class OptionError(InductorQuantError, ValueError):
    """An option is unknown or has a value that cannot be honoured."""

    @classmethod
    def unknown(cls, names: Iterable[str], known: Iterable[str]) -> OptionError:
        known = sorted(known)
        given = []
        for name in names:
            close = difflib.get_close_matches(name, known, n=1)
            given.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
        return cls(f"unknown option {', '.join(given)}; the options are {', '.join(known)}")


class RequirementError(InductorQuantError):
    """Fewer GEMMs were matched than ``Options.require`` demands."""

    def __init__(self, family: str, required: int, matched: int) -> None:
        super().__init__(
            f"Options.require demands {required} {family} GEMMs, this graph has {matched} matches; "
            "inductor_quant.explain(model, *inputs) says why other GEMMs do not match"
        )


class VerificationError(InductorQuantError):
    """A fused GEMM has a larger error than its graph (``Options.verify``)."""


class SpecError(InductorQuantError, ValueError):
    """A canonical op was called with tensors that do not form the GEMM it describes."""


class ConfigTableError(InductorQuantError):
    """A table of kernel configurations is malformed."""
