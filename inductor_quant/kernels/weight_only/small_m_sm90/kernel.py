"""``weight_only_small_m_sm90``: x [M, K] @ W [K, N] for int4 packed along K and large N, in Gluon.

Chosen on sm_90 for static M from 9 to 32, N >= 22016 and the weights of ``weight_only_decode``, if
packed weights, scales and zero points are contiguous along N, x along K, all at multiples of 16
bytes, and the tiles fill the SMs evenly.

swap_ab, with wgmma: W^T is the first operand, from registers, and x the second, from shared memory.
One warpgroup's 64 of N share each read of x; in ``weight_only_decode`` only 32 do, which at M = 16
reads twice the bytes of W. Packed weights, scales, zero points and x are copied ahead with cp.async
into ``num_stages`` stages. Each K iteration multiplies, then puts the next block of x into the
order of the packed weights. A CTA has one tile and all of K.
"""

from __future__ import annotations

import math

from inductor_quant.kernels.codegen.packed_tile import contiguous_axis
from inductor_quant.kernels.config import GemmConfig, reject_if_split, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, SMALL_M, Device, Problem
from inductor_quant.kernels.shared import horizontal
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.decode.codegen import SLICE
from inductor_quant.kernels.weight_only.rules import bad_blocks, no_kernel
from inductor_quant.kernels.weight_only.small_m_sm90.codegen import (
    WARPGROUP,
    SmallMSm90Codegen,
    are_aligned,
    are_neighbours,
    fields_of,
    supports_ops,
)
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

MIN_M = 9  # up to 8 rows of x are no larger than the packed weights of 32 columns: no gain
MIN_N = 22016  # the smallest that was faster than weight_only_decode
WARPS = (4, 8, 16)
# By block_m: (block_n, block_k, warps, stages), best guess first.
_BLOCKS = {
    DECODE_M: ((128, 256, 8, 2), (64, 256, 4, 2), (256, 256, 16, 2), (128, 128, 8, 4)),
    SMALL_M: ((256, 256, 16, 2),),
}
# Use the 64-column tile if it cuts the busiest SM's share of N to this.
FEWER_COLUMNS = 0.8
# All SMs together must have this much of N, in shares of the busiest: the others wait for it.
MIN_FILL = {DECODE_M: 0.8, SMALL_M: 0.65}


class WeightOnlySmallMSm90(rules.WeightOnlyKernel):
    name = "weight_only_small_m_sm90"
    template = "weight_only/small_m_sm90/template"
    is_gluon = True
    is_horizontal = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in rules.WGMMA_ARCHS:
            return no_kernel(f"written for sm_90, this is sm_{device.arch}")
        if detail := problem.rows_outside(MIN_M, SMALL_M):
            return no_kernel(detail)
        refused = (
            rules.packed_rejection(spec, problem, device)
            or rules.grouped_int4_rejection(spec, problem)
            or rules.reject_if_unaligned_rows(problem)
        )
        if refused is not None:
            return refused
        min_block_n = WARPS[0] * 16
        for member in problem.members or (problem,):
            weight, layout = rules.packed_weight_of(member)
            loop_ops, _ = rules.dequant_ops_of(spec, weight)
            if contiguous_axis(weight, layout) != "n":
                return no_kernel("packed weights are not contiguous along N")
            if not supports_ops(loop_ops, layout, spec.a.dtype):
                return no_kernel("needs scales, and at most a small integer as zero point")
            fields = fields_of(loop_ops)
            if not all(are_neighbours(field, weight, min_block_n) for field in fields):
                return no_kernel("scales or zero points are not contiguous along N")
            fields = (weight.format.element, *fields)
            if not all(are_aligned(field, weight, min_block_n) for field in fields):
                return no_kernel(
                    "packed weights, scales or zero points of a tile do not begin at multiples of "
                    "16 bytes"
                )
        return None

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig
    ) -> SmallMSm90Codegen:
        weight, layout = rules.packed_weight_of(problem)
        tile = rules.tile_of(spec, weight, config)
        return SmallMSm90Codegen(
            tile, layout, has_all_rows=problem.m_is_static and problem.m == config.block_m
        )

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        refused = reject_if_split(config) or rules.horizontal_rejection(problem, config)
        if refused is not None:
            return refused
        if problem.n % config.block_n or problem.k % (config.num_stages * config.block_k):
            return bad_blocks(f"{config} does not divide N={problem.n}, K={problem.k}")
        if rules.group_size_of(spec, rules.weight_of(problem)) % SLICE:
            return bad_blocks(f"a slice of {SLICE} of K exceeds the quantization group")
        if problem.m > config.block_m:
            return bad_blocks(f"{config} does not have all {problem.m} rows")
        is_tile = config.block_m in _BLOCKS and config.block_k % SLICE == 0
        is_tile = is_tile and config.num_warps in WARPS
        if not is_tile or config.block_n != 16 * config.num_warps:
            return bad_blocks(f"{config} does not have 64 columns per warpgroup of {WARPGROUP}")
        # Permuted x has two buffers, which must alternate from one turn of the stages to the next.
        if config.num_stages % 2:
            return bad_blocks(f"{config} has an odd number of stages")
        shared = self.codegen(spec, problem, config).shared_bytes()
        return tile_rejection(config, device, element_bytes=2, shared_bytes=shared)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        if problem.n < MIN_N or horizontal.reject_if_no_gain(problem) is not None:
            return []
        block_m = next(rows for rows in _BLOCKS if problem.m <= rows)
        blocks = list(_BLOCKS[block_m])
        busiest = [_busiest_sm(problem.n, block_n, device) for block_n, *_ in blocks]
        if len(blocks) > 1 and busiest[1] <= FEWER_COLUMNS * busiest[0]:
            blocks[:2], busiest[:2] = blocks[1::-1], busiest[1::-1]
        if problem.n < MIN_FILL[block_m] * device.num_sms * busiest[0]:
            return []
        listed = [GemmConfig(block_m, *block) for block in blocks]
        return [each for each in listed if not self.config_rejection(spec, problem, each, device)]


def _busiest_sm(n: int, block_n: int, device: Device) -> int:
    """How much of N the SM with the most tiles has."""
    return math.ceil(n / (block_n * device.num_sms)) * block_n


WEIGHT_ONLY_SMALL_M_SM90 = WeightOnlySmallMSm90()
