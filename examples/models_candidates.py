"""Which tile configurations are worth timing: for ``tune.py`` and ``tune_check.py``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

from models_sweep import EVEN, TARGETS, Shape

from inductor_quant.kernels import Kernel
from inductor_quant.kernels.config import Device, GemmConfig


def candidates(kernel: Kernel, device: Device, group_m: Iterable[int]) -> list[GemmConfig]:
    """All configurations that are legal and not senseless."""
    blocks = (16, 32, 64, 128, 256)
    grid = itertools.product(
        blocks, blocks, (64, 128, 256, 512), (2, 4, 8), (2, 3, 4, 5, 6, 8), group_m
    )
    configs = (GemmConfig(*values) for values in grid)
    rule = RULES[kernel.name]
    spec = TARGETS[kernel.name].spec()
    legal = functools.partial(kernel.legal, spec, EVEN)
    return [c for c in configs if rule(c) and legal(c, device) is None]


def is_sensible_block(c: GemmConfig) -> bool:
    """One block of K a step; two accumulators an element, so tiles are half as large."""
    return c.block_k == 128 and is_sensible(c)


def is_sensible_block_persistent(c: GemmConfig) -> bool:
    return (
        c.block_k == 128
        and c.num_stages in (3, 4, 5, 6)
        and c.num_warps in (4, 8)
        and c.block_m * c.block_n >= 64 * 128
        and min(c.block_m, c.block_n) >= 64
    )


def is_sensible_persistent(c: GemmConfig) -> bool:
    """Large tiles: in a sweep on an H200 a side of 64 cost 10 % and more."""
    return (
        c.block_m >= 128
        and c.block_n >= 128
        and 64 <= c.block_k <= 128
        and 3 <= c.num_stages <= 5
        and c.num_warps >= 4
        and (c.num_warps == 4 or c.block_m * c.block_n >= 128 * 256)
    )


def is_sensible(c: GemmConfig) -> bool:
    """Rules from a first sweep on an H200: what they exclude was never near the best."""
    area = c.block_m * c.block_n
    in_flight = c.num_stages * (c.block_m + c.block_n) * c.block_k
    accumulators = area / (32 * c.num_warps)
    return not (
        (in_flight < 24 * 1024 and area <= 64 * 64)
        or accumulators < 4
        or (c.block_m == 16 and c.block_n == 256)
        or (c.num_warps == 2 and c.block_m > 16)
        or (c.num_warps == 8 and area <= 64 * 64)
        or (c.block_k == 64 and (c.block_m < 64 or (area >= 128 * 128 and c.num_stages < 4)))
        or (c.block_k == 512 and c.block_m > 32)
        or (c.block_n == 16 and c.block_m > 32)
        or (c.block_m == 256 and c.block_n < 64)
        or (c.num_stages == 2 and c.block_k < 128)
    )


RULES: dict[str, Callable[[GemmConfig], bool]] = {
    "w8a8_mm": is_sensible,
    "w8a8_persistent": is_sensible_persistent,
    "fp8_mm": is_sensible,
    "fp8_persistent": is_sensible_persistent,
    "fp8_block_mm": is_sensible_block,
    "fp8_block_persistent": is_sensible_block_persistent,
}


def suits(config: GemmConfig, shape: Shape) -> bool:
    """Whether it is worth timing ``config`` for ``shape``; an uneven K is left to the model."""
    m, _, k = shape
    if k % config.block_k:
        return False
    if m >= 512:
        return config.block_m >= 64 and config.block_m * config.block_n >= 64 * 64
    return (
        config.block_m <= max(m, 16)
        and config.block_m >= m // 8
        and (m > 32 or config.num_stages > 2)
    )
