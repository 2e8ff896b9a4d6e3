"""The kernel of the ``weight_only`` family for few rows of x and many columns, for wgmma.

Where warps share out K (few_rows_gluon) every 32 columns read x again, which for 16 rows is twice
what their words take. Here 64 columns do, from shared memory, and the matrix unit reads it itself.
"""

from __future__ import annotations

from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import few_rows, few_rows_gluon, group, split_k
from inductor_quant.kernels.config import (
    INTERPRETER_ARCH,
    Device,
    GemmConfig,
    Problem,
    legal,
    refuse_split,
)
from inductor_quant.kernels.few_rows_gluon_code import SLICE
from inductor_quant.kernels.few_rows_wgmma_code import (
    WARPGROUP,
    FewRowsWgmmaCode,
    are_aligned,
    are_neighbours,
    fields_of,
    supports_steps,
)
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.word_tile import contiguous_axis
from inductor_quant.spec import QuantGemmSpec

ARCHS = (INTERPRETER_ARCH, 90)  # wgmma is Hopper's alone
# With 8 rows and fewer those of x are as little as the words of 32 columns: nothing is won.
MIN_M, MAX_M = 9, 32
WARPS = (4, 8, 16)
# By rule from trials on an H200 (words of GPTQ, K = 4096), best guess first. For so many rows at
# most: (columns, k, warps, stages).
_BLOCKS = {
    16: ((128, 256, 8, 2), (64, 256, 4, 2), (256, 256, 16, 2), (128, 128, 8, 4)),
    32: ((256, 256, 16, 2),),
}
# The smaller of the first two tiles, where the multiprocessor that has most of them has so many
# columns less: of 22016 a quarter (20.2 us, not 22.6), but none of 28672 (25.4, not 23.3).
FEWER_COLUMNS = 0.8
# The fewest for which it was faster; of 14336, 15.9 us where warps that share out K take 14.9.
WIDE_N = 22016
# That multiprocessor may have no more than the others by far: the rest of them wait. (32 rows of
# 22016, for 0.65 of them: 26.3 us, 34.5 in many_rows_gluon.)
MIN_FILL = {16: 0.8, 32: 0.65}


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = few_rows.supports(spec, problem, device)
    if general is not None:
        return general
    if device.arch not in ARCHS:
        return Rejection(RejectionCode.NO_KERNEL, f"written for sm_90, this is {device}")
    if not MIN_M <= problem.m <= MAX_M or not problem.m_is_static:
        return Rejection(
            RejectionCode.NO_KERNEL, f"{problem.m} rows, or any number, not {MIN_M} to {MAX_M}"
        )
    refused = few_rows_gluon.supports_weight(spec, problem)
    if refused is not None:
        return refused
    if not problem.has_aligned_rows:
        return Rejection(
            RejectionCode.NO_KERNEL,
            "x is not contiguous along K, or its rows do not begin at multiples of 16 bytes",
        )
    for member in problem.members or (problem,):
        weight, words = few_rows.weight_of(member)
        loop_steps, _ = split_k.steps_of(spec, weight)
        if contiguous_axis(weight, words) != "n":
            return Rejection(RejectionCode.NO_KERNEL, "words are not neighbours along N")
        if not supports_steps(loop_steps, words, spec.a.dtype):
            return Rejection(
                RejectionCode.NO_KERNEL, "not a small integer as zero point, if any, and scales"
            )
        narrowest = WARPS[0] * 16
        fields = fields_of(loop_steps)
        if not all(are_neighbours(each, weight, narrowest) for each in fields):
            return Rejection(
                RejectionCode.NO_KERNEL, "scales or zero points are not neighbours along N"
            )
        fields = (weight.format.element, *fields)
        if not all(are_aligned(each, weight, narrowest) for each in fields):
            return Rejection(
                RejectionCode.NO_KERNEL,
                "words, scales or zero points of a tile do not begin at multiples of 16 bytes",
            )
    return None


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    found = split_k.constants_of(code_of(spec, problem, config), spec, config)
    return found | group.constants(problem, config, shared=("X",))


def code_of(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> FewRowsWgmmaCode:
    weight, words = few_rows.weight_of(problem)
    loop_steps, _ = split_k.steps_of(spec, weight)
    return FewRowsWgmmaCode(
        weight,
        words,
        config,
        x_dtype=spec.a.dtype,
        loop_steps=loop_steps,
        has_all_rows=problem.m == config.block_m,
    )


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, _ = few_rows.weight_of(problem)
    refused = refuse_split(config) or few_rows.misfit(problem, config)
    if refused is not None:
        return refused
    if problem.n % config.block_n or problem.k % (config.num_stages * config.block_k):
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config} does not divide N={problem.n}, K={problem.k}"
        )
    if split_k.group_of(spec, weight) % SLICE:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"scales change within {SLICE} rows")
    if problem.m > config.block_m:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} has not all of {problem.m} rows")
    is_tile = config.block_m in _BLOCKS and config.block_k % SLICE == 0
    is_tile = is_tile and config.num_warps in WARPS
    if not is_tile or config.block_n != 16 * config.num_warps:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config} is not 64 columns a warpgroup of {WARPGROUP}"
        )
    # x is in order in two buffers, and so that they alternate, by stages.
    if config.num_stages % 2:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} has an odd number of stages")
    shared = code_of(spec, problem, config).shared_bytes()
    return legal(config, device, element_bytes=2, shared_bytes=shared)


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first."""
    block_m = next(rows for rows in _BLOCKS if problem.m <= rows)
    if problem.n < WIDE_N or group.is_no_gain(problem) is not None:
        return []
    blocks = list(_BLOCKS[block_m])
    most = [_most_columns(problem, block, device) for block in blocks]
    if len(most) > 1 and most[1] <= FEWER_COLUMNS * most[0]:
        blocks[:2], most[:2] = blocks[1::-1], most[1::-1]
    if problem.n < MIN_FILL[block_m] * device.num_sms * most[0]:
        return []
    listed = [GemmConfig(block_m, *block) for block in blocks]
    return [each for each in listed if is_legal(spec, problem, each, device) is None]


def _most_columns(problem: Problem, block: tuple[int, ...], device: Device) -> int:
    """Columns of the multiprocessor that has most of the tiles."""
    block_n, *_ = block
    return -(-problem.n // (block_n * device.num_sms)) * block_n


WEIGHT_ONLY_FEW_ROWS_WGMMA = Kernel(
    name="weight_only_few_rows_wgmma",
    family="weight_only",
    grid=split_k.grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    is_gluon=True,
    is_grouped=True,
)
