"""Kernels of the ``w8a8`` family: int8 x int8, exact int32 sums, scales and bias at the end."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import table
from inductor_quant.kernels.config import Device, GemmConfig, Problem
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.spec import QuantGemmSpec, dtype_name

ELEMENT_BYTES = 1
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Triton has no int8 matrix instruction below this capability.
MIN_ARCH = 80


def grid(m: Any, n: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, Any, Any]:
    """One program for each tile of the output."""
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]), 1, 1)


def supports(spec: QuantGemmSpec, device: Device) -> Rejection | None:
    if 0 < device.arch < MIN_ARCH:
        return Rejection(
            RejectionCode.DEVICE, f"sm_{device.arch} has no int8 matrix unit that Triton uses"
        )
    if spec.a.dtype != torch.int8 or spec.b.dtype != torch.int8:
        return Rejection(RejectionCode.NO_KERNEL, f"operands of {spec} are not both int8")
    if spec.out_dtype not in OUT_DTYPES:
        return Rejection(RejectionCode.NO_KERNEL, f"no output in {dtype_name(spec.out_dtype)}")
    return None


def constants(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> dict[str, Any]:
    a_scale, b_scale = spec.a.scale, spec.b.scale
    return {
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
    return table.load("w8a8_mm", 90).rank(problem, device, element_bytes=ELEMENT_BYTES)


W8A8_MM = Kernel(
    name="w8a8_mm",
    family="w8a8",
    grid=grid,
    supports=supports,
    constants=constants,
    configs=configs,
)
