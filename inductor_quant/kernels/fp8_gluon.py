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
MIN_FILL = 0.75  # of the chip, by tiles of 128 x 256
# Larger tiles read less, and where they are wide, a group reads half the scales of rows. Those of
# 192 and 128 rows are for sizes of which the large ones leave much of the last round idle.
THREE_GROUPS = GemmConfig(192, 128, STEP, num_warps=4, num_stages=5, group_m=4)
CONFIGS = (
    GemmConfig(128, 256, STEP, num_warps=4, num_stages=4, group_m=16),
    GemmConfig(128, 256, STEP, num_warps=4, num_stages=4, group_m=8),
    GemmConfig(256, 128, STEP, num_warps=4, num_stages=4, group_m=8),
    THREE_GROUPS,
    GemmConfig(128, 128, STEP, num_warps=4, num_stages=6, group_m=8),
)
# Time of an element of a tile that is computed, in those of the first's: rounded from timings of
# each tile on an H200, 4096 x 7168 x 16384 and 4096 x 24576 x 1536 in blocks.
EFFORT = {(128, 256): 1.0, (256, 128): 1.1, (192, 128): 1.1, (128, 128): 1.3}


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = fp8.supports(spec, problem, device)
    if general is not None:
        return general
    if device.arch != ARCH:
        return Rejection(RejectionCode.NO_KERNEL, f"written for sm_{ARCH}, this is {device}")
    if spec.fast_accum:
        return Rejection(RejectionCode.NO_KERNEL, "sums that are not promoted: not measured")
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
    tiles = math.ceil(problem.m / 128) * math.ceil(problem.n / 256)
    if tiles < MIN_FILL * device.num_sms:
        return Rejection(RejectionCode.NO_KERNEL, f"{tiles} tiles do not fill the chip")
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
        "IS_ODD": math.ceil(problem.k / STEP) % 2 == 1,
        "GROUPS": groups(config),
        "BRISK_EPILOGUE": problem.is_stored_narrow,
        "SUMS": config.block_m * config.block_n // (groups(config) * 64 * 128),
    }


def groups(config: GemmConfig) -> int:
    """Of four warps: as many as share the rows of a tile."""
    return 3 if config.block_m == 192 else 2


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Those first whose rounds of tiles, the last as long as the others, take least."""

    def time(config: GemmConfig) -> float:
        tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
        area = config.block_m * config.block_n
        return math.ceil(tiles / device.num_sms) * area * EFFORT[config.block_m, config.block_n]

    return sorted(CONFIGS, key=time)


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
