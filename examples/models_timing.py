"""Timing in a worker process: CUDA graphs, events, and a plain clock on a CPU."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Replay:
    """Calls that are timed together: captured in one CUDA graph, or called in turn.

    Call them once before, so that nothing compiles or tunes itself while they are captured.
    ``graph=False`` is for what cannot be captured; a CPU has no graphs.
    """

    def __init__(
        self, calls: Sequence[Callable[[], Any]], device: str, *, graph: bool = True
    ) -> None:
        self.calls, self.is_cuda = calls, device == "cuda"
        self.graph = None
        if self.is_cuda and graph:
            calls[-1]()  # the first weight is not special
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = [call() for call in calls]  # kept: each has memory of its own

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        with torch.no_grad():
            for call in self.calls:
                call()

    def seconds(self) -> float:
        """Time of one call: one pass to warm up clocks and caches, one that is timed."""
        self.run()
        if not self.is_cuda:
            start = time.perf_counter()
            self.run()
            return (time.perf_counter() - start) / len(self.calls)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        self.run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000 / len(self.calls)


def seconds(call: Callable[[], Any], repeat: int = 10) -> float:
    """Median time of a call that is long enough to need no graph."""
    replay = Replay([call], "cuda", graph=False)
    return sorted(replay.seconds() for _ in range(repeat))[repeat // 2]


def machine(device: str) -> dict[str, str]:
    """Where a measurement was made."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
