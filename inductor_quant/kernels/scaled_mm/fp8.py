"""Rules of the ``fp8`` and ``fp8_block`` kernels: FP8 x FP8, sums in fp32."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from inductor_quant.kernels.config import GemmConfig, reject_if_split, shared_memory, tile_rejection
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.base import WGMMA_ARCHS, ScaledMm
from inductor_quant.kernels.shared import horizontal
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec, ScaleSpec

TRITON_TYPES = {torch.float8_e4m3fn: "tl.float8e4nv", torch.float8_e5m2: "tl.float8e5"}
# Below FP8_ARCH operands are decoded to bf16, which Triton multiplies from MIN_ARCH on.
MIN_ARCH = 80
FP8_ARCH = 89
# Hopper accumulates FP8 products with about 14 bits: like cuBLASLt, move the sum to fp32 after this
# many elements of K.
PROMOTED_K = 128
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Fp8Kernel(ScaledMm):
    """A kernel of ``fp8``, and of ``fp8_block`` where the spec is block-scaled."""

    family = "fp8"
    dtypes = tuple(TRITON_TYPES)
    mma_type = "bf16"
    min_arch = MIN_ARCH
    has_groups: ClassVar[bool] = False  # takes an ``fp8`` of groups

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device):
            return found
        if is_block_scaled(spec) and block_shape(spec)[0] < 32:
            detail = f"{spec}: a matrix instruction takes 32 elements along K"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
        if self.family == "fp8" and is_block_scaled(spec) and not self.has_groups:
            return Rejection(RejectionCode.NO_KERNEL, "scales vary along K")
        return horizontal.reject_if_no_gain(problem)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        is_blocked = is_block_scaled(spec)
        quant_k, quant_n = block_shape(spec) if is_blocked else (0, 0)
        promote = 0 if is_blocked or not promotes(spec, device) else min(PROMOTED_K, config.block_k)
        return super().constants(spec, problem, config, device) | {
            "IS_INTEGER": False,
            "BLOCK_SCALED": is_blocked,
            "QUANT_K": quant_k,
            "QUANT_N": quant_n,
            "ONE_B_SCALE": is_blocked and quant_n % config.block_n == 0,
            "A_SCALE_E8M0": _is_e8m0(spec.a.scale),
            "B_SCALE_E8M0": _is_e8m0(spec.b.scale),
            "PROMOTE": promote,
            "SPLIT_K": config.split_k,
            "STAGES": config.num_stages,
            # wgmma needs 64 rows but only 8 columns: compute a tile of small M as its transpose
            "SWAP_AB": is_blocked and config.block_m < 64 <= config.block_n,
            "DECODE_A": _decode(spec.a, device),
            "DECODE_B": _decode(spec.b, device),
            **horizontal.constants(problem, config, shared=("A", "A_SCALE")),
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        return reject_if_split(config) or fp8_tile_rejection(spec, config, device)


def fp8_tile_rejection(spec: QuantGemmSpec, config: GemmConfig, device: Device) -> Rejection | None:
    """Why the tile of ``config`` cannot run, whether or not it splits K."""
    element_bytes = 2 if decodes(device) else 1
    shared_bytes = shared_memory(config, element_bytes)
    if is_block_scaled(spec):
        quant_k = block_shape(spec)[0]
        if quant_k % config.block_k or config.block_k > PROMOTED_K:
            return Rejection(
                RejectionCode.BLOCK_SHAPE,
                f"{config}: BLOCK_K must divide the scale block of {quant_k} along K, "
                f"and be {PROMOTED_K} at most",
            )
        # scales are pipelined too: one per row, and one per column unless all share one
        shared_bytes += 4 * config.num_stages * (config.block_m + config.block_n)
    return tile_rejection(
        config,
        device,
        element_bytes=element_bytes,
        shared_bytes=shared_bytes,
        sums=accumulators(spec, device),
    )


def is_block_scaled(spec: QuantGemmSpec) -> bool:
    """Whether the scales of ``b`` vary along K: an ``fp8_block``, or an ``fp8`` of groups."""
    return spec.b.scale is not None and spec.b.scale.block[0] != -1


def block_shape(spec: QuantGemmSpec) -> tuple[int, int]:
    """(block_k, block_n) of a block-scaled spec."""
    assert spec.b.scale is not None
    return spec.b.scale.block


def max_block_k(spec: QuantGemmSpec) -> int:
    """The longest BLOCK_K whose sum stays exact enough and within one scale block."""
    return min(block_shape(spec)[0], PROMOTED_K) if is_block_scaled(spec) else PROMOTED_K


def promotes(spec: QuantGemmSpec, device: Device) -> bool:
    """Whether sums of the matrix unit are moved to a second accumulator within the loop."""
    return is_block_scaled(spec) or (not spec.fast_accum and device.arch in WGMMA_ARCHS)


def accumulators(spec: QuantGemmSpec, device: Device) -> int:
    """Registers per output element: 2 with a second accumulator, or with operands to decode."""
    return 2 if promotes(spec, device) or decodes(device) else 1


def decodes(device: Device) -> bool:
    """Whether the device has no FP8, so that operands are decoded to bf16 first."""
    return 0 < device.arch < FP8_ARCH


def reject_unless_128(spec: QuantGemmSpec) -> Rejection | None:
    """For kernels of block scales that are written for blocks of 128 along K and float scales."""
    assert spec.a.scale is not None
    assert spec.b.scale is not None
    block_k, block_n = block_shape(spec)
    if block_k != 128 or block_n % 128:
        detail = f"blocks of {block_k} x {block_n}, not 128 x 128"
        return Rejection(RejectionCode.BLOCK_SHAPE, detail)
    if not {spec.a.scale.dtype, spec.b.scale.dtype} <= set(SCALE_DTYPES):
        return Rejection(RejectionCode.NO_KERNEL, f"scales of {spec} are not both floats")
    return None


def _is_e8m0(scale: ScaleSpec | None) -> bool:
    return scale is not None and scale.dtype == torch.float8_e8m0fnu


def _decode(operand: OperandSpec, device: Device) -> str:
    return TRITON_TYPES[operand.dtype] if decodes(device) else "None"
