"""Fits the cost model of a configuration table: which configurations to keep, and their constants.

Works on the measurements of ``examples.tuning.fit_table`` alone and needs no GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.tuning.cost_model import (
    MeasuredConfig,
    MeasuredShape,
    Table,
    parse,
    to_json,
)

Shape = tuple[int, int, int]
Samples = dict[Shape, dict[GemmConfig, float]]  # microseconds

CTA_SHARED_MEMORY = 1024  # shared memory that the hardware reserves for each CTA
MODEL_TOPS = 12  # how many configurations max-autotune times by default
# Some K are multiples of a small BLOCK_K only. Each shape therefore counts once more with the
# configurations up to this BLOCK_K alone, with a smaller weight.
SMALL_BLOCK_K = {64: 0.25, 128: 0.25}


@dataclasses.dataclass(frozen=True)
class Card:
    """What the model needs to know about a GPU. Sizes in bytes, per SM unless stated otherwise."""

    name: str
    arch: int
    num_sms: int
    block_shared_memory: int  # maximum for one CTA
    shared_memory: int
    registers: int
    threads: int

    def device(self) -> Device:
        return Device(self.arch, self.num_sms, self.block_shared_memory)

    def ctas_per_sm(self, config: GemmConfig, registers: int, shared: int) -> int:
        """How many CTAs fit on an SM, from the registers and shared memory of one."""
        threads = 32 * config.num_warps
        by_registers = self.registers // (threads * 8 * math.ceil(registers / 8))
        by_shared = self.shared_memory // (shared + CTA_SHARED_MEMORY)
        return max(1, min(by_registers, by_shared, self.threads // threads, 32))


def select(samples: Samples, count: int) -> list[GemmConfig]:
    """A covering set: each step adds the configuration that lowers the mean log regret the most."""
    views: list[tuple[float, dict[GemmConfig, float]]] = []
    for times in samples.values():
        views.append((1.0, times))
        for limit, weight in SMALL_BLOCK_K.items():
            few = {c: us for c, us in times.items() if c.block_k <= limit}
            if few:
                views.append((weight, few))
    floors = [min(times.values()) for _, times in views]
    # a shape without a configuration counts as three times slower than its best
    reached = [3.0] * len(views)
    left = sorted({config for times in samples.values() for config in times})
    chosen: list[GemmConfig] = []

    def cost(config: GemmConfig) -> float:
        total = 0.0
        for (weight, times), floor, now in zip(views, floors, reached, strict=True):
            total += weight * math.log(min(now, times.get(config, math.inf) / floor))
        return total

    while left and len(chosen) < count:
        best = min(left, key=cost)
        left.remove(best)
        chosen.append(best)
        reached = [
            min(now, times.get(best, math.inf) / floor)
            for (_, times), floor, now in zip(views, floors, reached, strict=True)
        ]
    return sorted(chosen)


def fit(
    config: GemmConfig,
    ctas_per_sm: int,
    samples: Samples,
    num_sms: int,
    without: Shape | None = None,
) -> MeasuredConfig | None:
    """``config`` with the constants that minimise the relative error; None without a sample.

    The weight of a shape is best time / time of ``config``: shapes where it is competitive decide,
    the others only prevent its choice there.
    """
    empty = MeasuredConfig(config, ctas_per_sm, 0.0, 0.0, 0.0)
    rows, weights = [], []
    for shape, times in samples.items():
        if shape == without or config not in times:
            continue
        us = times[config]
        weight = min(times.values()) / us
        full, partial = empty.rounds(Problem(*shape), num_sms)
        steps = empty.steps(Problem(*shape))
        terms = (1.0, steps * (full + (partial > 0)), steps * (full * ctas_per_sm + partial))
        rows.append([weight * term / us for term in terms])
        weights.append(weight)
    if not rows:
        return None
    constants, _ = nnls(np.array(rows), np.array(weights))
    return MeasuredConfig(config, ctas_per_sm, *(round(float(x), 5) for x in constants))


def make_table(
    kernel: str,
    card: Card,
    measured: dict[str, str],
    chosen: Iterable[GemmConfig],
    ctas_per_sm: dict[GemmConfig, int],
    samples: Samples,
    evidence: Samples,
) -> Table:
    """The table of ``chosen``: the fastest one for each shape of ``samples``, and the constants of
    the model fitted to ``evidence``."""
    fitted = [fit(c, ctas_per_sm[c], evidence, card.num_sms) for c in chosen]
    configs = tuple(entry for entry in fitted if entry is not None)
    index = {entry.config: i for i, entry in enumerate(configs)}
    rows = []
    for shape, times in sorted(samples.items()):
        usable = [c for c in times if c in index]
        if usable:
            best = min(usable, key=lambda c: times[c])
            rows.append(MeasuredShape(*shape, config=index[best], us=times[best]))
    return Table(kernel, card.arch, measured, configs, tuple(rows))


def regrets(
    table: Table, card: Card, samples: Samples, leave_out_of: Samples | None = None
) -> dict[str, list[float]]:
    """Regrets of the model alone, without the measured rows of the table.

    "model": time of its first choice / best time. "first 12": time of the best of its first twelve
    choices / best time. ``leave_out_of``: judge each shape with constants fitted to these samples
    without that shape.
    """
    found: dict[str, list[float]] = {"model": [], f"first {MODEL_TOPS}": []}
    for shape, times in samples.items():
        configs = table.configs
        if leave_out_of is not None:
            refits = [
                fit(c.config, c.ctas_per_sm, leave_out_of, card.num_sms, without=shape)
                for c in configs
            ]
            configs = tuple(entry for entry in refits if entry is not None)
        alone = dataclasses.replace(table, configs=configs, rows=())
        ranked = alone.rank(Problem(*shape), card.device(), element_bytes=1)
        ranked = [config for config in ranked if config in times]  # an uneven K is not measured
        best = min(times.values())
        found["model"].append(times[ranked[0]] / best)
        found[f"first {MODEL_TOPS}"].append(min(times[c] for c in ranked[:MODEL_TOPS]) / best)
    return found


def describe(regret: dict[str, list[float]]) -> list[list[str]]:
    """Rows of a table: name, mean, 90th percentile, maximum."""
    return [
        [name, f"{statistics.mean(v):.3f}", f"{np.quantile(v, 0.9):.3f}", f"{max(v):.3f}"]
        for name, v in regret.items()
    ]


def write_table(table: Table, path: Path) -> None:
    """Write JSON with one configuration and one row per line, for readable diffs."""
    raw = to_json(table)

    def lines(entries: list[dict[str, object]]) -> str:
        return ",\n".join(f"  {json.dumps(entry)}" for entry in entries)

    text = (
        "{\n"
        f' "kernel": {json.dumps(raw["kernel"])}, "arch": {raw["arch"]},\n'
        f' "measured": {json.dumps(raw["measured"])},\n'
        f' "configs": [\n{lines(raw["configs"])}\n ],\n'
        f' "rows": [\n{lines(raw["rows"])}\n ]\n}}\n'
    )
    if parse(json.loads(text)) != table:
        raise AssertionError("the table does not read back as it was written")
    path.write_text(text)
