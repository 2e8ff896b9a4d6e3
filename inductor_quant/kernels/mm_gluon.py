"""What the Gluon kernels for large products of 8-bit operands on Hopper have in common.

A program has the chip's tensor memory accelerator load, by a warp of its own, and two groups of
four warps multiply 64 rows each of a tile of 128 (``templates/mm_gluon.py.jinja``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem, refuse_split
from inductor_quant.kernels.kernel import Kernel

ARCH = 90  # wgmma is Hopper's alone
STEP = 128  # of K: a row of the 128-byte swizzle
# With fewer, reading the weight is what takes time.
MIN_ROWS = 256
MIN_FILL = 0.6  # of the chip, in the rounds of tiles that the best configuration takes
# Steps that fit the 227 KB beside the barriers, by the columns of a tile.
STAGES = {64: 8, 96: 7, 128: 6, 192: 5, 256: 4}

# Multiply-adds. Smaller products are over before it pays that loads are described to the
# accelerator: by trials, 256x4096x4096 int8 takes 12.1 us, by w8a8_mm 11.3; 256x6144x4096 15.5 and
# 15.7.
MIN_PRODUCTS = 6 * 10**9

# Time of an element of a tile that is computed, in those of the widest's, by the tile's columns.
Effort = Mapping[int, float]


def tile(columns: int, group_m: int) -> GemmConfig:
    return GemmConfig(128, columns, STEP, num_warps=4, num_stages=STAGES[columns], group_m=group_m)


# Where scales come behind the sums over all of K. The widest first: of several that take the same
# time by ``EFFORT`` it was the fastest. H200, 256 to 4096 rows of the four layers of Llama-3-8B,
# int8 and FP8, each tile timed (trials: no command here prints them).
CONFIGS = (
    *(tile(columns, group_m=8) for columns in (256, 192, 128, 96, 64)),
    *(tile(columns, group_m=16) for columns in (256, 128)),
)
EFFORT = {256: 1.0, 192: 1.0, 128: 1.0, 96: 1.2, 64: 1.6}


def misfit(problem: Problem, device: Device) -> Rejection | None:
    """What of sizes and memory is not for these kernels."""
    if device.arch != ARCH:
        return Rejection(RejectionCode.NO_KERNEL, f"written for sm_{ARCH}, this is {device}")
    if not (problem.has_aligned_rows and problem.k_is_static):
        return Rejection(
            RejectionCode.NO_KERNEL,
            "an operand is not contiguous along K, or its rows do not begin at 16-byte multiples",
        )
    if not problem.is_stored_narrow:
        return Rejection(RejectionCode.NO_KERNEL, "an fp32 result takes twice as long to store")
    if problem.m < MIN_ROWS:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows are few")
    return None


def is_small(problem: Problem) -> Rejection | None:
    products = problem.m * problem.n * problem.k
    if products < MIN_PRODUCTS:
        return Rejection(RejectionCode.NO_KERNEL, f"{products} products are few")
    return None


def leaves_idle(best: GemmConfig, problem: Problem, device: Device) -> Rejection | None:
    """Whether ``best`` is too coarse for the product."""
    filled = problem.m * problem.n / _computed(best, problem, device)
    if filled < MIN_FILL:
        return Rejection(RejectionCode.NO_KERNEL, f"{filled:.0%} of the chip is used")
    return None


def ranked(
    offered: Iterable[GemmConfig], effort: Effort, problem: Problem, device: Device
) -> list[GemmConfig]:
    """Those first whose rounds of tiles, the last as long as the others, take least."""
    return sorted(
        offered, key=lambda config: _computed(config, problem, device) * effort[config.block_n]
    )


def _computed(config: GemmConfig, problem: Problem, device: Device) -> int:
    """Elements of the output that the chip has time for in the rounds that the tiles take."""
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    rounds = math.ceil(tiles / device.num_sms)
    return rounds * device.num_sms * config.block_m * config.block_n


def constants(problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
    return {
        "STAGES": config.num_stages,
        "PROGRAMS": device.num_sms,
        "K_BLOCKS": math.ceil(problem.k / STEP),
        "BRISK_EPILOGUE": problem.is_stored_narrow,
    }


def kernel(name: str, family: str, offered: tuple[GemmConfig, ...], **parts: Any) -> Kernel:
    """The kernel of ``family``, legal in the configurations ``offered`` alone."""

    def is_legal(
        spec: Any, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        split = refuse_split(config)
        if split is not None or config in offered:
            return split
        text = ", ".join(map(str, offered))
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} is none of {text}")

    return Kernel(
        name=name,
        family=family,
        grid=w8a8.persistent_grid,
        legal=is_legal,
        template="mm_gluon",
        is_gluon=True,
        **parts,
    )
