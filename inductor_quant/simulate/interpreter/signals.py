"""Signals between the CTAs of a grid, which the interpreter runs one after the other.

A CTA does not wait for a later one, but goes on without what that leaves it. The grid then runs
again, and each CTA finds in memory what all left there the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_sent: set[tuple[int, int]] = set()
_missing: set[tuple[int, int]] = set()


def run_grid(run: Callable[[], None]) -> None:
    """Run all CTAs of a grid: twice if one awaits a signal of a later one."""
    _sent.clear()
    _missing.clear()
    run()
    if _missing:
        if never := _missing - _sent:
            raise AssertionError(f"awaits signals that are not sent: {sorted(never)}")
        run()


def send(*signals: Any, count: Any = 1, skipped: Any = -1, warps: Any) -> None:
    _sent.update(_numbers(*signals, count, skipped))


def wait(*signals: Any, count: Any = 1, skipped: Any = -1, warps: Any) -> None:
    _missing.update(set(_numbers(*signals, count, skipped)) - _sent)


def _numbers(*arguments: Any) -> Iterator[tuple[int, int]]:
    pointer, first, step, count, skipped = map(_integer, arguments)
    return ((pointer, first + i * step) for i in range(count) if i != skipped)


def _integer(value: Any) -> int:
    data = value.handle.data if hasattr(value, "handle") else getattr(value, "value", value)
    return int(np.asarray(data).item())
