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
    # 4: quantizes in the GEMM. 63: a spare row. 128: one launch for several GEMMs. 1023: beyond, a
    # weight along N is copied.
    "w8a8": (*_DECODE, 4, 63, 1023, *_MEASURED),
    # 32 and 64: with groups a kernel of its own between. 1024: beyond, the int8 weight is written;
    # 64 and 128: rows of a tile.
    "w4a8": (*_DECODE, 32, 64, 128, 192, 256, 320, 512, 768, 1024, 1536, 2048),
    # 4: quantizes in the GEMM. 32: tiles of 32 rows. 256: beyond, tiles of 128 rows.
    "fp8": (*_DECODE, 4, 32, 256, *_MEASURED),
    # 64 and 128 by themselves: a kernel for whole tiles. 64 and 256: the library beyond.
    "fp8_block": (*_DECODE, 32, 63, 64, 127, 128, 255, 256, 312, 384, 512, 768, 1024, 1536, 2048),
    # 64: TMA beyond. Then taller tiles.
    "block_sparse": (*_DECODE, 64, 128, 256, 512, 1024, 2048),
    # 32: one launch for several GEMMs. 128: beyond it the library competes. 192 and 448: beyond,
    # most rows of a tile of 256 are used. Then tiles of 64, 128 and 256 rows.
    "weight_only": (
        *(*_DECODE, 32, 64, 128, 192, 256, 320, 384, 448, 512),
        *(768, 1024, 1536, 2048),
    ),
    # One compilation serves every number of rows: which experts have them is known at run time.
    "experts": (),
    "scaled_experts": (),
}


def tops(families: Iterable[str]) -> tuple[int, ...]:
    """The largest M of each range for GEMMs of these families, ascending."""
    return tuple(sorted({top for family in families for top in TOPS[family]}))


def range_of(rows: int, tops: tuple[int, ...]) -> tuple[int, int | None]:
    """The range of ``rows`` > 0: its smallest and its largest M (None: open)."""
    at = bisect.bisect_left(tops, rows)
    return (tops[at - 1] + 1 if at else 1), (tops[at] if at < len(tops) else None)
