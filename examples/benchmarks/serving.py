"""A serving trace: one compilation of a dynamic M against stock, and against static compilations.

    python -m examples.benchmarks.serving                      # Llama-3-8B, 8 layers, on a GPU
    python -m examples.benchmarks.serving --formats gptq --json serving.jsonl
    python -m examples.benchmarks.serving --quick              # a tiny model and trace

Requests have prompts of 8 to 4000 tokens, log-uniform over ``--lengths`` sizes. Each is read in a
call of its own; then 63 tokens follow in batches of 1, 2, 4, ... or 64 requests. The systems share
one model with a static KV cache:

  ours    backend="inductor_quant", compiled once for dynamic sizes
  oracle  the same with dynamic=False: a compilation for each size of the trace
  stock   backend="inductor" for dynamic sizes (it cannot run int8 with 16 rows or fewer)

What is compiled is a layer, which serves all layers; with ``--whole`` it is the model. Decoding
replays a CUDA graph for each batch size, as servers do; prompts are calls from Python. Each system
runs the trace in turn; the median of the ratios of such rounds counts. Each line of the result
is JSON: first the compilations (``compile_s`` at each size, ``ranges``), then times and ratios.
Formats may run in processes beside each other: with ``--lock FILE`` each waits until all have
compiled, and is timed alone."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters  # noqa: TID251

import inductor_quant
from examples.benchmarks.dynamic_m import FORMATS, copied
from examples.benchmarks.timing import alone, machine
from examples.benchmarks.workers.quantizers import replace
from examples.benchmarks.workers.serving import Cache, ServedLlama, served_llama

SYSTEMS = {"ours": "inductor_quant", "oracle": "inductor_quant", "stock": "inductor"}
UNABLE = {("int8", "stock")}
# ours / system, at most
TARGETS = {("gptq", "stock"): 0.60, ("fp8", "stock"): 0.95}
OF_ORACLE = 1.05


@dataclasses.dataclass(frozen=True)
class Trace:
    """``prompts``: their lengths, in order; ``batches``: how many requests decode together."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    tokens: int

    @classmethod
    def draw(
        cls, seed: int, requests: int, longest: int, lengths: int, largest: int, tokens: int
    ) -> Trace:
        draw = random.Random(seed)
        ratio = longest / 8
        sizes = [round(8 * ratio ** (i / (lengths - 1))) for i in range(lengths)]
        batches: list[int] = []
        while (left := requests - sum(batches)) > 0:
            batches.append(min(left, 1 << draw.randint(0, largest.bit_length() - 1)))
        return cls(tuple(draw.choices(sizes, k=requests)), tuple(batches), tokens)


def run_layer(layer: nn.Module, x: Tensor, *others: Any) -> Tensor:
    return layer(x, *others)


def run_model(model: ServedLlama, ids: Tensor, *others: Any) -> Tensor:
    return model(ids, *others, run_layer)


class System:
    """The compiled model of one system, and what its compilations took."""

    def __init__(
        self,
        name: str,
        model: ServedLlama,
        *,
        is_whole: bool,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.model, self.is_whole, self.options = name, model, is_whole, options
        self.is_static = name == "oracle"
        self._calls: dict[Any, Callable[..., Tensor]] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.compile_s: dict[str, float] = {}
        self.ranges: list[tuple[str, float]] = []
        self.dynamo_graphs = 0
        self._is_compiling = False

    def __call__(self, ids: Tensor, cache: Cache, at: Tensor | None = None) -> Tensor:
        """The next tokens. ``at``: their positions; None: ``ids`` are prompts."""
        key = ids.shape if self.is_static else None
        if key not in self._calls:
            fn = run_model if self.is_whole else run_layer
            how: dict[str, Any] = {"dynamic": False} if self.is_static else {}
            how["options"] = self.options
            self._calls[key] = torch.compile(copied(fn), backend=SYSTEMS[self.name], **how)
        call = self._calls[key]
        if self._is_compiling and not self.is_static:
            call = functools.partial(self._with_dynamic_sizes, call, len(ids) > 1)
        return (
            call(self.model, ids, cache, at) if self.is_whole else self.model(ids, cache, at, call)
        )

    @staticmethod
    def _with_dynamic_sizes(
        call: Callable[..., Tensor], is_batch: bool, model: nn.Module, *inputs: Any
    ) -> Tensor:
        """Dynamo keeps the number of sequences symbolic, or the length of a prompt; 1 has a graph
        of its own."""
        tensors, _ = torch.utils._pytree.tree_flatten(inputs)
        for tensor in tensors:
            if is_batch and tensor is not None:
                torch._dynamo.mark_dynamic(tensor, 0)  # noqa: TID251
        if not is_batch and inputs[0].shape[1] > 1:
            x, *tables = (t for t in tensors[:3] if t is not None and t.dim() < 4)
            torch._dynamo.mark_dynamic(x, 1)  # noqa: TID251
            for table in tables:
                torch._dynamo.mark_dynamic(table, 0)  # noqa: TID251
        return call(model, *inputs)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Sizes that are met within the block are dynamic ones."""
        self._is_compiling = True
        yield
        self._is_compiling = False

    def compile(self, trace: Trace) -> None:
        """Each size of the trace once."""
        before = counters["stats"]["unique_graphs"]
        device = self.model.cos.device
        sizes = [(1, length) for length in dict.fromkeys(trace.prompts)]
        sizes += [(batch, 1) for batch in dict.fromkeys(trace.batches)]
        with self.compiling(), inductor_quant.collect() as report:
            for batch, length in sizes:
                ids = torch.zeros(batch, length, dtype=torch.int64, device=device)
                cache, start = self.model.cache(batch), self._now()
                self(ids, cache, None if length > 1 else torch.zeros_like(ids[:, 0]))
                self.compile_s[f"{batch}x{length}"] = self._now() - start
        self.ranges = [(bucket.rows, round(bucket.seconds, 2)) for bucket in report.buckets]
        self.dynamo_graphs = counters["stats"]["unique_graphs"] - before

    def capture(self, trace: Trace, cache: Cache, ids: Tensor, at: Tensor) -> None:
        """A CUDA graph for each batch size."""
        for batch in dict.fromkeys(trace.batches) if ids.is_cuda else ():
            part = [(keys[:batch], values[:batch]) for keys, values in cache]
            self(ids[:batch], part, at[:batch])
            graph = self._graphs[batch] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ids[:batch].copy_(self(ids[:batch], part, at[:batch]))
                at[:batch].add_(1)

    def run(
        self, trace: Trace, prompts: list[Tensor], cache: Cache, ids: Tensor, at: Tensor
    ) -> tuple[float, float, Tensor]:
        """The seconds of reading and of decoding, and the last tokens of all requests."""
        alone = self.model.cache(1)
        todo, read, decoded, last = iter(prompts), 0.0, 0.0, []
        for batch in trace.batches:
            start = self._now()
            for slot in range(batch):
                prompt = next(todo)
                ids[slot] = self(prompt, alone)[0]
                at[slot] = length = prompt.shape[1]
                for of_all, of_one in zip(cache, alone, strict=True):
                    for whole, single in zip(of_all, of_one, strict=True):
                        whole[slot, :, :length] = single[0, :, :length]
            between = self._now()
            part = [(keys[:batch], values[:batch]) for keys, values in cache]
            for _ in range(trace.tokens - 1):
                if batch in self._graphs:
                    self._graphs[batch].replay()
                else:
                    ids[:batch] = self(ids[:batch], part, at[:batch])
                    at[:batch] += 1
            last.append(ids[:batch, 0].clone())
            end = self._now()
            read, decoded = read + between - start, decoded + end - between
        return read, decoded, torch.cat(last)

    def _now(self) -> float:
        if self.model.cos.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def compiled_systems(
    name: str, trace: Trace, device: str, names: list[str], *, is_whole: bool, is_tiny: bool
) -> list[System]:
    """The systems of one format, every size of the trace compiled."""
    torch.compiler.reset()
    model = served_llama(device, max(trace.prompts) + trace.tokens, is_tiny=is_tiny)
    replace(model, FORMATS[name])
    systems = [
        System(each, model, is_whole=is_whole) for each in names if (name, each) not in UNABLE
    ]
    for system in systems:
        system.compile(trace)
    return systems


def compilations(name: str, systems: list[System]) -> Iterator[dict[str, Any]]:
    for system in systems:
        yield {
            "format": name,
            "system": system.name,
            "graphs": system.dynamo_graphs,
            "compile_s": {size: round(s, 2) for size, s in system.compile_s.items()},
            "ranges": system.ranges,
        }


def compare(
    name: str, trace: Trace, systems: list[System], rounds: int
) -> Iterator[dict[str, Any]]:
    """The times of the trace in each system, then the ratios."""
    model = systems[0].model
    device = model.cos.device
    cache = model.cache(max(trace.batches))
    ids = torch.zeros(max(trace.batches), 1, dtype=torch.int64, device=device)
    at = torch.zeros(max(trace.batches), dtype=torch.int64, device=device)
    torch.manual_seed(0)
    vocabulary = model.config.vocabulary
    prompts = [torch.randint(vocabulary, (1, n), device=device) for n in trace.prompts]
    for system in systems:
        system.capture(trace, cache, ids, at.zero_())
    times: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
    tokens: dict[str, Tensor] = {}
    for _ in range(rounds):
        for system in systems:
            read, decoded, tokens[system.name] = system.run(trace, prompts, cache, ids, at)
            times[system.name].append((read, decoded))
    for system in systems:
        middle = sorted(times[system.name], key=sum)[rounds // 2]
        same = (tokens[system.name] == tokens["ours"]).float().mean().item()
        yield {
            "format": name,
            "system": system.name,
            "seconds": round(sum(middle), 4),
            "reading_s": round(middle[0], 4),
            "decoding_s": round(middle[1], 4),
            "tokens_like_ours": round(same, 3),
        }
    for system in systems[1:]:
        parts = zip(times["ours"], times[system.name], strict=True)
        ratio = sorted(sum(ours) / sum(theirs) for ours, theirs in parts)[rounds // 2]
        limit = OF_ORACLE if system.name == "oracle" else TARGETS.get((name, system.name), math.inf)
        verdict = "ok" if ratio <= limit else "MISSED"
        yield {"format": name, "ours_of": system.name, "ratio": round(ratio, 3), "is": verdict}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["gptq", "fp8", "int8"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--lengths", type=int, default=8, help="different lengths of prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="compile the model, not its layers")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--lock", type=Path, help="processes with one: compile, then each alone")
    parser.add_argument("--json", type=Path, help="append each line to this file")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 4 requests")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        parser.error("this needs a GPU; --quick tries the script")
    trace = Trace.draw(options.seed, options.requests, 4000, options.lengths, 64, options.tokens)
    if options.quick:
        trace = Trace.draw(options.seed, 4, 40, 3, 2, 3)

    def show(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")

    show({**machine(device), "seed": options.seed, **dataclasses.asdict(trace)})
    for name in options.formats:
        with alone(options.lock) as wait, torch.no_grad():
            systems = compiled_systems(
                name, trace, device, options.systems, is_whole=options.whole, is_tiny=options.quick
            )
            for line in compilations(name, systems):
                show(line)
            wait()
            if not options.compile_only:
                for line in compare(name, trace, systems, options.rounds):
                    show(line)


if __name__ == "__main__":
    main()
