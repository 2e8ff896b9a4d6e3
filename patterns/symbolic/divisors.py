"""The radices into which a size can be split."""

from __future__ import annotations

import functools
import math


@functools.lru_cache(256)
def divisors(size: int) -> list[int]:
    """The divisors between 1 and ``size``, in order."""
    low = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    return sorted({*low, *(size // n for n in low)} - {1, size})
