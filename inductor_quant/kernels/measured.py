"""Measured choices of a family: ``configs/<family>_sm<arch>.json``.

A row has, for one kind of GEMM and its sizes, the kernels and configurations that a sweep found
faster than what the kernels' rules put first, with both times; ``examples/tune_family.py`` measures
them and writes the file. Where no row is near, and where there is no file, the rules choose.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Any

from inductor_quant.errors import ConfigTableError
from inductor_quant.kernels import KERNELS, Kernel
from inductor_quant.kernels.byte_numbers import bytes_of
from inductor_quant.kernels.config import Device, GemmConfig, Problem, Weight, parse_config
from inductor_quant.kernels.table import NEIGHBOUR_FACTOR, PROVENANCE
from inductor_quant.kernels.word_tile import contiguous_axis
from inductor_quant.kernels.words import words_of
from inductor_quant.spec import QuantGemmSpec

LEAST_ROWS = 8  # of a tile: fewer cost as much
Choice = tuple[Kernel, GemmConfig]


@dataclasses.dataclass(frozen=True)
class Row:
    """The sweep of one GEMM: ``choices`` are ``kernel config``, best first; ``us`` has the
    quartiles of the first, ``rule_us`` those of what the rules chose, timed in turn with it."""

    key: str
    m: int
    n: int
    k: int
    choices: tuple[str, ...]
    us: tuple[float, float, float]
    rule_us: tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Choices:
    """Rows of one family on one card."""

    family: str
    arch: int
    num_sms: int
    measured: dict[str, str]
    rows: tuple[Row, ...]

    def find(self, key: str, problem: Problem) -> list[Choice]:
        """Those of the nearest measured M at this N and K. A row speaks for as many tiles of rows
        and somewhat fewer: more would begin another tile. Symbolic rows may be any number."""
        if not problem.m_is_static:
            return []
        tiles = math.ceil(problem.m / LEAST_ROWS)
        near = [
            row
            for row in self.rows
            if (row.key, row.n, row.k) == (key, problem.n, problem.k)
            and 1 <= math.ceil(row.m / LEAST_ROWS) / tiles <= NEIGHBOUR_FACTOR
        ]
        if not near:
            return []
        nearest = min(near, key=lambda row: row.m)
        return [_parse_choice(text, self.family) for text in nearest.choices]


def key(spec: QuantGemmSpec, problem: Problem) -> str:
    """What a row is for beside its sizes: operands, and how a packed weight lies."""
    fast = ", fast_accum" if spec.fast_accum else ""
    return f"{spec.a} x {spec.b}{fast}{_layout(problem.weight) if problem.weight else ''}"


def _layout(weight: Weight) -> str:
    words = words_of(weight)
    if words is not None:
        axis = contiguous_axis(weight, words)
        return (
            f", {words.bits}-bit words of {words.count} along {words.axis}, in memory along {axis}"
        )
    found = bytes_of(weight)
    return f", bytes of {found[1].count} along k" if found is not None else ""


def choices(family: str, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[Choice]:
    """What was measured for the GEMM on such a card, best first; it may not be legal here."""
    found = load(family, device.arch)
    if found is None or found.num_sms != device.num_sms:
        return []
    return found.find(key(spec, problem), problem)


@functools.cache
def load(family: str, arch: int) -> Choices | None:
    """The choices of ``family`` for ``arch``, if there are. Raises ConfigTableError if they are
    malformed."""
    name = f"{family}_sm{arch}.json"
    path = resources.files("inductor_quant.kernels") / "configs" / name
    if not path.is_file():
        return None
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigTableError(f"{name}: {error!r}") from error


def parse(raw: dict[str, Any]) -> Choices:
    """Choices from their JSON form, which is that of the dataclasses. Raises KeyError, TypeError or
    ValueError."""
    missing = [name for name in PROVENANCE if not raw["measured"].get(name)]
    if missing:
        raise ValueError(f"'measured' lacks {', '.join(missing)}")
    rows = []
    for entry in raw["rows"]:
        lists = {name: tuple(entry[name]) for name in ("choices", "us", "rule_us")}
        rows.append(Row(**{**entry, **lists}))
        for text in rows[-1].choices:
            _parse_choice(text, raw["family"])
        if not rows[-1].choices:
            raise ValueError("a row without a choice")
    if len({(row.key, row.m, row.n, row.k) for row in rows}) != len(rows):
        raise ValueError("a GEMM is listed twice")
    return Choices(raw["family"], raw["arch"], raw["num_sms"], raw["measured"], tuple(rows))


def _parse_choice(text: str, family: str) -> Choice:
    name, _, config = text.rpartition(" ")
    kernels = [kernel for kernel in KERNELS if kernel.name == name and kernel.family == family]
    if not kernels:
        raise ValueError(f"{text!r} names no kernel of {family}")
    return kernels[0], parse_config(config)  # an OptionError is a ValueError
