"""The kernel of the ``weight_only`` family for words along K and more than few rows, in Gluon.

In Triton a dequantized tile passes through shared memory on its way to wgmma, and nothing is
multiplied meanwhile. Here it stays in registers, and the next tile is dequantized while one is
multiplied.
"""

from __future__ import annotations

from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import few_rows, many_rows, split_k
from inductor_quant.kernels.config import (
    INTERPRETER_ARCH,
    Device,
    GemmConfig,
    Problem,
    legal,
)
from inductor_quant.kernels.gluon_columns import supports_steps
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.many_rows_gluon_code import ManyRowsGluonCode
from inductor_quant.kernels.word_tile import contiguous_axis
from inductor_quant.spec import QuantGemmSpec

ARCHS = (INTERPRETER_ARCH, 90)  # wgmma is Hopper's alone
OFFSETS = tuple(range(0, 32, 4))  # of a word's numbers: a byte has two neighbours along k
MIN_M, MAX_M = 17, 256
UNROLLED = 2  # steps in the loop's body
SHARED_STEPS = 2  # of one group's scales, at most
WARPGROUP = 4
MAX_SUMS = 128  # registers a thread
WIDE_N = 16384


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    if not MIN_M <= problem.m <= MAX_M:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows, not {MIN_M} to {MAX_M}")
    return supports_nibbles(spec, problem, device)


def supports_nibbles(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """Whether ``ManyRowsGluonCode`` has code for the weight, and x lies as it must."""
    general = many_rows.supports_words(spec, problem, device)
    if general is not None:
        return general
    if device.arch not in ARCHS:
        return Rejection(RejectionCode.NO_KERNEL, f"written for sm_90, this is {device}")
    weight, words = few_rows.weight_of(problem)
    is_nibbles = words.width == 4 and words.offsets == OFFSETS
    if words.axis != "k" or not is_nibbles or contiguous_axis(weight, words) != "n":
        return Rejection(
            RejectionCode.NO_KERNEL,
            "not eight numbers of 4 bits a word, in order along K, neighbours along N",
        )
    if not problem.has_aligned_rows:
        return Rejection(
            RejectionCode.NO_KERNEL,
            "x is not contiguous along K, or its rows do not begin at multiples of 16 bytes",
        )
    loop_steps, column_steps = split_k.steps_of(spec, weight)
    if not supports_steps((*loop_steps, *column_steps)):
        return Rejection(RejectionCode.NO_KERNEL, "scales or zero points are not plain fields")
    return None


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    code = code_of(spec, problem, config)
    return split_k.constants_of(code, spec, config) | {"IS_ASYNC": is_async(config)}


def code_of(
    spec: QuantGemmSpec,
    problem: Problem,
    config: GemmConfig,
    *,
    by_tma: bool = False,
) -> ManyRowsGluonCode:
    weight, words = few_rows.weight_of(problem)
    loop_steps, column_steps = split_k.steps_of(spec, weight)
    shares = split_k.group_of(spec, weight) % (SHARED_STEPS * config.block_k) == 0
    return ManyRowsGluonCode(
        weight,
        words,
        config,
        x_dtype=spec.a.dtype,
        loop_steps=loop_steps,
        column_steps=column_steps,
        shared_steps=SHARED_STEPS if shares else 1,
        by_tma=by_tma,
    )


def is_async(config: GemmConfig) -> bool:
    """Whether a step is dequantized while another is multiplied. Where two blocks share a
    multiprocessor and each has two warpgroups they cover for each other: it only costs them
    registers and a stage."""
    return config.num_warps == WARPGROUP or config.block_m > 128


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, words = few_rows.weight_of(problem)
    refused = split_k.misfit(spec, weight, problem, config, unrolled=UNROLLED)
    if refused is not None:
        return refused
    # of four warpgroups a thread has 128 registers, fewer than ptxas wants for their sums
    is_tile = config.num_warps in (WARPGROUP, 2 * WARPGROUP)
    is_tile = is_tile and config.block_n % (16 * config.num_warps) == 0
    if not is_tile or config.block_k not in (64, 128) or config.block_m > 256:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} is no tile of wgmma")
    # The first stages are filled without asking whether there is so much of K.
    if not 3 <= config.num_stages <= problem.k // (config.split_k * config.block_k):
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} has too few stages, or too many")
    refused = split_k.too_many_sums(config, MAX_SUMS)
    if refused is not None:
        return refused
    stage = config.block_m * config.block_k * 2
    stage += config.block_n * config.block_k * words.bits // words.count // 8
    return legal(config, device, element_bytes=2, shared_bytes=config.num_stages * stage)


# By rule from sweeps on an H200 (words of GPTQ, N x K of Llama-3-8B): (rows, columns, k, warps,
# stages), for many columns and for others, best guess first.
_BLOCKS = {
    32: (
        ((32, 128, 64, 4, 4), (32, 64, 128, 4, 4), (32, 128, 128, 4, 4)),
        ((32, 64, 128, 4, 4), (32, 64, 64, 4, 4)),
    ),
    64: (
        ((64, 128, 64, 4, 8), (64, 128, 64, 4, 6), (64, 128, 128, 8, 4), (64, 64, 64, 4, 4)),
        ((64, 64, 64, 4, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4)),
    ),
    128: (
        ((128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (128, 64, 128, 4, 4)),
        ((128, 64, 64, 4, 4), (128, 64, 128, 4, 4), (128, 128, 64, 8, 3)),
    ),
    256: (
        ((256, 128, 64, 8, 4), (256, 64, 64, 4, 4), (128, 128, 64, 8, 3)),
        ((256, 128, 64, 8, 4), (256, 64, 64, 4, 4), (128, 64, 64, 4, 4)),
    ),
}
# (most rows, programs for each SM up to which K is split)
_PROGRAMS = ((128, 3), (MAX_M, 1))
MIN_STEPS = 8
MAX_SPLIT = 4


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    wide, narrow = next(blocks for most, blocks in _BLOCKS.items() if problem.m <= most)
    found = []
    for block_m, block_n, block_k, warps, stages in wide if problem.n >= WIDE_N else narrow:
        split = _split(problem, block_m, block_n, block_k, device)
        config = GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
        if is_legal(spec, problem, config, device) is None:
            found.append(config)
    return split_k.of_one_split(found)


def _split(problem: Problem, block_m: int, block_n: int, block_k: int, device: Device) -> int:
    return split_k.parts_of_k(
        problem,
        block_k,
        tiles=-(-problem.n // block_n) * -(-problem.m // block_m),
        programs=device.num_sms * next(most for m, most in _PROGRAMS if problem.m <= m),
        parts=MAX_SPLIT,
        min_steps=MIN_STEPS,
    )


WEIGHT_ONLY_WORDS_GLUON = Kernel(
    name="weight_only_words_gluon",
    family="weight_only",
    grid=split_k.grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    is_gluon=True,
)
