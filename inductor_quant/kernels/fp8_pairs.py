"""The ``fp8_block`` kernel for a row or two of tiles and a short K: two blocks of K a step.

Written in Gluon (``templates/fp8_block_pairs.py.jinja``). Where a product takes microseconds,
what its steps wait for is most of it: a barrier, memory, the matrix unit, and the additions.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import fp8, fp8_few, fp8_gluon, w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem, refuse_split
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.spec import QuantGemmSpec

# By trials on an H200 (no command here prints them), time in that of fp8_block_few, M x N x K:
# 128x7168x2048 0.82, 128x6400x2048 0.80, 128x7168x2816 0.83, 128x7168x512 0.86, 128x8192x1024 0.89,
# 64x7168x2048 0.93, 64x8192x2048 0.96. One tile of 64 columns or less an SM is slower (128x7168 in
# tiles of 32 columns 1.18), and so are two rounds of tiles (128x24576x1536: 18.0 us, fp8_block_mm
# 15.2).
ARCH = 90  # wgmma is Hopper's alone
ROWS = 64  # of a tile
MAX_ROWS = 128  # more were not measured
STEP = 256  # of K: two blocks
MAX_STEPS = 12  # each is written out
PROGRAMS = 2  # that a multiprocessor has room for
CONFIGS = tuple(GemmConfig(ROWS, columns, STEP, num_warps=4, num_stages=3) for columns in (64, 32))


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    refused = fp8.supports(spec, problem, device) or fp8_gluon.refuse_blocks(spec)
    if refused is not None:
        return refused
    if device.arch != ARCH:
        return Rejection(RejectionCode.NO_KERNEL, f"written for sm_{ARCH}, this is {device}")
    is_even = problem.k_is_static and problem.k % STEP == 0
    if not (problem.has_aligned_rows and is_even):
        return Rejection(
            RejectionCode.NO_KERNEL,
            "an operand is not contiguous along K, its rows do not begin at 16-byte multiples, or "
            f"{STEP} does not divide K",
        )
    best = configs(spec, problem, device)[0]
    if not problem.m_is_static or problem.m > MAX_ROWS or not _is_whole(best, problem):
        return Rejection(
            RejectionCode.NO_KERNEL, f"{problem.m} x {problem.n} is not a few whole tiles of {best}"
        )
    is_long = fp8_few.configs(spec, problem, device)[0].split_k > 1
    if is_long or problem.k > MAX_STEPS * STEP:
        return Rejection(RejectionCode.NO_KERNEL, f"K={problem.k} is long")
    tiles = _tiles(best, problem)
    if not device.num_sms < tiles <= PROGRAMS * device.num_sms:
        return Rejection(
            RejectionCode.NO_KERNEL,
            f"{tiles} tiles do not fill {device.num_sms} multiprocessors once with {PROGRAMS} each",
        )
    return None


def _tiles(config: GemmConfig, problem: Problem) -> int:
    return math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)


def _is_whole(config: GemmConfig, problem: Problem) -> bool:
    return problem.m % config.block_m == 0 and problem.n % config.block_n == 0


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    return fp8.constants(spec, problem, config, device) | {
        "K_SIZE": problem.k,
        "BRISK_EPILOGUE": problem.is_stored_narrow,
    }


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Narrow tiles first where wide ones are no more than multiprocessors."""
    wide, narrow = CONFIGS
    return [wide, narrow] if _tiles(wide, problem) > device.num_sms else [narrow, wide]


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    if config in CONFIGS and _is_whole(config, problem):
        return None
    offered = ", ".join(map(str, CONFIGS))
    return refuse_split(config) or Rejection(
        RejectionCode.BLOCK_SHAPE, f"{config} is none of {offered}, or does not divide the result"
    )


FP8_BLOCK_PAIRS = Kernel(
    name="fp8_block_pairs",
    family="fp8_block",
    grid=w8a8.grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    template="fp8_block_pairs",
    is_gluon=True,
)
