"""Shared parts of the benchmarks: worker processes, interleaved timing, result files, tables.

A system under test changes Inductor's configuration, its caches and the GPU's memory for the whole
process. ``System`` therefore runs each one in a process of its own, a module started with
``python -m``, and sends it requests as JSON lines on stdin:

    {"do": "prepare", ...}  ->  {"error_rms": ..., "compile_s": ..., ...}  or  {"failed": "why"}
    {"do": "time"}          ->  {"us": ...}

The worker answers through ``serve``. This module does not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # of the repository; workers start here
Row = dict[str, Any]


class NotMeasured(Exception):
    """The user has to give or install something first. Says nothing about the system."""


# Prefixes of failures that say nothing about what the system can do.
_UNKNOWN = ("not measured", "no answer within", "the process died")


def is_unknown(reply: Row | None) -> bool:
    """Whether another run may still yield a time. A system that raised an error has none."""
    return reply is None or str(reply.get("failed", "")).startswith(_UNKNOWN)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a row meets a target."""

    target: str
    met: bool | None  # None: a figure is missing
    detail: str = ""
    row: str = ""

    def __str__(self) -> str:
        met = {True: "met", False: "NOT MET", None: "missing"}[self.met]
        text = f"{met}: {self.row} {self.target}" if self.row else f"{met}: {self.target}"
        return text + (f" ({self.detail})" if self.detail else "")


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print the failed verdicts first; summarise those without any figure by what is missing."""
    print(f"\n{sum(v.met is True for v in verdicts)} of {len(verdicts)} verdicts met:")
    is_blank = {v: v.met is None and v.detail.startswith("without") for v in verdicts}
    for met in (False, None, True):
        for verdict in verdicts:
            if verdict.met is met and not is_blank[verdict]:
                print(verdict)
    blank = Counter((v.row.rpartition(" ")[0], v.target, v.detail) for v in verdicts if is_blank[v])
    for (family, target, detail), count in blank.items():
        print(f"missing on {count} rows: {family} {target} ({detail})")


class System:
    """A worker process, as the parent sees it. Starts at the first request and after each death.

    ``module`` runs as ``python -m module name *arguments`` in the root of the repository.
    """

    def __init__(self, name: str, module: str, *arguments: str) -> None:
        self.name = name
        self.command = [sys.executable, "-m", module, name, *arguments]
        self.process: subprocess.Popen[str] | None = None

    def send(self, **request: Any) -> None:
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``receive`` reports the death
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def receive(self, limit_s: float = 600) -> Row:
        """The reply, or {"failed": why} if the worker failed, died or timed out."""
        try:
            reply = self.replies.get(timeout=max(limit_s, 1))
        except queue.Empty:
            self.close()
            return {"failed": f"no answer within {limit_s:.0f} s"}
        if reply is not None:
            return reply
        self.errors.seek(0)
        said = [line for line in self.errors.read().splitlines() if line.strip()]
        self.close()
        return {"failed": f"the process died: {said[-1] if said else 'without a word'}"}

    def ask(self, limit_s: float = 600, **request: Any) -> Row:
        self.send(**request)
        return self.receive(limit_s)

    def _start(self) -> None:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.replies: queue.Queue[Row | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(self.process, self.replies), daemon=True)
        reader.start()

    def hang_up(self) -> None:
        """Close the worker's stdin, so that it exits once it is idle."""
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def close(self) -> None:
        """Wait for an idle worker to exit; kill a busy one."""
        self.hang_up()
        if self.process is not None:
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.errors.close()
            self.process = None


def _read(process: subprocess.Popen[str], replies: queue.Queue[Row | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(json.loads(line))
    replies.put(None)


@contextlib.contextmanager
def open_systems(names: Sequence[str], module: str, *arguments: str) -> Iterator[list[System]]:
    systems = [System(name, module, *arguments) for name in names]
    try:
        yield systems
    finally:
        for system in systems:  # all at once: each takes a second to exit
            system.hang_up()
        for system in systems:
            system.close()


def serve(handlers: dict[str, Callable[..., Row]]) -> None:
    """The worker's main loop: answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the output of Python and C libraries out of the protocol
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = handlers[request.pop("do")](**request)
        except (NotMeasured, ImportError) as error:
            reply = {"failed": f"not measured: {error}"[:300]}
        except Exception as error:  # goes into the parent's table
            said = str(error).strip().splitlines()
            reply = {"failed": f"{type(error).__name__}: {said[0] if said else ''}"[:300]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def measure(
    systems: Sequence[System],
    request: Row,
    *,
    rounds: int,
    unit: str = "us",
    limit_s: float = 600,
    alone: Callable[[str], bool] = lambda name: False,
) -> Row:
    """Prepare ``request`` in every system, then time all of them in interleaved rounds.

    Systems prepare in parallel, except those that are ``alone``: they time kernels while they
    compile (max-autotune).

    Returns {"systems": {name: reply + {unit: quartiles}}, "ratios": {"ours/peer": quartiles}}. A
    ratio is time of ours / time of the peer in the same round, so clock drift cancels.
    """
    until = time.perf_counter() + limit_s
    replies: dict[str, Row] = {}
    together = [system for system in systems if not alone(system.name)]
    for system in together:
        system.send(do="prepare", **request)
    for system in together:
        replies[system.name] = system.receive(until - time.perf_counter())
    for system in systems:
        if system not in together:
            replies[system.name] = system.ask(until - time.perf_counter(), do="prepare", **request)

    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for system in systems:
            if "failed" in replies[system.name]:
                continue
            reply = system.ask(do="time")
            if "failed" in reply:
                replies[system.name] = reply
            else:
                times.setdefault(system.name, []).append(reply[unit])
    times = {name: values for name, values in times.items() if len(values) == rounds}
    shown = {
        system.name: replies[system.name]
        | ({unit: quartiles(times[system.name])} if system.name in times else {})
        for system in systems
    }
    return {"systems": shown, "ratios": ratios(times)}


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles of time of ours / time of the peer, for each ``ours*`` and each other system."""
    return {
        f"{ours}/{peer}": quartiles([a / b for a, b in zip(times[ours], times[peer], strict=True)])
        for ours in times
        for peer in times
        if ours.startswith("ours") and peer != ours
    }


def quartiles(values: list[float]) -> list[float]:
    """[first quartile, median, third quartile]."""
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def geometric_means(rows: Iterable[Row]) -> dict[str, tuple[float, int]]:
    """Per pair of ours and a peer: (geometric mean of the median ratios, number of rows)."""
    medians: dict[str, list[float]] = {}
    for row in rows:
        for pair, (_, median, _) in row["ratios"].items():
            if "/ours" not in pair:
                medians.setdefault(pair, []).append(median)
    return {
        pair: (statistics.geometric_mean(values), len(values)) for pair, values in medians.items()
    }


def failures(rows: Iterable[Row], label: Callable[[Row], str]) -> dict[tuple[str, str], list[str]]:
    """(system, reason) -> labels of the rows that failed for that reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reply in row["systems"].items():
            if "failed" in reply:
                found.setdefault((name, reply["failed"]), []).append(label(row))
    return found


class Results:
    """Rows in a JSON file, saved after each row. Rows already there are not measured again."""

    def __init__(self, path: Path | None, header: Row, key: Sequence[str]) -> None:
        self.path, self.header, self.key = path, header, key
        self.rows: list[Row] = []
        if path is not None and path.exists():
            old = json.loads(path.read_text())
            for name in ("gpu", "torch"):
                if old["machine"][name] != header["machine"][name]:
                    raise SystemExit(
                        f"{path} was measured with {name} {old['machine'][name]}, this is "
                        f"{header['machine'][name]}: write to another file"
                    )
            self.rows, self.header = old["rows"], {**old, **header}

    def find(self, wanted: Row) -> Row | None:
        """The row with the same key that has at least the wanted systems."""
        for row in self.rows:
            same = all(row[name] == wanted[name] for name in self.key)
            if same and set(wanted["systems"]) <= set(row["systems"]):
                return row
        return None

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is not None:
            self.path.write_text(json.dumps({**self.header, "rows": self.rows}, indent=1))


def track(items: Sequence[Any], description: str) -> Iterator[Any]:
    """The items, with a progress bar if rich is installed and stdout is a terminal."""
    try:
        from rich.progress import track as rich_track
    except ImportError:
        return iter(items)
    if not sys.stdout.isatty():
        return iter(items)
    return iter(rich_track(items, description=description))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: with rich if it is installed, else as aligned text."""
    rows = [list(row) for row in rows]
    print(f"\n{title}")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        lines = [list(columns), *rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        for line in lines:
            print("  ".join(f"{cell:>{w}}" for cell, w in zip(line, widths, strict=True)).rstrip())
        return
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 200  # a file has no width: do not wrap at 80
    Console(width=width, highlight=False, markup=False).print(table)
    sys.stdout.flush()


def show_ratios(rows: Sequence[Row], label: Callable[[Row], str]) -> None:
    """Print each row's ratios and their geometric means, then each reason for failures once."""
    means = geometric_means(rows)
    if means:
        lines = []
        for row in rows:
            found = (row["ratios"].get(pair) for pair in means)
            texts = (f"{q[1]:.3f} [{q[0]:.3f}, {q[2]:.3f}]" if q else "-" for q in found)
            lines.append([label(row), *texts])
        lines.append(["geometric mean", *(f"{mean:.3f} ({n})" for mean, n in means.values())])
        show_table("time of ours / time of the peer: median [quartiles]", ("", *means), lines)
    for (name, reason), where in failures(rows, label).items():
        print(f"{name} fails: {reason}: {', '.join(where)}")
