"""The kernel of the ``weight_only`` family for words along K and many rows, loaded by tensor
descriptors.

``many_rows_gluon`` with another way to shared memory: there every warp copies, and waits for all
that it has begun to read before what was copied may be multiplied. Here programs go on from tile to
tile, and W is never written: on an H200 (GPTQ words, four layers of Llama-3-8B) that takes 1.01 of
the time of bf16 at 4096 rows (``bench_formal.py --family weight_only --m 4096``); to write W once
and leave the rest to cuBLAS took 1.05 to 1.07.
"""

from __future__ import annotations

import math
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import few_rows, many_rows_gluon, split_k
from inductor_quant.kernels.config import Device, GemmConfig, Problem, legal
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.many_rows_gluon import MAX_SUMS, UNROLLED, WARPGROUP
from inductor_quant.spec import QuantGemmSpec

# With fewer rows two blocks of many_rows_gluon share a multiprocessor, and win.
MIN_M = 129
# Of four warpgroups a thread has 112 registers.
MAX_SUMS_OF_FOUR = 32


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
    code = many_rows_gluon.code_of(spec, problem, config, by_tma=True)
    return split_k.constants_of(code, spec, config) | {"PROGRAMS": device.num_sms}


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, words = few_rows.weight_of(problem)
    refused = split_k.misfit(spec, weight, problem, config, unrolled=UNROLLED)
    if refused is not None:
        return refused
    groups = config.num_warps / WARPGROUP
    is_tile = groups in (1, 2, 4) and config.block_n % (16 * config.num_warps) == 0
    if not is_tile or config.block_k not in (64, 128) or config.block_m > 256:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} is no tile of wgmma")
    if config.num_stages < 3:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} has too few stages")
    refused = split_k.too_many_sums(config, MAX_SUMS_OF_FOUR if groups == 4 else MAX_SUMS)
    if refused is not None:
        return refused
    stage = config.block_m * config.block_k * 2
    stage += config.block_n * config.block_k * words.bits // words.count // 8
    return legal(config, device, element_bytes=2, shared_bytes=config.num_stages * stage)


# (rows, columns, k, warps, stages) and cycles a step, as measured on an H200. With 128 columns the
# matrix unit is busy for 1024 of them, with 64 for 512; there shared memory is for 592, to which
# x is brought and from which it is read for 64 columns only.
_BLOCKS = (
    ((256, 128, 64, 8, 4), 1120),
    ((256, 128, 64, 8, 5), 1120),
    ((256, 64, 64, 4, 5), 660),
    ((256, 64, 64, 4, 4), 660),
)
SPLITS = (1, 2, 4)
MIN_STEPS = 8  # of a part
SUMS_A_CYCLE = 150  # of parts of K, to be stored and added up by another kernel


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    found: list[tuple[float, GemmConfig]] = []
    for (block_m, block_n, block_k, warps, stages), cycles in _BLOCKS:
        for split in SPLITS:
            config = GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
            is_short = split > 1 and problem.k < split * block_k * MIN_STEPS
            if not is_short and is_legal(spec, problem, config, device) is None:
                tiles = split * math.ceil(problem.m / block_m) * problem.n // block_n
                steps = math.ceil(tiles / device.num_sms) * problem.k // (split * block_k)
                sums = split * problem.m * problem.n if split > 1 else 0
                found.append((steps * cycles + sums / SUMS_A_CYCLE, config))
    found.sort(key=lambda item: item[0])
    return split_k.of_one_split([config for _, config in found])


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
