"""The kernel of ``fp8`` and ``fp8_block`` for large products on Hopper, written in Gluon.

A step along K gives a partial sum that must be scaled and added to the accumulator by ordinary
instructions. Triton waits for each ``tl.dot`` whose result the loop uses, so there the matrix unit
idles meanwhile. In Gluon groups of warps take turns: one scales while another multiplies, and a
warp of its own loads.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import fp8, w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem, refuse_split
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.spec import QuantGemmSpec

ARCH = 90  # wgmma is Hopper's alone
STEP = 128  # of K: a block of scales, and a row of the 128-byte swizzle
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# With fewer, reading the weight is what takes time, and cuBLASLt was faster (128 x 24576 x 1536).
MIN_ROWS = 256
MIN_FILL = 0.6  # of the chip, in the rounds of tiles that the best configuration takes
CONFIGS = (
    GemmConfig(128, 256, STEP, num_warps=4, num_stages=4, group_m=16),
    GemmConfig(128, 256, STEP, num_warps=4, num_stages=4, group_m=8),
    GemmConfig(128, 192, STEP, num_warps=4, num_stages=5, group_m=16),
    GemmConfig(128, 192, STEP, num_warps=4, num_stages=5, group_m=8),
    GemmConfig(128, 128, STEP, num_warps=4, num_stages=6, group_m=8),
)
# Time of an element of a tile that is computed, in those of the widest's, by its columns: rounded
# from timings of each tile on an H200, 1024 and 4096 rows. Wide tiles read less.
EFFORT = {256: 1.0, 192: 1.05, 128: 1.3}


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = fp8.supports(spec, problem, device)
    if general is not None:
        return general
    if device.arch != ARCH:
        return Rejection(RejectionCode.NO_KERNEL, f"written for sm_{ARCH}, this is {device}")
    if fp8.is_block_scaled(spec):
        refused = _refuse_blocks(spec)
        if refused is not None:
            return refused
    if not (problem.has_aligned_rows and problem.k_is_static):
        return Rejection(
            RejectionCode.NO_KERNEL,
            "an operand is not contiguous along K, or its rows do not begin at 16-byte multiples",
        )
    if not problem.is_stored_narrow:
        return Rejection(RejectionCode.NO_KERNEL, "an fp32 result takes twice as long to store")
    if problem.m < MIN_ROWS:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows are few")
    best = configs(spec, problem, device)[0]
    filled = problem.m * problem.n / _computed(best, problem, device)
    if filled < MIN_FILL:
        return Rejection(RejectionCode.NO_KERNEL, f"{filled:.0%} of the chip is used")
    return None


def _refuse_blocks(spec: QuantGemmSpec) -> Rejection | None:
    assert spec.a.scale is not None
    assert spec.b.scale is not None
    block_k, block_n = fp8.blocks(spec)
    if block_k != STEP or block_n % STEP:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"blocks of {block_k} x {block_n}, not {STEP} x {STEP}"
        )
    if not {spec.a.scale.dtype, spec.b.scale.dtype} <= set(SCALE_DTYPES):
        return Rejection(RejectionCode.NO_KERNEL, f"scales of {spec} are not both floats")
    return None


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    return fp8.constants(spec, problem, config, device) | {
        "STAGES": config.num_stages,
        "PROGRAMS": device.num_sms,
        "K_BLOCKS": math.ceil(problem.k / STEP),
        "BRISK_EPILOGUE": problem.is_stored_narrow,
    }


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Those first whose rounds of tiles, the last as long as the others, take least."""

    return sorted(
        CONFIGS, key=lambda config: _computed(config, problem, device) * EFFORT[config.block_n]
    )


def _computed(config: GemmConfig, problem: Problem, device: Device) -> int:
    """Elements of the output that the chip has time for in the rounds that the tiles take."""
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    rounds = math.ceil(tiles / device.num_sms)
    return rounds * device.num_sms * config.block_m * config.block_n


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    split = refuse_split(config)
    if split is not None or config in CONFIGS:
        return split
    offered = ", ".join(map(str, CONFIGS))
    return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} is none of {offered}")


def _kernel(family: str) -> Kernel:
    return Kernel(
        name=f"{family}_gluon",
        family=family,
        grid=w8a8.persistent_grid,
        supports=supports,
        constants=constants,
        configs=configs,
        legal=is_legal,
        template="fp8_gluon",
        is_gluon=True,
    )


FP8_GLUON, FP8_BLOCK_GLUON = _kernel("fp8"), _kernel("fp8_block")
