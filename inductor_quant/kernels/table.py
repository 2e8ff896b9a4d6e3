"""Tables of measured configurations (``configs/*.json``) and the cost model fitted to them.

A table holds, for one kernel on one architecture, the configurations worth having, three fitted
constants for each, and the fastest configuration of each measured shape, with the provenance of the
measurement. ``rank`` orders the configurations for any shape: a measured neighbour first, the rest
by predicted time.

The model. A block of a configuration runs ``ceil(K / block_k)`` pipeline steps. With c blocks
sharing an SM a step takes ``step_us + c * step_us_per_cta``: the first term is latency that
neighbours hide, the second is throughput that they share. Blocks come in rounds of ``num_sms *
ctas_per_sm``; in the last, partial round fewer of them share an SM. Fitted by non-negative
least squares on relative error.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Any

from inductor_quant.errors import ConfigTableError
from inductor_quant.kernels.config import Device, GemmConfig, Problem, legal

# A measured shape speaks for an M within this factor of its own: further away, tiles and rounds
# differ.
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
        """(full rounds, blocks that share an SM in the partial round after them; 0 if there is
        none).
        """
        tiles = math.ceil(problem.m / self.config.block_m) * math.ceil(
            problem.n / self.config.block_n
        )
        full, rest = divmod(tiles, num_sms * self.ctas_per_sm)
        return full, math.ceil(rest / num_sms)

    def predict(self, problem: Problem, num_sms: int) -> float:
        """Microseconds for ``problem``, without the floor of the memory bandwidth."""
        full, partial = self.rounds(problem, num_sms)
        steps = math.ceil(problem.k / self.config.block_k)
        time = self.fixed_us
        time += full * steps * (self.step_us + self.ctas_per_sm * self.step_us_per_cta)
        if partial:
            time += steps * (self.step_us + partial * self.step_us_per_cta)
        return time


@dataclasses.dataclass(frozen=True)
class MeasuredShape:
    """The fastest configuration (an index into the table's) of one measured shape."""

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
        """The fastest configuration of the nearest measured M at this N and K, if one is near."""
        m = max(problem.m, 16)  # fewer rows than the smallest tile cost as much as the tile
        near = [
            (abs(math.log(m / row.m)), row)
            for row in self.rows
            if (row.n, row.k) == (problem.n, problem.k)
        ]
        if not near:
            return None
        distance, row = min(near, key=lambda item: item[0])
        return self.configs[row.config].config if distance <= math.log(NEIGHBOUR_FACTOR) else None

    def rank(self, problem: Problem, device: Device, *, element_bytes: int) -> list[GemmConfig]:
        """All legal configurations of the table, best guess first."""
        usable = [
            c for c in self.configs if legal(c.config, device, element_bytes=element_bytes) is None
        ]
        usable.sort(key=lambda c: c.predict(problem, device.num_sms))
        ranked = [c.config for c in usable]
        # An uneven K masks every load: the whole last step is paid for, so prefer to divide evenly.
        if problem.k_is_static and any(problem.is_even_k(config) for config in ranked):
            ranked.sort(key=lambda config: not problem.is_even_k(config))
        first = self.neighbour(problem)
        if first in ranked:
            ranked.remove(first)
            ranked.insert(0, first)
        return ranked


@functools.cache
def load(kernel: str, arch: int) -> Table:
    """The table of ``kernel`` for ``arch``. Raises ConfigTableError if it is malformed."""
    name = f"{kernel}_sm{arch}.json"
    path = resources.files("inductor_quant.kernels") / "configs" / name
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
            {
                **dataclasses.asdict(c.config),
                "ctas_per_sm": c.ctas_per_sm,
                "fixed_us": c.fixed_us,
                "step_us": c.step_us,
                "step_us_per_cta": c.step_us_per_cta,
            }
            for c in table.configs
        ],
        "rows": [dataclasses.asdict(row) for row in table.rows],
    }
