"""What happened to each candidate GEMM: collected while compilations run, influencing none."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from inductor_quant.decisions import Match, Rejection


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """What the lowering of one canonical op offered and took: names are ``kernel config``."""

    family: str
    spec: str
    offered: tuple[str, ...]


@dataclasses.dataclass
class Report:
    """The decisions of the compilations inside a ``collect()`` block, in order."""

    matches: list[Match] = dataclasses.field(default_factory=list)
    rejections: list[Rejection] = dataclasses.field(default_factory=list)
    kernels: list[KernelChoice] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"matched  {match}" for match in self.matches]
        lines += [f"rejected {rejection}" for rejection in self.rejections]
        return "\n".join(lines) or "no candidate GEMM"


_lock = threading.Lock()
_open: list[Report] = []


@contextmanager
def collect() -> Iterator[Report]:
    """Collect the decisions of every compilation in the process while the block runs.

    A compilation served from Inductor's cache runs no pass and shows nothing here: set
    ``torch._inductor.config.force_disable_caches`` to see all of them.
    """
    report = Report()
    with _lock:
        _open.append(report)
    try:
        yield report
    finally:
        with _lock:
            # by identity: two empty reports are equal
            _open[:] = [other for other in _open if other is not report]


def add(event: Match | Rejection | KernelChoice) -> None:
    """Record an event in every open report."""
    with _lock:
        for report in _open:
            if isinstance(event, Match):
                report.matches.append(event)
            elif isinstance(event, Rejection):
                report.rejections.append(event)
            else:
                report.kernels.append(event)
