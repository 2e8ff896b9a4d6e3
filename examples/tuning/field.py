"""Times many configurations of one GEMM against each other; used by ``examples.tuning.check``.

Worker processes (``examples.tuning.worker``) compile in parallel. Nothing compiles during timing:
each round times every choice once, so that clock drift affects all alike. Calls run in a CUDA graph
and read different weights, which exceed the L2 cache together. The best choices of a few rounds are
timed again in more rounds. This module does not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from examples.benchmarks.harness import Results, Row, System, open_systems, quartiles

WORKER = "examples.tuning.worker"
DEFAULT, AUTOTUNE = "default", "max-autotune"
MOST_WORKERS = 14
BATCH = 4  # cases that are compiled together, so that workers seldom wait for the last one
ROUNDS, FINAL_ROUNDS, FINALISTS = 3, 9, 5
LIMIT_S = 40  # for one reply of a worker
TIMING_S, AUTOTUNE_S = 2, 4  # what a case takes beside compiling its choices, roughly
KEY = ("family", "m", "n", "k")
Case = tuple[str, int, int, int]  # family, M, N, K
Timing = dict[str, list[float]]  # choice -> microseconds of each round


@dataclasses.dataclass
class Field:
    """The workers, and which one holds each compiled choice."""

    systems: list[System]
    place: dict[tuple[Case, str], System] = dataclasses.field(default_factory=dict)

    def describe(self, cases: Sequence[Case]) -> dict[tuple[Case, str], Row]:
        """The choices of each case. Compiles default mode to find them."""
        return self._share("describe", [(case, DEFAULT) for case in cases])

    def compile(
        self, wanted: Sequence[tuple[Case, str]], until: float
    ) -> dict[tuple[Case, str], Row]:
        """The workers' replies, for the choices that were started before ``until``."""
        return self._share("compile", wanted, until)

    def _share(
        self, do: str, wanted: Sequence[tuple[Case, str]], until: float = float("inf")
    ) -> dict[tuple[Case, str], Row]:
        """Each worker takes the next (case, choice) when it is idle."""
        queue, lock = iter(wanted), threading.Lock()
        replies: dict[tuple[Case, str], Row] = {}

        def work(system: System) -> None:
            while time.perf_counter() < until:
                with lock:
                    job = next(queue, None)
                if job is None:
                    return
                case, name = job
                reply = system.ask(LIMIT_S, do=do, case=case, name=name)
                with lock:
                    replies[job] = reply
                    if "failed" not in reply:
                        self.place[job] = system

        threads = [threading.Thread(target=work, args=(system,)) for system in self.systems]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies

    def time(self, case: Case, names: Sequence[str], rounds: int) -> Timing:
        """Microseconds of each choice in each round, after a round that warms up."""
        times: Timing = {name: [] for name in names}
        for number in range(rounds + 1):
            for system in self.systems if number % 2 else reversed(self.systems):
                mine = [name for name in names if self.place.get((case, name)) is system]
                reply = system.ask(LIMIT_S, do="time", case=case, names=mine) if mine else {}
                for name in mine if number and "failed" not in reply else ():
                    times[name].append(reply[name])
        return {name: values for name, values in times.items() if len(values) == rounds}

    def forget(self) -> None:
        self.place.clear()
        for system in self.systems:
            if system.process is not None:
                system.ask(do="forget")


@contextlib.contextmanager
def open_field(device: str, workers: int | None) -> Iterator[tuple[Field, Row]]:
    """Starts the workers: (field, machine)."""
    count = workers or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - 1))
    names = [f"worker{i}" for i in range(count)]
    with open_systems(names, WORKER, "--device", device) as systems:
        for system in systems:
            system.send(do="machine")
        machines = [system.receive() for system in systems]
        for found in machines:
            if "failed" in found:
                raise SystemExit(f"a worker does not start: {found['failed']}")
        yield Field(systems), machines[0]


def sweep(
    field: Field,
    cases: Sequence[Case],
    results: Results,
    until: float,
    *,
    autotune: bool = False,
    most: int | None = None,
) -> Iterator[Row]:
    """The rows of the cases, those of the file first. Stops before ``until``.

    A row counts the choices that were not compiled in time as ``left``; a later run measures such a
    case again. ``systems`` has the quartiles in microseconds of each choice, or why it failed.
    ``finals`` were timed in more rounds; ``ratios`` are default mode (and max-autotune) over the
    best of them in the same round. ``most``: maximum number of choices per case.
    """
    wanted = []
    for case in cases:
        row = results.find({**dict(zip(KEY, case, strict=True)), "systems": []})
        if row is not None and not row["left"] and (AUTOTUNE in row["chosen"] or not autotune):
            yield row
        else:
            wanted.append(case)
    for start in range(0, len(wanted), BATCH):
        if time.perf_counter() > until:
            return
        part = wanted[start : start + BATCH]
        replies = field.describe(part)
        choices: dict[Case, list[str]] = {}
        for case in part:
            found = replies[case, DEFAULT]
            if found.get("choices"):
                choices[case] = found["choices"][:most]
            else:
                print(f"{label(case)}: {found.get('failed') or found['chosen']}", flush=True)
        reserve = len(part) * (TIMING_S + (AUTOTUNE_S if autotune else 0))
        jobs = [(case, name) for case in choices for name in choices[case]]
        replies |= field.compile(jobs, until - reserve)
        for case, names in choices.items():
            if autotune:
                names.append(AUTOTUNE)
                replies |= field.compile([(case, AUTOTUNE)], until)  # alone, since it times kernels
            row = _measure(field, case, names, replies)
            if row is not None:
                old = results.find({**row, "systems": []})
                if old is not None:
                    results.rows.remove(old)
                results.add(row)
                yield row
        field.forget()


def _measure(
    field: Field, case: Case, names: Sequence[str], replies: dict[tuple[Case, str], Row]
) -> Row | None:
    """The row of a case; None if no choice beside default mode was compiled."""
    mine = {name: reply for (of, name), reply in replies.items() if of == case}
    first = field.time(case, [name for name in mine if "failed" not in mine[name]], ROUNDS)
    pinned = [name for name in first if name not in (DEFAULT, AUTOTUNE)]
    if DEFAULT not in first or not pinned:
        return None
    medians = {name: statistics.median(values) for name, values in first.items()}
    best = sorted(pinned, key=medians.__getitem__)[:FINALISTS]
    taken = [name for name in (DEFAULT, AUTOTUNE) if name in first]
    finals = field.time(case, [*best, *taken], FINAL_ROUNDS)
    best = [name for name in best if name in finals]
    if DEFAULT not in finals or not best:  # a worker has died
        return None
    taken = [name for name in taken if name in finals]
    least = min(best, key=lambda name: statistics.median(finals[name]))
    timed = {name: {"us": _quartiles(values)} for name, values in {**first, **finals}.items()}
    failed = {name: reply for name, reply in mine.items() if "failed" in reply}
    return {
        **dict(zip(KEY, case, strict=True)),
        "left": len(set(names) - set(mine)),
        "best": least,
        "finals": list(finals),
        "chosen": {name: mine[name]["chosen"] for name in taken},
        "ratios": {name: _ratio(finals[name], finals[least]) for name in taken},
        "systems": timed | failed,
    }


def _ratio(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return _quartiles([a / b for a, b in zip(times, others, strict=True)])


def _quartiles(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in quartiles(list(values))]


def label(case: Sequence[Any]) -> str:
    family, m, n, k = case
    return f"{family} {m}x{n}x{k}"
