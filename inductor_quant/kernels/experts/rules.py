"""What the kernels of the ``experts`` family share."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.experts.gate import GateCode
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.problem import Device, Groups, Problem
from inductor_quant.kernels.shared.grids import span_of
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.gemm import QuantGemmSpec

# What the epilogue of int8 products asks for.
NO_ZERO_POINTS = {
    "ALPHA": 1.0,
    "A_ZERO": 0,
    "HAS_B_SUM": False,
    "EXACT_A_ZERO": False,
    "EXACT_B_ZERO": False,
}
# Of what experts have in the mean, if that differs.
QUANTILES = [(i + 0.5) / 16 for i in range(16)]


class TilesOfExperts(Kernel):
    """Puts ``experts/rows.jinja`` in front of another family's template."""

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        groups = groups_of(problem)
        gate: dict[str, Any] = {}
        if groups.gate is not None:
            gate = {"GATE": GateCode(groups.gate, problem.n // 2), "HAS_GATE_BIAS": groups.has_bias}
        return (
            super().constants(spec, problem, config, device)
            | gate
            | {
                "HAS_COLUMN_SCALE": False,
                "MASK_M": True,
                "EXPERTS": groups.experts,
                "GROUPS": 1 << groups.experts.bit_length(),  # one more for rows without an expert
                "SPAN": span_of(groups.experts),
                "IS_SORTED": groups.is_sorted,
                "REPEATS": groups.repeats,
                "HAS_ROWS": groups.has_rows,
            }
        )

    @staticmethod
    def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
        m, n, meta = sizes
        # as in experts/rows.jinja
        tiles = min(m, meta["EXPERTS"] + 1 + m // meta["BLOCK_M"]) if meta["IS_SORTED"] else m
        return (tiles * cdiv(n, stored_columns(meta)), 1, 1)


def stored_columns(meta: Any) -> int:
    """The columns that a tile stores."""
    block_n: int = meta["BLOCK_N"]
    return block_n // 2 if "GATE" in meta else block_n


class ExpertsKernel(TilesOfExperts):
    family = "experts"


def groups_of(problem: Problem) -> Groups:
    assert problem.groups is not None
    return problem.groups


def reject_if_gathered(problem: Problem) -> Rejection | None:
    """Rejects rows of x that are no neighbours: TMA reads tiles of those that are."""
    if not problem.is_gathered:
        return None
    return Rejection(RejectionCode.NO_KERNEL, "rows of x are gathered")


def mean_rows(problem: Problem) -> float:
    """Mean rows of an expert, for the largest M: a choice by it then holds for every call. 1 if
    rows are not sorted, because each is a tile of its own."""
    groups = groups_of(problem)
    if not groups.is_sorted:
        return 1
    return problem.m / groups.experts if problem.m_is_bounded else math.inf


def expected_tiles(
    mean: float, block_m: int, few: int = 0, spread: float = 0.0
) -> tuple[float, float]:
    """Of an expert whose rows are sorted: tiles with more than ``few`` rows, and those with no
    more.

    Routing is random: an expert's number of rows is Poisson-distributed. With ``spread`` some
    experts have more rows than others: what they have in the mean is log-normal, and ``spread`` the
    deviation of its logarithm. The skew 0.5 of ``examples/benchmarks/experts.py`` gives 0.6 with 8
    experts of which a token has 2, 0.8 with 32 and 4, 1.1 with 128 and 8.
    """
    if not spread:
        return _poisson_tiles(mean, block_m, few)
    likely = [math.exp(spread * statistics.NormalDist().inv_cdf(each)) for each in QUANTILES]
    means = (mean * each / statistics.fmean(likely) for each in likely)
    found = [_poisson_tiles(each, block_m, few) for each in means]
    return statistics.fmean(large for large, _ in found), statistics.fmean(few for _, few in found)


@functools.lru_cache(maxsize=4096)
def _poisson_tiles(mean: float, block_m: int, few: int) -> tuple[float, float]:
    mean = max(mean, 1e-6)
    apart = 8 * math.sqrt(mean) + 8
    likely = range(max(0, math.floor(mean - apart)), math.ceil(mean + apart))
    logs = ((rows, rows * math.log(mean) - mean - math.lgamma(rows + 1)) for rows in likely)
    found = [(*divmod(rows, block_m), math.exp(log)) for rows, log in logs]
    large = sum(share * (whole + (left > few)) for whole, left, share in found)
    return large, sum(share for _, left, share in found if 0 < left <= few)


def staying_grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
    """``NUM_CTAS`` CTAs that take tile after tile of ``EXPERTS``; fewer if there cannot be so many
    tiles, none without rows."""
    m, n, meta = sizes
    tiles = min(m, m // meta["BLOCK_M"] + meta["EXPERTS"] + 1) * cdiv(n, stored_columns(meta))
    return (min(tiles, meta["NUM_CTAS"]), 1, 1)
