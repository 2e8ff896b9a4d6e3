"""Time linear layers of every weight format at random sizes: ours, stock Inductor, bf16.

    python -m examples.benchmarks.formats --seed 1 --json formats.jsonl --plot formats.png
    python -m examples.benchmarks.formats --formats gptq nf4 --m 33 128 --check

For each format and M, N x K is drawn from the layers of real models (``random_linears.MODELS``). x
has the format's dtype; stock compiles the same graph, bf16 is the library's product with the dense
weight. All cells are compiled and compared with fp64 first, then timed in interleaved
rounds. They are in memory together, about 1 GB each: a few ``--m`` at a time.
Prints each cell and the geometric mean of ours / bf16 by format and M. ``--prepacked`` times ours
after ``prepack_``, too. ``--check`` exits with 1 if a result is wrong or ours is slower than stock
by more than 5 %."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from examples.benchmarks.harness import Row, show_table
from examples.benchmarks.random_linears import MODELS, SYSTEMS, Fleet, line
from examples.benchmarks.workers.formats import FORMATS

OURS = ("ours", "ours-prepacked")
ROWS = (1, 4, 16, 33, 64, 128, 256, 512, 2048)
SLOWER = 1.05  # than stock


def draw(
    formats: Sequence[str],
    ms: Sequence[int],
    seed: int,
    elements: Sequence[float] = (4e6, math.inf),
) -> list[Row]:
    """A cell for each format and M, in random order. ``elements``: range of N * K."""
    source, (least, most) = random.Random(seed), elements
    layers = {nk for each in MODELS.values() for nk in each}
    sizes = sorted(nk for nk in layers if least <= nk[0] * nk[1] < most)
    cells: list[Row] = []
    for format in formats:
        fitting = [(n, k) for n, k in sizes if k % FORMATS[format].group == 0]
        for m in ms:
            n, k = source.choice(fitting)
            cells.append({"family": format, "m": m, "n": n, "k": k})
    source.shuffle(cells)
    return cells


def means(rows: Sequence[Row], pair: str = "ours/bf16") -> dict[tuple[str, int], float]:
    """Geometric mean of the ratio of each (format, M); "all" for all formats."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if pair in row["ratios"]:
            for format in (row["family"], "all"):
                found.setdefault((format, row["m"]), []).append(row["ratios"][pair][1])
    return {key: statistics.geometric_mean(values) for key, values in found.items()}


def show(rows: Sequence[Row], formats: Sequence[str], ms: Sequence[int]) -> None:
    for ours in OURS:
        found = means(rows, f"{ours}/bf16")
        lines = [
            [format, *(f"{found[format, m]:.2f}" if (format, m) in found else "-" for m in ms)]
            for format in (*formats, "all")
        ]
        if found:
            show_table(f"time of {ours} / bf16", ("format", *(f"M = {m}" for m in ms)), lines)


def plot(rows: Sequence[Row], formats: Sequence[str], ms: Sequence[int], path: Path) -> None:
    """Write the table as a heat map."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found, names = means(rows), (*formats, "all")
    values = [[found.get((format, m), float("nan")) for m in ms] for format in names]
    figure, axes = plt.subplots(figsize=(1 + 0.7 * len(ms), 1 + 0.3 * len(names)))
    axes.imshow(values, cmap="RdYlGn_r", vmin=0.3, vmax=1.7, aspect="auto")
    axes.set_xticks(range(len(ms)), [str(m) for m in ms])
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="M", title="time of ours / bf16")
    for i, each in enumerate(values):
        for j, value in enumerate(each):
            if value == value:
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7)
    figure.savefig(path, dpi=140, bbox_inches="tight")


def complaint(row: Row) -> str | None:
    """Why ``--check`` fails."""
    for name, reply in row["systems"].items():
        if reply.get("wrong") or (name in OURS and "failed" in reply):
            return f"{name}: {reply}"
    ratio = row["ratios"].get("ours/stock", [0, 0, 0])[1]
    return f"{ratio:.3f} of stock" if ratio > SLOWER else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--m", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--elements", type=float, nargs=2, default=(4e6, math.inf), help="range of N x K"
    )
    parser.add_argument("--shards", type=int, default=4, help="processes of each system")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=600, help="seconds for compiling")
    parser.add_argument("--json", type=Path, help="one line for each cell is added")
    parser.add_argument("--prepacked", action="store_true", help="ours after prepack_, too")
    parser.add_argument("--plot", type=Path, help="write a heat map (PNG)")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    cells = draw(options.formats, options.m, options.seed, options.elements)
    rows, complaints = [], []
    systems = (*SYSTEMS, OURS[1]) if options.prepacked else SYSTEMS
    with Fleet(dict.fromkeys(systems, options.shards), options.device) as fleet:
        machine = fleet.of("ours", 0).ask(do="machine")
        print(", ".join(machine.values()), flush=True)
        for row in fleet.time(fleet.prepare(cells, options.budget), options.rounds):
            rows.append(row)
            found = complaint(row)
            print(line(row), f"| {found}" if found else "", flush=True)
            complaints += [found] if found else []
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({**row, "seed": options.seed, **machine}) + "\n")
    show(rows, options.formats, options.m)
    print(f"{len(rows)} of {len(cells)} cells; {len(complaints)} wrong or slower than stock")
    if options.plot:
        plot(rows, options.formats, options.m, options.plot)
    return int(bool(options.check and (complaints or len(rows) < len(cells))))


if __name__ == "__main__":
    raise SystemExit(main())
