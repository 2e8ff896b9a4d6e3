"""Time our GEMMs against others: interleaved, each system in its own process, weights beyond L2.

    python examples/bench_gemm.py                              # the formal W8A8 grid, int8 in
    python examples/bench_gemm.py --measure linear --m 16 256  # bf16 in, quantization counted
    python examples/bench_gemm.py --family weight_only         # W4A16, words along K: formal grid
    python examples/bench_gemm.py --family weight_only_int8    # W8A16; or _fp8, _awq, _hqq, _fp16
    python examples/bench_gemm.py --family fp8_block           # FP8 in blocks; or fp8: by rows
    python examples/bench_gemm.py --json gemm.json --plot gemm.png --check --budget 570

Measures that never mix: 'gemm' has quantized inputs (GEMM, scales, bias), 'silu' has SiLU behind
that, 'linear' has bf16 inputs (quantization counted as well). A ratio is time ours / time peer, the
median over interleaved rounds, with its quartiles. The share is the time that the card's measured
ceilings allow over the time of the faster of ours. The systems are those of models_linear.py;
gemlite and torchao take part where they are installed (gemlite tunes itself for 10 to 20 s a shape,
the others compile for 2 to 5 s: --m, --grid and --systems choose a part). Shapes come in an order
in which the first half covers the grid, and rows that are in the --json file are not measured
again."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_systems import (
    Results,
    Row,
    measure,
    open_systems,
    show_ratios,
    show_table,
    track,
)

HERE = Path(__file__).parent
WORKER = HERE / "models_linear.py"
_WEIGHT_ONLY = ["ours", "ours-autotune", "bf16", "stock", "dequantize"]
_COMPILED = ["ours", "ours-autotune", "stock", "stock-autotune"]
_W8A8 = {
    "gemm": [*_COMPILED, "int_mm-bare", "gemlite"],
    "silu": _COMPILED,
    "linear": [*_COMPILED, "bf16", "gemlite", "torchao"],
}
# family -> measure -> systems; those of models_linear.py, where each has its entry
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
    "weight_only": {"linear": [*_WEIGHT_ONLY, "tinygemm", "gemlite"]},
    "weight_only_fp16": {"linear": [*_WEIGHT_ONLY, "gemlite"]},
    "weight_only_awq": {"linear": [*_WEIGHT_ONLY, "tinygemm", "gemlite"]},
    "weight_only_hqq": {"linear": [*_WEIGHT_ONLY, "tinygemm", "gemlite"]},
    "weight_only_int8": {"linear": [*_WEIGHT_ONLY, "int8pack", "gemlite"]},
    "weight_only_fp8": {"linear": [*_WEIGHT_ONLY, "gemlite"]},
}
MEASURES = ("gemm", "silu", "linear")
# Behind a peer is who takes longer by more than the larger of these: a share, and microseconds.
BEHIND, BEHIND_US = 0.03, 0.3
OPTIONAL = ("gemlite", "torchao")  # systems that are packages
GEMLITE_LIMIT_S = 120  # tuning one shape takes it 10 to 20 s; stop waiting after this
TINY = [(17, 64, 64), (32, 64, 128)]
TINY_GROUPS = [(5, 128, 256), (40, 128, 128)]


def is_weight_only(family: str) -> bool:
    return family.startswith("weight_only")


def default_systems(family: str, name: str) -> list[str]:
    missing = [s for s in OPTIONAL if importlib.util.find_spec(s) is None]
    return [system for system in DEFAULT_SYSTEMS[family][name] if system not in missing]


def grid_of(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(M, N, K) to measure; every second M first, so that a part of it covers the range."""
    if options.tiny:
        return TINY_GROUPS if is_weight_only(options.family) else TINY
    grids = json.loads((HERE / "shapes.json").read_text())
    family = "weight_only" if is_weight_only(options.family) else options.family
    formal = grids["formal"][family.removesuffix("_fp16")]
    rows = options.m or formal["M"]
    return [
        (m, n, k) for m in [*rows[::2], *rows[1::2]] for n, k in grids[options.grid or formal["NK"]]
    ]


def label(row: Row) -> str:
    return f"{row['m']}x{row['n']}x{row['k']}"


def operations(row: Row) -> float:
    return 2.0 * row["m"] * row["n"] * row["k"]


def bytes_moved(row: Row) -> int:
    """Operands and output, each once."""
    m, n, k = row["m"], row["n"], row["k"]
    is_wide = is_weight_only(row["family"]) or row["measure"] == "linear"
    return (2 if is_wide else 1) * m * k + weight_bytes(row) + 2 * m * n


def weight_bytes(row: Row) -> int:
    """The weight as it is stored; weight-only with its scales and zero points."""
    n, k = row["n"], row["k"]
    if row["family"] in ("weight_only_int8", "weight_only_fp8"):
        return n * k + 2 * n
    if is_weight_only(row["family"]):  # 4 bits; a scale of 16 and a zero of 4 for each 128
        return n * k // 2 + n * k // 128 * 5 // 2
    return n * k


def floor_us(row: Row, ceilings: dict[str, float]) -> float:
    """The time that the ceilings allow."""
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
    """The times, then the ratios, then what they come to."""
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
    """(ours, the fastest peer, its time, time ours / time peer, "behind" or "")."""
    ours = best_of_ours(row)
    peers = {
        name: reply["us"][1]
        for name, reply in row["systems"].items()
        if "us" in reply and not name.startswith("ours") and not reply["wrong"]
    }
    if is_weight_only(row["family"]):  # bf16 has another weight to read: see the ratios
        peers.pop("bf16", None)
    if ours is None or not peers:
        return ("-",) * 5
    name = min(peers, key=lambda peer: peers[peer])
    best = peers[name]
    is_behind = ours - best > max(BEHIND * best, BEHIND_US)
    return f"{ours:.1f}", name, f"{best:.1f}", f"{ours / best:.3f}", "behind" if is_behind else ""


def show_verdicts(rows: Sequence[Row]) -> None:
    found = [(label(row), *verdict(row)) for row in rows]
    behind = sum(line[-1] == "behind" for line in found)
    title = (
        f"best peer; behind by more than {BEHIND:.0%} and {BEHIND_US} us: {behind} of {len(found)}"
    )
    show_table(title, ("M x N x K", "ours us", "best peer", "us", "ours / it", "verdict"), found)


def plot(rows: Sequence[Row], systems: list[str], ceilings: dict[str, float], path: Path) -> None:
    """A roofline: operations a byte across, TOP/s up."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    intensities = sorted(operations(row) / bytes_moved(row) for row in rows)
    across = [intensities[0] / 2 * 1.1**i for i in range(200) if 1.1**i < 4e4]
    across = [x for x in across if x <= 2 * intensities[-1]]
    figure, axes = plt.subplots(figsize=(9, 6))
    rate = ceilings["bf16_tflops" if is_weight_only(rows[0]["family"]) else "int8_tops"]
    roof = [min(rate, x * ceilings["read_tbps"]) for x in across]
    axes.plot(across, roof, color="black", label="measured ceilings")
    for name in systems:
        timed = [row for row in rows if "us" in row["systems"].get(name, {})]
        xs = [operations(row) / bytes_moved(row) for row in timed]
        ys = [operations(row) / row["systems"][name]["us"][1] / 1e6 for row in timed]
        marker = "o" if name.startswith("ours") else "x"
        axes.scatter(xs, ys, label=name, marker=marker, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TOP/s")
    axes.set_title(f"{rows[0]['measure']}, {len(rows)} shapes")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"wrote {path}")


def run(options: argparse.Namespace, names: list[str]) -> tuple[list[Row], dict[str, float]]:
    """Measure what is not in the file yet, as long as the budget lasts; all rows of the grid."""
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
        help="inference/kernel.py of github.com/deepseek-ai/DeepSeek-V3, which 'deepseek' runs",
    )


def progress(row: Row, ceilings: dict[str, float]) -> str:
    """One line, printed as soon as the shape is measured: the tables come last."""
    cells = [label(row), *(f"{name} {cell(reply)}" for name, reply in row["systems"].items())]
    best = best_of_ours(row)
    if best is not None:
        cells.append(f"{floor_us(row, ceilings) / best:.0%} of the ceilings")
    return " | ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    grids: dict[str, Any] = json.loads((HERE / "shapes.json").read_text())
    parser.add_argument("--family", choices=list(DEFAULT_SYSTEMS), default="w8a8")
    parser.add_argument("--measure", choices=MEASURES, help="default: the first that a family has")
    parser.add_argument("--grid", choices=[g for g in grids if g not in ("comment", "formal")])
    parser.add_argument("--m", type=int, nargs="+")
    parser.add_argument("--systems", nargs="+", help="default: all that are installed")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget", type=float, default=540, help="seconds; the rest is left out")
    parser.add_argument("--limit", type=float, default=GEMLITE_LIMIT_S, help="seconds a shape")
    parser.add_argument("--apart", action="store_true", help="autotune one after the other")
    parser.add_argument("--json", type=Path, help="results; rows that are there are kept")
    parser.add_argument("--plot", type=Path, help="roofline, a PNG")
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
