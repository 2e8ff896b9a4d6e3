"""What the kernels of the ``experts`` family share."""

from __future__ import annotations

from typing import Any

from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.problem import Groups, Problem


class ExpertsKernel(Kernel):
    """Puts ``experts/rows.jinja`` in front of a template of the ``weight_only`` family."""

    family = "experts"

    @staticmethod
    def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
        m, n, meta = sizes
        # as in experts/rows.jinja
        tiles = min(m, meta["EXPERTS"] + 1 + m // meta["BLOCK_M"]) if meta["IS_SORTED"] else m
        return (tiles * cdiv(n, meta["BLOCK_N"]), 1, 1)


def groups_of(problem: Problem) -> Groups:
    assert problem.groups is not None
    return problem.groups


def mean_rows(problem: Problem) -> float:
    """Of an expert; of rows that are not sorted each is a tile."""
    groups = groups_of(problem)
    return problem.m / groups.experts if groups.is_sorted else 1


def constants(problem: Problem) -> dict[str, Any]:
    """The template's constants that say which experts there are."""
    groups = groups_of(problem)
    return {
        "HAS_COLUMN_SCALE": False,
        "EXPERTS": groups.experts,
        "GROUPS": 1 << groups.experts.bit_length(),  # one more for rows without an expert
        "IS_SORTED": groups.is_sorted,
    }
