"""The kernel of ``w8a8`` for large products on Hopper, written in Gluon: see ``mm_gluon``."""

from __future__ import annotations

from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import mm_gluon, w8a8
from inductor_quant.kernels.config import Device, GemmConfig, Problem
from inductor_quant.spec import QuantGemmSpec

# Of K. With fewer, stores weigh, which two programs of w8a8_persistent on a multiprocessor overlap
# with each other's products: by trials, 65536 rows of SAM's ViT-H, K = 1280, take 1.04 to 1.06 of
# its time.
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
    best, *_ = configs(spec, problem, device)
    return mm_gluon.is_small(problem) or mm_gluon.leaves_idle(best, problem, device)


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    return (
        w8a8.constants(spec, problem, config, device)
        | mm_gluon.constants(problem, config, device)
        | {"IS_INTEGER": True, "BLOCK_SCALED": False, "PROMOTE": 0}
    )


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    return mm_gluon.ranked(mm_gluon.CONFIGS, mm_gluon.EFFORT, problem, device)


W8A8_GLUON = mm_gluon.kernel(
    "w8a8_gluon", "w8a8", mm_gluon.CONFIGS, supports=supports, constants=constants, configs=configs
)
