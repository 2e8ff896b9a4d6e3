"""What the choice of a configuration loses against the best of a full legal sweep, on this GPU.

    python examples/tune_check.py                           # W8A8: 12 shapes of Llama-3-8B
    python examples/tune_check.py --m 16 --seconds 90 --json check.json     # with 16 rows
    python examples/tune_check.py --family fp8_block --m 16 64      # or any of bench_gemm.py
    python examples/tune_check.py --merge a.json b.json             # verdict of several runs

Every legal configuration of every kernel that takes the GEMM is timed, in turn with the others
(``models_field.py``), each compiled as a user's GEMM would be. Then the best, default mode and
max-autotune are timed again, in more rounds. Default mode may lose 10 % against the best,
max-autotune 3 %. Exit status 1 if one does not keep that. A run ends with its seconds and goes on
where the --json file ends."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from bench_systems import Results, Row, show_table
from models_field import AUTOTUNE, DEFAULT, KEY, label, open_field, sweep
from tune_family import cases_of, parser_of

ROWS = {"w8a8": (16, 256, 4096)}  # else those of tune_family.py
LIMITS = {DEFAULT: 1.10, AUTOTUNE: 1.03}
COLUMNS = ("GEMM", "timed", "left", "best", "us", "default / best", "autotune / best")


def measure(options: argparse.Namespace) -> list[Row]:
    until = time.perf_counter() + options.seconds
    options.m = options.m or ROWS.get(options.family)
    cases, rows = cases_of(options), []
    with open_field(options.device, options.workers) as (field, machine):
        print(", ".join(map(str, machine.values())), flush=True)
        results = Results(options.json, {"machine": machine}, KEY)
        found = sweep(field, cases, results, until, autotune=True, most=options.most)
        for row in found:
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
    """Print the verdicts; whether both are kept, on all that was swept to the end."""
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
    parser = parser_of(__doc__, "w8a8")
    parser.add_argument("--merge", type=Path, nargs="+", help="judge these files, measure nothing")
    options = parser.parse_args()
    if options.merge:
        files = [json.loads(path.read_text()) for path in options.merge]
        found = {tuple(row[name] for name in KEY): row for file in files for row in file["rows"]}
        rows = list(found.values())
    else:
        rows = measure(options)
    show_table("loss of the choice", COLUMNS, map(cells, rows))
    return 0 if judge(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
