"""Compare the configuration that is chosen for a GEMM with the best one of a full sweep.

    python -m examples.tuning.check                                      # W8A8: 12 shapes
    python -m examples.tuning.check --m 16 --seconds 90 --json check.json
    python -m examples.tuning.check --family fp8_block --m 16 64         # a family of GRIDS
    python -m examples.tuning.check --merge a.json b.json                # verdict of several runs

Times every legal configuration of every kernel that takes the GEMM (``examples.tuning.field``),
each compiled as a user's GEMM, then the best ones, default mode and max-autotune again in more
rounds. Default mode may be 10 % slower than the best configuration, max-autotune 3 %; otherwise the
exit status is 1. A run stops after --seconds; the next one resumes from the --json file."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from examples.benchmarks.gemm import SHAPES
from examples.benchmarks.harness import Results, Row, show_table
from examples.tuning.field import AUTOTUNE, DEFAULT, KEY, Case, label, open_field, sweep

# family of examples.benchmarks.gemm -> (grid of shapes.json, M; the important ones first)
GRIDS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(
        ("weight_only", "weight_only_awq", "weight_only_int8", "weight_only_fp8"),
        ("llama8b", (1, 16, 64, 32, 128, 256)),
    ),
    "weight_only_hqq": ("llama8b", (1, 16, 32)),
    "fp8_block": ("deepseek", (16, 64, 1, 128, 32, 256, 4096)),
    "fp8": ("llama8b", (16, 64, 1, 256, 128, 32, 4096)),
    "w8a8": ("llama8b", (16, 256, 4096)),
}
LIMITS = {DEFAULT: 1.10, AUTOTUNE: 1.03}
COLUMNS = ("GEMM", "timed", "left", "best", "us", "default / best", "autotune / best")


def cases_of(options: argparse.Namespace) -> list[Case]:
    grid, ms = GRIDS[options.family]
    nks = options.nk or json.loads(SHAPES.read_text())[grid]
    return [(options.family, m, n, k) for m in options.m or ms for n, k in nks]


def measure(options: argparse.Namespace) -> list[Row]:
    until = time.perf_counter() + options.seconds
    cases, rows = cases_of(options), []
    with open_field(options.device, options.workers) as (field, machine):
        print(", ".join(map(str, machine.values())), flush=True)
        results = Results(options.json, {"machine": machine}, KEY)
        for row in sweep(field, cases, results, until, autotune=True, most=options.most):
            rows.append(row)
            print(" | ".join([*cells(row), *row["chosen"].values()]), flush=True)
    if len(rows) < len(cases):
        print(f"time budget spent: {len(cases) - len(rows)} of {len(cases)} left out")
    return rows


def cells(row: Row) -> list[str]:
    timed = [name for name, reply in row["systems"].items() if "us" in reply]
    ratios = (row["ratios"].get(name) for name in LIMITS)
    return [
        label([row[name] for name in KEY]),
        str(len(timed)),
        str(row["left"]),
        row["best"],
        f"{row['systems'][row['best']]['us'][1]:.2f}",
        *(f"{q[1]:.3f} [{q[0]:.3f}, {q[2]:.3f}]" if q else "-" for q in ratios),
    ]


def judge(rows: Sequence[Row]) -> bool:
    """Print the verdicts. True if every row was swept completely and keeps both limits."""
    kept = bool(rows)
    whole = [row for row in rows if not row["left"]]
    for name, limit in LIMITS.items():
        ratios = [row["ratios"][name][1] for row in whole if name in row["ratios"]]
        worst = max(ratios, default=float("nan"))
        beyond = sum(ratio > limit for ratio in ratios)
        kept = kept and len(ratios) == len(rows) and not beyond
        print(
            f"{name}: at most {worst:.3f} of the best on {len(ratios)} of {len(rows)} shapes; "
            f"{beyond} beyond the limit of {limit}"
        )
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", choices=list(GRIDS), default="w8a8")
    parser.add_argument("--m", type=int, nargs="+", help="instead of those of GRIDS")
    parser.add_argument("--nk", type=int, nargs=2, action="append", help="instead of the grid")
    parser.add_argument("--seconds", type=float, default=540, help="time budget")
    parser.add_argument("--json", type=Path, help="file of results; a later run resumes")
    parser.add_argument("--most", type=int, help="configurations per GEMM, to try the script")
    parser.add_argument("--workers", type=int, help="processes; default: from the CPU count")
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda")
    parser.add_argument("--merge", type=Path, nargs="+", help="judge these files, measure nothing")
    options = parser.parse_args()
    if options.merge:
        files = [json.loads(path.read_text()) for path in options.merge]
        found = {tuple(row[name] for name in KEY): row for file in files for row in file["rows"]}
        rows = list(found.values())
    else:
        rows = measure(options)
    show_table("chosen against best", COLUMNS, map(cells, rows))
    return 0 if judge(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
