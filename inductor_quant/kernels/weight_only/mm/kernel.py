"""``weight_only_mm``: x [M, K] @ W [K, N] for every weight format, in Triton.

Chosen when no kernel before it takes the GEMM: any M up to ``preferred_rows``, any layout and
alignment, from sm_80 on (e4m3: sm_89).

Each CTA computes one BLOCK_M x BLOCK_N tile. It loads a block of packed weights, dequantizes it to
x's dtype and multiplies. Every packed word and every scale is loaded once per tile, not once per
element. Scales of whole columns and the bias are applied to the sum. K is never split, so the
epilogue is fused into this kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from inductor_quant.kernels.codegen.weight import WeightCodegen
from inductor_quant.kernels.config import GemmConfig, reject_if_split, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, Device, Problem
from inductor_quant.kernels.weight_only import library, rules
from inductor_quant.kernels.weight_only.digit_tiles import are_words_of_columns, varying
from inductor_quant.ops.weight_only import preferred_rows
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

# Dequantized elements per thread: with more, configurations of the list spill.
MAX_TILE_REGISTERS = 32

# From this K on a few tiles take longer than the launches of W written once and of a product. On
# sm_90 both are estimated: cycles of a tile for each 64 of K, times as many for a table, for words
# of columns, and if scales change with every k, while so many CTAs share an SM; by a margin, as
# tiles of all sizes count alike.
LONG_K = 2048
TILE_CYCLES, LOOKED_UP, OF_COLUMNS, CTAS_PER_SM, MARGIN = 1120, 2.6, 2.2, 2, 1.25
VARYING = 6.0

# (largest M, configurations). The first is for small N, the second for WIDE_N and more, the rest
# are for autotuning. Small M gets small tiles: that makes enough CTAs to keep the memory busy.
CONFIGS: tuple[tuple[float, tuple[GemmConfig, ...]], ...] = (
    (
        DECODE_M,
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


def is_slower_than_library(problem: Problem, config: GemmConfig, device: Device) -> bool:
    """Whether W written once and a product of the library take less time, because K is not split
    here and there are few tiles."""
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    format = rules.weight_of(problem).format
    is_looked_up = format.element != format.code
    is_timed = problem.m > DECODE_M or is_looked_up
    if device.arch in rules.WGMMA_ARCHS and is_timed and problem.m_is_bounded:
        factor = LOOKED_UP if is_looked_up else 1
        if are_words_of_columns(rules.weight_of(problem)):
            factor *= OF_COLUMNS
        factor *= VARYING if varying(format) else 1
        rounds = math.ceil(tiles / (CTAS_PER_SM * device.num_sms))
        cycles = rounds * problem.k / 64 * TILE_CYCLES * factor
        return cycles > MARGIN * library.cycles(problem, device)
    if problem.m <= config.block_m // 2 or config.block_m < 128 or problem.k < LONG_K:
        return False
    return tiles < device.num_sms * (0.5 if problem.m <= config.block_m else 1)


class WeightOnlyMM(rules.WeightOnlyKernel):
    name = "weight_only_mm"
    template = "weight_only/mm/template"

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        return rules.rejection(spec, problem, device)

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> WeightCodegen:
        return WeightCodegen(rules.tile_of(spec, rules.weight_of(problem), config))

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        return {
            "CODEGEN": self.codegen(spec, problem, config),
            # Mask the rows beyond a small M, else every CTA loads the same cache lines again for
            # each of them. (Inductor stores a result of one element without a mask.)
            "MASK_M": problem.has_masked_rows(config.block_m) and problem.m * problem.n > 1,
            "HAS_BIAS": spec.bias,
            "PRECISION": '"ieee"' if spec.a.dtype == torch.float32 else "None",
            "ACC_TYPE": "tl.float32",  # of the value that the template stores
        }

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        element_bytes = spec.a.dtype.itemsize
        loaded = self.codegen(spec, problem, config).loaded_bytes()
        stage = config.block_m * config.block_k * element_bytes + loaded
        # The dequantized tile goes to the matrix unit through shared memory, as fp32 at most if it
        # is transposed there.
        dequantized = config.block_n * config.block_k * 4
        return (
            reject_if_split(config)
            or tile_rejection(
                config,
                device,
                element_bytes=element_bytes,
                shared_bytes=config.num_stages * stage + dequantized,
            )
            or rules.reject_if_too_many_unpacked(config, MAX_TILE_REGISTERS)
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        weight = rules.weight_of(problem)
        dtypes = [tensor.dtype for tensor in weight.tensors]
        if problem.m > preferred_rows(weight.format, spec.a.dtype, dtypes):
            return []
        narrow, wide, *others = next(entries for most, entries in CONFIGS if problem.m <= most)
        first = (wide, narrow) if problem.n >= rules.WIDE_N else (narrow, wide)
        found = self.fitted((*first, *others), spec, problem, device)
        return [] if found and is_slower_than_library(problem, found[0], device) else found

    def fitted(
        self,
        entries: Iterable[GemmConfig],
        spec: QuantGemmSpec,
        problem: Problem,
        device: Device,
    ) -> list[GemmConfig]:
        """``entries`` with blocks of K that suit the groups, those that are legal; first those that
        divide K."""
        # An operand that is looked up for each k is loaded one by one, whatever the block.
        group = rules.group_size_of(spec, rules.weight_of(problem), least=2)
        found: list[GemmConfig] = []
        for entry in entries:
            # At most 4 groups per block, but no block shorter than two matrix instructions.
            block_k = max(32, min(entry.block_k, 4 * group))
            config = dataclasses.replace(entry, block_k=block_k)
            if config not in found and not self.config_rejection(spec, problem, config, device):
                found.append(config)
        found.sort(key=lambda config: not problem.is_even_k(config.block_k))
        return found


WEIGHT_ONLY_MM = WeightOnlyMM()
