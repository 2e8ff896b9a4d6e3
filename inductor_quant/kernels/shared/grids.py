"""Launch grids that several kernels share; ``sizes`` are (m, n, meta) or (split_k, m, n, meta)."""

from __future__ import annotations

from typing import Any


def tile_grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """One CTA per output tile."""
    *_, m, n, meta = sizes
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), 1, 1)


def persistent_grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """``NUM_CTAS`` CTAs that take tile after tile; fewer if there are fewer tiles."""
    tiles, _, _ = tile_grid(*sizes, cdiv=cdiv)
    return (min(tiles, sizes[-1]["NUM_CTAS"]), 1, 1)
