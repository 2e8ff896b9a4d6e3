"""What the choice of a configuration loses against the best of a full sweep, on this GPU.

    python examples/tune_check.py                       # 12 shapes of Llama-3-8B's W8A8 layers
    python examples/tune_check.py --m 16 --budget 50    # of these, those with 16 rows

Every legal configuration of every kernel of the family is timed on each shape (as ``tune.py`` does:
CUDA graphs, weights beyond the L2 cache). Then the best five, the table's first choice, which is
what default mode runs, and the one that a max-autotune compile picks are timed again together. Both
are printed over the best: default mode may lose 10 %, max-autotune 3 %. Exit status 1 if one does
not keep that."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench_systems import show_table
from models_candidates import candidates, suits
from models_sweep import TARGETS, Shape, Sweep, autotuned

from inductor_quant.kernels import KERNELS
from inductor_quant.kernels.config import GemmConfig, Problem, parse_config
from inductor_quant.lowering.common import describe_device

HERE = Path(__file__).parent
ROWS = (16, 256, 4096)
ROUNDS, FINAL_TURNS, FINALISTS = 3, 3, 5
DEFAULT_LIMIT, AUTOTUNE_LIMIT = 1.10, 1.03
Choice = tuple[str, GemmConfig]  # a kernel's name and a configuration


class Field:
    """All kernels of a family with all of their configurations for some shapes, compiled."""

    def __init__(self, family: str, shapes: list[Shape]) -> None:
        self.device = describe_device(torch.device("cuda"))
        self.kernels = [k for k in KERNELS if k.family == family and k.name in TARGETS]
        self.spec = TARGETS[self.kernels[0].name].spec()
        self.sweeps: dict[str, Sweep] = {}
        for kernel in self.kernels:
            mine = [shape for shape in shapes if self._supports(kernel, shape)]
            found = {c for shape in mine for c in self._configs(kernel, shape)}
            if found:
                self.sweeps[kernel.name] = Sweep(kernel, sorted(found))

    def _supports(self, kernel: Any, shape: Shape) -> bool:
        return kernel.supports(self.spec, self.problem(shape), self.device) is None

    def problem(self, shape: Shape) -> Problem:
        return Problem(*shape, has_aligned_rows=True)

    def _configs(self, kernel: Any, shape: Shape) -> list[GemmConfig]:
        problem = self.problem(shape)
        table = kernel.configs(self.spec, problem, self.device)
        all_ = [c for c in candidates(kernel, self.device, (8,)) if suits(c, shape)]
        legal = [c for c in table if kernel.legal(self.spec, problem, c, self.device) is None]
        return [*all_, *legal]

    def choices(self, shape: Shape) -> list[Choice]:
        return [
            (kernel.name, config)
            for kernel in self.kernels
            if kernel.name in self.sweeps and self._supports(kernel, shape)
            for config in dict.fromkeys(self._configs(kernel, shape))
        ]

    def default(self, shape: Shape) -> Choice:
        """What default mode runs: the first configuration of the first kernel."""
        kernel = next(k for k in self.kernels if self._supports(k, shape))
        problem = self.problem(shape)
        ranked = kernel.configs(self.spec, problem, self.device)
        legal = (c for c in ranked if not kernel.legal(self.spec, problem, c, self.device))
        return kernel.name, next(legal)

    def time(self, shape: Shape, choices: list[Choice], turns: int = 1) -> dict[Choice, float]:
        """Median microseconds of each choice, over turns that the kernels take."""
        times: dict[Choice, list[float]] = {}
        for _ in range(turns):
            for name, sweep in self.sweeps.items():
                configs = [config for kernel, config in choices if kernel == name]
                for config, us in sweep.time(shape, configs, ROUNDS).items() if configs else ():
                    times.setdefault((name, config), []).append(us)
        return {choice: statistics.median(values) for choice, values in times.items()}


def check(field: Field, shape: Shape) -> list[str]:
    """Label, microseconds of the best, of default mode and of max-autotune, their ratios."""
    swept = field.time(shape, field.choices(shape))
    default = field.default(shape)
    name, _, config = autotuned(field.kernels[0], shape).rpartition(" ")
    chosen = name, parse_config(config)
    best = sorted(swept, key=swept.__getitem__)[:FINALISTS]
    times = field.time(shape, list(dict.fromkeys([*best, default, chosen])), FINAL_TURNS)
    least = min(times, key=times.__getitem__)
    cells = ["x".join(map(str, shape)), str(len(swept)), f"{' '.join(map(str, least))}"]
    cells += [f"{times[least]:.2f}"]
    cells += [f"{times[choice] / times[least]:.3f}" for choice in (default, chosen)]
    return [*cells, " ".join(map(str, default)), " ".join(map(str, chosen))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", choices=("w8a8", "fp8", "fp8_block"), default="w8a8")
    parser.add_argument("--grid", default="llama8b", help="a grid of shapes.json")
    parser.add_argument("--m", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--nk", type=int, nargs=2, action="append", help="instead of the grid's")
    parser.add_argument("--budget", type=float, default=600, help="seconds; the rest is left out")
    options = parser.parse_args()
    torch.compiler.config.force_disable_caches = True  # a cached choice is not timed again
    began = time.perf_counter()
    nks = options.nk or json.loads((HERE / "shapes.json").read_text())[options.grid]
    shapes = [(m, n, k) for m in options.m for n, k in nks]
    field = Field(options.family, shapes)
    count = sum(len(sweep.resources) or 1 for sweep in field.sweeps.values())
    print(f"{count} kernels, compiled in {time.perf_counter() - began:.0f} s", flush=True)
    lines = []
    for shape in shapes:
        if time.perf_counter() - began > options.budget:
            print(f"time budget spent: {len(shapes) - len(lines)} of {len(shapes)} left out")
            break
        lines.append(check(field, shape))
        print(" | ".join(lines[-1]), flush=True)
    columns = ("M x N x K", "swept", "best", "us", "default / best", "autotune / best")
    show_table("loss of the choice", (*columns, "default", "autotune"), lines)
    limits = ((4, "default mode", DEFAULT_LIMIT), (5, "max-autotune", AUTOTUNE_LIMIT))
    kept = True
    for column, what, limit in limits:
        worst = max((float(line[column]) for line in lines), default=0.0)
        kept = kept and worst <= limit
        print(f"{what}: at most {worst:.3f} of the best on {len(lines)} shapes; limit {limit}")
    return 0 if kept and lines else 1


if __name__ == "__main__":
    raise SystemExit(main())
