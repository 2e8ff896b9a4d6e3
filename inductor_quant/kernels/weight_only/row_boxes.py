"""The rows of x of a tile that TMA loads.

TMA takes longer for rows beyond the last one, which it fills with zeros, than for those that it
reads (mm_sm90/README.md). So a tile that has some is loaded in boxes of a few rows, without those
that have none of x. What shared memory has there is multiplied, for rows that are not stored.
"""

from __future__ import annotations

import dataclasses
import math

from inductor_quant.kernels.problem import Problem

# Rows beyond M: at most this share of a tile, or so many. Boxes of a tile if M is any number.
MAX_BEYOND, LEAST_ROWS, BOXES_OF_ANY_M = 1 / 8, 8, 4


@dataclasses.dataclass(frozen=True)
class RowBoxes:
    """Boxes of ``rows`` rows; how many of them, in ascending order, the tiles have rows of x in."""

    rows: int
    counts: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, problem: Problem, block_m: int, *, has_halves: bool = False) -> RowBoxes:
        """The fewest that have few rows beyond M; of an expert, beyond whose rows are the next
        one's, halves of a tile if it ``has_halves``, or thirds of one of 96 rows."""
        if problem.groups is not None:
            parts = 3 if block_m & (block_m - 1) else 2
            return cls(block_m // parts, tuple(range(1, parts + 1))) if has_halves else cls(block_m)
        if not problem.m_is_static:
            rows = max(block_m // BOXES_OF_ANY_M, LEAST_ROWS)
            return cls(rows, tuple(range(1, block_m // rows + 1)))
        rows, (whole, rest) = block_m, divmod(problem.m, block_m)
        while rows > LEAST_ROWS and -rest % rows > max(block_m * MAX_BEYOND, LEAST_ROWS):
            rows //= 2
        counts = {block_m // rows} if whole else set()
        return cls(rows, tuple(sorted(counts | ({math.ceil(rest / rows)} if rest else set()))))
