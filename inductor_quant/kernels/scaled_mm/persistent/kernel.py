"""Persistent kernels of ``w8a8``, ``fp8`` and ``fp8_block`` for GEMMs of many output tiles.

out = scale * (A @ B) + bias, chosen from 4 tiles of 128 x 128 per SM on, with operands that TMA can
read and a result of 16 bits: ``w8a8`` where Triton has tensor descriptors (sm_90), FP8 on sm_90.

``NUM_CTAS`` CTAs, as many as are resident at once, take tile after tile. Triton flattens the loops
over tiles and over K into one, so that the first loads of a tile overlap with the last products of
the one before. TMA fills what is out of bounds with zeros: the loop needs no masks.
"""

from __future__ import annotations

from typing import Any

from inductor_quant.kernels.config import GemmConfig, shared_memory, shortened
from inductor_quant.kernels.problem import INTERPRETER_ARCH, Device, Problem
from inductor_quant.kernels.scaled_mm.base import (
    WGMMA_ARCHS,
    ScaledMm,
    alignment_rejection,
    count_tiles,
)
from inductor_quant.kernels.scaled_mm.fp8 import Fp8Kernel, accumulators, max_block_k, promotes
from inductor_quant.kernels.scaled_mm.int8 import Int8Kernel, reject_if_only_mm
from inductor_quant.kernels.shared.grids import persistent_grid
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

MIN_TILES_PER_SM = 4
DESCRIPTOR_ARCH = 90
# Of an SM: its registers. Of a CTA: registers a thread beside the accumulators, and shared memory
# beside the stages (8 KiB of the flattened loop, 1 KiB of the hardware).
SM_REGISTERS = 65536
OTHER_REGISTERS = 80
OTHER_SHARED_MEMORY = 9 * 1024


class Persistent(ScaledMm):
    template = "scaled_mm/persistent/template"

    grid = staticmethod(persistent_grid)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := super().rejection(spec, problem, device) or alignment_rejection(problem):
            return found
        if not problem.is_stored_narrow:
            return Rejection(
                RejectionCode.NO_KERNEL,
                "staging an fp32 tile takes 32 KiB of shared memory: one CTA an SM, not two",
            )
        tiles = count_tiles(problem, 128, 128)
        if tiles < MIN_TILES_PER_SM * device.num_sms:
            return Rejection(
                RejectionCode.NO_KERNEL, f"{tiles} tiles are too few for a second round"
            )
        return None


class W8A8Persistent(Persistent, Int8Kernel):
    name = "w8a8_persistent"
    is_horizontal = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch != INTERPRETER_ARCH and device.arch < DESCRIPTOR_ARCH:
            return Rejection(RejectionCode.NO_KERNEL, f"sm_{device.arch} has no tensor descriptors")
        return super().rejection(spec, problem, device) or reject_if_only_mm(spec, problem)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        found = super().constants(spec, problem, config, device)
        return found | {"NUM_CTAS": resident_ctas(config, device)}

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        return cost_model.load("w8a8_persistent", 90).rank(problem, device, element_bytes=1)


class Fp8Persistent(Persistent, Fp8Kernel):
    name = "fp8_persistent"

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in WGMMA_ARCHS:
            detail = f"its tiles are those of sm_90, this is sm_{device.arch}"
            return Rejection(RejectionCode.NO_KERNEL, detail)
        return super().rejection(spec, problem, device)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        ctas = resident_ctas(config, device, accumulators=accumulators(spec, device))
        return super().constants(spec, problem, config, device) | {"NUM_CTAS": ctas}

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        if not promotes(spec, device):
            return cost_model.load("fp8_persistent", 90).rank(problem, device, element_bytes=1)
        # Two CTAs an SM: one multiplies while the other promotes its sums.
        tiles = ((64, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 4))
        longest = max_block_k(spec)
        return [shortened(GemmConfig(m, n, 128, w, s), longest) for m, n, w, s in tiles]


class Fp8BlockPersistent(Fp8Persistent):
    name = "fp8_block_persistent"
    family = "fp8_block"


def resident_ctas(config: GemmConfig, device: Device, *, accumulators: int = 1) -> int:
    """CTAs that the device holds at once; ``accumulators``: registers per output element."""
    threads = 32 * config.num_warps
    registers = accumulators * config.block_m * config.block_n // threads + OTHER_REGISTERS
    by_registers = SM_REGISTERS // (threads * registers)
    by_memory = device.shared_memory // (shared_memory(config, 1) + OTHER_SHARED_MEMORY)
    return device.num_sms * max(1, min(by_registers, by_memory))


W8A8_PERSISTENT = W8A8Persistent()
FP8_PERSISTENT = Fp8Persistent()
FP8_BLOCK_PERSISTENT = Fp8BlockPersistent()
