"""``weight_only_bytes``: x [M, K] @ W [K, N] for int8, fp8 and int4 halves of bytes, in Triton.

Chosen for 16-bit x and M <= 128 (64 from WIDE_N on, 32 for halves of bytes, as HQQ has them) if the
bytes are contiguous along K; from sm_80 on (e4m3: sm_89).

The bytes go to registers as the matrix instruction wants them, are converted there and multiplied
without passing through shared memory again. Below M = 64 W^T is the first operand (swap_ab), so
that N fills the instruction's M and a tile may have 8 rows of x. From M = 64 on x is the first
operand, which wgmma prefers. K is split until the SMs are busy; the lowering adds the partials.
"""

from __future__ import annotations

import dataclasses

from inductor_quant.kernels.codegen.byte_layout import ByteLayout, byte_layout_of
from inductor_quant.kernels.codegen.packed_layout import BASES
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, SMALL_M, Device, Problem, Weight
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.bytes.codegen import BytesCodegen
from inductor_quant.kernels.weight_only.rules import WIDE_N, bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

MIN_BLOCK_M, MIN_BLOCK_N = 8, 16
# Above these M the tiles of the general kernel are as large, and at large N need no split K.
MAX_M, MAX_M_WIDE = 128, 64
# The fields of a byte have scales of their own, which above this M cost more than they save.
MAX_M_FIELDS = SMALL_M
# Fields of 2 bits and 1 bit were too slow or inexact on a GPU; the general kernel takes them.
MIN_WIDTH = 4
# Per thread: beyond these the converted bytes spill. If x is first, W is in shared memory.
MAX_ACCUMULATORS, MAX_ACCUMULATORS_X_FIRST = 32, 64

# (largest M, least N, (block_n, warps, block_k, stages) by preference). Small N gets the smallest
# tile and one warp: four CTAs an SM with five stages keep the memory busy. block_n counts bytes.
_BLOCKS: tuple[tuple[int, int, tuple[tuple[int, int, int, int], ...]], ...] = (
    (8, WIDE_N, ((64, 2, 256, 3), (32, 1, 256, 3), (64, 1, 256, 3), (128, 2, 256, 3))),
    (8, 0, ((16, 1, 256, 5), (16, 1, 128, 5), (16, 1, 512, 3), (32, 1, 128, 5))),
    (16, WIDE_N, ((64, 2, 256, 3), (64, 1, 256, 3), (128, 2, 256, 3), (64, 2, 128, 3))),
    (16, 6144, ((32, 1, 128, 5), (16, 1, 128, 5), (32, 1, 256, 3), (64, 2, 128, 3))),
    (16, 0, ((16, 1, 128, 5), (16, 1, 256, 3), (32, 1, 128, 3), (64, 2, 128, 4))),
    (32, 0, ((64, 2, 128, 3), (64, 2, 128, 4), (32, 1, 128, 4))),
    (64, WIDE_N, ((128, 4, 128, 3), (128, 4, 64, 4), (64, 4, 128, 3))),
    (64, 0, ((64, 4, 256, 3), (64, 4, 128, 3), (64, 4, 128, 4))),
    (128, 0, ((64, 4, 64, 4), (64, 4, 128, 3))),
)
# By block_m: K is split up to so many warps per SM.
WARPS_PER_SM = {8: 4, 16: 4, 32: 4, 64: 6, 128: 8}
MAX_STAGES = 8
MIN_K_ITERS = 4
MAX_SPLIT = 8


def is_x_first(config: GemmConfig) -> bool:
    """Whether x is the first operand and W the second, from shared memory: faster if the tile has
    the 64 rows of wgmma."""
    return config.block_m >= 64


def byte_weight_of(problem: Problem) -> tuple[Weight, ByteLayout]:
    found = byte_layout_of(rules.weight_of(problem))
    assert found is not None
    return found


def has_partial_blocks(spec: QuantGemmSpec, weight: Weight, layout: ByteLayout) -> bool:
    """Whether a tile may end beyond N and a slice beyond K: of whole bytes, scales of the sums."""
    loop_ops, _ = rules.dequant_ops_of(spec, weight)
    return layout.count == 1 and not loop_ops


class WeightOnlyBytes(rules.WeightOnlyKernel):
    name = "weight_only_bytes"
    template = "weight_only/bytes/template"

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        general = rules.rejection(spec, problem, device)
        if general is not None:
            return general
        if spec.a.dtype not in BASES:
            return no_kernel(f"x of {spec} does not have 16 bits")
        found = byte_layout_of(rules.weight_of(problem))
        if found is None:
            return no_kernel("quantized values are not bytes contiguous along K, nor their fields")
        _, layout = found
        most = MAX_M_WIDE if problem.n >= WIDE_N else MAX_M
        if layout.count > 1:
            most = min(most, MAX_M_FIELDS)
        if problem.m > most:
            return no_kernel(f"M = {problem.m} is above {most}")
        if problem.m * problem.n == 1:
            # and this kernel computes rows beyond M, too
            return no_kernel("Inductor stores a single element without a mask")
        if layout.width < MIN_WIDTH:
            return no_kernel(f"fields of {layout.width} bits")
        return None

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> BytesCodegen:
        weight, layout = byte_weight_of(problem)
        tile = rules.tile_of(spec, weight, config)
        return BytesCodegen(tile, layout, is_x_first=is_x_first(config))

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        weight, layout = byte_weight_of(problem)
        min_block_n = MIN_BLOCK_N * layout.count
        if config.block_m < MIN_BLOCK_M or config.block_n < min_block_n:
            return bad_blocks(f"{config} is below the smallest tile, {MIN_BLOCK_M}x{min_block_n}")
        most = MAX_ACCUMULATORS_X_FIRST if is_x_first(config) else MAX_ACCUMULATORS
        if has_partial_blocks(spec, weight, layout):
            refused = split_k.reject_if_unbounded(problem, config)
        else:
            refused = rules.block_rejection(spec, weight, problem, config)
        refused = refused or rules.reject_if_too_many_accumulators(config, most)
        if refused is not None:
            return refused
        bytes_of_n = config.block_n // layout.count
        stage = config.block_k * (config.block_m * spec.a.dtype.itemsize + bytes_of_n)
        # With W first a tile may have 8 rows of x: they are the instruction's N.
        checked = dataclasses.replace(config, block_m=max(16, config.block_m))
        shared_bytes = max(1, config.num_stages - 1) * stage
        if is_x_first(config):  # the converted tile passes through shared memory
            shared_bytes = config.num_stages * stage + 2 * config.block_n * config.block_k
        return tile_rejection(checked, device, element_bytes=2, shared_bytes=shared_bytes)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        weight, layout = byte_weight_of(problem)
        group = rules.group_size_of(spec, weight)
        # A symbolic M may be large in other calls: not the smallest tile.
        m = problem.m if problem.m_is_bounded else max(problem.m, DECODE_M)
        found: list[GemmConfig] = []
        for block_m, least_n, blocks in _BLOCKS:
            if m > block_m or problem.n < least_n:
                continue
            for block_n, warps, most_k, stages in blocks:
                block_k = min(most_k, group)
                # Shorter blocks, for small groups, keep as many bytes in flight.
                stages = min(MAX_STAGES, (stages - 1) * most_k // block_k + 1)
                config = split_k.with_split_k(
                    problem,
                    GemmConfig(block_m, block_n * layout.count, block_k, warps, stages),
                    max_ctas=WARPS_PER_SM[block_m] * device.num_sms // warps,
                    max_split=MAX_SPLIT,
                    min_k_iters=MIN_K_ITERS,
                    is_even=problem.is_even_k(block_k),
                )
                if config not in found and not self.config_rejection(spec, problem, config, device):
                    found.append(config)
            if found:
                break
        return split_k.same_split(found)


WEIGHT_ONLY_BYTES = WeightOnlyBytes()
