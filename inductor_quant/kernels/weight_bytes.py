"""The kernel of the ``weight_only`` family for int8, fp8 and halves of bytes, and few rows of x."""

from __future__ import annotations

import dataclasses
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import split_k, weight_only
from inductor_quant.kernels.byte_numbers import Bytes, bytes_of
from inductor_quant.kernels.bytes_code import BytesCode
from inductor_quant.kernels.config import Device, GemmConfig, Problem, Weight, legal
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.words import BASES
from inductor_quant.spec import QuantGemmSpec

MIN_BLOCK_M, MIN_BLOCK_N = 8, 16
# With more rows the tiles of the general kernel are as large, and where N is large they need no
# parts of K.
MAX_M, MAX_M_WIDE, WIDE_N = 128, 64, 16384
# Fields of a byte have scales of their own, which with more rows take longer than what they save
# (bench_gemm.py --family weight_only_hqq --m 64 on an H200, then: 1.9 to 3.6 of bf16's time).
MAX_M_FIELDS = 32
# Narrower fields are right in the interpreter, but on an H200 a layer of 1 bit (HQQ, one row) was
# beyond its bound of error, and one of 2 bits (optimum-quanto) did not finish in a minute. The
# general kernel takes them.
MIN_WIDTH = 4
# Of a thread: with more the converted bytes spill, which W as second operand passes on.
MAX_SUMS, MAX_SUMS_X_FIRST = 32, 64


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = weight_only.supports(spec, problem, device)
    if general is not None:
        return general
    assert problem.weight is not None
    if spec.a.dtype not in BASES:
        return Rejection(RejectionCode.NO_KERNEL, f"x of {spec} does not have 16 bits")
    if problem.m > (MAX_M_WIDE if problem.n >= WIDE_N else MAX_M):
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows are not few")
    found = bytes_of(problem.weight)
    if found is not None and found[1].count > 1 and problem.m > MAX_M_FIELDS:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows are not few")
    if found is None:
        return Rejection(
            RejectionCode.NO_KERNEL, "numbers are not bytes that lie along K, or their fields"
        )
    if found[1].width < MIN_WIDTH:
        return Rejection(RejectionCode.NO_KERNEL, f"fields of {found[1].width} bits")
    return None


def is_x_first(config: GemmConfig) -> bool:
    """Whether x is the first operand of the matrix instruction, W the second, from shared memory:
    faster where the tile has as many rows as wgmma."""
    return config.block_m >= 64


def weight_of(problem: Problem) -> tuple[Weight, Bytes]:
    assert problem.weight is not None
    found = bytes_of(problem.weight)
    assert found is not None
    return found


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    weight, numbers = weight_of(problem)
    loop_steps, column_steps = split_k.steps_of(spec, weight)
    code = BytesCode(
        weight,
        numbers,
        config,
        x_dtype=spec.a.dtype,
        loop_steps=loop_steps,
        column_steps=column_steps,
        is_x_first=is_x_first(config),
    )
    return split_k.constants_of(code, spec, config)


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, numbers = weight_of(problem)
    if config.block_m < MIN_BLOCK_M or config.block_n < MIN_BLOCK_N * numbers.count:
        least = f"{MIN_BLOCK_M}x{MIN_BLOCK_N * numbers.count}"
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config}: {least} is the least")
    most = MAX_SUMS_X_FIRST if is_x_first(config) else MAX_SUMS
    refused = split_k.misfit(spec, weight, problem, config) or split_k.too_many_sums(config, most)
    if refused is not None:
        return refused
    rows = config.block_n // numbers.count
    stage = config.block_k * (config.block_m * spec.a.dtype.itemsize + rows)
    # As tiles of the general kernel, but for the smallest: here N is the instruction's M.
    smallest = dataclasses.replace(config, block_m=max(16, config.block_m))
    shared_bytes = max(1, config.num_stages - 1) * stage
    if is_x_first(config):  # the converted tile passes through shared memory
        shared_bytes = config.num_stages * stage + 2 * config.block_n * config.block_k
    return legal(smallest, device, element_bytes=2, shared_bytes=shared_bytes)


# (most rows, least N, (block_n, warps, block_k, stages) by preference): from sweeps of a prototype
# on an H200, int8 and e4m3, N x K of Llama-3-8B. For few columns the smallest tile and one warp:
# four an SM with five stages are as many bytes under way as the memory wants (6144 x 4096, one row:
# 9.3 us; with 64 columns and K in four parts 11.1).
# Of fields, block_n counts bytes.
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
# By block_m the warps an SM up to which K is split; the least steps of a part.
MOST_WARPS = {8: 4, 16: 4, 32: 4, 64: 6, 128: 8}
MAX_STAGES = 8
MIN_STEPS = 4
MAX_SPLIT = 8


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    weight, numbers = weight_of(problem)
    group = split_k.group_of(spec, weight)
    # of symbolic rows there may be many: not the smallest tile
    rows = problem.m if problem.m_is_static else max(problem.m, 16)
    found = []
    for block_m, least_n, blocks in _BLOCKS:
        if rows > block_m or problem.n < least_n:
            continue
        for block_n, warps, most_k, stages in blocks:
            block_k = min(most_k, group)
            # as many bytes under way where scales change more often
            stages = min(MAX_STAGES, (stages - 1) * most_k // block_k + 1)
            config = GemmConfig(block_m, block_n * numbers.count, block_k, warps, stages)
            config = dataclasses.replace(config, split_k=_split(problem, config, device))
            if config not in found and is_legal(spec, problem, config, device) is None:
                found.append(config)
        if found:
            break
    return split_k.of_one_split(found)


def _split(problem: Problem, config: GemmConfig, device: Device) -> int:
    return split_k.parts_of_k(
        problem,
        config.block_k,
        tiles=-(-problem.n // config.block_n) * config.num_warps,
        programs=MOST_WARPS[config.block_m] * device.num_sms,
        parts=MAX_SPLIT,
        min_steps=MIN_STEPS,
    )


WEIGHT_ONLY_BYTES = Kernel(
    name="weight_only_bytes",
    family="weight_only",
    grid=split_k.grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
)
