"""One compilation of a dynamic M against a static compilation at each M: a linear layer, every M.

    python -m examples.benchmarks.dynamic_m                              # all formats, Llama-3-8B
    python -m examples.benchmarks.dynamic_m --formats int8 --m 1 16 300  # some

A ratio is dynamic time / static time, the median of interleaved rounds of CUDA graphs; in a graph
each call reads its own weight from memory. It also prints what was compiled, and what choosing the
range costs the host in a call. ``--tiny`` tries the script, also without a GPU."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor, nn
from torch._dynamo.utils import counters  # noqa: TID251

import inductor_quant
from examples.benchmarks.timing import Replay, copies_beyond_l2, machine
from examples.benchmarks.workers.quantizers import Fp8BlockLinear, Int4Linear, Int8Linear
from inductor_quant import row_buckets
from inductor_quant._compat.variants import Variant
from inductor_quant.options import Options

ROWS = (1, 3, 8, 16, 20, 48, 64, 100, 200, 300, 1000, 4096)
SHAPES = Path(__file__).with_name("shapes.json")
MOST, MEAN, DISPATCH_US = 1.05, 1.02, 2.0  # targets


class Fp8Linear(nn.Module):
    """nn.Linear in e4m3, a scale for each row of the input and of the weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 448
        self.register_buffer("weight", (linear.weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        q, w = (rows / scale).to(torch.float8_e4m3fn), self.weight.t()
        out = torch._scaled_mm(q, w, scale, self.scale.t(), out_dtype=x.dtype)
        return out.reshape(*x.shape[:-1], -1)


FORMATS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": Int8Linear,
    "gptq": Int4Linear,
    "fp8": Fp8Linear,
    "fp8_block": Fp8BlockLinear,
}


def call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def copied(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``fn`` with code of its own, so that Dynamo counts no recompilations."""
    name = f"{fn.__name__}_{next(_COPIES)}"
    return types.FunctionType(fn.__code__.replace(co_name=name), fn.__globals__)


_COPIES = itertools.count()


def layers(name: str, n: int, k: int, device: str) -> list[nn.Module]:
    """Equal layers whose weights exceed the L2 cache together."""
    with torch.device(device):
        first = FORMATS[name](nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
    size = sum(buffer.nbytes for buffer in first.buffers())
    found = [first]
    for _ in range(copies_beyond_l2(size, device) - 1):
        with torch.device(device):
            found.append(FORMATS[name](nn.Linear(k, n, bias=False, dtype=torch.bfloat16)))
    return found


def compiled(models: list[nn.Module], x: Tensor, fn: Callable[..., Tensor], device: str) -> Replay:
    calls = [functools.partial(fn, model, x) for model in models]
    for each in calls[:2]:  # the second: with another weight
        each()
    return Replay(calls, device)


class Comparison:
    """The layers of one format and size, compiled for each M: statically, and once for all."""

    def __init__(self, models: list[nn.Module], inputs: dict[int, Tensor], device: str) -> None:
        self.static: dict[int, Replay] = {}
        self.dynamic: dict[int, Replay] = {}
        self.seconds: list[float] = []
        for m, x in inputs.items():
            start = time.perf_counter()
            fn = torch.compile(copied(call), backend="inductor_quant", dynamic=False)
            self.static[m] = compiled(models, x, fn, device)
            self.seconds.append(time.perf_counter() - start)
        counters.clear()
        options = {"inductor_quant.row_buckets": True}
        fn = torch.compile(copied(call), backend="inductor_quant", options=options)
        with inductor_quant.collect() as self.report:
            for m in sorted(inputs, key=lambda m: m != 16):  # a first M that is neither
                x = inputs[m].clone()
                torch._dynamo.mark_dynamic(x, 0)  # noqa: TID251
                start = time.perf_counter()
                self.dynamic[m] = compiled(models, x, fn, device)
                self.seconds.append(time.perf_counter() - start)
        self.graphs = counters["stats"]["unique_graphs"]

    def rows(self, rounds: int) -> Iterator[dict[str, Any]]:
        """The ratio at each M."""
        for m, static in self.static.items():
            pairs = [(self.dynamic[m].seconds(), static.seconds()) for _ in range(rounds)]
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            us = 1e6 * sorted(theirs for _, theirs in pairs)[rounds // 2]
            yield {"m": m, "ratio": ratios[rounds // 2], "static_us": us}

    @property
    def made(self) -> dict[str, Any]:
        """What was compiled."""
        count = len(self.static)
        return {
            "graphs": self.graphs,
            "ranges": {bucket.rows: round(bucket.seconds, 2) for bucket in self.report.buckets},
            "static_s": sorted(self.seconds[:count])[count // 2],
            "dynamic_s": sum(self.seconds[count:]),
        }


def dispatch_us(count: int = 100_000) -> float:
    """Host time that choosing the range adds to a call of known sizes: the best of five."""
    symbol = sympy.Symbol("s0", integer=True, positive=True)

    class Graph:
        positions = {symbol: 0}

        def bounds(self, _: Any) -> tuple[int, None]:
            return 2, None

        def guards(self) -> list[Any]:
            return []

        def compile(self, *_: Any) -> Any:
            return Variant(nothing, ())

    def nothing(inputs: list[Any]) -> None:
        return None

    rows = row_buckets.Rows({symbol: ("w8a8",)})
    graph: Any = Graph()
    chosen = row_buckets.RowBuckets(graph, nothing, rows, Options(row_buckets=True))
    inputs = [64, None, None]

    def us(fn: Callable[[list[Any]], Any]) -> float:
        start = time.perf_counter()
        for _ in range(count):
            fn(inputs)
        return 1e6 * (time.perf_counter() - start) / count

    return min(us(chosen) - us(nothing) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "gptq", "fp8"])
    parser.add_argument("--m", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--nk", default="llama8b", help="a list of shapes.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("this needs a GPU; --tiny tries the script")
    sizes = [(256, 128)] if options.tiny else json.loads(SHAPES.read_text())[options.nk]
    print(", ".join(f"{name} {value}" for name, value in machine(device).items()))
    cost = dispatch_us()
    print(f"choosing the range: {cost:.2f} us a call (target {DISPATCH_US} us)")
    everything: list[dict[str, Any]] = []
    for name in options.formats:
        for n, k in sizes:
            torch.compiler.reset()
            with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
                inputs = {
                    m: torch.randn(m, k, dtype=torch.bfloat16, device=device) for m in options.m
                }
                both = Comparison(layers(name, n, k, device), inputs, device)
                found, made = list(both.rows(options.rounds)), both.made
            mean = math.exp(sum(math.log(each["ratio"]) for each in found) / len(found))
            worst = max(found, key=lambda each: each["ratio"])
            verdict = "ok" if worst["ratio"] <= MOST and mean <= MEAN else "MISSED"
            print(
                f"\n{name} {n}x{k}: geometric mean {mean:.3f}, worst {worst['ratio']:.3f} {verdict}"
            )
            print("  M       " + "".join(f"{each['m']:>8}" for each in found))
            print("  static  " + "".join(f"{each['static_us']:>8.1f}" for each in found) + " us")
            print("  ratio   " + "".join(f"{each['ratio']:>8.3f}" for each in found))
            print(
                f"  {made['graphs']} graph of Dynamo's, {len(made['ranges'])} ranges in "
                f"{made['dynamic_s']:.1f} s; one static compilation takes {made['static_s']:.1f} s"
            )
            print("  ranges  " + ", ".join(f"{r} {s} s" for r, s in made["ranges"].items()))
            everything.append({"format": name, "n": n, "k": k, "rows": found, **made})
    if options.json:
        result = {**machine(device), "dispatch_us": cost, "layers": everything}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
