"""The kernel of ``fp8`` and ``fp8_block`` for large products on Hopper, written in Gluon.

A step along K gives a partial sum that must be scaled and added to the accumulator by ordinary
instructions. Triton waits for each ``tl.dot`` whose result the loop uses, so there the matrix unit
idles meanwhile. In Gluon (``mm_gluon``) groups of warps take turns: one scales while another
multiplies, and a warp of its own loads.
"""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import fp8, mm_gluon
from inductor_quant.kernels.config import Device, GemmConfig, Problem
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.mm_gluon import STEP, tile
from inductor_quant.spec import QuantGemmSpec

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_CONFIGS = (
    *(tile(columns, group_m) for columns in (256, 192) for group_m in (16, 8)),
    tile(128, group_m=8),
)
# Rounded from timings of each tile on an H200, 1024 and 4096 rows. Wide tiles read less.
BLOCK_EFFORT = {256: 1.0, 192: 1.05, 128: 1.3}


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    refused = (
        fp8.supports(spec, problem, device)
        or (refuse_blocks(spec) if fp8.is_block_scaled(spec) else None)
        or mm_gluon.misfit(problem, device)
        or (None if fp8.is_block_scaled(spec) else mm_gluon.is_small(problem))
    )
    if refused is not None:
        return refused
    return mm_gluon.leaves_idle(configs(spec, problem, device)[0], problem, device)


def refuse_blocks(spec: QuantGemmSpec) -> Rejection | None:
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
    return (
        fp8.constants(spec, problem, config, device)
        | mm_gluon.constants(problem, config, device)
        | {"IS_INTEGER": False}
    )


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    offered = (mm_gluon.CONFIGS, mm_gluon.EFFORT)
    if fp8.is_block_scaled(spec):
        offered = (BLOCK_CONFIGS, BLOCK_EFFORT)
    return mm_gluon.ranked(*offered, problem, device)


def _kernel(family: str, offered: tuple[GemmConfig, ...]) -> Kernel:
    return mm_gluon.kernel(
        f"{family}_gluon",
        family,
        offered,
        supports=supports,
        constants=constants,
        configs=configs,
    )


FP8_GLUON = _kernel("fp8", mm_gluon.CONFIGS)
FP8_BLOCK_GLUON = _kernel("fp8_block", BLOCK_CONFIGS)
