"""The kernel of the ``weight_only`` family for few rows of x and words along K, in Gluon.

In Triton the warps of a program share out columns: K must be split over programs for there to be
enough of them, and the parts be added up by another kernel. Here warps share out K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels import few_rows, group, split_k
from inductor_quant.kernels.config import INTERPRETER_ARCH, Device, GemmConfig, Problem, legal
from inductor_quant.kernels.few_rows_gluon_code import COLUMNS, MAX_WARPS, SLICE, FewRowsGluonCode
from inductor_quant.kernels.gluon_columns import supports_steps
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.spec import QuantGemmSpec
from inductor_quant.weight_format import Field

ARCHS = (INTERPRETER_ARCH, 80, 86, 89, 90)
OFFSETS = tuple(range(0, 32, 4))  # of a word's numbers
MAX_M = 16


def supports(spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
    general = few_rows.supports(spec, problem, device)
    if general is not None:
        return general
    if device.arch not in ARCHS:
        return Rejection(RejectionCode.NO_KERNEL, f"not seen to run on {device}")
    if problem.m > MAX_M or not problem.m_is_static:
        return Rejection(RejectionCode.NO_KERNEL, f"{problem.m} rows, or any number, not {MAX_M}")
    return supports_weight(spec, problem)


def supports_weight(spec: QuantGemmSpec, problem: Problem) -> Rejection | None:
    """Whether lanes can take whole words, and what is made of them is the same for a slice."""
    weight, words = few_rows.weight_of(problem)
    if words.axis != "k" or words.width != 4 or words.offsets != OFFSETS:
        return Rejection(RejectionCode.NO_KERNEL, "not eight numbers of 4 bits a word along K")
    loop_steps, column_steps = split_k.steps_of(spec, weight)
    if column_steps or not supports_steps(loop_steps):
        return Rejection(RejectionCode.NO_KERNEL, "scales or zero points are not plain fields")
    for step in loop_steps:
        if isinstance(step.operand, Field) and weight.format.block(step.operand)[0] == -1:
            return Rejection(RejectionCode.NO_KERNEL, "scales or zero points of whole columns")
    return None


def constants(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> dict[str, Any]:
    weight, words = few_rows.weight_of(problem)
    loop_steps, _ = split_k.steps_of(spec, weight)
    code = FewRowsGluonCode(weight, words, config, x_dtype=spec.a.dtype, loop_steps=loop_steps)
    found = split_k.constants_of(code, spec, config)
    found |= group.constants(problem, dataclasses.replace(config, block_n=COLUMNS), shared=("X",))
    return found | {"PROGRAMS": programs(problem, config, device)}


def is_resident(problem: Problem, config: GemmConfig) -> bool:
    """Whether a program keeps its x: its part of K is one block."""
    return problem.k <= config.split_k * config.block_k


def programs(problem: Problem, config: GemmConfig, device: Device) -> int:
    """As many as run at once, each with one part of K; one for each tile if x is not kept."""
    tiles = problem.n // config.block_n
    if is_resident(problem, config):
        at_once = device.num_sms * (MAX_WARPS // config.num_warps) // config.split_k
        # as many for each part of K as leave none with a tile fewer than need be
        tiles = -(-tiles // -(-tiles // max(1, at_once)))
    return tiles * config.split_k


def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    *_, meta = sizes
    return (meta["PROGRAMS"], 1, 1)


def is_legal(
    spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
) -> Rejection | None:
    weight, _ = few_rows.weight_of(problem)
    if problem.n % config.block_n or problem.k % (config.split_k * SLICE):
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config} does not divide N={problem.n}, K={problem.k}"
        )
    refused = few_rows.misfit(problem, config)
    if refused is not None:
        return refused
    if split_k.group_of(spec, weight) % SLICE:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"scales change within {SLICE} rows")
    is_tile = config.block_m in (8, 16) and problem.m <= config.block_m
    is_tile = is_tile and config.block_n % COLUMNS == 0
    if not is_tile or config.block_k % (SLICE * config.num_warps) or config.num_warps > MAX_WARPS:
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} cannot be shared out to warps")
    shared = 2 * config.num_warps * config.block_m * config.block_n * 4
    return legal(
        GemmConfig(16, config.block_n, 128, config.num_warps, 1),
        device,
        element_bytes=2,
        shared_bytes=shared,
    )


# By rule from sweeps on an H200 (words of GPTQ, N x K of Llama-3-8B). Programs for 32 columns; all
# at once, with 16 warps an SM in all, if there are no more than these for an SM, or for 16 rows
# twice these (16x28672x4096: 25.9 us, with 4 warps a program 26.7).
MAX_PROGRAMS = 4
# With up to 8 rows and as many columns a program keeps its x, a part of K of so many rows, and has
# one tile after the other; so it is where parts of K are wanted for what is fused behind them.
WIDE_N = 16384
PART_K = 1024
MAX_SPLIT = 4


def configs(spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
    """Legal configurations, best guess first; those of one selection share ``split_k``."""
    block_m = 8 if problem.m <= 8 else 16
    is_wide = block_m == 8 and problem.n >= WIDE_N and problem.k <= MAX_SPLIT * PART_K
    needs_parts = group.is_no_gain(problem) is not None
    listed = [*_kept(problem, block_m)] if is_wide or needs_parts else []
    listed += _in_steps(problem, block_m, device, parts=2 if needs_parts else 1)
    found = [
        config
        for config in dict.fromkeys(listed)
        if is_legal(spec, problem, config, device) is None
    ]
    return split_k.of_one_split(found) if found else []


def _kept(problem: Problem, block_m: int) -> Iterator[GemmConfig]:
    """Programs that keep their x: of 8 rows a warp has registers for two slices."""
    parts = min(MAX_SPLIT, max(1, problem.k // PART_K))
    part = problem.k // parts
    warps = max(1, part // SLICE // (2 if block_m == 8 else 1))
    yield GemmConfig(block_m, COLUMNS, part, warps, 1, split_k=parts)


def _in_steps(
    problem: Problem, block_m: int, device: Device, *, parts: int
) -> Iterator[GemmConfig]:
    """Programs with a tile each, with at least ``parts`` of K."""
    tiles = -(-problem.n // COLUMNS)
    warps = MAX_WARPS
    while warps * MAX_PROGRAMS > MAX_WARPS and tiles * warps > device.num_sms * MAX_WARPS:
        warps //= 2
    while warps > 1 and SLICE * warps > problem.k:
        warps //= 2
    candidates = [warps, max(1, warps // 2)]
    at_once = [tiles * each <= device.num_sms * MAX_WARPS for each in candidates]
    if block_m == MAX_M and at_once == [False, True]:
        candidates.reverse()
    for each in candidates:
        split = split_k.parts_of_k(
            problem,
            SLICE * each,
            tiles=tiles,
            programs=device.num_sms,
            parts=MAX_SPLIT,
            min_steps=1,
        )
        yield GemmConfig(block_m, COLUMNS, SLICE * each, each, 1, split_k=max(parts, split))


WEIGHT_ONLY_FEW_ROWS_GLUON = Kernel(
    name="weight_only_few_rows_gluon",
    family="weight_only",
    grid=grid,
    supports=supports,
    constants=constants,
    configs=configs,
    legal=is_legal,
    is_gluon=True,
    is_grouped=True,
)
