"""Base of the kernels of 8-bit operands, and the checks that several of them make."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, ClassVar

import torch

from inductor_quant.kernels.config import GemmConfig, reject_if_split
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.problem import INTERPRETER_ARCH, Device, Problem
from inductor_quant.kernels.shared.grids import tile_grid
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec, dtype_name

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WGMMA_ARCHS = (INTERPRETER_ARCH, 90)


class ScaledMm(Kernel):
    """A kernel of 8-bit operands with one CTA per output tile, unless it has another ``grid``.

    dtypes     element types of the operands
    min_arch   the lowest compute capability whose matrix instruction on ``mma_type`` Triton uses
    """

    dtypes: ClassVar[Collection[torch.dtype]]
    mma_type: ClassVar[str]
    min_arch: ClassVar[int]

    grid = staticmethod(tile_grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if 0 < device.arch < self.min_arch:
            detail = f"sm_{device.arch} has no {self.mma_type} matrix unit that Triton uses"
            return Rejection(RejectionCode.DEVICE, detail)
        if spec.a.dtype not in self.dtypes or spec.b.dtype not in self.dtypes:
            names = " or ".join(map(dtype_name, self.dtypes))
            return Rejection(RejectionCode.NO_KERNEL, f"operands of {spec} are not both {names}")
        if spec.out_dtype not in OUT_DTYPES:
            return Rejection(RejectionCode.NO_KERNEL, f"no output in {dtype_name(spec.out_dtype)}")
        return None

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
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
            "EVEN_K": problem.is_even_k(config.block_k),
            # Without the mask every row of the tile re-reads the same L2 lines. Inductor stores a
            # 1 x 1 result without a mask, from every element of the tile: all must be that value.
            "MASK_M": problem.has_masked_rows(config.block_m) and problem.m * problem.n > 1,
            # Type of the value that the template stores; not that of the accumulator.
            "ACC_TYPE": "tl.float32",
        }


def count_tiles(problem: Problem, block_m: int, block_n: int) -> int:
    return math.ceil(problem.m / block_m) * math.ceil(problem.n / block_n)


def alignment_rejection(problem: Problem) -> Rejection | None:
    """TMA descriptors and 16-byte loads along K need aligned rows."""
    if problem.has_aligned_rows:
        return None
    return Rejection(
        RejectionCode.NO_KERNEL,
        "an operand is not contiguous along K, or its rows do not begin at 16-byte multiples",
    )


def unlisted_rejection(config: GemmConfig, listed: Collection[GemmConfig]) -> Rejection | None:
    """For kernels that are written for the configurations ``listed``."""
    if config in listed:
        return None
    detail = f"{config} is none of {', '.join(map(str, listed))}"
    return reject_if_split(config) or Rejection(RejectionCode.BLOCK_SHAPE, detail)
