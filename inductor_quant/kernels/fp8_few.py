"""The ``fp8_block`` kernel for few rows: parts of K side by side."""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import fp8, w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.spec import QuantGemmSpec

# What is worth splitting: with more rows, tiles are many enough.
MAX_FEW_ROWS = 64
MAX_SPLIT = 8
# Steps that a part must have to be worth its launch and its sum.
MIN_STEPS = 6


def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """A program for each tile of the output and each part of K."""
    *_, m, n, meta = sizes  # with parts there is their number before
    tiles, _, _ = w8a8.grid(m, n, meta, cdiv=cdiv)
    return (tiles, meta["SPLIT_K"], 1)


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = fp8.supports(spec, problem, device)
    if general is not None:
        return general
    if device.arch not in fp8.WGMMA_ARCHS:
        return Rejection(RejectionCode.NO_KERNEL, f"its tiles are those of sm_90, not {device}")
    if problem.m > MAX_FEW_ROWS:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows are not few")
    return None


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    if config.split_k > 1 and not problem.m_is_static:
        # parts of K are fp32 [split_k, M, N]: gigabytes where M is large
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} splits K, and M is symbolic")
    return fp8.is_legal_tile(spec, config, device)


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Best guess first; those of one selection share ``split_k``."""
    block_m = next(block for block in (16, 32, 64) if problem.m <= block)
    block_k = min(fp8.blocks(spec)[0], fp8.PROMOTED_K)
    split = _split(problem, block_m, block_k, device)
    tiles = ((64, 4, 4), (64, 4, 6), (64, 4, 8), (64, 4, 3), (128, 4, 4), (128, 8, 4))
    return [
        GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
        for block_n, warps, stages in tiles
    ]


def _split(problem: Problem, block_m: int, block_k: int, device: Device) -> int:
    """Two programs an SM, as long as each has some steps."""
    tiles, split = math.ceil(problem.n / 64) * math.ceil(problem.m / block_m), 1
    steps = math.ceil(problem.k / block_k)
    while (
        problem.m_is_static
        and 2 * split <= MAX_SPLIT
        and 2 * split * tiles <= 2 * device.num_sms
        and steps >= 2 * split * MIN_STEPS
    ):
        split *= 2
    return split


FP8_BLOCK_FEW = Kernel(
    name="fp8_block_few",
    family="fp8_block",
    grid=grid,
    supports=supports,
    constants=fp8.constants,
    configs=configs,
    legal=is_legal,
    template="fp8_mm",
)
