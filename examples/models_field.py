"""Many configurations of one GEMM, timed against each other: ``tune_family.py``, ``tune_check.py``.

Worker processes (``tune_worker.py``) compile, all at once; then nothing compiles and they are timed
in turn: each round takes one figure of every choice, so that a drift of the clocks meets all alike.
Each call reads other weights, more together than the L2 cache holds; calls are in a CUDA graph. The
best of a first few rounds are timed again with more. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_systems import Results, Row, System, open_systems, quartiles

WORKER = Path(__file__).parent / "tune_worker.py"
DEFAULT, AUTOTUNE = "default", "max-autotune"
MOST_WORKERS = 14
TOGETHER = 4  # cases that are compiled together: fewer waits for the last
ROUNDS, FINAL_ROUNDS, FINALISTS = 3, 9, 5
LIMIT_S = 40  # of a worker that hangs
TIMING_S, AUTOTUNE_S = 2, 4  # about what a case takes beside compiling its choices
KEY = ("family", "m", "n", "k")
Case = tuple[str, int, int, int]  # family, M, N, K
Timing = dict[str, list[float]]  # choice -> microseconds of each round


@dataclasses.dataclass
class Field:
    """The workers, and which of them has what."""

    systems: list[System]
    place: dict[tuple[Case, str], System] = dataclasses.field(default_factory=dict)

    def describe(self, cases: Sequence[Case]) -> dict[tuple[Case, str], Row]:
        """What is to be timed of each case; default mode is compiled thereby."""
        return self._share("describe", [(case, DEFAULT) for case in cases])

    def compile(
        self, wanted: Sequence[tuple[Case, str]], until: float
    ) -> dict[tuple[Case, str], Row]:
        """The workers' replies for those that were begun before ``until``."""
        return self._share("compile", wanted, until)

    def _share(
        self, do: str, wanted: Sequence[tuple[Case, str]], until: float = float("inf")
    ) -> dict[tuple[Case, str], Row]:
        """Each worker takes the next (case, choice) when it has done one."""
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
        """Microseconds of each choice, by rounds; the first round warms up and is left out."""
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
def open_field(device: str, workers: int | None, *arguments: str) -> Iterator[tuple[Field, Row]]:
    """The field and the machine that it is on; every worker has started, with ``arguments``."""
    count = workers or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - 1))
    names = [f"worker{i}" for i in range(count)]
    with open_systems(names, WORKER, "--device", device, *arguments) as systems:
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
    """Rows of the cases, those of the file first. Ends when ``until`` is near; what is missing of a
    case then is its row's ``left``, and such a row is measured anew by a later run.

    ``most`` choices of a case, at most. A row's ``systems`` has for each choice its quartiles in
    microseconds or why it failed; ``finals`` were timed in more rounds; ``ratios`` are of default
    mode (and max-autotune) over the best of these, round by round.
    """
    wanted = []
    for case in cases:
        row = results.find({**dict(zip(KEY, case, strict=True)), "systems": []})
        if row is not None and not row["left"] and (AUTOTUNE in row["chosen"] or not autotune):
            yield row
        else:
            wanted.append(case)
    for start in range(0, len(wanted), TOGETHER):
        if time.perf_counter() > until:
            return
        part = wanted[start : start + TOGETHER]
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
                replies |= field.compile([(case, AUTOTUNE)], until)  # times kernels: alone
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
    """The row of a case; None: nothing but default mode runs, or was begun."""
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
    if DEFAULT not in finals or not best:  # a worker has died meanwhile
        return None
    taken = [name for name in taken if name in finals]
    least = min(best, key=lambda name: statistics.median(finals[name]))
    timed = {name: {"us": _quartiles(values)} for name, values in {**first, **finals}.items()}
    failed = {name: reply for name, reply in mine.items() if "failed" in reply}
    return {
        **dict(zip(KEY, case, strict=True)),
        "key": mine[DEFAULT]["key"],
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
