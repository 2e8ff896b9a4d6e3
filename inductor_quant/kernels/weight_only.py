"""Kernels of the ``weight_only`` family: a real activation times a packed weight.

``WEIGHT_ONLY_MM`` takes every format; kernels for particular ones stand before it in ``KERNELS``
and ask ``problem.weight`` for the properties that they need.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels.config import Device, GemmConfig, Problem, legal, refuse_split
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.w8a8 import grid
from inductor_quant.kernels.weight_code import TRITON_TYPES, WeightCode
from inductor_quant.ops.weight_only import preferred_rows, split_steps
from inductor_quant.spec import QuantGemmSpec, dtype_name
from inductor_quant.weight_format import Field

# Triton has no bf16 matrix instruction below the first, and does not convert e4m3 below the second.
MIN_ARCH = 80
MIN_ARCH_E4M3 = 89
# Beside an accumulator: with more unpacked numbers a thread, configurations of the list spill.
MAX_TILE_REGISTERS = 32

# (largest M, configurations). The first is for few columns, the second for WIDE_N and more, the
# rest are for autotuning. By rule: for few rows small tiles, so that there are enough programs to
# keep the memory busy.
_CONFIGS: tuple[tuple[float, tuple[GemmConfig, ...]], ...] = (
    (
        16,
        (
            GemmConfig(16, 32, 128, num_warps=4, num_stages=5),
            GemmConfig(16, 32, 128, num_warps=4, num_stages=3),
            GemmConfig(16, 16, 256, num_warps=4, num_stages=3),
            GemmConfig(16, 16, 128, num_warps=2, num_stages=4),
            GemmConfig(16, 64, 128, num_warps=8, num_stages=3),
            GemmConfig(16, 32, 64, num_warps=2, num_stages=4),
            GemmConfig(16, 64, 64, num_warps=4, num_stages=5),
            GemmConfig(16, 32, 32, num_warps=2, num_stages=5),
        ),
    ),
    (
        64,
        (
            GemmConfig(64, 32, 128, num_warps=4, num_stages=3),
            GemmConfig(64, 64, 64, num_warps=4, num_stages=4),
            GemmConfig(32, 32, 128, num_warps=4, num_stages=4),
            GemmConfig(64, 128, 64, num_warps=8, num_stages=3),
            GemmConfig(32, 32, 32, num_warps=4, num_stages=4),
            GemmConfig(32, 32, 32, num_warps=4, num_stages=2),
        ),
    ),
    (
        float("inf"),
        (
            GemmConfig(128, 64, 64, num_warps=4, num_stages=3),
            GemmConfig(128, 128, 64, num_warps=8, num_stages=3),
            GemmConfig(64, 64, 64, num_warps=4, num_stages=3),
            GemmConfig(128, 64, 64, num_warps=8, num_stages=4),
            GemmConfig(64, 64, 32, num_warps=4, num_stages=3),
            GemmConfig(32, 32, 32, num_warps=4, num_stages=2),
        ),
    ),
)
WIDE_N = 16384


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    if 0 < device.arch < MIN_ARCH:
        return Rejection(
            RejectionCode.DEVICE, f"sm_{device.arch} has no matrix unit that Triton uses"
        )
    if problem.weight is None or spec.a.dtype not in TRITON_TYPES:
        return Rejection(RejectionCode.NO_KERNEL, f"{spec} is no weight_only GEMM")
    uses_e4m3 = any(
        tensor.dtype == torch.float8_e4m3fn for tensor in problem.weight.tensors
    ) or any(field.float8 == "e4m3" for field in problem.weight.format.fields())
    if 0 < device.arch < MIN_ARCH_E4M3 and uses_e4m3:
        return Rejection(RejectionCode.DEVICE, f"sm_{device.arch} does not convert e4m3")
    if spec.out_dtype not in TRITON_TYPES:
        return Rejection(RejectionCode.NO_KERNEL, f"no output in {dtype_name(spec.out_dtype)}")
    return None


def weight_code(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> WeightCode:
    """The code that reads and dequantizes one tile of the problem's weight."""
    weight = problem.weight
    assert weight is not None
    element = weight.tensors[weight.format.element.source]
    loop_steps, column_steps = split_steps(weight.format, spec.a.dtype, element.dtype)
    return WeightCode(
        weight.format,
        weight.tensors,
        config,
        x_dtype=spec.a.dtype,
        loop_steps=loop_steps,
        column_steps=column_steps,
    )


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    return {
        "WEIGHT": weight_code(spec, problem, config),
        # As in w8a8_mm: with one row, all programs would read the same lines 16 times.
        "FEW_ROWS": problem.m < config.block_m and problem.m * problem.n > 1,
        "HAS_BIAS": spec.bias,
        "PRECISION": '"ieee"' if spec.a.dtype == torch.float32 else "None",
        # The type of the value that the template stores.
        "ACC_TYPE": "tl.float32",
    }


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    element_bytes = spec.a.dtype.itemsize
    code = weight_code(spec, problem, config)
    stage = config.block_m * config.block_k * element_bytes + code.loaded_bytes()
    # The unpacked tile passes through shared memory on its way to the matrix unit, as fp32 at most
    # where it is turned round.
    unpacked = config.block_n * config.block_k * 4
    found = refuse_split(config) or legal(
        config,
        device,
        element_bytes=element_bytes,
        shared_bytes=config.num_stages * stage + unpacked,
    )
    numbers = config.block_n * config.block_k // (32 * config.num_warps)
    if found is None and numbers > MAX_TILE_REGISTERS:
        return Rejection(
            RejectionCode.REGISTERS,
            f"{config} unpacks {numbers} numbers a thread; {MAX_TILE_REGISTERS} is the most",
        )
    return found


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    assert problem.weight is not None
    dtypes = [tensor.dtype for tensor in problem.weight.tensors]
    if problem.m > preferred_rows(problem.weight.format, spec.a.dtype, dtypes):
        return []
    narrow, wide, *others = next(entries for most, entries in _CONFIGS if problem.m <= most)
    listed = (wide, narrow, *others) if problem.n >= WIDE_N else (narrow, wide, *others)
    group = _group(spec, problem)
    fitted: list[GemmConfig] = []
    for entry in listed:
        # Few rows of scales a step, but no block shorter than two units of the matrix instruction.
        block_k = max(32, min(entry.block_k, 4 * group))
        config = dataclasses.replace(entry, block_k=block_k)
        if config not in fitted and is_legal(spec, problem, config, device) is None:
            fitted.append(config)
    fitted.sort(key=lambda config: not problem.is_even_k(config))
    return fitted


def _group(spec: QuantGemmSpec, problem: Problem) -> int:
    """Rows along K that share the operands of every step in the loop, as a power of two."""
    assert problem.weight is not None
    format = problem.weight.format
    element = problem.weight.tensors[format.element.source]
    loop_steps, _ = split_steps(format, spec.a.dtype, element.dtype)
    group = 1 << 30
    for step in loop_steps:
        rows = format.block(step.operand)[0] if isinstance(step.operand, Field) else -1
        if rows > 1:  # rows that are listed in a tensor are read one by one whatever the block
            group = min(group, rows & -rows)
    return group


def dequantize_grid(
    k: Any, n: Any, meta: dict[str, Any], *, cdiv: Any, min: Any = min
) -> tuple[Any, Any, Any]:
    return (cdiv(k, meta["BLOCK_K"]) * cdiv(n, meta["BLOCK_N"]), 1, 1)


def dequantize_constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    weight = problem.weight
    assert weight is not None
    code = WeightCode(
        weight.format,
        weight.tensors,
        config,
        x_dtype=spec.a.dtype,
        loop_steps=weight.format.steps,
        column_steps=(),
    )
    return {"WEIGHT": code, "ACC_TYPE": TRITON_TYPES[spec.a.dtype]}


def dequantize_configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    return [GemmConfig(16, 128, 32, num_warps=4, num_stages=1)]


def dequantize_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    return refuse_split(config)


# Writes W [K, N], for a GEMM of the library.
WEIGHT_ONLY_DEQUANTIZE = Kernel(
    name="weight_only_dequantize",
    family="weight_only_dequantize",
    grid=dequantize_grid,
    supports=supports,
    constants=dequantize_constants,
    configs=dequantize_configs,
    legal=dequantize_legal,
)
WEIGHT_ONLY_MM = Kernel(
    name="weight_only_mm",
    family="weight_only",
    grid=grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
)
