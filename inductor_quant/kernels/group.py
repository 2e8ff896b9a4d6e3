"""GEMMs that share their first operand and a launch: what kernels and templates have for them.

Their columns stand side by side in the output. A tile lies within one of them: its place says whose
tensors the program reads, and from there on it is a program of that GEMM alone. So a template has
one text for both, in which ``GROUP``, if it is there, chooses what the names stand for.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence

from inductor_quant.decisions import Rejection, RejectionCode
from inductor_quant.kernels.config import GemmConfig, Problem
from inductor_quant.kernels.weight_code import Hook


class GroupCode:
    """A template's constant ``GROUP``; as a constant of the kernel it reads as the numbers of
    columns.

    ``shared`` are the names of the inputs that all have in common. The others are inputs of each:
    those of the GEMM ``i`` are called ``W0_i``, and ``W0`` what was chosen.
    """

    def __init__(self, columns: Sequence[int], block_n: int, *, shared: Collection[str]) -> None:
        self.columns, self.block_n, self.shared = tuple(columns), block_n, shared
        self.n = sum(columns)

    def __str__(self) -> str:
        return repr(self.columns)

    __repr__ = __str__

    def inputs(self, names: Sequence[str]) -> list[str]:
        """The inputs of the kernel, of a GEMM that alone has ``names``: the shared ones, then those
        of each GEMM."""
        shared = [name for name in names if name in self.shared]
        return shared + [name for i in range(len(self.columns)) for name in self._of(i, names)]

    def stride(self, stride: Hook) -> Hook:
        """The template's ``stride``, for what was chosen: a number where it is the same for all."""

        def chosen(name: str, dim: int) -> str:
            if name in self.shared:
                return stride(name, dim)
            found = {stride(f"{name}_{i}", dim) for i in range(len(self.columns))}
            return found.pop() if len(found) == 1 else f"stride_{name}_{dim}"

        return chosen

    def choose(self, names: Sequence[str], stride: Callable[..., str]) -> str:
        """Statements that make ``names`` those of the GEMM of the tile ``pid_n``, ``first_n`` its
        first tile, and ``pid_n`` the place among its own."""
        own = [name for name in names if name not in self.shared]
        lines = []
        ends = list(itertools.accumulate(n // self.block_n for n in self.columns))
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            is_last = end == ends[-1]
            lines.append("else:" if is_last else f"{'el' if i else ''}if pid_n < {end}:")
            lines.append(f"    first_n = {begin}")
            lines += [f"    {name} = {name}_{i}" for name in own]
            lines += [f"    {line}" for name in own for line in self._strides(name, i, stride)]
        return "\n".join([*lines, "pid_n = pid_n - first_n"])

    def _of(self, i: int, names: Sequence[str]) -> list[str]:
        return [f"{name}_{i}" for name in names if name not in self.shared]

    def _strides(self, name: str, i: int, stride: Callable[..., str]) -> list[str]:
        """Assignments of those strides in which the GEMMs differ; ``stride`` without a dimension
        gives all of a tensor."""
        of_all = [stride(f"{name}_{j}").split(", ") for j in range(len(self.columns))]
        return [
            f"stride_{name}_{dim} = {values[i]}"
            for dim, values in enumerate(zip(*of_all, strict=True))
            if len(set(values)) > 1
        ]


def together(members: Sequence[Problem], *, lost_fusions: int = 0) -> Problem:
    """The GEMMs ``members`` in one launch, for configurations one of all their columns; what a
    kernel knows of a weight is said by the widest."""
    widest = max(members, key=lambda member: member.n)
    return dataclasses.replace(
        widest,
        n=sum(member.n for member in members),
        members=tuple(members),
        lost_fusions=lost_fusions,
    )


def is_no_gain(problem: Problem) -> Rejection | None:
    """Whether one launch for all saves none, if its kernel's output is their results."""
    if problem.lost_fusions < max(1, len(problem.members) - 1):
        return None
    return Rejection(RejectionCode.NO_KERNEL, "what follows would be as many kernels more")


def misfit(problem: Problem, config: GemmConfig) -> Rejection | None:
    """Whether a tile of ``config`` lies within one of the GEMMs."""
    for member in problem.members:
        if member.n % config.block_n:
            detail = f"{config} does not divide N={member.n} of one of the GEMMs in the launch"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
    return None


def constants(
    problem: Problem, config: GemmConfig, *, shared: Collection[str]
) -> dict[str, GroupCode]:
    """What a template is told of a group; nothing of a GEMM alone."""
    if not problem.members:
        return {}
    columns = [member.n for member in problem.members]
    return {"GROUP": GroupCode(columns, config.block_n, shared=shared)}
