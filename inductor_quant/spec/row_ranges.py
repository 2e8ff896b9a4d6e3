"""The ranges of M in which a choice of ours differs, by family: the one table of them.

A graph with a symbolic M is compiled for each range that is met (``row_buckets.py``), for the
largest M of the range. So the table has each threshold of M: those of kernels
(``kernels/problem.py``) and of passes (``patterns/fusion``), and, for tiles, where the choice for
the largest M would be another one than for the smaller ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

# The largest M of each range; the last one is open. One row is a range everywhere: its GEMM is a
# product with a vector for Inductor too.
_DECODE = (1, 8, 16)
# w8a8 and fp8 take the tiles of the nearest M in their table, by ratio (16, 32, 64, 128, 256), and
# add up whole tiles of 64 rows.
# From 256 on tiles have 128 rows; the kernel for large M asks that they be filled by 5/6.
_MEASURED = (22, 45, 64, 90, 128, 181, 255, 312, 384, 512, 768, 1024, 1536, 2048)
TOPS: dict[str, tuple[int, ...]] = {
    # 4: quantizes in the GEMM. 63: a spare row. 128: one launch for several GEMMs,
    # beyond it for short ones. 1023: beyond, a weight along N is copied.
    "w8a8": (*_DECODE, 4, 63, 1023, *_MEASURED),
    # 32: tiles of few rows in registers. 256: beyond, other kernels for e4m3 and scaled int8. 1024:
    # beyond, the int8 weight is written. 64 and 128: rows of a tile.
    "w4a8": (*_DECODE, 32, 64, 128, 192, 256, 320, 512, 768, 1024, 1536, 2048),
    # 4: quantizes in the GEMM. 32: tiles of 32 rows. 192: beyond, tiles of 96 and 192 columns. 256:
    # beyond, tiles of 128 rows.
    "fp8": (*_DECODE, 4, 32, 192, 256, *_MEASURED),
    # 64 and 128 by themselves: a kernel for whole tiles. 64 and 256: the library beyond.
    "fp8_block": (*_DECODE, 32, 63, 64, 127, 128, 255, 256, 312, 384, 512, 768, 1024, 1536, 2048),
    # 32, 48, 64: tiles of 16 rows, if each has an SM. Then taller tiles; 256: TMA beyond.
    "block_sparse": (*_DECODE, 32, 48, 64, 128, 256, 512, 1024, 2048),
    # 32: one launch for several GEMMs. 128: beyond it the library competes. Then tiles of 64, 128
    # and 256 rows, with few rows beyond M.
    "weight_only": (
        *(*_DECODE, 32, 64, 128, 192, 256, 320, 384, 448, 512),
        *(768, 1024, 1536, 2048),
    ),
    # In rows that an expert has in the mean. 1 and 5, by format: tiles of 16 rows beyond. 8, 12 and
    # 32: up to them experts_direct, by card, format and the width of values. 16, 64 and 128: taller
    # tiles beyond. 2048: the library beyond.
    "experts": (1, 5, 8, 12, 16, 32, 64, 128, 256, 2048),
    # Likewise. 12, 20 and 128: taller tiles beyond, from 115 to 192 the tallest. 16: the library
    # beyond, on cards that are not tuned. 48, for few experts 512 and 2048: tiles for most SMs
    # beyond, which the kernel of large M asks for.
    "scaled_experts": (12, 16, 20, 48, 114, 128, 192, 512, 2048),
}


# What decides beyond so many rows: the library takes scales of blocks for multiples of four rows.
MULTIPLES = {"fp8_block": (64, 4)}
LARGEST_STEP = max(step for _, step in MULTIPLES.values())


def kind_of(family: str, experts: int) -> str:
    """The kind of GEMMs whose rows are sorted by so many experts. 0: each row is a tile of its own,
    whatever M is."""
    return f"{family} {experts}"


def tops(kinds: Iterable[str]) -> tuple[int, ...]:
    """The largest M of each range for GEMMs of these kinds, ascending: families, or ``kind_of``."""
    found: set[int] = set()
    for kind in kinds:
        family, _, experts = kind.partition(" ")
        found |= {int(experts or 1) * top for top in TOPS[family]}
    return tuple(sorted(found - {0}))


def step(kinds: Iterable[str], rows: int) -> int:
    """If ``rows`` are a multiple of it, their kernels are those of multiples; 1: of all rows."""
    found = [MULTIPLES[kind] for kind in kinds if kind in MULTIPLES]
    return max((multiple for least, multiple in found if rows > least), default=1)


def range_of(rows: int, tops: tuple[int, ...]) -> tuple[int, int | None]:
    """The range of ``rows`` > 0: its smallest and its largest M (None: open)."""
    at = bisect.bisect_left(tops, rows)
    return (tops[at - 1] + 1 if at else 1), (tops[at] if at < len(tops) else None)
