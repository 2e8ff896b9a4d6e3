"""Kernels of the ``w8a8`` family: int8 x int8, exact int32 sums, scales and bias at the end."""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import group, table
from inductor_quant.kernels.config import (
    INTERPRETER_ARCH,
    Device,
    GemmConfig,
    Problem,
    legal,
    refuse_split,
    shared_memory,
    shortened,
)
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.spec import QuantGemmSpec, dtype_name

ELEMENT_BYTES = 1
# Of an SM: its registers, and those of a persistent program beside the accumulators (Triton 3.6 and
# 3.7, 128x128x128 with 4 and 8 warps: 80 and 64); bytes of the pipeline's shared memory and of what
# the flattened loop keeps beside it (8 KiB, 1 KiB of the hardware's).
SM_REGISTERS = 65536
OTHER_REGISTERS = 80
OTHER_SHARED_MEMORY = 9 * 1024
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Triton has no int8 matrix instruction below this capability.
MIN_ARCH = 80
DESCRIPTOR_ARCH = 90
MIN_GROUP = 32  # of K, what the matrix unit takes at once
# Of a thread, with which registers are left for what the epilogue loads. H200, by trials, time in
# that of loading it behind the products, where memory's answer is waited for: with 16 to 256 rows
# 0.96 to 0.99 in 13 GEMMs, 0.99 to 1.00 in three with N=28672, 1.03 in one (16x4096x4096).
EARLY_SUMS = 32


def grid(
    m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any = min
) -> tuple[Any, Any, Any]:
    """One program for each tile of the output."""
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), 1, 1)


def persistent_grid(
    m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any = min
) -> tuple[Any, Any, Any]:
    """As many programs as run at once, no more than there are tiles."""
    tiles, _, _ = grid(m, n, meta, cdiv=cdiv)
    return (min(tiles, meta["PROGRAMS"]), 1, 1)


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    if 0 < device.arch < MIN_ARCH:
        return Rejection(
            RejectionCode.DEVICE, f"sm_{device.arch} has no int8 matrix unit that Triton uses"
        )
    if spec.a.dtype != torch.int8 or spec.b.dtype != torch.int8:
        return Rejection(RejectionCode.NO_KERNEL, f"operands of {spec} are not both int8")
    if spec.out_dtype not in OUT_DTYPES:
        return Rejection(RejectionCode.NO_KERNEL, f"no output in {dtype_name(spec.out_dtype)}")
    if spec.group_size % MIN_GROUP:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{spec}: groups must be multiples of {MIN_GROUP} along K"
        )
    return group.is_no_gain(problem)


def persistent_supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """Large products of operands that a tensor descriptor can describe, from sm_90 on.

    H200, against one program a tile: from 4 tiles of 128 x 128 an SM on 1 to 5 % less time for the
    GEMMs of Llama-3-8B, 6 to 20 % for the shorter K of SAM's ViT-H (65536x5120x1280: 717 us instead
    of 891); with fewer tiles up to 20 % more.
    """
    general = supports(spec, problem, device)
    if general is not None:
        return general
    if device.arch != INTERPRETER_ARCH and device.arch < DESCRIPTOR_ARCH:
        return Rejection(RejectionCode.NO_KERNEL, f"sm_{device.arch} has no tensor descriptors")
    if not problem.has_aligned_rows:
        return Rejection(
            RejectionCode.NO_KERNEL,
            "an operand is not contiguous along K, or its rows do not begin at 16-byte multiples",
        )
    if not problem.is_stored_narrow:
        return Rejection(
            RejectionCode.NO_KERNEL,
            "an fp32 tile on its way out takes 32 KiB of shared memory: a program an SM, not two",
        )
    if problem.needs_spare_row:
        return Rejection(RejectionCode.NO_KERNEL, "tiles are read without a mask")
    if spec.group_size:
        return Rejection(RejectionCode.NO_KERNEL, "scales of groups along K")
    tiles = math.ceil(problem.m / 128) * math.ceil(problem.n / 128)
    if tiles < 4 * device.num_sms:
        return Rejection(RejectionCode.NO_KERNEL, f"{tiles} tiles are too few for a second round")
    return None


def programs(config: GemmConfig, device: Device, *, sums: int = 1) -> int:
    """How many persistent programs the device runs at once; ``sums`` is as for ``legal``."""
    threads = 32 * config.num_warps
    accumulators = sums * config.block_m * config.block_n // threads
    by_registers = SM_REGISTERS // (threads * (accumulators + OTHER_REGISTERS))
    needed = shared_memory(config, ELEMENT_BYTES) + OTHER_SHARED_MEMORY
    return device.num_sms * max(1, min(by_registers, device.shared_memory // needed))


def persistent_constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    found = constants(spec, problem, config, device)
    return found | {"PROGRAMS": programs(config, device)}


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    return tile_constants(spec, problem, config) | {
        "HAS_A_ZERO_POINT": spec.a.zero in ("int", "float"),
        "HAS_B_ZERO_POINT": spec.b.zero in ("int", "float"),
        "SUM_B": problem.needs_spare_row,
        "LOADS_EARLY": config.block_m * config.block_n <= EARLY_SUMS * 32 * config.num_warps,
        **group.constants(problem, config, shared=("A", "A_SCALE")),
    }


def tile_constants(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> dict[str, Any]:
    """What templates of 8-bit operands are told of scales, bias and edges of the matrices."""
    a_scale, b_scale = spec.a.scale, spec.b.scale
    return {
        "QUANT_K": spec.group_size,
        "A_SCALE_GROUPED": a_scale is not None and a_scale.block[1] > 0,
        "B_SCALE_GROUPED": b_scale is not None and b_scale.block[0] > 0,
        "HAS_A_SCALE": a_scale is not None,
        "A_SCALE_PER_TOKEN": a_scale is not None and a_scale.block == (1, -1),
        "HAS_B_SCALE": b_scale is not None,
        "B_SCALE_PER_CHANNEL": b_scale is not None and b_scale.block == (-1, 1),
        "HAS_BIAS": spec.bias,
        "EVEN_K": problem.is_even_k(config),
        # H200, 1x4096x14336: 18.1 us with the mask, 32.6 without; 4 rows 18.0 and 23.6; 16 the same
        # (but a result of one element Inductor stores without a mask, from each place of the tile)
        "FEW_ROWS": problem.m < config.block_m and problem.m * problem.n > 1,
        # The type of the value that the template stores, which is fp32 whatever the sums were in.
        "ACC_TYPE": "tl.float32",
    }


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    # One table: its model carries the shape and the number of SMs, ``legal`` the limits of the
    # device.
    ranked = table.load("w8a8_mm", 90).rank(problem, device, element_bytes=ELEMENT_BYTES)
    length = spec.group_size
    if length:  # a step lies within one group
        step = length & -length
        ranked = list(dict.fromkeys(shortened(config, step) for config in ranked))
    return ranked


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    if problem.needs_spare_row and config.block_m <= problem.m:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config} has no row beyond the {problem.m} of a"
        )
    length = spec.group_size
    if length % config.block_k:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config}: a step must lie within a group of {length} of K"
        )
    sums = 2 if length else 1
    return (
        refuse_split(config)
        or group.misfit(problem, config)
        or legal(config, device, element_bytes=ELEMENT_BYTES, sums=sums)
    )


def persistent_configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    return table.load("w8a8_persistent", 90).rank(problem, device, element_bytes=ELEMENT_BYTES)


W8A8_PERSISTENT = Kernel(
    name="w8a8_persistent",
    family="w8a8",
    grid=persistent_grid,
    supports=persistent_supports,
    constants=persistent_constants,
    configs=persistent_configs,
    legal=is_legal,
)
W8A8_MM = Kernel(
    name="w8a8_mm",
    family="w8a8",
    grid=grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    is_grouped=True,
)
