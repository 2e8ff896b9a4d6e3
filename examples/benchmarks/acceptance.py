"""Measure every family's acceptance grid against all peers and judge it by the targets.

    python -m examples.benchmarks.acceptance --json all.json              # everything; resumes
    python -m examples.benchmarks.acceptance --family weight_only --m 1 16 --json a.json
    python -m examples.benchmarks.acceptance --family weight_only --systems gemlite --json b.json
    python -m examples.benchmarks.acceptance --family fp8_block --systems deepseek \\
        --deepseek-kernel kernel.py
    python -m examples.benchmarks.acceptance --merge a.json b.json        # verdicts of both runs

The rows are the 'acceptance' grids of shapes.json. Families, peers and targets are data in
targets.py. Measures: 'gemm' takes quantized inputs (GEMM, scales, bias; FP8 in blocks has no bias),
'silu' adds a bias and SiLU, 'linear' takes bf16 inputs and includes their quantization.

Each system runs in its own process; ours compiles in default mode. Each call runs in a CUDA graph
and reads its weight from memory. Rounds are interleaved. The median of the ratios decides, its
quartiles are printed. The rate is TB/s of the weight if its share of the measured bandwidth is the
larger one, else TFLOP/s (TOP/s) with its share of the measured peak.

Shapes that a target names come first. --family, --measure, --m and --nk select rows, --systems and
--leave-out select systems beside ours. A verdict without all of its figures is 'missing', not
'met'. With --check the exit status is 1 if a target is not met."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from examples.benchmarks import gemm
from examples.benchmarks.harness import (
    Results,
    Row,
    failures,
    is_unknown,
    measure,
    open_systems,
    show_table,
    show_verdicts,
)
from examples.benchmarks.targets import GRIDS, TARGETS, TUNED, judge, systems_of, to_fastest, where

WORKER = gemm.WORKER
KEY = ("family", "measure", "m", "n", "k")
FAMILIES = tuple(dict.fromkeys(grid.family for grid in GRIDS))


def requests(options: argparse.Namespace) -> list[Row]:
    """The selected rows: first those whose shape a target names, then in the order of --m.

    The measures of a shape are adjacent, so that a library that tunes itself does so once.
    """

    def order(row: Row) -> tuple[bool, int]:
        is_named = any(target.nk and target.covers(row) for target in TARGETS)
        return not is_named, options.m.index(row["m"]) if options.m else 0

    rows = [row for row in all_rows(is_tiny=options.tiny) if is_selected(row, options)]
    return rows if options.tiny else sorted(rows, key=order)


def all_rows(*, is_tiny: bool = False) -> list[Row]:
    grids = json.loads(gemm.SHAPES.read_text())
    found = []
    for family in FAMILIES:
        grid = grids["acceptance"][family.removesuffix("_fp16")]
        shapes = [(m, n, k) for m in grid["M"] for n, k in grids[grid["NK"]]]
        if is_tiny:
            has_groups = gemm.is_weight_only(family) or family == "fp8_block"
            shapes = gemm.TINY_GROUPS if has_groups else gemm.TINY
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
    """The systems of a row: ours, and the selected ones among those of the grid."""
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
    """One row per shape, with the systems of all runs. A ratio is always of a single run."""
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
    """The rows of several result files, which must be of the same GPU and torch."""
    files = [json.loads(path.read_text()) for path in paths]
    for name in ("gpu", "torch"):
        values = {str(path): file["machine"][name] for path, file in zip(paths, files, strict=True)}
        if len(set(values.values())) > 1:
            raise SystemExit(f"not measured with the same {name}: {values}")
    return [{"ceilings": file["ceilings"], **row} for file in files for row in file["rows"]]


# ------------------------------------------------------------------------------------------
# tables


def rate(row: Row) -> list[str]:
    """[rate of ours, its share of the ceiling]."""
    us, ceilings = row["systems"]["ours"]["us"][1], row["ceilings"]
    terabytes = gemm.weight_bytes(row) / us / 1e6
    tera = gemm.operations(row) / us / 1e6
    is_wide = gemm.is_weight_only(row["family"])
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
            cells = [gemm.label(row)]
            cells += ["" if reply is None else gemm.cell(reply) for reply in replies]
            pair = to_fastest(row, "ours", [s for s in columns if not s.startswith("ours")])
            low, median, high = pair[0] if pair else (0.0, 0.0, 0.0)
            cells += [pair[1], f"{median:.3f} [{low:.3f}, {high:.3f}]"] if pair else ["-", "-"]
            cells += rate(row) if "us" in row["systems"]["ours"] else ["-", "-"]
            lines.append(cells)
        names = ("M x N x K", *columns, "best peer", "ours / best peer [quartiles]")
        show_table(f"{family} {name}: microseconds", (*names, "rate", "share"), lines)


def conclude(rows: Sequence[Row], wanted: Sequence[Row]) -> bool:
    """Print the verdicts and the ``wanted`` rows that are absent. False if a target is not met."""
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
    """The wanted rows. Measures those missing in the file until the budget is spent."""
    until = time.perf_counter() + options.budget
    names = list(dict.fromkeys(name for row in wanted for name in systems(row, options)))
    arguments = gemm.worker_arguments(options)
    with open_systems(names, WORKER, *arguments) as workers:
        for worker in workers:
            worker.send(do="machine")  # all start at once
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
                limit_s=min(left + 30, gemm.GEMLITE_LIMIT_S),
                alone=lambda name: name == TUNED,
            )
            row |= {"ceilings": ceilings, "seconds": round(time.perf_counter() - began, 1)}
            results.add(row)
            cells = [f"{name} {gemm.cell(reply)}" for name, reply in row["systems"].items()]
            cells += [f"{row['seconds']:.0f} s", *row["systems"]["ours"].get("kernels", [])]
            print(" | ".join([where(row), *cells]), flush=True)
    rows = [{"ceilings": ceilings, **row} for row in merged(results.rows)]
    return [row for row in rows if where(row) in {where(request) for request in wanted}]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file of results; a later run resumes")
    parser.add_argument("--merge", type=Path, nargs="+", help="judge these files, measure nothing")
    parser.add_argument("--family", choices=FAMILIES, nargs="+")
    parser.add_argument("--measure", choices=gemm.MEASURES, nargs="+")
    parser.add_argument("--m", type=int, nargs="+", help="only these M, in this order")
    parser.add_argument("--nk", nargs="+", help="only these N x K, for example 28672x4096")
    parser.add_argument("--systems", nargs="+", help="only these systems beside ours")
    parser.add_argument("--leave-out", nargs="+", help="all systems but these")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tune-all", action="store_true", help="stock-autotune on every W8A8 row")
    parser.add_argument("--budget", type=float, default=1200, help="seconds for measuring")
    parser.add_argument("--brief", action="store_true", help="no tables")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is not met")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    gemm.add_worker_options(parser)
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
