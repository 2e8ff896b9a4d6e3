"""One compilation of a dynamic M against a static compilation at each M: 8 layers of Llama-3-8B.

    python -m examples.benchmarks.dynamic_llama --formats gptq               # on a GPU
    python -m examples.benchmarks.dynamic_llama --m 8 19 115 --batches 4 64  # prompts, then batches
    python -m examples.benchmarks.dynamic_llama --compile ours               # what compiling takes

M = 1 is a token after a prompt, other M are prompts of M tokens, and ``--batches`` are tokens of so
many sequences. A layer is compiled, and serves all layers. A line of JSON for each size:

  static_us, ratio        a CUDA graph of the model; dynamic time / static time, the median of
                          interleaved rounds
  called_us, called_ratio the same as calls from Python, which small sizes wait for
  compile_s, rows         of the dynamic compilation ([dynamic, static] seconds), the range that
                          this size was the first of; null: an earlier size compiled it

``--compile`` (ours: the dynamic one, ahead: with all ranges in the first call, oracle: static ones)
compiles and does not time. A second process with the caches of the first
(``TORCHINDUCTOR_CACHE_DIR``) shows what warm ones take.
Formats may run in processes beside each other: with ``--lock FILE`` each waits until all have
compiled, and is timed alone. ``--tiny`` tries the script, also without a GPU."""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import inductor_quant
from examples.benchmarks.dynamic_m import FORMATS, MEAN, MOST, ROWS
from examples.benchmarks.serving import System
from examples.benchmarks.timing import Replay, alone, machine
from examples.benchmarks.workers.quantizers import replace
from examples.benchmarks.workers.serving import ServedLlama, served_llama

Size = tuple[int, int]  # sequences, tokens of each
AHEAD = {"inductor_quant.compile_buckets": "ahead"}
FIRST = 16  # tokens of the first call, which the dynamic compilation begins with


class Comparison:
    """The systems "ours" and "oracle", or some, of one model, every size compiled."""

    def __init__(
        self, model: ServedLlama, sizes: list[Size], names: tuple[str, ...] = ("ours", "oracle")
    ) -> None:
        self.model = model
        self.systems = [
            System("ours", model, is_whole=False, options=AHEAD)
            if name == "ahead"
            else System(name, model, is_whole=False)
            for name in names
        ]
        self.compile_s: dict[Size, list[float]] = {size: [] for size in sizes}
        self.ranges: dict[Size, list[str]] = {size: [] for size in sizes}
        for system in self.systems:
            with system.compiling():
                for size in sorted(sizes, key=lambda size: size != (1, FIRST)):
                    start = self._now()
                    with inductor_quant.collect() as report:
                        self.call(system, size)()
                    self.compile_s[size].append(round(self._now() - start, 2))
                    if system.name == "ours":
                        self.ranges[size] = [bucket.rows for bucket in report.buckets]

    def call(self, system: System, size: Size) -> Callable[[], Tensor]:
        """One step of the model, with a cache of its own."""
        sequences, tokens = size
        device = self.model.cos.device
        ids = torch.zeros(sequences, tokens, dtype=torch.int64, device=device)
        at = None if tokens > 1 else torch.full((sequences,), self.model.context // 2).to(device)
        return functools.partial(system, ids, self.model.cache(sequences), at)

    def _now(self) -> float:
        if self.model.cos.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def times(self, size: Size, rounds: int) -> dict[str, Any]:
        """Of one size, in CUDA graphs and called from Python."""
        device = self.model.cos.device.type
        calls = [self.call(system, size) for system in self.systems]
        found: dict[str, Any] = {}
        for prefix, is_graph in (("", True), ("called_", False)):
            ours, oracle = (Replay([call], device, graph=is_graph) for call in calls)
            pairs = [(ours.seconds(), oracle.seconds()) for _ in range(rounds)]
            ratios = sorted(one / other for one, other in pairs)
            static = sorted(other for _, other in pairs)[rounds // 2]
            name = "called_us" if prefix else "static_us"
            found[name] = round(1e6 * static, 1)
            found[f"{prefix}ratio"] = round(ratios[rounds // 2], 3)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--m", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--batches", nargs="*", type=int, default=[])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--compile", choices=("ours", "ahead", "oracle"))
    parser.add_argument("--json", type=Path, help="append each line to this file")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("this needs a GPU; --tiny tries the script")
    sizes = [*((1, m) for m in options.m), *((batch, 1) for batch in options.batches)]

    def show(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")

    show(dict(machine(device)))
    for name in options.formats:
        torch.compiler.reset()
        with alone(options.lock) as wait, torch.no_grad():
            model = served_llama(device, max(64, *options.m) + 1, is_tiny=options.tiny)
            replace(model, FORMATS[name])
            both = Comparison(model, sizes, *([(options.compile,)] if options.compile else []))
            wait()
            ratios = {}
            for size in sizes:
                times = {} if options.compile else both.times(size, options.rounds)
                sequences, tokens = size
                what = {"m": tokens} if sequences == 1 else {"batch": sequences}
                made = {"compile_s": both.compile_s[size], "rows": both.ranges[size] or None}
                show({"format": name, **what, **times, **made})
                ratios |= {size: times["ratio"]} if times else {}
            if options.compile:
                continue
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            worst = max(ratios.values())
            verdict = "ok" if worst <= MOST and mean <= MEAN else "MISSED"
            show({"format": name, "mean": round(mean, 3), "worst": worst, "is": verdict})


if __name__ == "__main__":
    main()
