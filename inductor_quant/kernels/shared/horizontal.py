"""Horizontal launches: several GEMMs of one activation (q, k and v; gate and up) in one kernel.

The outputs are concatenated along N, and every tile belongs to one GEMM. The CTA selects that
GEMM's tensors by its tile index and then runs as if the GEMM were alone, so one template serves
both cases: the constant ``HORIZONTAL``, if defined, makes the selection.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Problem
from inductor_quant.spec.decisions import Rejection, RejectionCode


class HorizontalCode:
    """The template constant ``HORIZONTAL``. In the kernel's text it reads as the N of each GEMM.

    ``shared`` names the inputs that all GEMMs have in common. Every other input exists once per
    GEMM: ``W0_i`` is that of GEMM ``i``, and ``W0`` the selected one.
    """

    def __init__(self, columns: Sequence[int], block_n: int, *, shared: Collection[str]) -> None:
        self.columns, self.block_n, self.shared = tuple(columns), block_n, shared
        self.n = sum(columns)

    def __str__(self) -> str:
        return repr(self.columns)

    __repr__ = __str__

    def inputs(self, names: Sequence[str]) -> list[str]:
        """The kernel's inputs, where one GEMM has ``names``: the shared ones, then each GEMM's."""
        shared = [name for name in names if name in self.shared]
        own = [name for name in names if name not in self.shared]
        return shared + [f"{name}_{i}" for i in range(len(self.columns)) for name in own]

    def of_each(self, name: str) -> list[str]:
        """The names of each GEMM's ``name``."""
        return [f"{name}_{i}" for i in range(len(self.columns))]

    def stride(self, stride: Hook) -> Hook:
        """The template's ``stride`` of the selected tensor: a literal if all GEMMs agree."""

        def chosen(name: str, dim: int) -> str:
            if name in self.shared:
                return stride(name, dim)
            found = {stride(f"{name}_{i}", dim) for i in range(len(self.columns))}
            return found.pop() if len(found) == 1 else f"stride_{name}_{dim}"

        return chosen

    def choose(
        self, names: Sequence[str], stride: Callable[..., str], others: Sequence[str] = ()
    ) -> str:
        """Statements that bind ``names`` to the tensors of the GEMM that tile ``pid_n`` belongs to,
        ``first_n`` to its first tile, and make ``pid_n`` relative to that. ``others``: values
        without strides that the template has computed for each GEMM, such as descriptors."""
        own = [name for name in names if name not in self.shared]
        lines = []
        ends = list(itertools.accumulate(n // self.block_n for n in self.columns))
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            is_last = end == ends[-1]
            lines.append("else:" if is_last else f"{'el' if i else ''}if pid_n < {end}:")
            lines.append(f"    first_n = {begin}")
            lines += [f"    {name} = {name}_{i}" for name in (*own, *others)]
            lines += [f"    {line}" for name in own for line in self._strides(name, i, stride)]
        return "\n".join([*lines, "pid_n = pid_n - first_n"])

    def _strides(self, name: str, i: int, stride: Callable[..., str]) -> list[str]:
        """Assignments of the strides in which the GEMMs differ; ``stride(name)`` gives all strides
        of a tensor."""
        of_all = [stride(f"{name}_{j}").split(", ") for j in range(len(self.columns))]
        return [
            f"stride_{name}_{dim} = {values[i]}"
            for dim, values in enumerate(zip(*of_all, strict=True))
            if len(set(values)) > 1
        ]


def together(members: Sequence[Problem], *, lost_fusions: int = 0) -> Problem:
    """One problem for the GEMMs ``members``: the sum of their N, the weight of the widest; aligned
    rows only if all have them."""
    widest = max(members, key=lambda member: member.n)
    return dataclasses.replace(
        widest,
        n=sum(member.n for member in members),
        has_aligned_rows=all(member.has_aligned_rows for member in members),
        members=tuple(members),
        lost_fusions=lost_fusions,
    )


def reject_if_no_gain(problem: Problem) -> Rejection | None:
    """Rejects a launch that stores final results if it adds as many kernels as it saves."""
    if problem.lost_fusions < max(1, len(problem.members) - 1):
        return None
    return Rejection(
        RejectionCode.NO_KERNEL, "one launch would cost as many fusions as it saves launches"
    )


def config_rejection(problem: Problem, config: GemmConfig) -> Rejection | None:
    """Rejects tiles that would straddle two GEMMs."""
    for member in problem.members:
        if member.n % config.block_n:
            detail = f"{config} does not divide N={member.n} of one of the GEMMs in the launch"
            return Rejection(RejectionCode.BLOCK_SHAPE, detail)
    return None


def constants(
    problem: Problem, config: GemmConfig, *, shared: Collection[str]
) -> dict[str, HorizontalCode]:
    """The template constant ``HORIZONTAL`` of a horizontal launch; nothing for a single GEMM."""
    if not problem.members:
        return {}
    columns = [member.n for member in problem.members]
    return {"HORIZONTAL": HorizontalCode(columns, config.block_n, shared=shared)}
