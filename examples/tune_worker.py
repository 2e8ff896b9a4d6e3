"""Worker process of ``models_field.py``: one GEMM under many configurations.

A case is a problem of ``bench_gemm.py``, so the function is compiled as a user's would be, whole:
recognition, epilogue, and the sum over parts where K is split. A choice is "default" (what default
mode takes; with ``--rules`` as if nothing had been measured), "max-autotune", or a ``kernel
config`` that is pinned, as reports name it.

``--device virtual`` needs no GPU: kernels are compiled for an imagined H100 and their spills are
counted; times are invented. To try the tools and to check a sweep."""

from __future__ import annotations

import argparse
import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are as many workers as cores

import torch
from bench_systems import Row, serve
from models_candidates import legal_sweep
from models_linear import EXACT, FAMILIES
from models_timing import machine

from inductor_quant import collect, simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.kernels import KERNELS, measured
from inductor_quant.lowering import common

Call = Callable[[], torch.Tensor]
Case = tuple[str, int, int, int]  # family, M, N, K
DEFAULT, AUTOTUNE = "default", "max-autotune"
ARCH, VIRTUAL = 90, "virtual"  # of the imagined card, and what its name begins with
BOUND = 2 * EXACT  # of the relative RMS error, as bench_gemm.py has it for weights of 4 bits


def options_of(name: str) -> dict[str, Any]:
    """What ``torch.compile`` is told for a choice."""
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
    """max-autotune compiles alone: all cores are its own."""
    threads = str(os.cpu_count()) if name == AUTOTUNE else "1"
    return mock.patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": threads})


class Cuda:
    """Compiles and times on the GPU."""

    def __init__(self) -> None:
        # each choice is a compilation of the same function of its own
        torch.compiler.config.recompile_limit = 1 << 20
        torch.compiler.config.accumulated_recompile_limit = 1 << 20
        torch.compiler.config.fail_on_recompile_limit_hit = True
        torch.compiler.config.force_disable_caches = True  # a cached choice is not timed again
        # the first compilation takes seconds: now, while the other workers start too
        torch.compile(torch.neg)(torch.ones(16, device="cuda"))
        self.forget()

    def machine(self) -> Row:
        card = common.describe_device(torch.device("cuda"))
        return {**machine("cuda"), "arch": card.arch, "num_sms": card.num_sms}

    def forget(self) -> None:
        """All cases."""
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
            vars(made).pop("weight", None)  # in fp32, for ``exact`` alone
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
        """Outputs are not kept, and graphs share their memory: large ones come to gigabytes."""
        calls[-1]()  # the first weight is not special
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            for call in calls:
                call()
        return graph

    def time(self, case: Case, names: Sequence[str]) -> dict[str, float]:
        """Microseconds of one call: a pass to warm up clocks and caches, then one that is timed."""
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
    """Compiles for an imagined card."""

    def machine(self) -> Row:
        gpu = simulate.GPUS[ARCH]
        found = {"gpu": f"{VIRTUAL} {gpu.name}", "arch": gpu.arch, "num_sms": gpu.num_sms}
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

        fn = make_problem((case[0], 16, 128, 128), "cpu").function  # of any sizes
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
        """By lot: the same for the same name."""
        return {name: 10 + zlib.crc32(f"{case}{name}".encode()) % 1000 / 200 for name in names}


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[Any, ...]]]:
    """What the lowering is asked meanwhile: (family, spec, problem, device)."""
    asked: list[tuple[Any, ...]] = []
    ordinary = common._best_kernel

    def watch(family: str, spec: Any, problem: Any, inputs: Any, layout: Any, *rest: Any) -> Any:
        asked.append((family, spec, problem, common.describe_device(layout.device)))
        return ordinary(family, spec, problem, inputs, layout, *rest)

    with mock.patch.object(common, "_best_kernel", watch):
        yield asked


class Worker:
    def __init__(self, device: str) -> None:
        self.device: Cuda | Virtual = Cuda() if device == "cuda" else Virtual()

    def describe(self, case: Sequence[Any], name: str) -> Row:
        """``compile``, what is to be timed for the case, and the key of its row in a table."""
        with watched() as asked:
            reply = self.compile(case, name)
        if "failed" in reply:
            return reply
        if not asked:
            return {"failed": "it is left to the library"}
        [(family, spec, problem, device)] = asked
        kernels = [k for k in KERNELS if k.family == family and k.name in common._TEMPLATES]
        choices = legal_sweep(kernels, spec, problem, device)
        return {**reply, "choices": choices, "key": measured.key(spec, problem)}

    def compile(self, case: Sequence[Any], name: str) -> Row:
        """``chosen``: the kernel and configuration that were taken."""
        with torch.no_grad(), collect() as report:
            reply = self.device.compile(_tuple(case), name)
        chosen = report.kernels[-1].chosen if report.kernels else "none of ours"
        if name not in (DEFAULT, AUTOTUNE, chosen):
            return {"failed": f"it was not taken, but {chosen}"}
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
    parser.add_argument("--rules", action="store_true", help="default mode without measured tables")
    options = parser.parse_args()
    if options.rules:
        measured.choices = lambda *_: []
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
