"""``w4a8_direct``: int8 A [M, K] @ int4 W [K, N] for few rows, in Gluon.

Chosen for A whose rows are aligned: M <= 16 on sm_80, 86, 89 and 90, M <= 32 on sm_90.

``weight_only_direct`` with int8 operands of mma.sync: words of nibbles go straight to the registers
of the lane that multiplies them, which unpacks four at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import DECODE_M, SMALL_M, Device, Problem
from inductor_quant.kernels.shared import split_k
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.kernels.w4a8.direct.codegen import W4A8DirectCodegen
from inductor_quant.kernels.weight_only.digit_tiles import are_words_of_columns, n_order
from inductor_quant.kernels.weight_only.direct.codegen import MAX_WARPS
from inductor_quant.kernels.weight_only.direct.kernel import (
    ARCHS,
    cheapest_of_each,
    tile_misfit,
)
from inductor_quant.kernels.weight_only.direct.operands import ROWS
from inductor_quant.kernels.weight_only.rules import (
    WGMMA_ARCHS,
    bad_blocks,
    horizontal_rejection,
    no_kernel,
)
from inductor_quant.ops.w4a8 import INT8
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

MAX_VALUES = 128  # of W that a thread unpacks at once: with more it spills at 16 rows
# (columns, k) of a warp's tile, best first: for few rows, and for more, whose A is read less often.
FEW_ROWS = 8
_WIDE = ((32, 128), (64, 64), (32, 64), (32, 32), (128, 32))
_FEW, _HALF = (16, 256), (16, 128)
MAX_WARPS_MEDIUM = 8  # for more than 16 rows, in tiles of 32: one CTA an SM would be left
# The model of a configuration's time in us (README.md): bytes of W per us with all resident warps;
# the share of the time that does not depend on their number; a further round of CTAs; the sum of
# partials.
BYTES_PER_US, FIXED, TURN, SPLIT = 3.3e6, 0.68, 0.6, 1.5


class W4A8Direct(rules.W4A8Kernel):
    name = "w4a8_direct"
    template = "w4a8/direct/template"
    is_gluon = True
    is_horizontal = True

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if device.arch not in ARCHS:
            return no_kernel(f"never run on sm_{device.arch}")
        most = SMALL_M if device.arch in WGMMA_ARCHS else DECODE_M
        if detail := problem.rows_outside(0, most):
            return no_kernel(detail)
        if spec.a.dtype != INT8:
            return no_kernel("few rows of e4m3: those of weight_only read the weight as fast")
        return rules.quad_rejection(spec, problem, device)

    def codegen(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig
    ) -> W4A8DirectCodegen:
        weight = rules.weight_of(problem)
        plan = rules.quad_plan(weight, config, own=True)
        assert plan is not None
        view = as_words(weight)
        return W4A8DirectCodegen(
            rules.tile_of(spec, view.weight, config), view, plan, n_order(view.weight.format)
        )

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if rules.has_inexact_partials(spec, problem, config):
            return bad_blocks(f"{config}: fp32 does not hold the integer sums of its parts")
        refused = tile_misfit(problem, config, device, MAX_VALUES, (*ROWS, SMALL_M))
        plan = rules.quad_plan(rules.weight_of(problem), config, own=True)
        if refused is None and plan is None:
            return bad_blocks(f"{config} does not suit the digits of {problem.weight}")
        if problem.m > DECODE_M and config.num_warps > MAX_WARPS_MEDIUM:
            return bad_blocks(f"{config}: the sums of more than {MAX_WARPS_MEDIUM} warps")
        if refused is not None or not problem.members:
            return refused
        plans = [rules.quad_plan(rules.weight_of(m), config, own=True) for m in problem.members]
        if len({None if each is None else each.of_a_tile() for each in plans}) > 1:
            return bad_blocks(f"{config} assigns the weights of one launch to threads differently")
        return horizontal_rejection(problem, config)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        tiles: Sequence[tuple[int, int]] = _WIDE
        if problem.m <= FEW_ROWS:
            tiles = (_FEW, *_WIDE)
        if problem.m > DECODE_M:
            tiles = (_HALF if _needs_registers(spec, problem) else _WIDE[0], *_WIDE[2:4])
        found = cheapest_of_each(
            problem,
            tiles,
            lambda config: _cost(problem, config, device),
            lambda config: self.config_rejection(spec, problem, config, device) is not None,
        )
        return split_k.same_split(found)


def _needs_registers(spec: QuantGemmSpec, problem: Problem) -> bool:
    """Whether tiles of 32 rows and ``_WIDE[0]`` spill: sums of groups beside those of all K, an
    int8 that is computed, or values of a register in four words."""
    weight = rules.weight_of(problem)
    is_computed = bool(spec.group_size or weight.format.to_int8)
    return is_computed or are_words_of_columns(weight)


def _cost(problem: Problem, config: GemmConfig, device: Device) -> float:
    ctas = math.ceil(problem.n / config.block_n) * config.split_k
    fill = ctas * config.num_warps / (device.num_sms * MAX_WARPS)
    loop = problem.n * problem.k / 2 / BYTES_PER_US * (FIXED + (1 - FIXED) / min(1.0, fill))
    partials = SPLIT + 8 * config.split_k * problem.m * problem.n / BYTES_PER_US
    return loop + TURN * (math.ceil(fill) - 1) + (partials if config.split_k > 1 else 0)


W4A8_DIRECT = W4A8Direct()
