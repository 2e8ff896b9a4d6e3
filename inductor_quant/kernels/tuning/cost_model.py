"""Tables of measured configurations (``configs/*.json``) and the cost model fitted to them.

A table holds, for one kernel on one architecture: the configurations worth having, three fitted
constants for each, the fastest configuration of each measured shape, and the provenance. ``rank``
orders the configurations for any shape: that of a measured neighbour first, the rest by the model.

The model: a CTA runs ``ceil(K / (block_k * split_k))`` K iterations. With c CTAs per SM an
iteration takes ``step_us + c * step_us_per_cta``: latency, which neighbours hide, and throughput,
which they share. CTAs come in rounds of ``num_sms * ctas_per_sm``; the last round may have fewer
per SM. The sum of partials is part of ``fixed_us``. The constants are fitted by non-negative least
squares on the relative error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Any

from inductor_quant.errors import ConfigTableError
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import Device, Problem

# A measured shape stands for every M within this factor; beyond it, tiles and rounds differ.
NEIGHBOUR_FACTOR = 1.5
PROVENANCE = ("gpu", "torch", "triton", "date", "by")


@dataclasses.dataclass(frozen=True)
class MeasuredConfig:
    """A configuration with its fitted constants, in microseconds; see the module's docstring."""

    config: GemmConfig
    ctas_per_sm: int
    fixed_us: float
    step_us: float
    step_us_per_cta: float

    def rounds(self, problem: Problem, num_sms: int) -> tuple[int, int]:
        """(full rounds, CTAs per SM in the partial round after them, or 0)."""
        config = self.config
        tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
        full, rest = divmod(tiles * config.split_k, num_sms * self.ctas_per_sm)
        return full, math.ceil(rest / num_sms)

    def steps(self, problem: Problem) -> int:
        """K iterations of a CTA."""
        return math.ceil(problem.k / (self.config.block_k * self.config.split_k))

    def predict(self, problem: Problem, num_sms: int) -> float:
        """Microseconds; ignores the bound of the memory bandwidth."""
        full, partial = self.rounds(problem, num_sms)
        k_iters = self.steps(problem)
        time = self.fixed_us
        time += full * k_iters * (self.step_us + self.ctas_per_sm * self.step_us_per_cta)
        if partial:
            time += k_iters * (self.step_us + partial * self.step_us_per_cta)
        return time


@dataclasses.dataclass(frozen=True)
class MeasuredShape:
    """One measured shape; ``config`` is the index of its fastest configuration."""

    m: int
    n: int
    k: int
    config: int
    us: float


@dataclasses.dataclass(frozen=True)
class Table:
    kernel: str
    arch: int
    measured: dict[str, str]
    configs: tuple[MeasuredConfig, ...]
    rows: tuple[MeasuredShape, ...]

    def neighbour(self, problem: Problem) -> GemmConfig | None:
        """The fastest configuration of the nearest M measured at this N and K, if near enough."""
        m = max(problem.m, 16)  # below the smallest tile, M makes no difference
        near = [
            (abs(math.log(m / row.m)), row)
            for row in self.rows
            if (row.n, row.k) == (problem.n, problem.k)
        ]
        if not near:
            return None
        distance, row = min(near, key=lambda item: item[0])
        return self.configs[row.config].config if distance <= math.log(NEIGHBOUR_FACTOR) else None

    def predict(self, config: GemmConfig, problem: Problem, device: Device) -> float:
        """Microseconds of a configuration of the table."""
        [found] = [each for each in self.configs if each.config == config]
        return found.predict(problem, device.num_sms)

    def rank(self, problem: Problem, device: Device, *, element_bytes: int) -> list[GemmConfig]:
        """All legal configurations of the table, best guess first."""
        usable = [
            c
            for c in self.configs
            if tile_rejection(c.config, device, element_bytes=element_bytes) is None
        ]
        usable.sort(key=lambda c: c.predict(problem, device.num_sms))
        ranked = [c.config for c in usable]
        # If block_k does not divide K, every load is masked and the last iteration is padding.
        if problem.k_is_static and any(problem.is_even_k(config.block_k) for config in ranked):
            ranked.sort(key=lambda config: not problem.is_even_k(config.block_k))
        first = self.neighbour(problem)
        if first in ranked:
            ranked.remove(first)
            ranked.insert(0, first)
        return ranked


@functools.cache
def load(kernel: str, arch: int) -> Table:
    """The table of ``kernel`` for ``arch``. Raises ConfigTableError if it is malformed."""
    name = f"{kernel}_sm{arch}.json"
    path = resources.files("inductor_quant.kernels.tuning") / "configs" / name
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigTableError(f"{name}: {error!r}") from error


def parse(raw: dict[str, Any]) -> Table:
    """A table from its JSON form: see ``to_json``. Raises KeyError, TypeError or ValueError."""
    missing = [name for name in PROVENANCE if not raw["measured"].get(name)]
    if missing:
        raise ValueError(f"'measured' lacks {', '.join(missing)}")
    fields = [field.name for field in dataclasses.fields(GemmConfig)]
    configs = []
    for entry in raw["configs"]:
        values = dict(entry)
        config = GemmConfig(**{name: values.pop(name) for name in fields if name in values})
        configs.append(MeasuredConfig(config, **values))
    if len({c.config for c in configs}) != len(configs):
        raise ValueError("a configuration is listed twice")
    rows = tuple(MeasuredShape(**row) for row in raw["rows"])
    if any(not 0 <= row.config < len(configs) for row in rows):
        raise ValueError("a row names a configuration that is not listed")
    if len({(r.m, r.n, r.k) for r in rows}) != len(rows):
        raise ValueError("a shape is listed twice")
    return Table(raw["kernel"], raw["arch"], raw["measured"], tuple(configs), rows)


def to_json(table: Table) -> dict[str, Any]:
    """The JSON form of a table, read back by ``parse``."""
    return {
        "kernel": table.kernel,
        "arch": table.arch,
        "measured": table.measured,
        "configs": [
            dataclasses.asdict(each.config)
            | {name: value for name, value in vars(each).items() if name != "config"}
            for each in table.configs
        ],
        "rows": [dataclasses.asdict(row) for row in table.rows],
    }
