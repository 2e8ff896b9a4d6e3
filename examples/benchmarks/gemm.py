"""Time one family's GEMMs against other systems, each in its own process.

    python -m examples.benchmarks.gemm                              # W8A8, int8 in
    python -m examples.benchmarks.gemm --measure linear --m 16 256  # bf16 in, with quantization
    python -m examples.benchmarks.gemm --family weight_only         # int4 weights, GPTQ's layout
    python -m examples.benchmarks.gemm --family weight_only_int8    # or _fp8, _awq, _hqq, _fp16
    python -m examples.benchmarks.gemm --family w4a8                # groups of 128, or w4a8_channel
    python -m examples.benchmarks.gemm --family fp8_block           # or fp8: row-wise scales
    python -m examples.benchmarks.gemm --random 20 --seed 7         # (M, N, K) off the grid
    python -m examples.benchmarks.gemm --json gemm.json --plot gemm.png --check --budget 570

Measures: 'gemm' takes quantized inputs (GEMM, scales, bias), 'silu' adds SiLU, 'linear' takes bf16
inputs and includes their quantization. Times of different measures are never compared. A ratio is
time of ours / time of the peer, the median over interleaved rounds with quartiles. The share is the
time that the GPU's measured ceilings allow / the time of the faster of ours. Weights exceed the L2
cache, so that each call reads its weight from memory.

The systems are those of examples.benchmarks.workers.linear; gemlite and torchao take part if they
are installed. gemlite tunes itself for 10 to 20 s per shape, the others compile for 2 to 5 s: use
--m, --grid and --systems to select. The first half of the shapes covers the whole grid. Rows that
are in the --json file already are not measured again."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks.harness import (
    Results,
    Row,
    measure,
    open_systems,
    show_ratios,
    show_table,
    track,
)

SHAPES = Path(__file__).with_name("shapes.json")
WORKER = "examples.benchmarks.workers.linear"
_WEIGHT_ONLY = ["ours", "ours-autotune", "bf16", "stock", "dequantize"]
_COMPILED = ["ours", "ours-autotune", "stock", "stock-autotune"]
_W8A8 = {
    "gemm": [*_COMPILED, "int_mm-bare", "gemlite"],
    "silu": _COMPILED,
    "linear": [*_COMPILED, "bf16", "gemlite", "torchao"],
}
_W4A8 = {
    "gemm": ["ours", "stock", "w8a8", "w4a16"],
    "linear": ["ours", "stock", "w8a8", "w4a16", "bf16"],
}
# family -> measure -> systems of examples.benchmarks.workers.linear
DEFAULT_SYSTEMS = {
    "w8a8": _W8A8,
    "w8a8_fp16": _W8A8,
    "fp8": {
        "gemm": [*_COMPILED, "cublaslt"],
        "silu": _COMPILED,
        "linear": [*_COMPILED, "bf16"],
    },
    "fp8_block": {
        "gemm": [*_COMPILED, "cublaslt", "deepseek"],
        "silu": _COMPILED,
        "linear": [*_COMPILED, "bf16"],
    },
    "w4a8": _W4A8,
    "w4a8_channel": _W4A8,
    "weight_only": {"linear": [*_WEIGHT_ONLY, "tinygemm", "gemlite"]},
    "weight_only_fp16": {"linear": [*_WEIGHT_ONLY, "gemlite"]},
    "weight_only_awq": {"linear": [*_WEIGHT_ONLY, "tinygemm", "gemlite"]},
    "weight_only_hqq": {"linear": [*_WEIGHT_ONLY, "tinygemm", "gemlite"]},
    "weight_only_int8": {"linear": [*_WEIGHT_ONLY, "int8pack", "gemlite"]},
    "weight_only_fp8": {"linear": [*_WEIGHT_ONLY, "gemlite"]},
}
MEASURES = ("gemm", "silu", "linear")
# slower than a peer: by more than this share and by more than these microseconds
SLOWER, SLOWER_US = 0.03, 0.3
OPTIONAL = ("gemlite", "torchao")  # systems that are packages
GEMLITE_LIMIT_S = 120  # to prepare a shape; gemlite takes 10 to 20 s
TINY = [(17, 64, 64), (32, 64, 128)]
TINY_GROUPS = [(5, 128, 256), (40, 128, 128)]  # whole groups and blocks of 128


def is_weight_only(family: str) -> bool:
    return family.startswith("weight_only")


def default_systems(family: str, name: str) -> list[str]:
    missing = [s for s in OPTIONAL if importlib.util.find_spec(s) is None]
    return [system for system in DEFAULT_SYSTEMS[family][name] if system not in missing]


def grid_of(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(M, N, K) to measure. Every second M comes first, so that a part covers the range."""
    if options.tiny:
        has_groups = is_weight_only(options.family) or options.family == "w4a8"
        return TINY_GROUPS if has_groups else TINY
    if options.random:
        return random_sizes(options.random, options.seed, options.m)
    grids = json.loads(SHAPES.read_text())
    family = "weight_only" if is_weight_only(options.family) else options.family
    default = grids["acceptance"][family.removesuffix("_fp16").removesuffix("_channel")]
    ms = options.m or default["M"]
    nks = grids[options.grid or default["NK"]]
    return [(m, n, k) for m in [*ms[::2], *ms[1::2]] for n, k in nks]


def random_sizes(count: int, seed: int, ms: Sequence[int] | None) -> list[tuple[int, int, int]]:
    """(M, N, K) with N * K >= 4 M; K has groups of 128, and rows are aligned."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        n, k = 16 * draw.randint(16, 1792), 128 * draw.randint(4, 128)
        m = draw.choice(ms) if ms else round(2 ** draw.uniform(0, 12))
        found += [(m, n, k)] if n * k >= 1 << 22 else []
    return found


def label(row: Row) -> str:
    return f"{row['m']}x{row['n']}x{row['k']}"


def operations(row: Row) -> float:
    return 2.0 * row["m"] * row["n"] * row["k"]


def bytes_moved(row: Row) -> int:
    """Bytes of operands and output, each counted once."""
    m, n, k = row["m"], row["n"], row["k"]
    is_wide = is_weight_only(row["family"]) or row["measure"] == "linear"
    return (2 if is_wide else 1) * m * k + weight_bytes(row) + 2 * m * n


def weight_bytes(row: Row) -> int:
    """Bytes of the stored weight; weight-only with scales and zero points."""
    n, k = row["n"], row["k"]
    if row["family"] in ("weight_only_int8", "weight_only_fp8"):
        return n * k + 2 * n
    if row["family"] in ("w4a8", "w4a8_channel"):
        return n * k // 2 + (n * k // 64 if row["family"] == "w4a8" else 4 * n)
    if is_weight_only(row["family"]):  # int4; 16 bits of scale and 4 of zero_point per 128
        return n * k // 2 + n * k // 128 * 5 // 2
    return n * k


def floor_us(row: Row, ceilings: dict[str, float]) -> float:
    """The least time that the ceilings allow, in microseconds."""
    memory = bytes_moved(row) / ceilings["read_tbps"] / 1e6
    rate = ceilings["bf16_tflops" if is_weight_only(row["family"]) else "int8_tops"]
    return max(memory, operations(row) / rate / 1e6)


def best_of_ours(row: Row) -> float | None:
    found = [r["us"][1] for name, r in row["systems"].items() if "us" in r and "ours" in name]
    return min(found, default=None)


def cell(reply: Row) -> str:
    if "us" not in reply:
        return "fails"
    return f"{reply['us'][1]:.1f}" + (" WRONG" if reply["wrong"] else "")


def show(rows: Sequence[Row], systems: list[str], ceilings: dict[str, float]) -> None:
    """Print the times, the ratios and the verdicts."""
    lines = []
    for row in rows:
        cells = [label(row), *(cell(row["systems"].get(name, {})) for name in systems)]
        best = best_of_ours(row)
        if best is None:
            cells += ["-", "-"]
        else:
            tops = operations(row) / best / 1e6
            cells += [f"{tops:.0f}", f"{floor_us(row, ceilings) / best:.0%}"]
        lines.append(cells)
    title = f"{rows[0]['measure']}: microseconds; TOP/s and share of the ceilings of our best"
    show_table(title, ("M x N x K", *systems, "TOP/s", "share"), lines)

    show_ratios(rows, label)
    if any(name.startswith("ours") for name in systems):
        show_verdicts(rows)


def verdict(row: Row) -> tuple[str, ...]:
    """(ours in us, the fastest peer, its us, ratio, "slower" or "")."""
    ours = best_of_ours(row)
    peers = {
        name: reply["us"][1]
        for name, reply in row["systems"].items()
        if "us" in reply and not name.startswith("ours") and not reply["wrong"]
    }
    if is_weight_only(row["family"]):  # bf16 reads four times the bytes; the ratios show it
        peers.pop("bf16", None)
    if ours is None or not peers:
        return ("-",) * 5
    name = min(peers, key=lambda peer: peers[peer])
    best = peers[name]
    is_slower = ours - best > max(SLOWER * best, SLOWER_US)
    return f"{ours:.1f}", name, f"{best:.1f}", f"{ours / best:.3f}", "slower" if is_slower else ""


def show_verdicts(rows: Sequence[Row]) -> None:
    found = [(label(row), *verdict(row)) for row in rows]
    slower = sum(line[-1] == "slower" for line in found)
    title = f"best peer; slower by more than {SLOWER:.0%} and {SLOWER_US} us: {slower}"
    title += f" of {len(found)}"
    columns = ("M x N x K", "ours us", "best peer", "us", "ours / best peer", "verdict")
    show_table(title, columns, found)


def plot(rows: Sequence[Row], systems: list[str], ceilings: dict[str, float], path: Path) -> None:
    """Write a roofline, and beside it a heat map of ours / the best peer by M and N x K."""
    from inductor_quant.report import pictures

    def dot(row: Row, reply: Row) -> tuple[float, float]:
        return operations(row) / bytes_moved(row), operations(row) / reply["us"][1] / 1e6

    timed = {
        name: [
            dot(row, row["systems"][name]) for row in rows if "us" in row["systems"].get(name, {})
        ]
        for name in systems
    }
    rate = ceilings["bf16_tflops" if is_weight_only(rows[0]["family"]) else "int8_tops"]
    title = f"{rows[0]['measure']}, {len(rows)} shapes"
    roofs = {"measured ceilings": (ceilings["read_tbps"], rate)}
    pictures.roofline(path, {n: dots for n, dots in timed.items() if dots}, roofs, title)
    verdicts = {(f"M = {row['m']}", f"{row['n']} x {row['k']}"): verdict(row)[3] for row in rows}
    ratios = {place: float(text) for place, text in verdicts.items() if text != "-"}
    beside = path.with_stem(f"{path.stem}-ratios")
    if ratios:
        pictures.heat_map(beside, ratios, "ours / the best peer")
    print(f"wrote {path}" + (f" and {beside}" if ratios else ""))


def run(options: argparse.Namespace, names: list[str]) -> tuple[list[Row], dict[str, float]]:
    """(rows of the grid, ceilings). Measures rows missing in the file until the budget is spent."""
    until = time.perf_counter() + options.budget
    grid, rows = grid_of(options), []
    with open_systems(names, WORKER, *worker_arguments(options)) as systems:
        header = {
            "machine": systems[0].ask(do="machine"),
            "ceilings": systems[0].ask(do="ceilings"),
        }
        for reply in header.values():
            if "failed" in reply:
                raise SystemExit(f"{systems[0].name} does not start: {reply['failed']}")
        ceilings = header["ceilings"]
        print(", ".join(header["machine"].values()))
        print("ceilings:", ", ".join(f"{k} {v:.2f}" for k, v in ceilings.items()), flush=True)
        results = Results(options.json, header, ("family", "measure", "m", "n", "k"))
        for m, n, k in track(grid, options.measure):
            request: Row = {"family": options.family, "measure": options.measure}
            request |= {"m": m, "n": n, "k": k}
            row = results.find({**request, "systems": names})
            left = until - time.perf_counter()
            if row is None and left > 0:
                row = request | measure(
                    systems,
                    request,
                    rounds=options.rounds,
                    limit_s=min(left + 60, options.limit),
                    alone=lambda name: options.apart and "autotune" in name,
                )
                results.add(row)
                print(progress(row, ceilings), flush=True)
            if row is not None:
                rows.append(row)
    if len(rows) < len(grid):
        print(f"time budget spent: {len(grid) - len(rows)} of {len(grid)} shapes left out")
    return rows, ceilings


def worker_arguments(options: argparse.Namespace) -> list[str]:
    found = ["--device", options.device]
    if options.deepseek_kernel is not None:
        found += ["--deepseek-kernel", str(options.deepseek_kernel.resolve())]
    return found


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--deepseek-kernel",
        metavar="PATH",
        type=Path,
        help="inference/kernel.py of github.com/deepseek-ai/DeepSeek-V3, for the system 'deepseek'",
    )


def progress(row: Row, ceilings: dict[str, float]) -> str:
    """One line about a row, printed as soon as it is measured."""
    cells = [label(row), *(f"{name} {cell(reply)}" for name, reply in row["systems"].items())]
    best = best_of_ours(row)
    if best is not None:
        cells.append(f"{floor_us(row, ceilings) / best:.0%} of the ceilings")
    return " | ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    grids: dict[str, Any] = json.loads(SHAPES.read_text())
    parser.add_argument("--family", choices=list(DEFAULT_SYSTEMS), default="w8a8")
    parser.add_argument("--measure", choices=MEASURES, help="default: the family's first")
    parser.add_argument(
        "--grid",
        choices=[g for g in grids if g not in ("comment", "acceptance")],
        help="(N, K) of shapes.json; default: the family's acceptance grid",
    )
    parser.add_argument("--m", type=int, nargs="+", help="default: those of the acceptance grid")
    parser.add_argument("--random", type=int, default=0, help="so many random sizes instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random sizes")
    parser.add_argument("--systems", nargs="+", help="default: all that are installed")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget", type=float, default=540, help="seconds for measuring")
    parser.add_argument("--limit", type=float, default=GEMLITE_LIMIT_S, help="seconds per shape")
    parser.add_argument("--apart", action="store_true", help="run max-autotune systems one by one")
    parser.add_argument("--json", type=Path, help="file of results; a later run resumes")
    parser.add_argument("--plot", type=Path, help="write a roofline, and a heat map beside it")
    parser.add_argument("--check", action="store_true", help="exit 1 if a result is wrong")
    parser.add_argument("--tiny", action="store_true", help="two small shapes, to try the script")
    add_worker_options(parser)
    options = parser.parse_args()

    options.measure = options.measure or next(iter(DEFAULT_SYSTEMS[options.family]))
    names = options.systems or default_systems(options.family, options.measure)
    rows, ceilings = run(options, names)
    if not rows:
        print("nothing was measured")
        return 1
    show(rows, names, ceilings)
    if options.plot:
        plot(rows, names, ceilings, options.plot)
    wrong = [
        f"{name} {label(row)}: relative RMS error {reply['error_rms']:.2e}"
        for row in rows
        for name, reply in row["systems"].items()
        if reply.get("wrong")
    ]
    print("\n".join(["wrong results:", *wrong]) if wrong else "every result is right")
    runs_ours = any(name.startswith("ours") for name in names)
    if options.check and runs_ours and not all(best_of_ours(row) for row in rows):
        print("ours did not run on every shape")
        return 1
    return 1 if wrong and options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
