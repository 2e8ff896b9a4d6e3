"""A deterministic stand-in for Inductor's autotuning: costs are computed, nothing is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch._inductor import config, select_algorithm
from torch._inductor.select_algorithm import AlgorithmSelectorCache


def install(
    stack: contextlib.ExitStack,
    offered: list[list[Any]],
    pick: Callable[[Any], float] | None,
) -> None:
    """Until ``stack`` unwinds, take the choice of the least cost, and nothing is timed.

    Args:
        stack: undoes it.
        offered: gets the list of choices of each selection.
        pick: cost of a choice. Without it the first on the list is the cheapest.
    """
    select = AlgorithmSelectorCache.__call__

    def recorded_select(self: Any, name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
        offered.append(list(choices))
        return select(self, name, choices, *args, **kwargs)

    def benchmark(self: Any, choices: list[Any], *args: Any, **kwargs: Any) -> dict[Any, float]:
        if pick is None:
            return {choice: float(position) for position, choice in enumerate(choices, start=1)}
        return {choice: float(pick(choice)) for choice in choices}

    def make_precompile_fn(self: Any, *args: Any, **kwargs: Any) -> Callable[..., dict[Any, float]]:
        def precompile(*args: Any, **kwargs: Any) -> dict[Any, float]:
            return {}

        return precompile

    def ignore(*args: Any, **kwargs: Any) -> None:
        pass

    for name, replacement in (
        ("__call__", recorded_select),
        ("benchmark", benchmark),
        ("make_precompile_fn", make_precompile_fn),
    ):
        stack.enter_context(mock.patch.object(AlgorithmSelectorCache, name, replacement))

    # Two tables of timings, which are none.
    report = mock.patch.object(AlgorithmSelectorCache, "log_results", staticmethod(ignore))
    stack.enter_context(report)
    if hasattr(select_algorithm, "_log_autotune_choices_stats"):
        stack.enter_context(
            mock.patch.object(select_algorithm, "_log_autotune_choices_stats", ignore)
        )

    # Otherwise the scheduler times the fused against the unfused kernel.
    # 2.11, 2.13: benchmark_epilogue_fusion; 2.15: renamed, the old name warns.
    fusion = "benchmark_template_fusion"
    if not hasattr(config, fusion):
        fusion = "benchmark_epilogue_fusion"
    stack.enter_context(config.patch({fusion: False, "autotune_in_subproc": False}))
