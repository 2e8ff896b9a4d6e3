"""Timing inside a worker process: CUDA graphs and events, or a plain clock on a CPU."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

WEIGHT_BYTES = 320 * 2**20  # several times the L2 cache of the largest GPU
MAX_CALLS = 40


def copies_beyond_l2(weight_bytes: int, device: str) -> int:
    """How many weights exceed the L2 cache together, so that each call reads its own from
    memory."""
    if device == "cpu":
        return 2
    return max(2, min(MAX_CALLS, -(-WEIGHT_BYTES // weight_bytes)))


class Replay:
    """Calls that are timed together: captured in one CUDA graph, or called in a loop.

    Run each call once before, so that nothing compiles or tunes itself during the capture.
    ``graph=False`` is for calls that cannot be captured, and for the CPU. No two outputs share
    memory, except in graphs of one memory ``pool``: those share it among all their outputs.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[], Any]],
        device: str,
        *,
        graph: bool = True,
        pool: Any = None,
    ) -> None:
        self.calls, self.is_cuda = calls, device == "cuda"
        self.graph = None
        if self.is_cuda and graph:
            calls[-1]()  # the call was compiled with the first weight; it must serve the others
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            self.outputs = []
            with torch.cuda.graph(self.graph, pool=pool):
                for call in calls:
                    out = call()
                    if pool is None:
                        self.outputs.append(out)

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        with torch.no_grad():
            for call in self.calls:
                call()

    def seconds(self) -> float:
        """Time of one call. The first of two passes warms up clocks and caches."""
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
    """Median time of a call that is long enough to be timed without a CUDA graph."""
    replay = Replay([call], "cuda", graph=False)
    return sorted(replay.seconds() for _ in range(repeat))[repeat // 2]


def machine(device: str) -> dict[str, str]:
    """GPU, versions and date, for the header of a result file."""
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


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[Callable[[], None]]:
    """Within the block the processes of one ``lock`` run beside each other until each calls what it
    is given: from then on one after the other, the first when all have called it or ended."""
    if lock is None:
        yield lambda: None
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield lambda: fcntl.flock(file, fcntl.LOCK_EX)
