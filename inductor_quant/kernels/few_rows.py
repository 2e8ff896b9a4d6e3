"""The kernel of the ``weight_only`` family for few rows of x and words of several numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import group, split_k, weight_only
from inductor_quant.kernels.config import Device, GemmConfig, Problem, Weight, legal
from inductor_quant.kernels.few_rows_code import FewRowsCode
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.word_tile import contiguous_axis
from inductor_quant.kernels.words import BASES, Words, tile_order, words_of
from inductor_quant.spec import QuantGemmSpec

# Rows of x in one tile: the columns of the matrix instruction, which takes 8 at once.
MIN_BLOCK_M = 8
# Of a thread, and as many of the block: with more nothing is left for what is unpacked.
MAX_SUMS = 64
# More rows are for kernels that unpack a tile of W for more rows at once.
MAX_M = 32


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = weight_only.supports(spec, problem, device)
    if general is not None:
        return general
    assert problem.weight is not None
    if spec.a.dtype not in BASES:
        return Rejection(RejectionCode.NO_KERNEL, f"x of {spec} does not have 16 bits")
    if problem.m > MAX_M:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows are not few")
    if words_of(problem.weight) is None:
        return Rejection(
            RejectionCode.NO_KERNEL, "numbers are not neighbours in words of 32 or 8 bits"
        )
    return _differ(problem) if problem.members else None


def _differ(problem: Problem) -> Rejection | None:
    """In what weights of one launch differ beside their number of columns: then one text, that for
    the widest, does not read them all. (Nor does it where it asks for the size of a tensor.)"""
    layouts = set()
    _, words = weight_of(problem)
    for member in problem.members:
        weight = member.weight
        assert weight is not None
        format = weight.format
        forms = [form for field in format.fields() for form in field.index]
        if any(form.is_data or form.bounds(format.radix)[0] < 0 for form in forms):
            return Rejection(RejectionCode.NO_KERNEL, "positions in a weight are data")
        # The number of columns is the radix of their first digit.
        of_all = dataclasses.replace(format, n=(1, *format.n[1:]))
        dtypes = tuple(tensor.dtype for tensor in weight.tensors)
        layouts.add((of_all, dtypes, contiguous_axis(weight, words)))
    if len(layouts) == 1:
        return None
    return Rejection(RejectionCode.NO_KERNEL, "weights of one launch do not lie alike in memory")


def code(spec: QuantGemmSpec, problem: Problem, config: GemmConfig) -> FewRowsCode:
    weight, words = weight_of(problem)
    loop_steps, column_steps = split_k.steps_of(spec, weight)
    return FewRowsCode(
        weight,
        words,
        config,
        x_dtype=spec.a.dtype,
        loop_steps=loop_steps,
        column_steps=column_steps,
    )


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    found = split_k.constants_of(code(spec, problem, config), spec, config)
    return found | group.constants(problem, config, shared=("X",))


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, words = weight_of(problem)
    order = tile_order(
        words,
        block_k=config.block_k,
        block_n=config.block_n,
        warps=config.num_warps,
        contiguous=contiguous_axis(weight, words),
    )
    if order is None or config.block_m < MIN_BLOCK_M:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} is too small to hand out its words")
    refused = (
        split_k.misfit(spec, weight, problem, config)
        or split_k.too_many_sums(config, MAX_SUMS)
        or misfit(problem, config)
    )
    if refused is not None:
        return refused
    stage = config.block_m * config.block_k * spec.a.dtype.itemsize
    stage += config.block_n * config.block_k * words.bits // words.count // 8
    stage += 8 * config.block_n  # scales and zeros
    # As tiles of the general kernel, but for the smallest: here N is the instruction's M.
    smallest = dataclasses.replace(config, block_m=max(16, config.block_m))
    shared_bytes = max(1, config.num_stages - 1) * stage
    return legal(smallest, device, element_bytes=2, shared_bytes=shared_bytes)


def misfit(problem: Problem, config: GemmConfig) -> Rejection | None:
    """What is wrong with ``config`` for GEMMs in one launch."""
    refused = group.is_no_gain(problem) if config.split_k == 1 else None
    return refused or group.misfit(problem, config)


# By rule from a sweep on an H200 (words of GPTQ and AWQ, N x K of Llama-3-8B): up to eight programs
# an SM, each with MIN_STEPS steps of K or more. (block_n, warps, stages), best guess first.
_BLOCKS: dict[str, dict[int, tuple[tuple[int, int, int], ...]]] = {
    "k": {
        8: ((128, 2, 3), (256, 2, 3), (64, 1, 3), (128, 1, 3), (256, 4, 3), (64, 2, 3)),
        16: ((128, 2, 3), (256, 2, 3), (64, 1, 3), (128, 1, 3), (64, 2, 3)),
        32: ((128, 2, 3), (64, 2, 3), (32, 1, 3)),
    },
    # Of words along N a thread reads two at once: with one warp.
    "n": {
        8: ((128, 1, 3), (256, 2, 3), (256, 4, 3), (256, 1, 3), (64, 1, 3)),
        16: ((128, 1, 3), (256, 2, 3), (128, 2, 3), (64, 1, 3)),
        32: ((128, 2, 3), (64, 1, 3)),
    },
}
# With more columns than this the largest tile of 16 rows comes first, and K is in two parts: more
# are faster by themselves, but have to be added. H200, GPTQ, 16x28672x4096: 31.7 us with the sum
# (bench_gemm.py --family weight_only --m 16).
WIDE_N = 16384
MAX_SPLIT_WIDE = 2
MIN_STEPS = 4
MAX_SPLIT = 8


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    weight, words = weight_of(problem)
    blocks = _BLOCKS[words.axis]
    # of symbolic rows there may be many: not the smallest tile
    rows = problem.m if problem.m_is_static else max(problem.m, 16)
    block_m = next(b for b in blocks if rows <= b)
    group = split_k.group_of(spec, weight)
    found = []
    listed = list(blocks[block_m])
    is_wide = words.axis == "k" and block_m == 16 and problem.n >= WIDE_N
    if is_wide:
        listed.sort(key=lambda block: block != (256, 2, 3))
    for block_n, warps, stages in listed:
        for block_k in (128, 64, 32):
            most = MAX_SPLIT_WIDE if is_wide else MAX_SPLIT
            split = _split(problem, block_n, block_k, device, most)
            config = GemmConfig(block_m, block_n, block_k, warps, stages, split_k=split)
            if block_k <= group and is_legal(spec, problem, config, device) is None:
                found.append(config)
                break
    return split_k.of_one_split(found)


def _split(problem: Problem, block_n: int, block_k: int, device: Device, parts: int) -> int:
    """Parts of K, ``parts`` at most."""
    return split_k.parts_of_k(
        problem,
        block_k,
        tiles=-(-problem.n // block_n),
        programs=(8 if problem.m <= 16 else 4) * device.num_sms,
        parts=parts,
        min_steps=MIN_STEPS,
    )


def weight_of(problem: Problem) -> tuple[Weight, Words]:
    weight = problem.weight
    assert weight is not None
    words = words_of(weight)
    assert words is not None
    return weight, words


WEIGHT_ONLY_FEW_ROWS = Kernel(
    name="weight_only_few_rows",
    family="weight_only",
    grid=split_k.grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    is_grouped=True,
)
