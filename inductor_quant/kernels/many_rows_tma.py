"""The kernel of the ``weight_only`` family for words along K and many rows, loaded by tensor
descriptors.

``many_rows_gluon`` with another way to shared memory: there every warp copies, and waits for all
that it has begun to read before what was copied may be multiplied. Here no warp waits for another,
programs go on from tile to tile, and W is never written: on an H200 (GPTQ words, four layers of
Llama-3-8B) that takes 1.01 of the time of bf16 at 4096 rows
(``bench_formal.py --family weight_only --m 4096``); to write W once and leave the rest to cuBLAS
took 1.05 to 1.07.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import few_rows, many_rows_gluon, split_k
from inductor_quant.kernels.config import Device, GemmConfig, Problem, legal
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.many_rows_gluon import MAX_SUMS, UNROLLED, WARPGROUP, WIDE_N
from inductor_quant.kernels.many_rows_gluon_code import parts_of_steps
from inductor_quant.spec import QuantGemmSpec

MIN_M, FEW_M = 17, 128
# Of four warpgroups a thread has 112 registers.
MAX_SUMS_OF_FOUR = 32
TURN = 256  # rows of K
# Bytes of shared memory beside the stages: what _gluon_warps has, and Triton to exchange sums.
BARRIERS, EXCHANGE = 1024, 8192


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = many_rows_gluon.supports_nibbles(spec, problem, device)
    if general is not None:
        return general
    if problem.m < MIN_M:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows; it is for {MIN_M} and more")
    _, words = few_rows.weight_of(problem)
    if not problem.has_described_words or words.steps != ((1, 0, 0), (0, 1, 0)):
        return Rejection(
            RejectionCode.NO_KERNEL,
            "x or the words are no matrix whose rows begin at multiples of 16 bytes",
        )
    return None


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    steps = unrolled(problem, config)
    code = many_rows_gluon.code_of(spec, problem, config, by_tma=True)
    constants = {"UNROLLED": steps, "PROGRAMS": device.num_sms}
    return split_k.constants_of(code, spec, config) | constants


def unrolled(problem: Problem, config: GemmConfig) -> int:
    """Steps in the loop's body: a turn takes longer than memory to bring scales and zero points,
    and goes through all stages if it can."""
    turn = max(UNROLLED, TURN // config.block_k)
    most = config.num_stages if config.num_stages % turn == 0 else turn
    part = problem.k // config.split_k
    return next((n for n in (most, turn) if part % (n * config.block_k) == 0), UNROLLED)


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, words = few_rows.weight_of(problem)
    refused = split_k.misfit(spec, weight, problem, config, unrolled=UNROLLED)
    if refused is not None:
        return refused
    groups = config.num_warps / WARPGROUP
    parts = parts_of_steps(config)
    is_tile = groups in (1, 2, 4) and config.block_n % 64 == 0 and parts in (1, 2)
    is_tile = is_tile and config.block_k % (64 * parts) == 0
    if not is_tile or config.block_k not in (64, 128) or config.block_m > 256:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} is no tile of wgmma")
    if config.num_stages < 3:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} has too few stages")
    most = (MAX_SUMS_OF_FOUR if groups == 4 else MAX_SUMS) // parts
    refused = split_k.too_many_sums(config, most)
    if refused is not None:
        return refused
    stage = config.block_m * config.block_k * 2
    stage += config.block_n * config.block_k * words.bits // words.count // 8
    shared = config.num_stages * stage + BARRIERS + (EXCHANGE if parts > 1 else 0)
    return legal(config, device, element_bytes=2, shared_bytes=shared)


# For so many rows at most: (rows, columns, k, warps, stages) and cycles a step, as measured on an
# H200. Where 256 rows have 128 columns the matrix unit is busy for 1024 of them, with 64 for 512,
# which is what shared memory takes as well: x is brought there and read from there for 64 columns
# only. In the last, half of the warps have half of each step. Fewer rows take nearly as long:
# products of 64 rows leave no time to dequantize. So tiles of 64 rows and 192 columns are no gain
# at 256 x 6144, where nearly all multiprocessors have one: their products alone take 20.7 us,
# dequantizing alone 22.9, both 32.6; of 256 rows and 64 columns, on 96 of 132, 22.8, 19.8, 23.5.
_BLOCKS = {
    32: (((32, 128, 64, 8, 8), 460),),
    64: (((64, 128, 64, 8, 8), 560),),
    FEW_M: (((128, 128, 128, 8, 4), 1250), ((128, 128, 64, 8, 8), 670)),
    math.inf: (
        ((256, 128, 64, 8, 4), 1120),
        ((256, 64, 64, 4, 5), 640),
        ((128, 64, 128, 8, 5), 800),
    ),
}
SPLITS = (1, 2, 4)
MIN_STEPS = 8  # of a part
SUMS_A_CYCLE = 150  # of parts of K, to be stored and added up by another kernel
FINISHING = 1500  # cycles of a tile, beside its steps
# Of multiprocessors with a tile, and rows of K that it has. By trials 64 rows of 8192 x 28672 take
# 71 us (gluon: 87), 3584 x 18944 29.4 (31.6), 128 of 14336 x 4096 26.3 (32.0), but 64 of
# 12288 x 4096, 96 tiles, 21.6 (20.4), and of 4096 x 4096 in four parts 10.8 (9.9).
MIN_FILL, MIN_K = 0.8, 3072


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    found: list[tuple[float, GemmConfig]] = []
    blocks = next(blocks for most, blocks in _BLOCKS.items() if problem.m <= most)
    for (block_m, block_n, block_k, warps, stages), cycles in blocks:
        for split in SPLITS:
            config = GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
            tiles = split * math.ceil(problem.m / block_m) * problem.n // block_n
            is_short = split > 1 and problem.k < split * block_k * MIN_STEPS
            is_behind = problem.m <= FEW_M and not _is_ahead(problem, split, tiles, device)
            if not (is_short or is_behind) and is_legal(spec, problem, config, device) is None:
                steps = problem.k // (split * block_k)
                tile = steps * cycles + FINISHING
                sums = split * problem.m * problem.n if split > 1 else 0
                cost = math.ceil(tiles / device.num_sms) * tile + sums / SUMS_A_CYCLE
                found.append((cost, config))
    found.sort(key=lambda item: item[0])
    return split_k.of_one_split([config for _, config in found])


def _is_ahead(problem: Problem, split: int, tiles: int, device: Device) -> bool:
    """Whether it takes less time than ``many_rows_gluon``, two blocks of which share a
    multiprocessor with FEW_M rows or fewer: if nearly all have one long tile here, or with more
    than 64 rows enough of them."""
    is_one_round = MIN_FILL * device.num_sms <= tiles <= device.num_sms
    is_long = problem.k >= MIN_K * split
    return (is_one_round and is_long) or (problem.m > 64 and problem.n >= WIDE_N)


WEIGHT_ONLY_WORDS_TMA = Kernel(
    name="weight_only_words_tma",
    family="weight_only",
    grid=split_k.persistent_grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    is_gluon=True,
)
