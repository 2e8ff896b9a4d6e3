"""What the kernels have in common that dequantize a block of W at a time and split K."""

from __future__ import annotations

from typing import Any

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels.config import GemmConfig, Problem, Weight
from inductor_quant.ops.weight_only import split_steps
from inductor_quant.spec import QuantGemmSpec
from inductor_quant.weight_format import Field, Step


def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """A program for each tile of the output and each part of K."""
    *_, m, n, meta = sizes  # with parts there is their number before
    return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]) * meta["SPLIT_K"], 1, 1)


def persistent_grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """As many programs as run at once, no more than there are tiles of parts."""
    tiles, _, _ = grid(*sizes, cdiv=cdiv)
    return (min(tiles, sizes[-1]["PROGRAMS"]), 1, 1)


def constants_of(code: Any, spec: QuantGemmSpec, config: GemmConfig) -> dict[str, Any]:
    """What the templates are told; ``code`` writes the statements that depend on the weight."""
    return {
        "WEIGHT": code,
        "HAS_BIAS": spec.bias,
        "SPLIT_K": config.split_k,
        "STAGES": config.num_stages,
        "ACC_TYPE": "tl.float32",
    }


def misfit(
    spec: QuantGemmSpec, weight: Weight, problem: Problem, config: GemmConfig, *, unrolled: int = 1
) -> Rejection | None:
    """What is wrong with the blocks of ``config``: they divide N and each part of K, in loops of
    ``unrolled`` steps, and lie within a group of rows that share their scales."""
    if problem.n % config.block_n or problem.k % (unrolled * config.split_k * config.block_k):
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config} does not divide N={problem.n}, K={problem.k}"
        )
    if config.split_k > 1 and not problem.m_is_static:
        # parts of K are fp32 [split_k, M, N]: gigabytes where M is large
        return Rejection(RejectionCode.BLOCK_SHAPE, f"{config} splits K, and M is symbolic")
    group = group_of(spec, weight)
    if group % config.block_k:
        return Rejection(
            RejectionCode.BLOCK_SHAPE, f"{config}: scales change every {group} rows, within a block"
        )
    return None


def too_many_sums(config: GemmConfig, most: int) -> Rejection | None:
    """Whether a thread has more than ``most`` sums."""
    sums = config.block_m * config.block_n // (32 * config.num_warps)
    if sums <= most:
        return None
    return Rejection(RejectionCode.REGISTERS, f"{config} has {sums} sums a thread; {most} is most")


def parts_of_k(
    problem: Problem, block_k: int, *, tiles: int, programs: int, parts: int, min_steps: int
) -> int:
    """How often K is halved: into ``parts`` at most, of ``min_steps`` blocks at least, as long as
    there are no more than ``programs`` for the ``tiles`` of the output."""
    split = 1
    while (
        problem.m_is_static
        and 2 * split <= parts
        and 2 * split * tiles <= programs
        and problem.k % (2 * split * block_k) == 0
        and problem.k >= 2 * split * block_k * min_steps
    ):
        split *= 2
    return split


def of_one_split(found: list[GemmConfig]) -> list[GemmConfig]:
    """Those with as many parts of K as the first: the result of a kernel has a size for each."""
    return [config for config in found if config.split_k == found[0].split_k]


def steps_of(spec: QuantGemmSpec, weight: Weight) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """(steps of W, steps of the sums), see ``split_steps``."""
    element = weight.tensors[weight.format.element.source]
    return split_steps(weight.format, spec.a.dtype, element.dtype)


def group_of(spec: QuantGemmSpec, weight: Weight) -> int:
    """Rows along K that share the operands of every step in the loop, as a power of two."""
    group = 1 << 30
    loop_steps, _ = steps_of(spec, weight)
    for step in loop_steps:
        rows = weight.format.block(step.operand)[0] if isinstance(step.operand, Field) else -1
        if rows != -1:
            group = min(group, rows & -rows)
    return group
