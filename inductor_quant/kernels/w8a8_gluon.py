"""The kernel of ``w8a8`` for large products on Hopper, written in Gluon: see ``mm_gluon``."""

from __future__ import annotations

from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import mm_gluon, w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem
from inductor_quant.kernels.mm_gluon import tile
from inductor_quant.spec import QuantGemmSpec

# The widest first: of several that take the same time by ``EFFORT`` it was the fastest.
CONFIGS = (
    *(tile(columns, group_m=8) for columns in (256, 192, 128, 96, 64)),
    *(tile(columns, group_m=16) for columns in (256, 128)),
)
# H200, 128 to 4096 rows of the four layers of Llama-3-8B, each tile timed: against the kernels of
# ``w8a8`` 0.83 to 0.98 of the time from 256 rows on, but for what follows.
EFFORT = {256: 1.0, 192: 1.0, 128: 1.0, 96: 1.2, 64: 1.6}
# Multiply-adds. Smaller products are over before it pays that loads are described to the
# accelerator: 256x4096x4096 takes 12.1 us, by w8a8_mm 11.3; 256x6144x4096 15.5 and 15.7.
MIN_PRODUCTS = 6 * 10**9
# Of K. With fewer, stores weigh, which two programs of w8a8_persistent on a multiprocessor overlap
# with each other's products: 65536 rows of SAM's ViT-H, K = 1280, take 1.04 to 1.06 of its time.
MIN_STEPS = 32


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    refused = w8a8.supports(spec, problem, device) or mm_gluon.misfit(problem, device)
    if refused is not None:
        return refused
    if problem.needs_spare_row:
        return Rejection(RejectionCode.NO_KERNEL, "tiles are read without a mask")
    if spec.group_size:
        return Rejection(RejectionCode.NO_KERNEL, "scales of groups along K")
    if problem.k < MIN_STEPS * mm_gluon.STEP:
        return Rejection(RejectionCode.NO_KERNEL, f"K = {problem.k} is short")
    products = problem.m * problem.n * problem.k
    if products < MIN_PRODUCTS:
        return Rejection(RejectionCode.NO_KERNEL, f"{products} products are few")
    return mm_gluon.leaves_idle(configs(spec, problem, device)[0], problem, device)


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    return (
        w8a8.constants(spec, problem, config, device)
        | mm_gluon.constants(problem, config, device)
        | {"IS_INTEGER": True, "BLOCK_SCALED": False, "PROMOTE": 0}
    )


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    return mm_gluon.ranked(CONFIGS, EFFORT, problem, device)


W8A8_GLUON = mm_gluon.kernel(
    "w8a8_gluon", "w8a8", CONFIGS, supports=supports, constants=constants, configs=configs
)
