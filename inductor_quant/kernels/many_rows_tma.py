"""The kernel of the ``weight_only`` family for words along K and many rows, loaded by tensor
descriptors.

``many_rows_gluon`` with another way to shared memory: there every warp copies, and waits for all
that it has begun to read before what was copied may be multiplied. With fewer rows that kernel
wins: more blocks of it share a multiprocessor. Beyond, W is written once.
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

# On an H200, GPTQ words: 0.91 of the time of many_rows_gluon at 256 rows of 28672x4096; of W
# written once 0.72 at 512 rows, 1.04 at 1024 rows of 6144x4096.
MIN_M, MAX_M = 129, 512
# Of four warpgroups a thread has 112 registers.
MAX_SUMS_OF_FOUR = 32


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = many_rows_gluon.supports_nibbles(spec, problem, device)
    if general is not None:
        return general
    if not MIN_M <= problem.m <= MAX_M:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows, not {MIN_M} to {MAX_M}")
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
    return split_k.constants_of(code, spec, config)


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


# (rows, columns, k, warps, stages), best guess first. Blocks of fewer columns read x more often,
# and win where all of them run at once.
_NARROW = ((256, 64, 64, 4, 5), (256, 64, 64, 4, 4))
_WIDE = ((256, 128, 64, 8, 4), (256, 128, 64, 8, 5))
MIN_STEPS = 8
MAX_SPLIT = 4


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    block_m, block_n, *_ = _NARROW[0]
    blocks = math.ceil(problem.m / block_m) * math.ceil(problem.n / block_n)
    found = []
    for block_m, block_n, block_k, warps, stages in _NARROW if blocks <= device.num_sms else _WIDE:
        split = split_k.parts_of_k(
            problem,
            block_k,
            tiles=math.ceil(problem.n / block_n) * math.ceil(problem.m / block_m),
            programs=device.num_sms,
            parts=MAX_SPLIT,
            min_steps=MIN_STEPS,
        )
        config = GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
        if is_legal(spec, problem, config, device) is None:
            found.append(config)
    return split_k.of_one_split(found)


WEIGHT_ONLY_WORDS_TMA = Kernel(
    name="weight_only_words_tma",
    family="weight_only",
    grid=split_k.grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    is_gluon=True,
)
