"""The formal grids against their bars: every peer in one run, a verdict for each row.

    python examples/bench_formal.py --json formal.json                    # all of it; resumes
    python examples/bench_formal.py --family weight_only --m 1 16 --json a.json --budget 80
    python examples/bench_formal.py --family weight_only --m 1 16 --systems gemlite --json b.json
    python examples/bench_formal.py --family fp8_block --systems deepseek --deepseek-kernel k.py
    python examples/bench_formal.py --merge a.json b.json                 # judge them as one

Rows are the shapes of shapes.json's ``formal`` grids, in measures that are never compared: 'gemm'
has quantized inputs (GEMM, scales, bias; FP8 in blocks has no bias), 'silu' a bias and SiLU behind
that, on both sides, 'linear' bf16 inputs (the quantization of the activation counted). Families,
peers and bars are data of formal_bars.py. Each system runs in its own process, in default mode on
our side, as a CUDA graph over weights beyond the L2 cache; times are interleaved, the median of the
ratios judges and its quartiles are shown. The rate is TB/s of the weight where reading it is what
takes time, TFLOP/s (TOP/s) else; its share is of what the card showed in the same run.

Shapes that a bar names come first. A run may take a part of the rows (--family, --measure, --m,
--nk) and of the systems (--systems, --leave-out; ours always); files of several runs are merged for
the verdicts. What a row lacks is said as missing, not as met. Exit status 1 if a verdict is not
met, with --check."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import bench_gemm
from bench_systems import (
    Results,
    Row,
    failures,
    is_unknown,
    measure,
    open_systems,
    show_table,
    show_verdicts,
)
from formal_bars import BARS, GRIDS, TUNED, judge, systems_of, to_fastest, where

WORKER = bench_gemm.WORKER
KEY = ("family", "measure", "m", "n", "k")
FAMILIES = tuple(dict.fromkeys(grid.family for grid in GRIDS))


def requests(options: argparse.Namespace) -> list[Row]:
    """The selected rows, those first whose shape a bar names, then in the order of --m. A shape's
    measures follow each other: a library that tunes itself does so once for all."""

    def order(row: Row) -> tuple[bool, int]:
        is_named = any(bar.nk and bar.covers(row) for bar in BARS)
        return not is_named, options.m.index(row["m"]) if options.m else 0

    rows = [row for row in all_rows(is_tiny=options.tiny) if is_selected(row, options)]
    return rows if options.tiny else sorted(rows, key=order)


def all_rows(*, is_tiny: bool = False) -> list[Row]:
    grids = json.loads((bench_gemm.HERE / "shapes.json").read_text())
    found = []
    for family in FAMILIES:
        formal = grids["formal"][family.removesuffix("_fp16")]
        shapes = [(m, n, k) for m in formal["M"] for n, k in grids[formal["NK"]]]
        if is_tiny:
            is_grouped = bench_gemm.is_weight_only(family) or family == "fp8_block"
            shapes = bench_gemm.TINY_GROUPS if is_grouped else bench_gemm.TINY
        measures = dict.fromkeys(grid.measure for grid in GRIDS if grid.family == family)
        for shape in shapes:
            for name in measures:
                row = dict(zip(KEY, (family, name, *shape), strict=True))
                if len(systems_of(row, is_tiny=is_tiny)) > 1:
                    found.append(row)
    return found


def is_selected(row: Row, options: argparse.Namespace) -> bool:
    if options.systems and not set(options.systems) & set(systems(row, options)):
        return False
    return (
        (not options.family or row["family"] in options.family)
        and (not options.measure or row["measure"] in options.measure)
        and (not options.m or row["m"] in options.m)
        and (not options.nk or f"{row['n']}x{row['k']}" in options.nk)
    )


def systems(row: Row, options: argparse.Namespace) -> list[str]:
    """Who takes part in a row: ours, and those of the selected that the grid has there."""
    names = systems_of(row, is_tiny=options.tiny)
    if options.tune_all and row["family"].startswith("w8a8"):
        names = list(dict.fromkeys([*names, TUNED]))
    return [
        name
        for name in names
        if name == "ours"
        or (
            (not options.systems or name in options.systems)
            and (not options.leave_out or name not in options.leave_out)
        )
    ]


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row for each shape: what was timed in any of its runs. A ratio is always of one run."""
    found: dict[tuple, Row] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        if key not in found:
            found[key] = {**row, "systems": dict(row["systems"]), "ratios": dict(row["ratios"])}
            continue
        mine = found[key]
        for name, reply in row["systems"].items():
            if is_unknown(mine["systems"].get(name)):
                mine["systems"][name] = reply
        mine["ratios"] = row["ratios"] | mine["ratios"]
    return list(found.values())


def load(paths: Sequence[Path]) -> list[Row]:
    """The rows of several result files of the same card and torch."""
    files = [json.loads(path.read_text()) for path in paths]
    for name in ("gpu", "torch"):
        values = {str(path): file["machine"][name] for path, file in zip(paths, files, strict=True)}
        if len(set(values.values())) > 1:
            raise SystemExit(f"these were not measured with the same {name}: {values}")
    return [{"ceilings": file["ceilings"], **row} for file in files for row in file["rows"]]


# ------------------------------------------------------------------------------------------
# tables


def rate(row: Row) -> list[str]:
    """[what ours reaches, its share of the ceiling]."""
    us, ceilings = row["systems"]["ours"]["us"][1], row["ceilings"]
    terabytes = bench_gemm.weight_bytes(row) / us / 1e6
    tera = bench_gemm.operations(row) / us / 1e6
    is_wide = bench_gemm.is_weight_only(row["family"])
    peak = ceilings["bf16_tflops" if is_wide else "int8_tops"]
    if terabytes / ceilings["read_tbps"] > tera / peak:
        return [f"{terabytes:.2f} TB/s", f"{terabytes / ceilings['read_tbps']:.0%}"]
    unit = "TOP/s" if row["family"].startswith("w8a8") else "TFLOP/s"
    return [f"{tera:.0f} {unit}", f"{tera / peak:.0%}"]


def show(rows: Sequence[Row]) -> None:
    for family, name in dict.fromkeys((row["family"], row["measure"]) for row in rows):
        mine = [row for row in rows if (row["family"], row["measure"]) == (family, name)]
        columns = list(dict.fromkeys(system for row in mine for system in row["systems"]))
        lines = []
        for row in mine:
            replies = [row["systems"].get(system) for system in columns]
            cells = [bench_gemm.label(row)]
            cells += ["" if reply is None else bench_gemm.cell(reply) for reply in replies]
            pair = to_fastest(row, "ours", [s for s in columns if not s.startswith("ours")])
            low, median, high = pair[0] if pair else (0.0, 0.0, 0.0)
            cells += [pair[1], f"{median:.3f} [{low:.3f}, {high:.3f}]"] if pair else ["-", "-"]
            cells += rate(row) if "us" in row["systems"]["ours"] else ["-", "-"]
            lines.append(cells)
        names = ("M x N x K", *columns, "best peer", "ours / it [quartiles]", "rate", "share")
        show_table(f"{family} {name}: microseconds", names, lines)


def conclude(rows: Sequence[Row], wanted: Sequence[Row]) -> bool:
    """Print every verdict on the rows, and which of the ``wanted`` there are not. Whether none is
    not met."""
    verdicts = list(judge(rows, wanted))
    show_verdicts(verdicts)
    for (name, reason), shapes in failures(rows, where).items():
        print(f"{name}: {reason}: {', '.join(shapes)}")
    for row in rows:
        for name, reply in row["systems"].items():
            if reply.get("wrong"):
                print(f"{name} {where(row)}: WRONG, relative error {reply['error_rms']:.1e}")
    measured = {where(row) for row in rows}
    absent = Counter(
        f"{row['family']} {row['measure']}" for row in wanted if where(row) not in measured
    )
    if absent:
        print("not measured:", ", ".join(f"{n} rows of {name}" for name, n in absent.items()))
    return not any(verdict.met is False for verdict in verdicts)


# ------------------------------------------------------------------------------------------
# measuring


def run(options: argparse.Namespace, wanted: Sequence[Row]) -> list[Row]:
    """Measure the wanted rows that are not in the file, as long as the budget lasts."""
    until = time.perf_counter() + options.budget
    names = list(dict.fromkeys(name for row in wanted for name in systems(row, options)))
    arguments = bench_gemm.worker_arguments(options)
    with open_systems(names, WORKER, *arguments) as workers:
        for worker in workers:
            worker.send(do="machine")  # they start side by side
        machine, *_ = [worker.receive(150) for worker in workers]
        ceilings = workers[0].ask(do="ceilings")
        for reply in (machine, ceilings):
            if "failed" in reply:
                raise SystemExit(f"ours does not start: {reply['failed']}")
        print(", ".join(machine.values()))
        print("ceilings:", ", ".join(f"{k} {v:.2f}" for k, v in ceilings.items()), flush=True)
        results = Results(options.json, {"machine": machine, "ceilings": ceilings}, KEY)
        for request in wanted:
            mine = systems(request, options)
            done = [row for row in merged(results.rows) if where(row) == where(request)]
            left = until - time.perf_counter()
            if (done and set(mine) <= set(done[0]["systems"])) or left <= 0:
                continue
            began = time.perf_counter()
            row = request | measure(
                [worker for worker in workers if worker.name in mine],
                request,
                rounds=options.rounds,
                limit_s=min(left + 30, bench_gemm.GEMLITE_LIMIT_S),
                alone=lambda name: name == TUNED,
            )
            row |= {"ceilings": ceilings, "seconds": round(time.perf_counter() - began, 1)}
            results.add(row)
            cells = [f"{name} {bench_gemm.cell(reply)}" for name, reply in row["systems"].items()]
            cells += [f"{row['seconds']:.0f} s", *row["systems"]["ours"].get("kernels", [])]
            print(" | ".join([where(row), *cells]), flush=True)
    rows = [{"ceilings": ceilings, **row} for row in merged(results.rows)]
    return [row for row in rows if where(row) in {where(request) for request in wanted}]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="results; rows that are there are kept")
    parser.add_argument("--merge", type=Path, nargs="+", help="measure nothing, judge these files")
    parser.add_argument("--family", choices=FAMILIES, nargs="+")
    parser.add_argument("--measure", choices=bench_gemm.MEASURES, nargs="+")
    parser.add_argument("--m", type=int, nargs="+", help="only these M, in this order")
    parser.add_argument("--nk", nargs="+", help="only these N x K, such as 28672x4096")
    parser.add_argument("--systems", nargs="+", help="only these beside ours")
    parser.add_argument("--leave-out", nargs="+", help="systems that do not take part")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tune-all", action="store_true", help="stock max-autotune everywhere")
    parser.add_argument("--budget", type=float, default=1200, help="seconds; the rest is left out")
    parser.add_argument("--brief", action="store_true", help="no tables")
    parser.add_argument("--check", action="store_true", help="exit 1 where a verdict is not met")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    bench_gemm.add_worker_options(parser)
    options = parser.parse_args()

    wanted = requests(options)
    if options.merge:
        rows = [row for row in merged(load(options.merge)) if is_selected(row, options)]
    else:
        rows = run(options, wanted) if wanted else []
    if not rows:
        print("nothing was measured")
        return 1
    if not options.brief:
        show(rows)
    is_met = conclude(rows, wanted)
    is_right = all(not row["systems"]["ours"].get("wrong", True) for row in rows)
    return 1 if options.check and not (is_met and is_right) else 0


if __name__ == "__main__":
    raise SystemExit(main())
