"""Autotuning times a choice as the compiled model will run it: in a CUDA graph, on cold operands.

Inductor's benchmark times one launch at a time after a cache flush. At ten microseconds a GEMM that
measures clocks and launches rather than the kernel. Here each choice is captured several times into
a CUDA graph, over copies of its operands that together exceed the L2 cache, and the graph is
replayed. (``autotune_in_subproc`` keeps Inductor's benchmark: only the request goes to the other
process.)
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

REPLAYS = 5
MAX_CALLS = 24


def time_in_graph(choice: Any, handicap: float) -> None:
    """Let autotuning time ``choice`` (a template's ChoiceCaller) in a CUDA graph, and multiply the
    time by ``handicap``."""
    choice.benchmark = functools.partial(_handicapped, handicap, choice.bmreq)


def _handicapped(handicap: float, request: Any, *inputs: torch.Tensor, out: torch.Tensor) -> float:
    return handicap * _milliseconds(request, *inputs, out=out)


def _milliseconds(request: Any, *inputs: torch.Tensor, out: torch.Tensor) -> float:
    if out.device.type != "cuda":
        return request.benchmark(*inputs, out=out)
    with torch.cuda.device(out.device):
        l2_bytes = torch.cuda.get_device_properties(out.device).L2_cache_size
        read = sum(tensor.nbytes for tensor in inputs)
        calls = max(2, min(MAX_CALLS, -(-2 * l2_bytes // max(read, 1))))
        # Operands larger than the cache need no copy; copies take at most half of the free memory.
        each = sum(tensor.untyped_storage().nbytes() for tensor in inputs)
        room = torch.cuda.mem_get_info()[0] // 2 // max(each, 1)
        copies = 0 if read >= 2 * l2_bytes else min(calls - 1, room)
        sets = [inputs, *(tuple(map(_copy, inputs)) for _ in range(copies))]
        operands = [sets[i % len(sets)] for i in range(calls)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # on the stream of the capture, which torch 2.11 binds here
            runs = [request.make_run_fn(*tensors, out=out) for tensors in operands]
            runs[0]()
            stream.synchronize()
            # other threads may call CUDA meanwhile: a loader that pins memory, a server
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for run in runs:
                    run()
        times = [_replay(graph) for _ in range(1 + REPLAYS)]
        return statistics.median(times[1:]) / calls


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, offset and storage size, which kernels have compiled in."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        whole.clone().untyped_storage(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
    )


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
