"""Worker process of ``examples.tuning.field``: one GEMM under many configurations.

A case is a problem of ``examples.benchmarks.gemm``, compiled as a user's function: recognition,
epilogue and the sum over split_k partials included. A choice is "default" (default mode),
"max-autotune", or a pinned ``kernel config`` as reports name it.

``--device virtual`` needs no GPU: it compiles kernels for a virtual H100, counts spills and invents
times, for tests of the tools."""

from __future__ import annotations

import argparse
import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there is a worker for each core

import torch

from examples.benchmarks.harness import Row, serve
from examples.benchmarks.timing import machine
from examples.benchmarks.workers.linear import EXACT, FAMILIES
from examples.tuning.candidates import legal_sweep
from examples.tuning.field import AUTOTUNE, DEFAULT, Case
from inductor_quant import collect, simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.kernels import KERNELS, dispatch
from inductor_quant.lowering import select

Call = Callable[[], torch.Tensor]
ARCH = 90  # of the virtual GPU
BOUND = 2 * EXACT  # on the relative RMS error, as for int4 weights in workers.linear


def options_of(name: str) -> dict[str, Any]:
    """The options of ``torch.compile`` for a choice."""
    options: dict[str, Any] = {"inductor_quant.on_error": "raise"}
    if name == AUTOTUNE:
        options["max_autotune"] = True
    elif name != DEFAULT:
        options["inductor_quant.configs"] = (name,)
    return options


def make_problem(case: Case, device: str) -> Any:
    family, m, n, k = case
    measure = "linear" if family.startswith("weight_only") else "gemm"
    return FAMILIES[family][0](measure, m, n, k, device)


def compile_threads(name: str) -> Any:
    """max-autotune compiles alone and may use all cores."""
    threads = str(os.cpu_count()) if name == AUTOTUNE else "1"
    return mock.patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": threads})


class Cuda:
    """Compiles and times on the GPU."""

    def __init__(self) -> None:
        # each choice recompiles the same function
        torch.compiler.config.recompile_limit = 1 << 20
        torch.compiler.config.accumulated_recompile_limit = 1 << 20
        torch.compiler.config.fail_on_recompile_limit_hit = True
        torch.compiler.config.force_disable_caches = True  # a cached choice is not timed again
        # the first compilation takes seconds: do it while the other workers start
        torch.compile(torch.neg)(torch.ones(16, device="cuda"))
        self.forget()

    def machine(self) -> Row:
        card = select.describe_device(torch.device("cuda"))
        return {**machine("cuda"), "arch": card.arch, "num_sms": card.num_sms}

    def forget(self) -> None:
        """Free all cases."""
        self.problems: dict[Case, tuple[Any, torch.Tensor]] = {}
        self.counts: dict[Case, int] = {}  # calls in a graph
        self.graphs: dict[tuple[Case, str], torch.cuda.CUDAGraph] = {}
        self.kept: list[Any] = []
        self.pool: Any = None
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def compile(self, case: Case, name: str) -> Row:
        if case not in self.problems:
            made = make_problem(case, "cuda")
            self.problems[case] = made, made.exact().float()
            vars(made).pop("weight", None)  # in fp32; only ``exact`` needs it
            torch.cuda.empty_cache()
        problem, reference = self.problems[case]
        fn = torch.compile(
            problem.function, backend="inductor_quant", dynamic=False, options=options_of(name)
        )
        calls = problem.calls(fn)
        with compile_threads(name):
            out = calls[0]()
        error = (out.float() - reference).square().mean().sqrt()
        rms = (error / reference.square().mean().sqrt()).item()
        if not rms <= BOUND:  # a NaN is wrong
            return {"failed": f"wrong: relative RMS error {rms:.1e}"}
        self.graphs[case, name], self.counts[case] = self._capture(calls), len(calls)
        self.kept.append(fn)
        return {"error_rms": rms}

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        """A CUDA graph that keeps no outputs. All graphs share a memory pool, to save gigabytes."""
        calls[-1]()  # compiled with the first weight; it must serve the others
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            for call in calls:
                call()
        return graph

    def time(self, case: Case, names: Sequence[str]) -> dict[str, float]:
        """Microseconds of one call. The first of two passes warms up clocks and caches."""
        found = {}
        for name in names:
            graph = self.graphs[case, name]
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            found[name] = first.elapsed_time(last) * 1000 / self.counts[case]
        return found


class Virtual:
    """Compiles for a virtual GPU."""

    def machine(self) -> Row:
        gpu = simulate.GPUS[ARCH]
        found = {"gpu": f"virtual {gpu.name}", "arch": gpu.arch, "num_sms": gpu.num_sms}
        return machine("cpu") | found

    def forget(self) -> None:
        pass

    def compile(self, case: Case, name: str) -> Row:
        def make(device: str) -> tuple[torch.Tensor, ...]:
            problem = make_problem(case, "cpu")
            [call, *_] = problem.calls(problem.function)
            return tuple(
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
                for t in call.args
            )

        fn = make_problem((case[0], 16, 128, 128), "cpu").function  # any sizes will do
        code = simulate.generate(
            fn, make, arch=ARCH, backend=inductor_quant_backend, options=options_of(name)
        )
        spills = shared = 0
        for kernel, source in code.kernels.items():
            if "_tem_" in kernel:
                found = simulate.compile_kernel(kernel, source)
                spills, shared = spills + found.spill_stores, max(shared, found.shared_bytes)
        return {"spills": spills, "shared": shared}

    def time(self, case: Case, names: Sequence[str]) -> dict[str, float]:
        """Invented times, always the same for a case and choice."""
        return {name: 10 + zlib.crc32(f"{case}{name}".encode()) % 1000 / 200 for name in names}


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[Any, ...]]]:
    """Records the (family, spec, problem, device) that the lowering selects kernels for."""
    seen: list[tuple[Any, ...]] = []
    original = dispatch.candidates

    def watch(*given: Any, **options: Any) -> Any:
        seen.append(given)
        return original(*given, **options)

    with mock.patch.object(dispatch, "candidates", watch):
        yield seen


class Worker:
    def __init__(self, device: str) -> None:
        self.device: Cuda | Virtual = Cuda() if device == "cuda" else Virtual()

    def describe(self, case: Sequence[Any], name: str) -> Row:
        """``compile``, and the choices to time for the case."""
        with watched() as seen:
            reply = self.compile(case, name)
        if "failed" in reply:
            return reply
        if not seen:
            return {"failed": "left to the library"}
        [(family, spec, problem, device)] = seen
        has_gluon = select.has_gluon()
        kernels = [k for k in KERNELS if k.family == family and (has_gluon or not k.is_gluon)]
        return {**reply, "choices": legal_sweep(kernels, spec, problem, device)}

    def compile(self, case: Sequence[Any], name: str) -> Row:
        """``chosen``: kernel and configuration of the compiled GEMM."""
        with torch.no_grad(), collect() as report:
            reply = self.device.compile(_tuple(case), name)
        chosen = report.kernels[-1].chosen if report.kernels else "none of ours"
        if name not in (DEFAULT, AUTOTUNE, chosen):
            return {"failed": f"{chosen} was taken instead"}
        return {"chosen": chosen, **reply}

    def time(self, case: Sequence[Any], names: list[str]) -> Row:
        return self.device.time(_tuple(case), names)

    def forget(self) -> Row:
        self.device.forget()
        return {}


def _tuple(case: Sequence[Any]) -> Case:
    family, m, n, k = case
    return family, m, n, k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda")
    options = parser.parse_args()
    worker = Worker(options.device)
    serve(
        {
            "machine": worker.device.machine,
            "describe": worker.describe,
            "compile": worker.compile,
            "time": worker.time,
            "forget": worker.forget,
        }
    )


if __name__ == "__main__":
    main()
