"""Configurations of experts are timed with rows that have experts."""

from __future__ import annotations

import types

import pytest
import torch

from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.problem import Groups, Problem
from inductor_quant.lowering import select
from tests.support.gemms.generated import generate
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs

ROUTE = types.SimpleNamespace(get_device=lambda: torch.device("cpu"), get_dtype=lambda: torch.int32)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_every_row_has_an_expert_and_experts_differ(is_sorted):
    problem = Problem(500, 64, 64, groups=Groups(8, is_sorted))
    route = select._example_of_route(problem, ROUTE)
    assert route.dtype == torch.int32
    counts = route.diff(prepend=route.new_zeros(1)) if is_sorted else route.bincount(minlength=8)
    assert counts.sum() == 500
    assert (counts > 0).all()
    assert len(set(counts.tolist())) > 1


def test_the_last_input_is_the_route(monkeypatch):
    case, seen = Case((3, 0, 5), 64, 128), []
    ordinary = compat.select

    def watched(name, choices, inputs, layout, examples=None):
        seen.append((inputs, examples))
        return ordinary(name, choices, inputs, layout, examples)

    monkeypatch.setattr(compat, "select", watched)
    generate(gemm(case), lambda device: make_inputs(case, device))
    [(inputs, examples)] = seen
    [(position, make)] = examples.items()
    assert inputs[position].get_dtype() == torch.int32
    assert make.args[0].m == 8
