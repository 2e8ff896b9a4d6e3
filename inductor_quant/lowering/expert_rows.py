"""Which row of x a row of experts has: in the kernel, or gathered before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels import Kernel, dispatch
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Problem
from inductor_quant.lowering.select import describe_device, has_gluon, lowering_of
from inductor_quant.options import Options
from inductor_quant.spec.gemm import QuantGemmSpec

aten = torch.ops.aten


def count_of(x: Any, rows: Any | None, repeats: int) -> Any:
    """The number of rows of the product."""
    return x.get_size()[0] * repeats if rows is None else rows.get_size()[0]


def gathered(x: Any, rows: Any | None, repeats: int) -> Any:
    """x [S, K], a row for each row of the product."""
    if repeats > 1:
        count, width = x.get_size()
        x = lowering_of(aten.unsqueeze.default)(x, 1)
        x = lowering_of(aten.expand.default)(x, [count, repeats, width])
        x = lowering_of(aten.reshape.default)(x, [count * repeats, width])
    return x if rows is None else lowering_of(aten.index.Tensor)(x, [rows])


def is_gathered_before(
    family: str, spec: QuantGemmSpec, problem: Problem, device: torch.device
) -> bool:
    """Whether the kernel that is best for neighbouring rows takes no others."""
    assert problem.groups is not None
    if not compat.runs_triton(device):
        return True
    plain = dataclasses.replace(problem.groups, repeats=1, has_rows=False)
    of_neighbours = dataclasses.replace(problem, groups=plain)
    chosen, of_others = (best(family, spec, each, device) for each in (problem, of_neighbours))
    return (chosen and chosen[0]) is not (of_others and of_others[0])


def best(
    family: str, spec: QuantGemmSpec, problem: Problem, device: torch.device
) -> tuple[Kernel, GemmConfig] | None:
    options = fallback.active_options() or Options()
    found = dispatch.candidates(
        *(family, spec, problem, describe_device(device)),
        pinned=options.configs,
        has_gluon=has_gluon(),
    )
    return next(found, None)
