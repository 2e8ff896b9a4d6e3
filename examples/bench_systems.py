"""One system of a GEMM benchmark, in a process of its own: builds, checks and times one shape at a
time.

``bench_gemm.py`` starts one such process for each system, because some of them change Inductor's
configuration for the whole process, and sends it requests as JSON lines:

    {"do": "prepare", "measure": "gemm", "m": 16, "n": 4096, "k": 4096}  ->  {"error_rms": ..., ...}
    {"do": "time"}                                                       ->  {"us": ...}

A prepared shape is a CUDA graph of calls with different weights, more bytes together than the L2
cache holds, so that each call reads its weight from memory; ``us`` is the time of one call."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

WEIGHT_BYTES = 320 * 2**20  # several times the L2 cache of the largest card
MAX_CALLS = 40

Tensor = torch.Tensor


def int8_gemm(a: Tensor, w: Tensor, sa: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
    """int8 in: GEMM, both scales, bias. What any W8A8 producer's graph says after quantizing."""
    return (torch._int_mm(a, w.t()).float() * sa * sw + bias).to(torch.bfloat16)


def int8_linear(x: Tensor, w: Tensor, sw: Tensor, bias: Tensor) -> Tensor:
    """bf16 in: per-token quantization of the activation, then ``int8_gemm``."""
    sa = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    a = (x / sa).round().clamp(-128, 127).to(torch.int8)
    return int8_gemm(a, w, sa, sw, bias)


def bf16_linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w, bias)


class Problem:
    """Inputs of one shape: one activation, and enough weights to leave the L2 cache cold."""

    def __init__(self, measure: str, m: int, n: int, k: int, *, bf16: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def integers(*size: int) -> Tensor:
            return torch.randint(
                -128, 128, size, dtype=torch.int8, device="cuda", generator=generator
            )

        def uniform(*size: int) -> Tensor:
            return torch.rand(size, device="cuda", generator=generator) * 0.01 + 0.001

        bytes_each = n * k * (2 if bf16 else 1)
        count = max(2, min(MAX_CALLS, -(-WEIGHT_BYTES // bytes_each)))
        self.measure, self.m, self.n, self.k = measure, m, n, k
        self.bias = torch.randn(n, device="cuda", generator=generator, dtype=torch.bfloat16)
        self.x = torch.randn(m, k, device="cuda", generator=generator, dtype=torch.bfloat16)
        self.a, self.sa = integers(m, k), uniform(m, 1)
        if bf16:
            first = torch.randn(n, k, device="cuda", generator=generator, dtype=torch.bfloat16)
            self.weights = [first] + [first.clone() for _ in range(count - 1)]
            self.sw = self.bias
        else:
            self.weights = [integers(n, k) for _ in range(count)]
            self.sw = uniform(n)

    def arguments(self, weight: Tensor) -> tuple[Tensor, ...]:
        if weight.dtype == torch.bfloat16:
            return (self.x, weight, self.bias)
        if self.measure == "gemm":
            return (self.a, weight, self.sa, self.sw, self.bias)
        return (self.x, weight, self.sw, self.bias)

    def reference(self) -> Tensor:
        """fp64 result for the first weight, of the operands as the system multiplies them."""
        weight = self.weights[0]
        if weight.dtype == torch.bfloat16:
            return self.x.double() @ weight.double().t() + self.bias.double()
        a, sa = self.a, self.sa
        if self.measure == "linear":
            sa = self.x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
            a = (self.x / sa).round().clamp(-128, 127).to(torch.int8)
        product = a.double() @ weight.double().t()
        return product * sa.double() * self.sw.double() + self.bias.double()


def build(system: str, measure: str) -> Callable[..., Tensor]:
    """The compiled function of a system: see SYSTEMS."""
    options = SYSTEMS[system]
    if options["model"] == "bf16":
        return torch.compile(bf16_linear, mode=options["mode"], dynamic=False)
    fn = int8_gemm if measure == "gemm" else int8_linear
    return torch.compile(fn, backend=options["backend"], mode=options["mode"], dynamic=False)


MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
SYSTEMS: dict[str, dict[str, Any]] = {
    "ours": {"model": "int8", "backend": "inductor_quant", "mode": None},
    "ours-autotune": {"model": "int8", "backend": "inductor_quant", "mode": MAX_AUTOTUNE},
    "stock": {"model": "int8", "backend": "inductor", "mode": None},
    "stock-autotune": {"model": "int8", "backend": "inductor", "mode": MAX_AUTOTUNE},
    "bf16": {"model": "bf16", "backend": "inductor", "mode": None},
    "bf16-autotune": {"model": "bf16", "backend": "inductor", "mode": MAX_AUTOTUNE},
}


class Worker:
    def __init__(self, system: str) -> None:
        self.system = system
        self.graph: Any = None
        self.calls = 0
        self.keep: tuple[Any, ...] = ()

    def prepare(self, measure: str, m: int, n: int, k: int) -> dict[str, Any]:
        self.graph, self.keep = None, ()
        torch.compiler.reset()
        torch.cuda.empty_cache()
        bf16 = SYSTEMS[self.system]["model"] == "bf16"
        problem = Problem(measure, m, n, k, bf16=bf16)
        fn = build(self.system, measure)
        start = time.perf_counter()
        with torch.no_grad():
            out = fn(*problem.arguments(problem.weights[0]))
            torch.cuda.synchronize()
            compile_s = time.perf_counter() - start
            error = out.double() - problem.reference()
            rms = (error.square().mean().sqrt() / out.double().square().mean().sqrt()).item()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [fn(*problem.arguments(weight)) for weight in problem.weights]
        self.graph, self.calls, self.keep = graph, len(problem.weights), (problem, outs, fn)
        return {"error_rms": rms, "error_max": error.abs().max().item(), "compile_s": compile_s}

    def time(self) -> dict[str, Any]:
        """One replay to warm up clocks and caches, one that is timed."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return {"us": start.elapsed_time(end) * 1000 / self.calls}


def ceilings() -> dict[str, float]:
    """What this card reaches now: read bandwidth in TB/s, matrix products 8192^3 in T(FL)OP/s."""

    def seconds(fn: Callable[[], Any], repeat: int = 10) -> float:
        fn()
        times = []
        for _ in range(repeat):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return sorted(times)[repeat // 2]

    big = torch.randint(0, 2**30, (2**28,), dtype=torch.int32, device="cuda")
    size = 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    i = torch.randint(-128, 128, (size, size), dtype=torch.int8, device="cuda")
    operations = 2 * size**3 / 1e12
    return {
        "read_tbps": big.nbytes / 1e12 / seconds(lambda: big.max()),
        "bf16_tflops": operations / seconds(lambda: a @ a.t()),
        "int8_tops": operations / seconds(lambda: torch._int_mm(i, i.t())),
    }


def main() -> None:
    worker = Worker(sys.argv[1])
    replies = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not reach the protocol
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            handlers = {"prepare": worker.prepare, "time": worker.time, "ceilings": ceilings}
            reply = handlers[do](**request)
        except Exception as error:  # reported to the parent, which shows it in the table
            reply = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
