"""Time quantized linear layers of random sizes: ours, stock Inductor on the same graph, and bf16.

    python -m examples.benchmarks.random_linears --family fp8 --count 60 --seed 1 --json rows.jsonl
    python -m examples.benchmarks.random_linears --family w8a8 --elements 1e6 4e6

N x K is that of a layer of a real model (MODELS), M is log-uniform between --rows. x is bf16, its
quantization is counted. Each cell has an epilogue: none, bias, SiLU or a residual. Every system
runs in processes of its own; all cells are compiled and compared with fp64 first, then timed in
interleaved rounds. Prints each cell, and geometric means of the ratios by rows and by N x K."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from examples.benchmarks.harness import Row, System, quartiles, ratios

WORKER = "examples.benchmarks.workers.random_linear"
SYSTEMS = ("ours", "stock", "bf16")
FAMILIES = {
    "fp8": SYSTEMS,
    "fp8_precise": SYSTEMS,
    "w8a8": ("ours", "bf16"),  # Stock's int8 product needs 17 rows, and writes int32 sums.
}
EPILOGUES = ("", "bias", "silu", "residual")
# (N, K) of the linear layers of models, those of 128 Mi elements and more left out
MODELS = {
    "BERT-base, ViT-B": ((768, 768), (2304, 768), (3072, 768), (768, 3072)),
    "BERT-large, ViT-L": ((1024, 1024), (3072, 1024), (4096, 1024), (1024, 4096)),
    "Whisper-large, ViT-H": ((1280, 1280), (3840, 1280), (5120, 1280), (1280, 5120)),
    "SigLIP-so400m": ((1152, 1152), (4304, 1152), (1152, 4304)),
    "MiniLM": ((384, 1536), (1536, 384)),
    "Qwen2.5-0.5B": ((896, 896), (4864, 896), (896, 4864)),
    "Qwen2.5-1.5B": ((1536, 1536), (2048, 1536), (8960, 1536), (1536, 8960)),
    "Llama-3.2-1B": ((2048, 2048), (3072, 2048), (8192, 2048), (2048, 8192)),
    "Llama-3.2-3B": ((3072, 3072), (5120, 3072), (8192, 3072), (3072, 8192)),
    "Gemma-2-9B": ((8192, 3584), (3584, 4096), (14336, 3584), (3584, 14336)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (18944, 3584), (3584, 18944)),
    "Llama-3-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama-2-13B": ((5120, 5120), (15360, 5120), (13824, 5120), (5120, 13824)),
    "Llama-3-70B": ((10240, 8192), (8192, 8192)),
    "DeepSeek-V3": ((2112, 7168), (24576, 1536), (7168, 2048), (4096, 7168)),
    "Flux, SD3": ((3072, 3072), (9216, 3072), (12288, 3072), (3072, 12288)),
}


def draw(
    family: str,
    count: int,
    seed: int,
    *,
    rows: Sequence[float] = (1, 8192),
    elements: Sequence[float] = (1e6, math.inf),
) -> list[Row]:
    """``count`` cells of the family, without repetition."""
    source = random.Random(seed)
    sizes = sorted({nk for layers in MODELS.values() for nk in layers})
    sizes = [(n, k) for n, k in sizes if elements[0] <= n * k < elements[1]]
    found: dict[tuple[int, int, int], Row] = {}
    while len(found) < count:
        n, k = source.choice(sizes)
        m = round(math.exp(source.uniform(math.log(rows[0]), math.log(rows[1]))))
        epilogue = source.choice(EPILOGUES)
        found.setdefault(
            (m, n, k), {"family": family, "epilogue": epilogue, "m": m, "n": n, "k": k}
        )
    return list(found.values())


class Fleet:
    """The processes of all systems. Cell ``i`` belongs to process ``i % shards`` of each system."""

    def __init__(self, shards: dict[str, int], device: str) -> None:
        self.systems = {
            name: [System(name, WORKER, "--device", device) for _ in range(count)]
            for name, count in shards.items()
        }

    def names(self, cell: Row) -> Sequence[str]:
        return FAMILIES.get(cell["family"], tuple(self.systems))

    def of(self, name: str, cell: int) -> System:
        return self.systems[name][cell % len(self.systems[name])]

    def prepare(self, cells: Sequence[Row], limit_s: float) -> list[Row]:
        """The cells with the replies of the ``systems`` that were asked within the time."""
        done: list[Row] = [{**cell, "systems": {}} for cell in cells]
        until = time.perf_counter() + limit_s

        def run(name: str, shard: int) -> None:
            system, step = self.systems[name][shard], len(self.systems[name])
            for i in range(shard, len(cells), step):
                if name in self.names(cells[i]) and time.perf_counter() < until:
                    reply = system.ask(do="prepare", cell=i, **cells[i])
                    done[i]["systems"][name] = reply
                    if "failed" in reply or reply["wrong"]:
                        print(f"{label(cells[i])}: {name} {reply}", flush=True)

        shards = [(name, i) for name, each in self.systems.items() for i in range(len(each))]
        with ThreadPoolExecutor(len(shards)) as executor:
            list(executor.map(lambda shard: run(*shard), shards))
        return done

    def time(self, rows: list[Row], rounds: int) -> Iterable[Row]:
        """The prepared rows with ``us``, quartiles of each system, and ``ratios``."""
        for i, row in enumerate(rows):
            if len(row["systems"]) < len(self.names(row)):
                continue
            times: dict[str, list[float]] = {}
            for _ in range(rounds):
                for name, reply in row["systems"].items():
                    if "failed" not in reply:
                        answer = self.of(name, i).ask(do="time", cell=i)
                        times.setdefault(name, []).append(answer.get("us", math.inf))
            for name, values in times.items():
                row["systems"][name]["us"] = quartiles(values)
            row["ratios"] = ratios(times)
            yield row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self.systems.values():
            for system in each:
                system.hang_up()
        for each in self.systems.values():
            for system in each:
                system.close()


def label(row: Row) -> str:
    return f"{row['family']} {row['m']}x{row['n']}x{row['k']} {row.get('epilogue', '')}".strip()


def line(row: Row) -> str:
    times = [f"{name} {r['us'][1]:.2f}" for name, r in row["systems"].items() if "us" in r]
    found = [f"{pair.partition('/')[2]} {q[1]:.3f}" for pair, q in row["ratios"].items()]
    kernels = ", ".join(row["systems"].get("ours", {}).get("kernels", []))
    return f"{label(row)}: {', '.join(times)} | of {', '.join(found)} | {kernels}"


def show_means(rows: Sequence[Row]) -> None:
    """Geometric means, and the largest ratio, of all rows and of parts."""
    parts: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        "M <= 64": lambda row: row["m"] <= 64,
        "M 65 to 256": lambda row: 64 < row["m"] <= 256,
        "M > 256": lambda row: row["m"] > 256,
        "N x K < 4e6": lambda row: row["n"] * row["k"] < 4e6,
        "N x K >= 4e6": lambda row: row["n"] * row["k"] >= 4e6,
    }
    for family in dict.fromkeys(row["family"] for row in rows):
        for part, belongs in parts.items():
            mine = [row for row in rows if row["family"] == family and belongs(row)]
            for pair in sorted({pair for row in mine for pair in row["ratios"]}):
                found = [row["ratios"][pair][1] for row in mine if pair in row["ratios"]]
                mean, worst = statistics.geometric_mean(found), max(found)
                print(f"{family}, {part}: {pair} {mean:.3f}, at most {worst:.3f} ({len(found)})")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, default="fp8")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=float, nargs=2, default=(1, 8192), help="range of M")
    parser.add_argument(
        "--elements", type=float, nargs=2, default=(1e6, math.inf), help="range of N x K"
    )
    parser.add_argument("--shards", type=int, default=2, help="processes of ours; half of stock")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=600, help="seconds for compiling")
    parser.add_argument("--json", type=Path, help="one line for each cell is added")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    sizes = {"rows": options.rows, "elements": options.elements}
    cells = draw(options.family, options.count, options.seed, **sizes)
    shards = {"ours": options.shards, "stock": -(-options.shards // 2), "bf16": 1}
    counts = {name: shards[name] for name in FAMILIES[options.family]}
    with Fleet(counts, options.device) as fleet:
        return report(fleet, cells, options)


def report(fleet: Fleet, cells: list[Row], options: argparse.Namespace) -> int:
    machine = fleet.of("ours", 0).ask(do="machine")
    print(", ".join(machine.values()), flush=True)
    rows = []
    for row in fleet.time(fleet.prepare(cells, options.budget), options.rounds):
        rows.append(row)
        print(line(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({**row, "seed": options.seed, **machine}) + "\n")
    show_means(rows)
    return int(any(reply.get("wrong") for row in rows for reply in row["systems"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
