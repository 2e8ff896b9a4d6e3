"""What happened to each candidate GEMM: collected during compilations, without influencing them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from inductor_quant.spec.decisions import Match, Rejection, RejectionCode
from inductor_quant.spec.weight_format import WeightFormat

PackedWeight = tuple[WeightFormat, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]


# A configuration must beat the best guess by this factor: times vary as much from run to run.
HANDICAP = 1.02


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """What the lowering of one canonical op offered, as ``kernel config``, and took.

    node           the canonical op's FX node
    times_us       of autotuning; None or empty: not timed (a single choice needs no timing)
    sizes          M, N, K; of a symbolic size its value in the call that was compiled
    weight         of a packed weight, its format and the dtype and shape of each tensor
    is_horizontal  the launch computes other GEMMs of the activation too, each with its own event
    rows           the range of M that is compiled, "" if the graph serves all
    gate           what is stored of two columns a and b, "" if they are
    """

    family: str
    spec: str
    offered: tuple[str, ...]
    node: str = ""
    times_us: tuple[float | None, ...] = ()
    sizes: tuple[int, int, int] | None = None
    weight: PackedWeight | None = None
    is_horizontal: bool = False
    rows: str = ""
    gate: str = ""

    @property
    def chosen(self) -> str:
        """The first, unless another is faster by more than ``HANDICAP``."""
        pairs = zip(self.times_us, self.offered, strict=False)
        timed = [
            (us if name == self.offered[0] else HANDICAP * us, name) for us, name in pairs if us
        ]
        return min(timed)[1] if timed else self.offered[0]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Canonical ops ``members`` (FX nodes) that one op, ``call``, replaced: a horizontal op, or one
    that quantizes its activation. Whether it became one launch, its ``KernelChoice`` says, which
    has ``rows`` too."""

    call: str
    members: tuple[str, ...]
    rows: str = ""


@dataclasses.dataclass(frozen=True)
class RowBucket:
    """A graph of symbolic M was compiled for a range of M, ``rows`` ("17..32"), or read from
    Inductor's cache, in ``seconds``."""

    rows: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Verification:
    """A fused GEMM compared with its graph on the first real inputs (``Options.verify``).

    ``ours_*`` and ``graph_*``: errors of the kernel and of the graph, run op by op, against the
    same arithmetic in fp64 (not ``is_exact``: against the graph), relative to its root mean square;
    ``limit`` bounds ``ours_rms``.
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
    buckets: list[RowBucket] = dataclasses.field(default_factory=list)

    @property
    def matches(self) -> list[Match]:
        """Each product once: without what ranges of M repeat."""
        return [d for d in self.decisions if isinstance(d, Match) and not is_of_range(d)]

    @property
    def rejections(self) -> list[Rejection]:
        """Candidates that were not rewritten, without products that read no quantized data."""
        return [
            decision
            for decision in self.decisions
            if isinstance(decision, Rejection)
            and decision.code != RejectionCode.NOT_QUANTIZED
            and not is_of_range(decision)
        ]

    def __str__(self) -> str:
        lines = [f"matched  {match}" for match in self.matches]
        lines += [f"rejected {rejection}" for rejection in self.rejections]
        return "\n".join(lines) or "no candidate GEMM"


def is_of_range(decision: Match | Rejection) -> bool:
    """Whether it was decided for a range of M of a graph that is compiled for all M too."""
    return decision.site is not None and bool(decision.site.rows)


def is_decision(event: Event) -> bool:
    return isinstance(event, Match | Rejection)


Event = Match | Rejection | KernelChoice | Grouped | RowBucket | Verification

_held: ContextVar[list[Event] | None] = ContextVar("inductor_quant_events", default=None)
_bucket: ContextVar[str] = ContextVar("inductor_quant_bucket", default="")
_lock = threading.Lock()
_open: list[Report] = []


@contextmanager
def collect() -> Iterator[Report]:
    """Collect the decisions of every compilation in the process while the block runs.

    A compilation served from Inductor's cache runs no pass and is not collected: set
    ``torch._inductor.config.force_disable_caches`` to see it.
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
    """Whether a report is open; if not, callers skip what only a report needs."""
    return bool(_open)


@contextmanager
def held(is_kept: Callable[[Event], bool] = lambda _: True) -> Iterator[list[Event]]:
    """Events of the block's thread reach the open reports when it ends, if it does not raise and
    they are kept."""
    events: list[Event] = []
    token = _held.set(events)
    try:
        yield events
    finally:
        _held.reset(token)
    for event in events:
        if is_kept(event):
            add(event)


@contextmanager
def bucket(rows: str) -> Iterator[None]:
    """What this thread records in the block belongs to a range of M."""
    token = _bucket.set(rows)
    try:
        yield
    finally:
        _bucket.reset(token)


def is_in_bucket() -> bool:
    return bool(_bucket.get())


def add(event: Event) -> None:
    """Record an event in every open report."""
    if (rows := _bucket.get()) and isinstance(event, KernelChoice | Grouped):
        event = dataclasses.replace(event, rows=rows)
    elif rows and isinstance(event, Match | Rejection) and event.site is not None:
        event = dataclasses.replace(event, site=dataclasses.replace(event.site, rows=rows))
    if (held := _held.get()) is not None:
        held.append(event)
        return
    with _lock:
        for report in _open:
            if isinstance(event, KernelChoice):
                report.kernels.append(event)
            elif isinstance(event, Verification):
                report.verifications.append(event)
            elif isinstance(event, Grouped):
                report.groups.append(event)
            elif isinstance(event, RowBucket):
                report.buckets.append(event)
            else:
                report.decisions.append(event)
