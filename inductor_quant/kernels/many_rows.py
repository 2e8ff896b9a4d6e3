"""The kernel of the ``weight_only`` family for words of several numbers and more than few rows."""

from __future__ import annotations

from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import few_rows, split_k, weight_only
from inductor_quant.kernels.config import Device, GemmConfig, Problem, legal
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.many_rows_code import ManyRowsCode, suits
from inductor_quant.kernels.words import BASES, words_of
from inductor_quant.spec import QuantGemmSpec

# Numbers of W that a thread unpacks and holds at once.
MAX_TILE_REGISTERS = 128
# With more rows it takes less time to write W once, but for a W of many columns.
MAX_M = 128
MAX_M_WIDE, WIDE_N = 256, 16384


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = supports_words(spec, problem, device)
    if general is not None:
        return general
    _, words = few_rows.weight_of(problem)
    if problem.m > (MAX_M_WIDE if problem.n >= WIDE_N and words.axis == "k" else MAX_M):
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows: W is written once")
    return None


def supports_words(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    """Whether a tile of W can be dequantized in packed arithmetic of x's type."""
    general = weight_only.supports(spec, problem, device)
    if general is not None:
        return general
    weight = problem.weight
    assert weight is not None
    words = words_of(weight)
    if spec.a.dtype not in BASES or words is None:
        return Rejection(
            RejectionCode.NO_KERNEL, "numbers are not neighbours in words of 32 or 8 bits"
        )
    loop_steps, _ = split_k.steps_of(spec, weight)
    if not suits(loop_steps, weight, words, spec.a.dtype):
        return Rejection(
            RejectionCode.NO_KERNEL, "not a small integer as zero point and a scale of x's type"
        )
    return None


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    weight, words = few_rows.weight_of(problem)
    loop_steps, column_steps = split_k.steps_of(spec, weight)
    code = ManyRowsCode(
        weight,
        words,
        config,
        x_dtype=spec.a.dtype,
        loop_steps=loop_steps,
        column_steps=column_steps,
    )
    return split_k.constants_of(code, spec, config)


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, words = few_rows.weight_of(problem)
    refused = split_k.misfit(spec, weight, problem, config)
    if refused is not None:
        return refused
    length = config.block_k if words.axis == "k" else config.block_n
    if length < 2 * words.count:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} is no two words long")
    numbers = config.block_n * config.block_k // (32 * config.num_warps)
    if numbers > MAX_TILE_REGISTERS:
        return Rejection(
            RejectionCode.REGISTERS,
            f"{config} unpacks {numbers} numbers a thread; {MAX_TILE_REGISTERS} is the most",
        )
    stage = config.block_m * config.block_k * 2
    stage += config.block_n * config.block_k * words.bits // words.count // 8
    stage += 8 * config.block_n  # scales and zeros
    unpacked = config.block_n * config.block_k * 2  # on its way between threads
    return legal(config, device, element_bytes=2, shared_bytes=config.num_stages * stage + unpacked)


# By rule from a sweep on an H200, GPTQ words, Llama-3-8B: (block_m, block_n, block_k, warps).
_BLOCKS = {
    64: ((64, 128, 128, 8), (64, 64, 128, 4), (64, 128, 128, 4), (64, 64, 64, 4)),
    MAX_M: ((128, 64, 128, 4), (128, 128, 64, 8), (128, 128, 128, 8), (64, 64, 128, 4)),
    MAX_M_WIDE: ((256, 128, 128, 8), (256, 128, 64, 8), (128, 128, 128, 8), (64, 64, 128, 4)),
}
MIN_STEPS = 4
MAX_SPLIT = 8


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    found = []
    for block_m, block_n, block_k, warps in next(b for m, b in _BLOCKS.items() if problem.m <= m):
        # less than twice as many programs as SMs: they wait for each other
        split = split_k.parts_of_k(
            problem,
            block_k,
            tiles=-(-problem.n // block_n) * -(-problem.m // block_m),
            programs=2 * device.num_sms - 1,
            parts=MAX_SPLIT,
            min_steps=MIN_STEPS,
        )
        config = GemmConfig(block_m, block_n, block_k, warps, 3, split_k=split)
        if is_legal(spec, problem, config, device) is None:
            found.append(config)
    return split_k.of_one_split(found)


WEIGHT_ONLY_WORDS = Kernel(
    name="weight_only_words",
    family="weight_only",
    grid=split_k.grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
)
