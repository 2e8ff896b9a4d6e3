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


# What a configuration that is not the best guess must be faster by to be taken. Times differ by so
# much from run to run: at 16x28672x4096 int8 one was taken that is 1 % slower than the guess.
HANDICAP = 1.02


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """What the lowering of one canonical op offered and took: names are ``kernel config``.

    ``node`` is the canonical op's FX node; ``times_us`` are autotuning's, None where not timed (one
    choice needs no timing); ``sizes`` are M, N, K, and where one is symbolic, what it was in the
    call that was compiled. ``weight``, of a packed one, is its format and the type and sizes of
    each of its tensors. ``is_grouped``: the launch computes other GEMMs of the activation as well;
    there is an event for each of them.
    """

    family: str
    spec: str
    offered: tuple[str, ...]
    node: str = ""
    times_us: tuple[float | None, ...] = ()
    sizes: tuple[int, int, int] | None = None
    weight: PackedWeight | None = None
    is_grouped: bool = False

    @property
    def chosen(self) -> str:
        """The first, unless another was timed and faster by more than ``HANDICAP``."""
        pairs = zip(self.times_us, self.offered, strict=False)
        timed = [
            (us if name == self.offered[0] else HANDICAP * us, name) for us, name in pairs if us
        ]
        return min(timed)[1] if timed else self.offered[0]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """GEMMs that became one op, or one that quantizes its activation as well, by the FX nodes of
    the canonical ops: ``call`` in the place of ``members``. Whether GEMMs go in one launch a
    ``KernelChoice`` says."""

    call: str
    members: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Verification:
    """A fused GEMM compared with its graph on the first real inputs (``Options.verify``).

    ``ours_*`` and ``graph_*`` are the distances of the kernel's result and of the graph's, run op
    by op, from the same arithmetic in fp64 (``is_exact``; else from the graph's), relative to the
    root mean square of that; ``limit`` is the most for ``ours_rms``.
    """

    name: str
    is_exact: bool
    ours_rms: float
    graph_rms: float
    ours_max: float
    graph_max: float
    limit: float

    @property
    def is_good(self) -> bool:
        return self.ours_rms <= self.limit

    def __str__(self) -> str:
        against = "fp64" if self.is_exact else "the graph"
        verdict = "verified" if self.is_good else "NOT VERIFIED"
        return (
            f"{verdict} {self.name}: rms error {self.ours_rms:.3g} against {against} (the graph's "
            f"{self.graph_rms:.3g}, limit {self.limit:.3g}), max {self.ours_max:.3g} "
            f"({self.graph_max:.3g})"
        )


@dataclasses.dataclass
class Report:
    """The decisions of the compilations inside a ``collect()`` block, in order."""

    decisions: list[Match | Rejection] = dataclasses.field(default_factory=list)
    kernels: list[KernelChoice] = dataclasses.field(default_factory=list)
    verifications: list[Verification] = dataclasses.field(default_factory=list)
    groups: list[Grouped] = dataclasses.field(default_factory=list)

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


def add(event: Match | Rejection | KernelChoice | Grouped | Verification) -> None:
    """Record an event in every open report."""
    with _lock:
        for report in _open:
            if isinstance(event, KernelChoice):
                report.kernels.append(event)
            elif isinstance(event, Verification):
                report.verifications.append(event)
            elif isinstance(event, Grouped):
                report.groups.append(event)
            else:
                report.decisions.append(event)
