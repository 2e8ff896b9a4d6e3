"""The ``fp8_block`` kernel for few rows: parts of K side by side."""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import fp8, w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.spec import QuantGemmSpec

# Any N with so many rows; with more where the chip would be half empty (``leaves_half_idle``).
FEW_ROWS = 64
MAX_ROWS = 256
MAX_SPLIT = 8
# Steps that a part must have: to put SMs to use that have none, and where all have one already,
# since a sum of parts is a kernel more. By trials on an H200 with the five shapes of DeepSeek-V3.
MIN_STEPS = 6
MIN_STEPS_FULL = 12
# Three parts instead of two, three programs an SM.
MIN_STEPS_THREE = 40
BLOCK_N = 64


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
    is_few = problem.m <= FEW_ROWS or (
        problem.m <= MAX_ROWS and problem.m_is_static and leaves_half_idle(problem, device)
    )
    if not is_few:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows are not few")
    return None


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    if config.split_k > 1 and not problem.m_is_static:
        # parts of K are fp32 [split_k, M, N]: gigabytes where M is large
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} splits K, and M is symbolic")
    return fp8.is_legal_tile(spec, config, device)


def leaves_half_idle(problem: Problem, device: Device) -> bool:
    """Whether tiles of 128 x 128, which do not split K, are for half of the SMs or fewer."""
    return 2 * math.ceil(problem.m / 128) * math.ceil(problem.n / 128) <= device.num_sms


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Best guess first; those of one selection share ``split_k``."""
    block_m = next(block for block in (16, 32, 64, 128) if problem.m <= block or block == 128)
    block_k = min(fp8.blocks(spec)[0], fp8.PROMOTED_K)
    tiles = math.ceil(problem.n / BLOCK_N) * math.ceil(problem.m / block_m)
    split = _split(problem, block_m, tiles, math.ceil(problem.k / block_k), device)
    # Deep pipelines while they take no program's place: at 128 rows two fit an SM with 4 stages;
    # with 6 one, which is faster where there are no more than that (128 x 7168 x 2048, by trials).
    roomy = {16: 2.0, 32: 2.0, 64: 1.25, 128: 1.0}[block_m] * device.num_sms
    first = 6 if tiles * split <= roomy else 4
    stages = sorted((3, 4, 6), key=lambda count: abs(count - first))
    offered = [(BLOCK_N, 4, count) for count in stages] + [(128, 4, 4), (128, 8, 4), (128, 8, 3)]
    return [
        GemmConfig(block_m, block_n, block_k, warps, count, split_k=split)
        for block_n, warps, count in offered
    ]


def _split(problem: Problem, block_m: int, tiles: int, steps: int, device: Device) -> int:
    """So many parts of K that there are up to two programs an SM, as long as parts are long."""
    if not problem.m_is_static:
        return 1
    split = 1
    while 2 * split <= MAX_SPLIT and 2 * split * tiles <= 2 * device.num_sms:
        is_full = 4 * split * tiles >= 3 * device.num_sms
        if steps < 2 * split * (MIN_STEPS_FULL if is_full else MIN_STEPS):
            break
        split *= 2
    is_long = steps >= 3 * MIN_STEPS_THREE and tiles <= device.num_sms
    return 3 if split == 2 and block_m <= FEW_ROWS and is_long else split


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
