"""A deterministic replacement of Inductor's autotuning: costs are computed, nothing is timed."""

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
    """Until ``stack`` unwinds, the choice of the least cost is taken, and nothing is timed.

    Args:
        stack: undoes it.
        offered: receives the list of choices of each selection.
        pick: cost of a choice. Default: the first on the list is the cheapest.
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
        return lambda *args, **kwargs: {}

    def ignore(*args: Any, **kwargs: Any) -> None:
        pass

    replacements: list[tuple[Any, str, Any]] = [
        (AlgorithmSelectorCache, "__call__", recorded_select),
        (AlgorithmSelectorCache, "benchmark", benchmark),
        (AlgorithmSelectorCache, "make_precompile_fn", make_precompile_fn),
        # Reports of the timings.
        (AlgorithmSelectorCache, "log_results", staticmethod(ignore)),
    ]
    if hasattr(select_algorithm, "_log_autotune_choices_stats"):
        replacements.append((select_algorithm, "_log_autotune_choices_stats", ignore))
    for owner, name, replacement in replacements:
        stack.enter_context(mock.patch.object(owner, name, replacement))

    # Otherwise the scheduler times the fused kernel against the unfused ones.
    # 2.11, 2.13: benchmark_epilogue_fusion; 2.15: renamed, the old name warns.
    fusion = "benchmark_template_fusion"
    if not hasattr(config, fusion):
        fusion = "benchmark_epilogue_fusion"
    stack.enter_context(config.patch({fusion: False, "autotune_in_subproc": False}))
