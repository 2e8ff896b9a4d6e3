"""Time our GEMMs against others: interleaved, each system in its own process, weights beyond L2.

    python examples/bench_gemm.py                              # the formal W8A8 grid, int8 in
    python examples/bench_gemm.py --measure linear --m 16 256  # bf16 in, quantization counted
    python examples/bench_gemm.py --json gemm.json --budget 300

Two measures that never mix: 'gemm' has quantized inputs (GEMM, scales, bias), 'linear' has bf16
inputs (quantization counted as well). A ratio is time ours / time peer, the median over interleaved
rounds, with its quartiles. The share is the time that the card's measured ceilings allow over our
time."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEFAULT_SYSTEMS = {
    "gemm": ["ours", "ours-autotune", "stock", "stock-autotune"],
    "linear": ["ours", "ours-autotune", "stock", "stock-autotune", "bf16"],
}


class System:
    """A worker process: see bench_systems.py."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "bench_systems.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": "the process died"}

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.receive()


def quartiles(values: list[float]) -> list[float]:
    """[first quartile, median, third quartile]."""
    if len(values) == 1:
        return values * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def bench_shape(
    systems: list[System], measure: str, m: int, n: int, k: int, rounds: int
) -> dict[str, Any]:
    """Times of every system for one shape, and the ratios of the first to the others."""
    for system in systems:  # compile side by side, time one after the other
        system.send(do="prepare", measure=measure, m=m, n=n, k=k)
    prepared = {system.name: system.receive() for system in systems}
    alive = [system for system in systems if "failed" not in prepared[system.name]]
    times: dict[str, list[float]] = {system.name: [] for system in alive}
    for _ in range(rounds):
        for system in alive:
            times[system.name].append(system.ask(do="time")["us"])
    row: dict[str, Any] = {"measure": measure, "m": m, "n": n, "k": k, "systems": {}}
    for name, info in prepared.items():
        row["systems"][name] = {**info, "us": quartiles(times[name])} if name in times else info
    row["ratios"] = {
        f"{ours}/{peer}": quartiles([a / b for a, b in zip(times[ours], times[peer], strict=True)])
        for ours in times
        for peer in times
        if ours.startswith("ours") and not peer.startswith("ours")
    }
    return row


def floor_us(row: dict[str, Any], ceilings: dict[str, float]) -> float:
    """The time that the ceilings allow: bytes of operands and output, or operations."""
    m, n, k = row["m"], row["n"], row["k"]
    a_bytes = 1 if row["measure"] == "gemm" else 2
    moved = a_bytes * m * k + n * k + 2 * m * n
    return max(
        moved / ceilings["read_tbps"] / 1e6, 2 * m * n * k / 1e6 / ceilings["int8_tops_peak"]
    )


def show(row: dict[str, Any], ceilings: dict[str, float]) -> str:
    m, n, k = row["m"], row["n"], row["k"]
    cells = [f"{row['measure']:6} {m:5} {n:6} {k:6}"]
    for name, info in row["systems"].items():
        cells.append(f"{name} {info['us'][1]:.1f}" if "us" in info else f"{name} fails")
    best = min(
        (i["us"][1] for s, i in row["systems"].items() if "us" in i and "ours" in s), default=0
    )
    if best:
        cells.append(f"{2 * m * n * k / best / 1e6:.0f} TOP/s")
        cells.append(f"{floor_us(row, ceilings) / best:.0%} of the ceiling")
    for pair, (low, median, high) in row["ratios"].items():
        cells.append(f"{pair} {median:.3f} [{low:.3f}, {high:.3f}]")
    return " | ".join(cells)


def main() -> None:
    grids = json.loads((HERE / "shapes.json").read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measure", choices=list(DEFAULT_SYSTEMS), default="gemm")
    parser.add_argument("--grid", choices=[g for g in grids if g not in ("comment", "formal")])
    parser.add_argument("--m", type=int, nargs="+")
    parser.add_argument("--systems", nargs="+")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget", type=float, default=570, help="seconds; the rest is skipped")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    began = time.perf_counter()
    formal = grids["formal"]["w8a8"]
    shapes = [
        (m, n, k) for n, k in grids[options.grid or formal["NK"]] for m in options.m or formal["M"]
    ]
    systems = [System(name) for name in options.systems or DEFAULT_SYSTEMS[options.measure]]
    ceilings = systems[0].ask(do="ceilings")
    # Nothing that we can call reaches the int8 units' peak, so the datasheet's stands for it.
    ceilings["int8_tops_peak"] = 1979.0
    print("ceilings", {name: round(value, 2) for name, value in ceilings.items()}, flush=True)
    rows = []
    for m, n, k in shapes:
        if time.perf_counter() - began > options.budget:
            print(f"time budget spent: {len(shapes) - len(rows)} of {len(shapes)} shapes left out")
            break
        rows.append(bench_shape(systems, options.measure, m, n, k, options.rounds))
        print(show(rows[-1], ceilings), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"ceilings": ceilings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
