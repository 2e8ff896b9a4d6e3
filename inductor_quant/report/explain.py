"""``explain(model, *args)``: what happened to each matrix product of a model, and why."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from inductor_quant._version import __version__
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.options import PREFIX
from inductor_quant.report import advice, pictures, roofline
from inductor_quant.report.events import KernelChoice, Report, collect, is_of_range
from inductor_quant.spec.decisions import MEANINGS, Match, Rejection, RejectionCode, Site

SCHEMA_VERSION = 1
_PLAIN_WIDTH = 160
# What a product with a symbolic M may be for some M only.
_BY_ROWS = (RejectionCode.MANY_ROWS, RejectionCode.UNTUNED)


@dataclasses.dataclass(frozen=True)
class Row:
    """One matrix product: where it is, what was decided, its kernel and the kernel's time.

    ``launched_with``: the modules (or nodes) of the other products in the same launch.
    """

    site: Site
    decision: Match | Rejection
    kernel: KernelChoice | None = None
    timing: roofline.Timing | None = None
    launched_with: tuple[str, ...] = ()

    @property
    def is_near_miss(self) -> bool:
        """A product of quantized data that was not matched: what a user most wants to know."""
        if not isinstance(self.decision, Rejection):
            return False
        return bool(self.site.source) and self.decision.code is not RejectionCode.NOT_QUANTIZED

    @property
    def status(self) -> str:
        if isinstance(self.decision, Match):
            return f"matched {self.decision.family}"
        return self.decision.code.value

    @property
    def reason(self) -> str:
        """One sentence: the kernel of a match, or what stopped one."""
        if isinstance(self.decision, Match):
            kernel = self.kernel.chosen if self.kernel else "no kernel applies"
            gate = f", stores {self.kernel.gate}" if self.kernel and self.kernel.gate else ""
            others = ", ".join(self.launched_with)
            together = f", in one launch with {others}" if others else ""
            name = f"{self.decision.format}, " if self.decision.format else ""
            at = self.decision.computed
            computed = f", its weight is computed in each call (at {at})" if at else ""
            return f"{name}{kernel}, {self.decision.exactness.value}{gate}{together}{computed}"
        where = f" (at {self.decision.node})" if self.decision.node != self.site.node else ""
        detail = self.decision.detail
        meaning = MEANINGS[self.decision.code]
        return f"{meaning}{where}" + (f": {detail}" if detail else "")

    @property
    def shape(self) -> str:
        """M x N x K, "of E" if each row has one of E weights; of a symbolic M the range, or its
        value in this call, for which the row is timed."""
        known = self.kernel.sizes if self.kernel is not None and not self.site.rows else None
        sizes = [str(size) for size in (self.site.rows or self.site.m, self.site.n, self.site.k)]
        if known is not None:
            sizes = [
                text if text == str(size) else f"{text}={size}"
                for text, size in zip(sizes, known, strict=True)
            ]
        size = "x".join(sizes)
        if self.site.experts:
            return f"{size} of {self.site.experts}"
        return size if self.site.batch == 1 else f"{self.site.batch}x{size}"

    def to_dict(self) -> dict[str, Any]:
        """JSON types, documented by ``explain.schema.json``; None where a key does not apply."""
        decision, kernel, timing = self.decision, self.kernel, self.timing
        row: dict[str, Any] = {
            **dataclasses.asdict(self.site),
            "matched": isinstance(decision, Match),
            "near_miss": self.is_near_miss,
            **dict.fromkeys(
                ("family", "spec", "format", "activation", "exactness", "bytes", "operations")
            ),
            "code": None,
            "reason": self.reason,
            "stopped_at": None,
            "kernel": kernel and kernel.chosen,
            "compiled_sizes": list(kernel.sizes) if kernel and kernel.sizes else None,
            "launched_with": list(self.launched_with),
            "us": timing and timing.us,
            "stock_us": timing and timing.stock_us,
            "roofline_share": timing and timing.share,
        }
        if isinstance(decision, Rejection):
            return row | {"code": decision.code.value, "stopped_at": decision.node}
        row |= {
            "family": decision.family,
            "spec": str(decision.spec),
            "format": decision.format or None,
            "activation": str(decision.activation) if decision.activation is not None else None,
            "exactness": decision.exactness.value,
        }
        m, n, k = decision.m, decision.n, decision.k
        if isinstance(m, int) and isinstance(n, int) and isinstance(k, int):
            experts = self.site.experts
            is_chosen = experts and self.site.batch != experts
            weights = roofline.hit_experts(experts, m) if is_chosen else experts or 1
            row["bytes"] = roofline.gemm_bytes(decision.spec, m, n, k, weights=weights)
            row["operations"] = roofline.gemm_operations(decision.spec, m, n, k)
        return row


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The rows of every graph of the model, near misses first, plain products last. A product of
    symbolic M has a row for the kernel that serves any M, then one for each range of M.

    ``advice``: what to do about what was not matched. ``roofs``: TB/s and TOP/s of the card, if
    GEMMs were timed. ``str()`` is a plain table; ``print()`` uses rich where it is installed.
    """

    rows: tuple[Row, ...]
    device: str
    advice: tuple[str, ...] = ()
    roofs: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    @property
    def products(self) -> list[Row]:
        """The rows without those of ranges."""
        return [row for row in self.rows if not row.site.rows]

    @property
    def matches(self) -> list[Match]:
        return [row.decision for row in self.products if isinstance(row.decision, Match)]

    @property
    def rejections(self) -> list[Rejection]:
        return [row.decision for row in self.products if isinstance(row.decision, Rejection)]

    @property
    def near_misses(self) -> list[Row]:
        return [row for row in self.products if row.is_near_miss]

    @property
    def summary(self) -> str:
        matched, near = len(self.matches), len(self.near_misses)
        return (
            f"{matched} of {len(self.products)} matrix products matched, "
            f"{near} near miss{'' if near == 1 else 'es'}, "
            f"{len(self.products) - matched - near} not quantized ({self.device})"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types, documented and checked by ``explain.schema.json``."""
        return {
            "schema": SCHEMA_VERSION,
            "inductor_quant": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": self.device,
            "matched": len(self.matches),
            "near_misses": len(self.near_misses),
            "advice": list(self.advice),
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self, indent: int | None = 1) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        cells = self._table()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        return "\n".join([self.summary, *lines, *self._to_do()])

    def _to_do(self) -> list[str]:
        return [f"to do: {line}" for line in self.advice]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a roofline (a PNG, or what the suffix says) with a dot for each timed GEMM. Needs
        matplotlib, and ``timings``."""
        series: dict[str, list[tuple[float, float]]] = {}
        for row in self.products:
            told = row.to_dict()
            if row.timing is None or told["bytes"] is None:
                continue
            times = {"ours": row.timing.us, "stock": row.timing.stock_us}
            for name, us in times.items():
                if us:
                    dot = told["operations"] / told["bytes"], told["operations"] / us / 1e6
                    series.setdefault(f"{name}, {told['family']}", []).append(dot)
        if not series:
            raise ValueError("no GEMM was timed: explain(..., timings=True) on a GPU")
        pictures.roofline(path, series, self.roofs, self.summary)

    def print(self) -> None:
        try:
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table
        except ImportError:
            print(self)
            return
        header, *lines = self._table()
        table = Table(title=escape(self.summary), title_justify="left")
        for name in header:
            table.add_column(name, overflow="fold", no_wrap=name != "kernel or reason")
        for row, line in zip(self.rows, lines, strict=True):
            style = "green" if isinstance(row.decision, Match) else "dim"
            table.add_row(*map(escape, line), style="yellow" if row.is_near_miss else style)
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(width=_PLAIN_WIDTH)  # a file or a pipe, which has no width
        console.print(table)
        for text in self._to_do():
            console.print(escape(text))

    def _table(self) -> list[list[str]]:
        """Header and rows as text, without columns of timings if there are none."""
        header = ["module", "op", "M x N x K", "status", "kernel or reason"]
        if any(row.timing for row in self.rows):
            header += ["us", "stock us", "roofline"]
        return [header] + [_cells(row)[: len(header)] for row in self.rows]


def _cells(row: Row) -> list[str]:
    timing = row.timing
    return [
        row.site.module or row.site.node,
        row.site.op.removeprefix("aten."),
        row.shape,
        row.status,
        row.reason,
        f"{timing.us:.1f}" if timing else "",
        (f"{timing.stock_us:.1f}" if timing.stock_us else "fails") if timing else "",
        f"{timing.share:.0%}" if timing else "",
    ]


def explain(
    model: Callable[..., Any],
    *args: Any,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = False,
    timings: bool | None = None,
    verbose: bool = True,
    **kwargs: Any,
) -> Explanation:
    """Compile ``model`` for ``args``, run it once, and report what became of each matrix product.

    mode, options   as for ``torch.compile(backend="inductor_quant")``
    dynamic         likewise; False: explain the sizes of ``args``. With a symbolic M every range of
                    M is compiled (``compile_buckets="ahead"``)
    timings         time each matched GEMM alone, ours and stock Inductor's; default: if there is a
                    GPU. A symbolic size has its value in this call; ranges are not timed
    verbose         print the table

    Disables caches for its compilation: a compilation served from a cache runs no pass. Earlier
    compilations stay valid. Returns an Explanation with a row for each matrix product of all
    graphs, subgraphs included.
    """

    options = {f"{PREFIX}compile_buckets": "ahead"} | (options or {})

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        # a new function for each call: Dynamo reuses what it compiled for the same backend
        return inductor_quant_backend(gm, example_inputs, mode=mode, options=options)

    pending, left = advice.pending(model), advice.left(model)
    config: Any = torch.compiler.config
    caches = config.force_disable_caches
    config.force_disable_caches = True
    try:
        with collect() as report, warnings.catch_warnings():
            # "dynamo_pgo force disabled": by us
            warnings.filterwarnings("ignore", message=".*force_disable_caches.*")
            torch.compile(model, backend=backend, dynamic=dynamic)(*args, **kwargs)
        explanation = _explanation(report, mode, timings)
        found = advice.of(explanation.rejections, pending, len(explanation.matches), left)
        explanation = dataclasses.replace(explanation, advice=(*found, *advice.by_hand(model)))
    finally:
        config.force_disable_caches = caches
    if verbose:
        explanation.print()
    return explanation


def _explanation(report: Report, mode: str | None, timings: bool | None) -> Explanation:
    decisions = [d for d in report.decisions if d.site is not None and _is_told(d)]
    devices = sorted({d.site.device for d in decisions if d.site is not None})
    is_timed = torch.cuda.is_available() if timings is None else timings
    measured: dict[tuple[Any, ...], roofline.Timing | None] = {}
    kernels = list(report.kernels)
    groups = _groups(report)
    rows = []
    for decision in decisions:
        assert decision.site is not None
        kernel = timing = None
        others: tuple[str, ...] = ()
        if isinstance(decision, Match):
            call, together = groups.get(id(decision), (decision.call, ()))
            kernel = _take_kernel(kernels, decision, call)
            if kernel is not None and kernel.is_horizontal:
                others = together
            sizes = kernel.sizes if kernel is not None else None
            is_timed_here = (
                is_timed and not decision.site.rows and decision.family in roofline.TIMED_FAMILIES
            )
            if is_timed_here and sizes is not None and decision.site.device.startswith("cuda"):
                weight = kernel.weight if kernel is not None else None
                key = (decision.spec, sizes, weight)
                if key not in measured:
                    device = torch.device(decision.site.device)
                    measured[key] = roofline.time_gemm(
                        decision.spec, *sizes, device, mode, weight=weight
                    )
                timing = measured[key]
        rows.append(Row(decision.site, decision, kernel, timing, others))
    places: dict[tuple[str, str], int] = {}  # the ranges of a product follow it
    for row in rows:
        places.setdefault((row.site.module, row.site.node), len(places))
    has_ranges = any(row.site.rows for row in rows)
    rows.sort(key=lambda r: (_order(r), has_ranges and places[r.site.module, r.site.node]))
    name = ", ".join(devices) or "no matrix product"
    if torch.cuda.is_available() and any(d.startswith("cuda") for d in devices):
        name += f": {torch.cuda.get_device_name()}"
    timed = [row.site.device for row in rows if row.timing is not None]
    roofs = roofline.roofs(torch.device(timed[0])) if timed else {}
    return Explanation(tuple(rows), name, roofs=roofs)


def _is_told(decision: Match | Rejection) -> bool:
    """Whether to report it: not again for each range, if it does not depend on M."""
    depends_on_m = isinstance(decision, Match) or decision.code in _BY_ROWS
    return depends_on_m or not is_of_range(decision)


def _take_kernel(kernels: list[KernelChoice], match: Match, call: str) -> KernelChoice | None:
    """The kernel chosen for a match, whose canonical op is ``call``. Each is taken once: node names
    repeat between graphs."""
    for i, kernel in enumerate(kernels):
        is_same = (kernel.node, kernel.spec, kernel.rows) == (call, str(match.spec), _rows(match))
        # the GEMMs of a horizontal launch differ in N
        if is_same and (call == match.call or (kernel.sizes and kernel.sizes[1] == match.n)):
            return kernels.pop(i)
    return None


def _groups(report: Report) -> dict[int, tuple[str, tuple[str, ...]]]:
    """id of a match in a group -> the group's op, and the modules (or nodes) of other matches."""
    found: dict[int, tuple[str, tuple[str, ...]]] = {}
    matches = [d for d in report.decisions if isinstance(d, Match)]
    for group in report.groups:
        members = []
        for name in group.members:
            keys = ((match, (match.call, _rows(match))) for match in matches)
            match = next((match for match, key in keys if key == (name, group.rows)), None)
            if match is not None:
                matches.remove(match)
                members.append(match)
        for match in members:
            others = (other for other in members if other is not match)
            names = tuple(other.module or other.node for other in others)
            found[id(match)] = (group.call, names)
    return found


def _rows(match: Match) -> str:
    return match.site.rows if match.site is not None else ""


def _order(row: Row) -> int:
    if row.is_near_miss:
        return 0
    if isinstance(row.decision, Match):
        return 1
    return 3 if row.decision.code == RejectionCode.NOT_QUANTIZED else 2
