"""What happened to each candidate GEMM: collected while compilations run, influencing none."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from inductor_quant.decisions import Match, Rejection, RejectionCode
from inductor_quant.weight_format import WeightFormat

PackedWeight = tuple[WeightFormat, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """What the lowering of one canonical op offered and took: names are ``kernel config``.

    ``node`` is the canonical op's FX node; ``times_us`` are autotuning's, None where not timed (one
    choice needs no timing); ``sizes`` are M, N, K, and where one is symbolic, what it was in the
    call that was compiled. ``weight``, of a packed one, is its format and the type and sizes of
    each of its tensors.
    """

    family: str
    spec: str
    offered: tuple[str, ...]
    node: str = ""
    times_us: tuple[float | None, ...] = ()
    sizes: tuple[int, int, int] | None = None
    weight: PackedWeight | None = None

    @property
    def chosen(self) -> str:
        """The fastest of those timed, the only one where nothing was."""
        timed = [(us, name) for us, name in zip(self.times_us, self.offered, strict=False) if us]
        return min(timed)[1] if timed else self.offered[0]


@dataclasses.dataclass
class Report:
    """The decisions of the compilations inside a ``collect()`` block, in order."""

    decisions: list[Match | Rejection] = dataclasses.field(default_factory=list)
    kernels: list[KernelChoice] = dataclasses.field(default_factory=list)

    @property
    def matches(self) -> list[Match]:
        return [decision for decision in self.decisions if isinstance(decision, Match)]

    @property
    def rejections(self) -> list[Rejection]:
        """Candidates that were not rewritten; products without quantized data do not count."""
        return [
            decision
            for decision in self.decisions
            if isinstance(decision, Rejection) and decision.code != RejectionCode.NOT_QUANTIZED
        ]

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


def is_open() -> bool:
    """Whether anybody collects: what is only worth knowing for a report need not be found out."""
    return bool(_open)


def add(event: Match | Rejection | KernelChoice) -> None:
    """Record an event in every open report."""
    with _lock:
        for report in _open:
            if isinstance(event, KernelChoice):
                report.kernels.append(event)
            else:
                report.decisions.append(event)
