"""Launch grids that several kernels share; ``sizes`` are (m, n, meta) or (split_k, m, n, meta)."""

from __future__ import annotations

import math
from typing import Any

# Of experts whose tiles CTAs find (experts/tiles.jinja): so many a warp looks at together, as its
# registers suffice for; bytes of shared memory for each.
WARP, MAX_SPAN, BYTES_OF_EXPERT = 32, 128, 8


def tile_grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """One CTA per output tile."""
    *_, m, n, meta = sizes
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), 1, 1)


def persistent_grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """``NUM_CTAS`` CTAs that take tile after tile; fewer if there are fewer tiles."""
    tiles, _, _ = tile_grid(*sizes, cdiv=cdiv)
    return (min(tiles, sizes[-1]["NUM_CTAS"]), 1, 1)


def span_of(experts: int) -> int:
    """How many experts a warp looks at together: all or ``MAX_SPAN``, each lane at as many."""
    return max(WARP, min(MAX_SPAN, 1 << (experts - 1).bit_length()))


def memory_of_experts(experts: int) -> int:
    span = span_of(experts)
    return BYTES_OF_EXPERT * span * math.ceil(experts / span)
