"""Kernels of the ``fp8`` and ``fp8_block`` families: FP8 x FP8, sums in fp32.

Both families share two templates: one program a tile, and persistent programs on tensor
descriptors.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import table, w8a8
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
from inductor_quant.spec import OperandSpec, QuantGemmSpec, ScaleSpec, dtype_name

# Triton's names of them
ELEMENT_DTYPES = {torch.float8_e4m3fn: "tl.float8e4nv", torch.float8_e5m2: "tl.float8e5"}
# Below FP8_ARCH the operands become bf16, which Triton multiplies from here on.
MIN_ARCH = w8a8.MIN_ARCH
# The matrix unit multiplies FP8 from here on.
FP8_ARCH = 89
WGMMA_ARCHS = (INTERPRETER_ARCH, 90)
# Hopper adds fp8 products with about 14 bits. cuBLASLt moves the sum to fp32 after so many of K.
PROMOTED_K = 128


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    if 0 < device.arch < MIN_ARCH:
        return Rejection(
            RejectionCode.DEVICE, f"sm_{device.arch} has no bf16 matrix unit that Triton uses"
        )
    for operand in (spec.a, spec.b):
        if operand.dtype not in ELEMENT_DTYPES:
            return Rejection(RejectionCode.NO_KERNEL, f"operands of {spec} are not both fp8")
    if spec.out_dtype not in w8a8.OUT_DTYPES:
        return Rejection(RejectionCode.NO_KERNEL, f"no output in {dtype_name(spec.out_dtype)}")
    if is_block_scaled(spec) and blocks(spec)[0] < 32:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{spec}: the matrix unit takes 32 of K at once"
        )
    return None


def persistent_supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """Large products of operands that a tensor descriptor can describe, on sm_90."""
    general = supports(spec, problem, device)
    if general is not None:
        return general
    if device.arch not in WGMMA_ARCHS:
        return Rejection(RejectionCode.NO_KERNEL, f"its tiles are those of sm_90, not {device}")
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
    tiles = math.ceil(problem.m / 128) * math.ceil(problem.n / 128)
    if tiles < 4 * device.num_sms:
        return Rejection(RejectionCode.NO_KERNEL, f"{tiles} tiles are too few for a second round")
    return None


def is_block_scaled(spec: QuantGemmSpec) -> bool:
    """Whether the scales of ``b`` vary along K: those of the ``fp8_block`` op."""
    return spec.b.scale is not None and spec.b.scale.block[0] != -1


def blocks(spec: QuantGemmSpec) -> tuple[int, int]:
    """(block_k, block_n) of a block-scaled spec."""
    assert spec.b.scale is not None
    return spec.b.scale.block


def promotes(spec: QuantGemmSpec, device: Device) -> bool:
    """Whether what the matrix unit adds is moved to a second accumulator on the way."""
    return is_block_scaled(spec) or (not spec.fast_accum and device.arch in WGMMA_ARCHS)


def sums(spec: QuantGemmSpec, device: Device) -> int:
    """Accumulators of an element: 2 where one is added to another, or decoding needs registers."""
    return 2 if promotes(spec, device) or decodes(device) else 1


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    a_scale, b_scale = spec.a.scale, spec.b.scale
    is_blocked = is_block_scaled(spec)
    quant_k, quant_n = blocks(spec) if is_blocked else (0, 0)
    promote = 0 if is_blocked or not promotes(spec, device) else min(PROMOTED_K, config.block_k)
    return w8a8.tile_constants(spec, problem, config) | {
        "BLOCK_SCALED": is_blocked,
        "QUANT_K": quant_k,
        "QUANT_N": quant_n,
        "ONE_B_SCALE": is_blocked and quant_n % config.block_n == 0,
        "A_SCALE_E8M0": _is_e8m0(a_scale),
        "B_SCALE_E8M0": _is_e8m0(b_scale),
        "PROMOTE": promote,
        "SPLIT_K": config.split_k,
        "STAGES": config.num_stages,
        "SWAP": is_swapped(spec, config),
        "DECODE_A": _decode(spec.a, device),
        "DECODE_B": _decode(spec.b, device),
    }


def is_swapped(spec: QuantGemmSpec, config: GemmConfig) -> bool:
    """Whether a tile is computed as its transpose: wgmma takes 64 rows, columns from 8 on."""
    return is_block_scaled(spec) and config.block_m < 64 <= config.block_n


def _is_e8m0(scale: ScaleSpec | None) -> bool:
    return scale is not None and scale.dtype == torch.float8_e8m0fnu


def decodes(device: Device) -> bool:
    """Whether the device has no FP8, so that operands become bf16 first."""
    return 0 < device.arch < FP8_ARCH


def _decode(operand: OperandSpec, device: Device) -> str:
    return ELEMENT_DTYPES[operand.dtype] if decodes(device) else "None"


def persistent_constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    programs = w8a8.programs(config, device, sums=sums(spec, device))
    return constants(spec, problem, config, device) | {"PROGRAMS": programs}


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    return refuse_split(config) or is_legal_tile(spec, config, device)


def is_legal_tile(spec: QuantGemmSpec, config: GemmConfig, device: Device) -> Rejection | None:
    if is_block_scaled(spec):
        quant_k = blocks(spec)[0]
        if quant_k % config.block_k or config.block_k > PROMOTED_K:
            return Rejection(
                RejectionCode.BLOCK_SHAPE,
                f"{config}: a step must lie within one block of {quant_k} along K, "
                f"and take {PROMOTED_K} at most",
            )
    # decoded operands are bf16 where the matrix unit takes them, bytes in shared memory
    element_bytes = 2 if decodes(device) else 1
    shared_bytes = shared_memory(config, element_bytes)
    if is_block_scaled(spec):  # scales of rows, of columns where they are not one, fetched ahead
        shared_bytes += 4 * config.num_stages * (config.block_m + config.block_n)
    return legal(
        config,
        device,
        element_bytes=element_bytes,
        shared_bytes=shared_bytes,
        sums=sums(spec, device),
    )


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Those of the int8 kernel: the same bytes, multiplied at the same rate. Of a sweep of 86
    configurations and more on five FP8 shapes (H200, 16 and 64 rows of Llama-3-8B) its first choice
    lost 0 to 9 % against the best, of 30 and more on seven shapes in blocks 0 to 30 %."""
    ranked = table.load("w8a8_mm", 90).rank(problem, device, element_bytes=1)
    if is_block_scaled(spec):
        # Blocks shorter than the table's steps take its tiles in shorter steps.
        step = min(blocks(spec)[0], PROMOTED_K)
        ranked = list(dict.fromkeys(shortened(config, step) for config in ranked))
    return ranked


def persistent_configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    if not promotes(spec, device):
        return table.load("fp8_persistent", 90).rank(problem, device, element_bytes=1)
    # In order of a few trials on an H200, of blocks: two programs an SM that cover for each other.
    step = min(blocks(spec)[0], PROMOTED_K) if is_block_scaled(spec) else PROMOTED_K
    tiles = ((64, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 4))
    return [shortened(GemmConfig(m, n, 128, w, s), step) for m, n, w, s in tiles]


def _kernels(family: str) -> tuple[Kernel, Kernel]:
    """The persistent kernel of a family and the one with a program a tile."""
    return (
        Kernel(
            name=f"{family}_persistent",
            family=family,
            grid=w8a8.persistent_grid,
            supports=persistent_supports,
            constants=persistent_constants,
            configs=persistent_configs,
            legal=is_legal,
            template="fp8_persistent",
        ),
        Kernel(
            name=f"{family}_mm",
            family=family,
            grid=w8a8.grid,
            supports=supports,
            constants=constants,
            configs=configs,
            legal=is_legal,
            template="fp8_mm",
        ),
    )


FP8_PERSISTENT, FP8_MM = _kernels("fp8")
FP8_BLOCK_PERSISTENT, FP8_BLOCK_MM = _kernels("fp8_block")
