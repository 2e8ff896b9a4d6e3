"""The formal W8A8 grid against its bars: every peer in one run, a verdict for each row.

    python examples/bench_formal.py --json formal.json                 # all of it; resumes
    python examples/bench_formal.py --json formal.json --m 16 --budget 80

Rows are the shapes of shapes.json's ``formal`` grid (and one in fp16), each in two measures that
are never compared: 'linear' has bf16 inputs (the quantization of the activation counted), 'gemm'
int8 ones (GEMM, both scales, bias). Peers: bf16 (cuBLAS), stock, which is cuBLASLt's ``_int_mm``
with one kernel for scales and bias, GemLite, and stock max-autotune, by default only at the shapes
that have a bar, because tuning is most of its time. Each system runs in its own process, in default
mode on our side; times are interleaved, a ratio is time ours / time peer of the same round, its
median judges and its quartiles are shown.

What is judged: no row behind its best peer by more than max(3 %, 0.3 us); 'linear' ahead of bf16
from 16 rows on; fewer rows than 16 no slower than 16; and the bars of ``BARS``. What a row lacks is
said as missing, not as met. Exit status 1 if a verdict is not met, with --check."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import bench_gemm
from bench_systems import Results, Row, measure, open_systems, show_table

WORKER = bench_gemm.WORKER
SLACK, SLACK_US = 0.03, 0.3
TUNED = "stock-autotune"
PEERS = {
    "linear": ("bf16", "stock", "gemlite", TUNED),
    "gemm": ("stock", "gemlite", TUNED),
}
KEY = ("family", "measure", "m", "n", "k")
HALF = ("w8a8_fp16", 256, 4096, 4096)  # the row in fp16
BEST = "the best"
# (measure, M, N, K) -> (peer, the largest ratio)
BARS: dict[tuple[str, int, int, int], tuple[str, float]] = {
    ("linear", 4096, 28672, 4096): (TUNED, 0.72),
    ("linear", 4096, 4096, 14336): (TUNED, 0.80),
    ("linear", 256, 4096, 14336): (BEST, 0.80),
    ("linear", 256, 6144, 4096): (BEST, 0.80),
    ("linear", 64, 28672, 4096): (BEST, 0.80),
    ("linear", 16, 6144, 4096): (BEST, 0.75),
    ("gemm", 4096, 28672, 4096): ("stock", 0.74),
    ("gemm", 4096, 4096, 14336): ("stock", 0.74),
    ("gemm", 4096, 6144, 4096): ("stock", 0.74),
    ("gemm", 4096, 4096, 4096): ("stock", 0.74),
    ("gemm", 16, 6144, 4096): ("gemlite", 0.65),
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    what: str
    met: bool | None  # None: a figure is missing
    detail: str = ""

    def __str__(self) -> str:
        met = {True: "met", False: "NOT MET", None: "missing"}[self.met]
        return f"{met}: {self.what}" + (f" ({self.detail})" if self.detail else "")


def requests(options: argparse.Namespace) -> list[Row]:
    """Shapes with a bar come first. A shape's measures follow each other: a library that tunes
    itself does so once for both."""
    if options.tiny:
        shapes = [("w8a8", *shape) for shape in bench_gemm.TINY]
    else:
        grids = json.loads((bench_gemm.HERE / "shapes.json").read_text())
        formal = grids["formal"]["w8a8"]
        rows = [m for m in formal["M"] if m in (options.m or formal["M"])]
        shapes = [("w8a8", m, n, k) for m in rows for n, k in grids[formal["NK"]]]
        shapes += [HALF] if HALF[1] in rows else []
        barred = {tuple(shape) for _, *shape in BARS}
        shapes.sort(key=lambda shape: tuple(shape[1:]) not in barred)
    values = [(family, name, *mnk) for family, *mnk in shapes for name in options.measure]
    return [dict(zip(KEY, value, strict=True)) for value in values]


def peers(row: Row, *, tune_all: bool) -> list[str]:
    """The systems of a row, beside ours."""
    is_tuned = tune_all or _shape(row) in BARS
    return [peer for peer in PEERS[row["measure"]] if peer != TUNED or is_tuned]


def _shape(row: Row) -> tuple[str, int, int, int]:
    return row["measure"], row["m"], row["n"], row["k"]


def best_peer(row: Row) -> str | None:
    timed = {name: r["us"][1] for name, r in row["systems"].items() if "us" in r and name != "ours"}
    return min(timed, key=timed.__getitem__, default=None)


def median_us(row: Row, name: str) -> float | None:
    reply = row["systems"].get(name, {})
    return reply["us"][1] if "us" in reply else None


def judge(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Every verdict that the rows allow, and what is missing for the others."""
    for row in rows:
        where = f"{row['measure']} {bench_gemm.label(row)}"
        best = best_peer(row)
        if median_us(row, "ours") is None or best is None:
            yield Verdict(f"{where} runs, and a peer", met=None)
            continue
        ratio, peer_us = row["ratios"][f"ours/{best}"][1], median_us(row, best)
        assert peer_us is not None
        limit = 1 + max(SLACK, SLACK_US / peer_us)
        yield Verdict(f"{where} not behind", ratio <= limit, f"{ratio:.3f} of {best}")
        if row["measure"] == "linear" and row["m"] >= 16:
            found = row["ratios"].get("ours/bf16")
            detail = f"{found[1]:.3f}" if found else ""
            yield Verdict(f"{where} ahead of bf16", found and found[1] < 1, detail)
        if _shape(row) in BARS and row["family"] == "w8a8":
            yield _bar(row, where, best)
    yield from _few_rows(rows)


def _bar(row: Row, where: str, best: str) -> Verdict:
    peer, most = BARS[_shape(row)]
    what = f"{where} <= {most} x {peer}"
    found = row["ratios"].get(f"ours/{best if peer == BEST else peer}")
    missing = [name for name in PEERS[row["measure"]] if median_us(row, name) is None]
    if found is None or (peer == BEST and missing and found[1] <= most):
        return Verdict(what, None, "without " + ", ".join(missing))
    return Verdict(what, found[1] <= most, f"{found[1]:.3f} [{found[0]:.3f}, {found[2]:.3f}]")


def _few_rows(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Rows below 16 against 16, which cost as much as the smallest tile."""
    times = {(r["family"], *_shape(r)): median_us(r, "ours") for r in rows}
    for (family, name, m, n, k), us in times.items():
        if m >= 16 or us is None:
            continue
        what = f"{name} {m}x{n}x{k} no slower than with 16 rows"
        full = times.get((family, name, 16, n, k))
        if full is None:
            yield Verdict(what, None)
        else:
            limit = full * (1 + max(SLACK, SLACK_US / full))
            yield Verdict(what, us <= limit, f"{us:.1f} and {full:.1f} us")


def show(rows: Sequence[Row], ceilings: dict[str, float]) -> None:
    for name in PEERS:
        mine = [row for row in rows if row["measure"] == name]
        if not mine:
            continue
        lines = []
        for row in mine:
            best = best_peer(row)
            cells = [bench_gemm.label(row) + (" fp16" if row["family"] == HALF[0] else "")]
            cells += [bench_gemm.cell(row["systems"].get(s, {})) for s in ("ours", *PEERS[name])]
            ratio = row["ratios"].get(f"ours/{best}")
            cells += (
                [best or "-", f"{ratio[1]:.3f} [{ratio[0]:.3f}, {ratio[2]:.3f}]"] if ratio else []
            )
            us = median_us(row, "ours")
            if ratio and us:
                cells.append(f"{bench_gemm.operations(row) / us / 1e6:.0f}")
                cells.append(f"{bench_gemm.bytes_moved(row) / us / 1e6:.2f}")
                cells.append(f"{bench_gemm.floor_us(row, ceilings) / us:.0%}")
            lines.append(cells + [""] * (len(PEERS[name]) + 7 - len(cells)))
        columns = ("M x N x K", "ours", *PEERS[name], "best peer", "ours / it [quartiles]")
        show_table(f"{name}: microseconds", (*columns, "TOP/s", "TB/s", "share"), lines)


def run(options: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    until = time.perf_counter() + options.budget
    wanted, rows = requests(options), []
    names = ["ours", *dict.fromkeys(p for r in wanted for p in peers(r, tune_all=options.tune_all))]
    names = [name for name in names if not options.leave_out or name not in options.leave_out]
    with open_systems(names, WORKER, "--device", options.device) as systems:
        machine, ceilings = (systems[0].ask(do=what) for what in ("machine", "ceilings"))
        for reply in (machine, ceilings):
            if "failed" in reply:
                raise SystemExit(f"ours does not start: {reply['failed']}")
        print(", ".join(machine.values()), flush=True)
        results = Results(options.json, {"machine": machine, "ceilings": ceilings}, KEY)
        for request in wanted:
            mine = ["ours", *peers(request, tune_all=options.tune_all)]
            taking_part = [system for system in systems if system.name in mine]
            row = results.find({**request, "systems": [s.name for s in taking_part]})
            left = until - time.perf_counter()
            if row is None and left > 0:
                began = time.perf_counter()
                row = request | measure(
                    taking_part,
                    request,
                    rounds=options.rounds,
                    limit_s=min(left + 30, bench_gemm.GEMLITE_LIMIT_S),
                    alone=lambda name: name == TUNED,
                )
                row["seconds"] = round(time.perf_counter() - began, 1)
                results.add(row)
                spent = f"{row['seconds']:.0f} s"
                print(
                    f"{row['measure']} {bench_gemm.progress(row, ceilings)} | {spent}", flush=True
                )
            if row is not None:
                rows.append(row)
    if len(rows) < len(wanted):
        print(f"time budget spent: {len(wanted) - len(rows)} of {len(wanted)} rows left out")
    return rows, ceilings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="results; rows that are there are kept")
    parser.add_argument("--m", type=int, nargs="+", help="only these M of the grid")
    parser.add_argument("--measure", choices=list(PEERS), nargs="+", default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tune-all", action="store_true", help="stock max-autotune everywhere")
    parser.add_argument("--leave-out", nargs="+", help="systems that do not take part")
    parser.add_argument("--budget", type=float, default=1200, help="seconds; the rest is left out")
    parser.add_argument("--check", action="store_true", help="exit 1 where a verdict is not met")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two small shapes, to try the script")
    options = parser.parse_args()

    rows, ceilings = run(options)
    if not rows:
        print("nothing was measured")
        return 1
    show(rows, ceilings)
    verdicts = list(judge(rows))
    count = sum(verdict.met is True for verdict in verdicts)
    print(f"\n{count} of {len(verdicts)} verdicts met; the others:")
    print("\n".join(str(verdict) for verdict in verdicts if not verdict.met) or "none")
    print("\n".join(str(v) for v in verdicts if v.met and "<=" in v.what))
    for row in rows:
        for name, reply in row["systems"].items():
            if reply.get("wrong") or "failed" in reply:
                reason = reply.get("failed") or f"WRONG, relative error {reply['error_rms']:.1e}"
                print(f"{name} {row['measure']} {bench_gemm.label(row)}: {reason}")
    is_wrong = any(r["systems"]["ours"].get("wrong", True) for r in rows)
    return 1 if options.check and (is_wrong or any(v.met is False for v in verdicts)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
