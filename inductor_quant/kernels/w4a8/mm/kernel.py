"""``w4a8_mm``: int8 or e4m3 A [M, K] @ int4 W [K, N] for every form of the op, in Triton.

Takes any M, layout, alignment and zero point, and groups of multiples of 32 along K, from sm_80 on.
Chosen where otherwise a dense weight would be written in each call, up to an M at which unpacking
it for each tile of rows costs more than that: ``MAX_M``, on sm_90 one tile.

Each CTA computes one BLOCK_M x BLOCK_N tile. It loads a block of packed weights, unpacks it, four
nibbles of a register at a time if they are halves of bytes, and multiplies. Zero points and scales
that vary along K are loaded one step ahead. With groups along K the int32 sum of a step is scaled
and added in fp32. If tiles are few, several CTAs share one, each with a part of K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import WeightTile
from inductor_quant.kernels.config import MAX_ACCUMULATORS, GemmConfig, shortened, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, INTERPRETER_ARCH, Device, Problem
from inductor_quant.kernels.scaled_mm import fp8
from inductor_quant.kernels.scaled_mm.int8 import MAX_ACCUMULATORS_EARLY_LOADS, MIN_GROUP
from inductor_quant.kernels.scaled_mm.mm.kernel import unaligned_rejection
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.kernels.w4a8.mm.codegen import W4A8MMCodegen, loop_ops
from inductor_quant.kernels.w4a8.quads import MAX_MAGIC_K
from inductor_quant.kernels.weight_only.rules import (
    bad_blocks,
    reject_if_too_many_unpacked,
)
from inductor_quant.ops.w4a8 import E4M3
from inductor_quant.ops.weight_only import preferred_rows
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec
from inductor_quant.spec.weight_format import WeightFormat

# Unpacked weights of a thread: four neighbours along K in a register, or others.
MAX_VALUES, MAX_OTHER_VALUES = 64, 32
# sm_100 has a unit of its own for e4m3, not for int8; its sums come back through registers.
TCGEN05_ARCH, MAX_ACCUMULATORS_TCGEN05 = 100, 32
# By compute capability: the largest M for weights of channels, for those that are made int8, which
# takes more instructions, and for those of groups. README.md has the model. On sm_90 it is one tile
# of rows: then either way unpacks the weight once; ROUNDED_M_SM90 was timed.
MAX_M: dict[int, tuple[int, int, int]] = {
    80: (1024, 512, 1024),
    86: (1024, 512, 1024),
    89: (1024, 512, 1024),
    90: (DECODE_M, DECODE_M, 0),
    100: (128, 64, 0),
    120: (1024, 512, 1024),
}
ROUNDED_M_SM90 = 512  # of weights that are rounded to int8
# The model of a tile: a CTA alone on its SM multiplies so many pairs a cycle, and unpacks a weight
# in the time of its products with so many rows; a sum of partials, and the bytes of these a cycle.
PAIRS_PER_CYCLE, UNPACK_ROWS = 1024, 48
SUM_CYCLES, BYTES_PER_CYCLE = 8000, 10
MAX_SPLIT, MIN_K_ITERS = 4, 8
CONFIGS = (
    GemmConfig(16, 64, 128, num_warps=4, num_stages=4),
    GemmConfig(16, 32, 128, num_warps=4, num_stages=5),
    GemmConfig(16, 32, 64, num_warps=2, num_stages=4),
    GemmConfig(32, 64, 128, num_warps=4, num_stages=4),
    GemmConfig(32, 32, 128, num_warps=4, num_stages=4),
    GemmConfig(64, 64, 128, num_warps=4, num_stages=4),
    GemmConfig(64, 64, 64, num_warps=4, num_stages=4),
    GemmConfig(64, 128, 64, num_warps=4, num_stages=4),
    GemmConfig(64, 128, 128, num_warps=8, num_stages=3),
    GemmConfig(128, 64, 64, num_warps=4, num_stages=4),
    GemmConfig(128, 128, 64, num_warps=8, num_stages=4),
)
# For where these need too many registers: rows of A that begin at any byte.
SMALL_CONFIGS = (
    GemmConfig(32, 32, 32, num_warps=4, num_stages=3),
    GemmConfig(16, 32, 32, num_warps=2, num_stages=3),
)


class W4A8MM(rules.W4A8Kernel):
    name = "w4a8_mm"
    template = "w4a8/mm/template"

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if found := rules.rejection(spec, problem, device):
            return found
        if spec.group_size % MIN_GROUP:
            return bad_blocks(f"groups of {spec.group_size} along K, no multiples of {MIN_GROUP}")
        return None

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, *, decodes: bool = False
    ) -> W4A8MMCodegen:
        weight = rules.weight_of(problem)
        tile = WeightTile(weight, config, spec.a.dtype, loop_ops(weight.format))
        return W4A8MMCodegen(tile, decodes=decodes)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        decodes = _decodes(spec, device)
        promotes = spec.a.dtype == E4M3 and not spec.group_size and fp8.promotes(spec, device)
        accumulators = config.block_m * config.block_n // (32 * config.num_warps)
        found = super().constants(spec, problem, config, device) | {
            "CODEGEN": self.codegen(spec, problem, config, decodes=decodes),
            "DECODE_A": fp8.TRITON_TYPES[spec.a.dtype] if decodes else "None",
            "PROMOTE": min(fp8.PROMOTED_K, config.block_k) if promotes else 0,
            "EVEN_K": problem.is_even_k(config.block_k),
            "MASK_M": problem.has_masked_rows(config.block_m) and problem.m * problem.n > 1,
            "LOADS_EARLY": accumulators <= MAX_ACCUMULATORS_EARLY_LOADS,
        }
        if _may_contract(rules.weight_of(problem).format):
            found["triton_meta"] = {"enable_fp_fusion": False}
        return found

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if rules.has_inexact_partials(spec, problem, config):
            return bad_blocks(f"{config}: fp32 does not hold the integer sums of its parts")
        if spec.group_size % config.block_k:
            return bad_blocks(f"{config}: BLOCK_K must divide groups of {spec.group_size}")
        longest = fp8.PROMOTED_K if spec.a.dtype == E4M3 else MAX_MAGIC_K
        if rules.is_promoted(spec) and config.block_k > longest:
            return bad_blocks(f"{config}: sums of more than {longest} products")
        element_bytes = 2 if _decodes(spec, device) else 1
        codegen = self.codegen(spec, problem, config)
        most = MAX_VALUES if codegen.has_halves_along_k else MAX_OTHER_VALUES
        stage = config.block_m * config.block_k + codegen.loaded_bytes()
        # Operands that are computed may go to the matrix unit through shared memory.
        computed = config.block_n * config.block_k * element_bytes
        computed += config.block_m * config.block_k * element_bytes if element_bytes > 1 else 0
        sums = 2 if rules.is_promoted(spec) else 1
        accumulators = sums * config.block_m * config.block_n // (32 * config.num_warps)
        is_tcgen05 = device.arch == TCGEN05_ARCH and spec.a.dtype == E4M3
        if accumulators > (MAX_ACCUMULATORS_TCGEN05 if is_tcgen05 else MAX_ACCUMULATORS):
            return bad_blocks(f"{config}: W, which is computed, needs registers too")
        return (
            split_k.reject_if_unbounded(problem, config)
            or tile_rejection(
                config,
                device,
                element_bytes=element_bytes,
                shared_bytes=config.num_stages * stage + computed,
                sums=sums,
            )
            or reject_if_too_many_unpacked(config, most)
            or unaligned_rejection(problem, config, sums)
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        if not is_preferred(spec, problem, device):
            return []
        return self.ranked(spec, problem, device)

    def ranked(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        """The legal tiles, best guess first: by the products, and the unpacking, of the busiest
        SM."""
        return self._ranked(CONFIGS, spec, problem, device) or self._ranked(
            SMALL_CONFIGS, spec, problem, device
        )

    def _ranked(
        self,
        entries: Sequence[GemmConfig],
        spec: QuantGemmSpec,
        problem: Problem,
        device: Device,
    ) -> list[GemmConfig]:
        group = spec.group_size
        rows = max(16, 1 << (problem.m - 1).bit_length())
        found: dict[GemmConfig, float] = {}
        for entry in entries:
            whole = shortened(entry, group & -group) if group else entry
            parts = split_k.with_split_k(
                *(problem, whole),
                max_ctas=2 * device.num_sms,
                max_split=MAX_SPLIT,
                min_k_iters=MIN_K_ITERS,
            )
            for config in (whole, parts):
                is_legal = not self.config_rejection(spec, problem, config, device)
                if config.block_m <= rows and is_legal:
                    found[config] = _cycles(problem, config, device)
        return split_k.same_split(sorted(found, key=found.__getitem__)) if found else []


def is_preferred(spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
    """Whether no kernel of another family reads the packed weight, and unpacking it for each tile
    of rows costs less than writing it once."""
    weight = rules.weight_of(problem)
    dtypes = [tensor.dtype for tensor in weight.tensors]
    if problem.m <= problem.rows_in_16_bits:
        return False
    if not preferred_rows(weight.format, torch.bfloat16, dtypes):
        return False  # its places are computed
    if _decodes(spec, device):
        return True  # a weight of 8 bits would be decoded for each tile too
    arch = 90 if device.arch == INTERPRETER_ARCH else device.arch
    channels, made_int8, groups = MAX_M.get(arch, (0, 0, 0))
    if spec.group_size:
        return problem.m <= groups
    is_rounded = weight.format.to_int8 == "round" and not weight.format.code.offset.is_data
    if arch == 90 and is_rounded:
        return problem.m <= ROUNDED_M_SM90
    return problem.m <= (made_int8 if weight.format.to_int8 else channels)


def _decodes(spec: QuantGemmSpec, device: Device) -> bool:
    return spec.a.dtype == E4M3 and fp8.decodes(device)


def _may_contract(format: WeightFormat) -> bool:
    """Whether a weight is rounded to int8 after a sum of a product, which a multiply-add would
    round once less than the graph."""
    kinds = [op.kind for op in format.dequant_ops]
    sums = [i for i, kind in enumerate(kinds) if kind in ("add", "sub")]
    return format.to_int8 == "round" and any({"mul", "div"} & set(kinds[:i]) for i in sums)


def _cycles(problem: Problem, config: GemmConfig, device: Device) -> float:
    split = config.split_k
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    turns = math.ceil(tiles * split / device.num_sms) / split
    a_step = (config.block_m + UNPACK_ROWS) * config.block_n / PAIRS_PER_CYCLE
    partials = 8 * split * problem.m * problem.n / (BYTES_PER_CYCLE * device.num_sms)
    return turns * a_step * problem.k + (SUM_CYCLES + partials if split > 1 else 0)


W4A8_MM = W4A8MM()
