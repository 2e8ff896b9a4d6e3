"""Split K: several CTAs share an output tile, each adds up a slice of K.

The kernel stores fp32 partials [split_k, M, N]; the lowering adds them (``lowering/split_k_sum``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Problem
from inductor_quant.kernels.shared.grids import tile_grid
from inductor_quant.spec.decisions import Rejection, RejectionCode


def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """One CTA per output tile and slice of K."""
    tiles, _, _ = tile_grid(*sizes, cdiv=cdiv)
    return (tiles * sizes[-1].get("SPLIT_K", 1), 1, 1)


def persistent_grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """``NUM_CTAS`` CTAs that take tile after tile; no more than ``grid`` has."""
    ctas, _, _ = grid(*sizes, cdiv=cdiv)
    return (min(ctas, sizes[-1]["NUM_CTAS"]), 1, 1)


def reject_if_unbounded(problem: Problem, config: GemmConfig) -> Rejection | None:
    """Partials are fp32 [split_k, M, N]: gigabytes if M turns out to be large."""
    if config.split_k == 1 or problem.m_is_bounded:
        return None
    return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} splits K, and M has no bound")


def with_split_k(
    problem: Problem,
    config: GemmConfig,
    *,
    max_ctas: int,
    max_split: int,
    min_k_iters: int,
    is_even: bool = True,
) -> GemmConfig:
    """``config`` with the largest power of two up to ``max_split`` as ``split_k`` that launches at
    most ``max_ctas`` CTAs and leaves each at least ``min_k_iters`` blocks of K, and each as many if
    ``is_even``."""
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    split = 1
    while (
        problem.m_is_bounded
        and 2 * split <= max_split
        and 2 * split * tiles <= max_ctas
        and not (is_even and problem.k % (2 * split * config.block_k))
        and problem.k >= 2 * split * config.block_k * min_k_iters
    ):
        split *= 2
    return dataclasses.replace(config, split_k=split)


def same_split(configs: list[GemmConfig]) -> list[GemmConfig]:
    """Those that split K as the first does: autotuning compares outputs of one shape only."""
    return [config for config in configs if config.split_k == configs[0].split_k]
