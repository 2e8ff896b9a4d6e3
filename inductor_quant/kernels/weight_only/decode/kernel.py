"""``weight_only_decode``: x [M, K] @ W [K, N] for int4 packed along K, in Gluon.

Chosen for static M <= 16, 16-bit x and eight int4 values in order along K per int32 (GPTQ), with
scales and zero points per group; on sm_80, 86, 89 and 90. For M from 9 and large N on sm_90
``weight_only_small_m_sm90`` comes first.

swap_ab, with mma.sync: W^T is the first operand. The warps of a CTA split K among themselves, 128
at a time, where those of ``weight_only_small_m`` split N: so few CTAs keep an SM busy without
partials in memory. Each lane loads whole packed words straight to the registers it multiplies
from; nothing of W passes through shared memory. Once per tile the warps' sums are added in shared
memory. At small M and large N a CTA keeps its slice of x in registers and walks several tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from inductor_quant.kernels.codegen.packed_tile import contiguous_axis
from inductor_quant.kernels.config import GemmConfig, tile_rejection
from inductor_quant.kernels.problem import DECODE_M, INTERPRETER_ARCH, Device, Problem
from inductor_quant.kernels.shared import horizontal, split_k
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.decode.codegen import (
    COLUMNS,
    MAX_WARPS,
    SLICE,
    DecodeCodegen,
)
from inductor_quant.kernels.weight_only.direct.kernel import WEIGHT_ONLY_DIRECT
from inductor_quant.kernels.weight_only.rules import WIDE_N, bad_blocks, no_kernel
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import QuantGemmSpec

ARCHS = (INTERPRETER_ARCH, 80, 86, 89, 90)  # that it has run on, or compiles for
# An SM runs 16 warps. A CTA, which has 32 of N, gets as many of them as let all CTAs run at once,
# but at least 16 / MAX_CTAS_PER_SM; above M = 8 half of these if only then all run at once.
MAX_CTAS_PER_SM = 4
# With M <= 8 and N >= WIDE_N a CTA keeps its x, a slice of at most so many k, and walks the tiles.
# So it does where a horizontal launch needs partials.
RESIDENT_K = 1024
MAX_SPLIT = 4
TIMED_ARCH = 90  # where weight_only_direct was timed beside it
MAX_IDLE = 0.2  # of the slices that the warps of a CTA could have in the time that they take


def is_resident(problem: Problem, config: GemmConfig) -> bool:
    """Whether a CTA keeps its x in registers: one block has its whole slice of K."""
    return problem.k <= config.split_k * config.block_k


def num_ctas(problem: Problem, config: GemmConfig, device: Device) -> int:
    """All that run at once if x is resident, else one per tile; times ``split_k``."""
    tiles = problem.n // config.block_n
    if is_resident(problem, config):
        at_once = device.num_sms * (MAX_WARPS // config.num_warps) // config.split_k
        # As few as need no more rounds: each CTA reads x once.
        tiles = math.ceil(tiles / math.ceil(tiles / max(1, at_once)))
    return tiles * config.split_k


class WeightOnlyDecode(rules.WeightOnlyKernel):
    name = "weight_only_decode"
    template = "weight_only/decode/template"
    is_gluon = True
    is_horizontal = True

    @staticmethod
    def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
        *_, meta = sizes
        return (meta["NUM_CTAS"], 1, 1)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if detail := problem.rows_outside(0, DECODE_M):
            return no_kernel(detail)
        if device.arch not in ARCHS:
            return no_kernel(f"never run on sm_{device.arch}")
        refused = rules.packed_rejection(spec, problem, device) or rules.grouped_int4_rejection(
            spec, problem
        )
        if refused is not None or problem.members:
            return refused
        weight, layout = rules.packed_weight_of(problem)
        if contiguous_axis(weight, layout) != "n" and problem.has_aligned_rows:
            return no_kernel("weight_only_direct is faster where words are contiguous along K")
        return None

    def codegen(self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> DecodeCodegen:
        weight, layout = rules.packed_weight_of(problem)
        return DecodeCodegen(rules.tile_of(spec, weight, config), layout)

    def own_constants(self, problem: Problem, config: GemmConfig, device: Device) -> dict[str, Any]:
        one = dataclasses.replace(config, block_n=COLUMNS)  # by which the template counts tiles
        found: dict[str, Any] = {**horizontal.constants(problem, one, shared=("X",))}
        return found | {"NUM_CTAS": num_ctas(problem, config, device)}

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        if problem.n % config.block_n or problem.k % (config.split_k * SLICE):
            return bad_blocks(f"{config} does not divide N={problem.n}, K={problem.k}")
        refused = rules.horizontal_rejection(problem, config)
        if refused is not None:
            return refused
        if rules.group_size_of(spec, rules.weight_of(problem)) % SLICE:
            return bad_blocks(f"a slice of {SLICE} of K exceeds the quantization group")
        is_tile = config.block_m in (8, 16) and problem.m <= config.block_m
        is_tile = is_tile and config.block_n % COLUMNS == 0 and config.num_warps <= MAX_WARPS
        if not is_tile or config.block_k % (SLICE * config.num_warps):
            return bad_blocks(f"{config} cannot be shared among its warps")
        return tile_rejection(
            GemmConfig(16, config.block_n, 128, config.num_warps, 1),
            device,
            element_bytes=2,
            shared_bytes=2 * config.num_warps * config.block_m * config.block_n * 4,
        )

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        if _is_for_direct(spec, problem, device):
            return []
        block_m, is_wide = _rows(problem), _is_wide(problem)
        needs_partials = horizontal.reject_if_no_gain(problem) is not None
        listed = [_resident(problem, block_m)] if is_wide or needs_partials else []
        listed += _one_tile(problem, block_m, device, min_split=2 if needs_partials else 1)
        found = [
            config
            for config in dict.fromkeys(listed)
            if self.config_rejection(spec, problem, config, device) is None
        ]
        return split_k.same_split(found)


def _is_for_direct(spec: QuantGemmSpec, problem: Problem, device: Device) -> bool:
    """Whether ``weight_only_direct``, whose tiles are smaller, is faster: for few tiles, or where
    warps have nothing of the last K."""
    if problem.members or device.arch != TIMED_ARCH:
        return False
    if WEIGHT_ONLY_DIRECT.rejection(spec, problem, device) is not None:
        return False
    return 2 * problem.n // COLUMNS <= device.num_sms or _idle(problem, device) > MAX_IDLE


def _rows(problem: Problem) -> int:
    return 8 if problem.m <= 8 else DECODE_M


def _is_wide(problem: Problem) -> bool:
    """Whether CTAs keep their x."""
    is_short = problem.k <= MAX_SPLIT * RESIDENT_K
    return _rows(problem) == 8 and problem.n >= WIDE_N and is_short


def _idle(problem: Problem, device: Device) -> float:
    """The share of the slices of K that the warps of a CTA do not have, as K ends before."""
    if _is_wide(problem):
        return 0.0
    config = next(_one_tile(problem, _rows(problem), device, min_split=1))
    slices = problem.k / SLICE / config.split_k
    return 1 - slices / (math.ceil(slices / config.num_warps) * config.num_warps)


def _resident(problem: Problem, block_m: int) -> GemmConfig:
    """CTAs that keep their x: a warp has registers for two slices of 8 rows, or one of 16."""
    split = min(MAX_SPLIT, max(1, problem.k // RESIDENT_K))
    block_k = problem.k // split
    warps = max(1, block_k // SLICE // (2 if block_m == 8 else 1))
    return GemmConfig(block_m, COLUMNS, block_k, warps, 1, split_k=split)


def _one_tile(
    problem: Problem, block_m: int, device: Device, *, min_split: int
) -> Iterator[GemmConfig]:
    """CTAs with one tile each."""
    tiles = math.ceil(problem.n / COLUMNS)
    warps = MAX_WARPS
    while warps * MAX_CTAS_PER_SM > MAX_WARPS and tiles * warps > device.num_sms * MAX_WARPS:
        warps //= 2
    while warps > 1 and SLICE * warps > problem.k:
        warps //= 2
    candidates = [warps, max(1, warps // 2)]
    at_once = [tiles * each <= device.num_sms * MAX_WARPS for each in candidates]
    if block_m == DECODE_M and at_once == [False, True]:
        candidates.reverse()
    for each in candidates:
        config = split_k.with_split_k(
            problem,
            GemmConfig(block_m, COLUMNS, SLICE * each, each, 1),
            max_ctas=device.num_sms,
            max_split=MAX_SPLIT,
            min_k_iters=1,
        )
        yield dataclasses.replace(config, split_k=max(min_split, config.split_k))


WEIGHT_ONLY_DECODE = WeightOnlyDecode()
