"""Time every legal configuration of a family's kernels on this GPU, and write its table of choices.

    python examples/tune_family.py --family weight_only --seconds 90 --json a.json   # measure
    python examples/tune_family.py --family weight_only --m 64 256 --json b.json
    python examples/tune_family.py --table a.json b.json                             # no GPU

Each GEMM is compiled as a user's would be, in default mode and with each configuration pinned, and
all are timed in turn (``models_field.py``). The important shapes come first; a run ends with its
seconds, and goes on where the --json file ends. --table merges files of one card and keeps a row
for each GEMM where a configuration takes so much less time than the rules' choice that their
quartiles lie apart: inductor_quant/kernels/configs/<family>_sm<arch>.json, which
``kernels/measured.py`` reads. (tune.py makes the tables with a cost model, for any shape.)"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_systems import Results, Row, show_table
from models_field import DEFAULT, KEY, Case, label, open_field, sweep

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "inductor_quant" / "kernels" / "configs"
CARD = ("gpu", "num_sms", "torch", "triton")
GEMM = ("key", "m", "n", "k")
LEAST_GAIN = 1.02  # of the rules' time over the best's
NEAR, MOST_CHOICES = 1.03, 4  # what a row offers to max-autotune
# family of bench_gemm.py -> grid of shapes.json, and rows: the important ones first
GRIDS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(
        ("weight_only", "weight_only_awq", "weight_only_int8", "weight_only_fp8"),
        ("llama8b", (1, 16, 64, 32, 128, 256)),
    ),
    "weight_only_hqq": ("llama8b", (1, 16, 32)),
    "fp8_block": ("deepseek", (16, 64, 1, 128, 32, 256, 4096)),
    "fp8": ("llama8b", (16, 64, 1, 256, 128, 32, 4096)),
    "w8a8": ("llama8b", (16, 64, 1, 256, 128, 32, 4096)),
}
# Of a table: a family of bench_gemm.py begins with one of them, fp8_block before fp8.
FAMILIES = ("weight_only", "fp8_block", "fp8", "w8a8")


def cases_of(options: argparse.Namespace) -> list[Case]:
    grids = json.loads((HERE / "shapes.json").read_text())
    grid, rows = GRIDS[options.family]
    nks = options.nk or grids[grid]
    return [(options.family, m, n, k) for m in options.m or rows for n, k in nks]


def measure(options: argparse.Namespace) -> int:
    until = time.perf_counter() + options.seconds
    with open_field(options.device, options.workers, "--rules") as (field, machine):
        print(", ".join(map(str, machine.values())), flush=True)
        header = {"machine": machine, "by": "; ".join(commands(options))}
        results = Results(options.json, header, KEY)
        rows = []
        for row in sweep(field, cases_of(options), results, until, most=options.most):
            rows.append(row)
            print(" | ".join(cells(row)), flush=True)
    missing = len(cases_of(options)) - sum(not row["left"] for row in rows)
    print(f"{missing} of {len(cases_of(options))} GEMMs are not swept to the end")
    show_table("sweeps", COLUMNS, map(cells, rows))
    return 0 if rows else 1


def commands(options: argparse.Namespace) -> list[str]:
    """Those that made the file of results, this one last; without what changes no figure."""
    this = ["examples/tune_family.py --family", options.family]
    this += ["--m", *map(str, options.m)] if options.m else []
    this += [f"--nk {n} {k}" for n, k in options.nk or ()]
    path = options.json
    before = json.loads(path.read_text())["by"].split("; ") if path and path.exists() else []
    return list(dict.fromkeys([*before, " ".join(this)]))


COLUMNS = ("GEMM", "timed", "failed", "left", "best", "us", "rule", "rule / best [quartiles]")


def cells(row: Row) -> list[str]:
    timed = [name for name, reply in row["systems"].items() if "us" in reply]
    q = row["ratios"][DEFAULT]
    counts = [len(timed), len(row["systems"]) - len(timed), row["left"]]
    return [
        label([row[name] for name in KEY]),
        *map(str, counts),
        row["best"],
        f"{row['systems'][row['best']]['us'][1]:.2f}",
        row["chosen"][DEFAULT],
        f"{q[1]:.3f} [{q[0]:.3f}, {q[2]:.3f}]",
    ]


# ------------------------------------------------------------------------------------------
# tables


def table_row(row: Row) -> Row | None:
    """The row of a table; None where the rule is as good."""
    best, rule = (row["systems"][name]["us"] for name in (row["best"], DEFAULT))
    if row["ratios"][DEFAULT][1] < LEAST_GAIN or best[2] >= rule[0]:
        return None
    finals = {name: row["systems"][name]["us"] for name in row["finals"]}
    near = [n for n, us in finals.items() if n in pinned(row) and us[1] <= NEAR * best[1]]
    near.sort(key=lambda name: finals[name][1])
    sizes = {name: row[name] for name in GEMM}
    return {**sizes, "choices": near[:MOST_CHOICES], "us": best, "rule_us": rule}


def pinned(row: Row) -> set[str]:
    return set(row["systems"]) - set(row["ratios"])


def merge(paths: Sequence[Path], folder: Path) -> list[str]:
    """Write the table of each family that the files have measured; what was done, in words. Of a
    GEMM the last file's row counts, and GEMMs that they have not keep the table's."""
    files = [json.loads(path.read_text()) for path in paths]
    cards = {tuple(file["machine"][name] for name in CARD) for file in files}
    if len(cards) != 1:
        raise SystemExit(f"the files are of several cards or versions: {sorted(cards)}")
    machine = files[-1]["machine"]
    if machine["gpu"].startswith("virtual") and folder == CONFIGS:
        raise SystemExit(f"{machine['gpu']}: the times are invented; write them with --out")
    done = []
    for family in FAMILIES:
        rows: dict[Any, Row] = {}
        by: list[str] = []
        for file in files:
            mine = [row for row in file["rows"] if family_of(row) == family]
            rows |= {tuple(row[name] for name in GEMM): row for row in mine}
            by += [file["by"]] if mine else []
        if rows:
            done.append(_write(family, machine, rows, by, folder))
    return done


def family_of(row: Row) -> str:
    return next(name for name in FAMILIES if row["family"].startswith(name))


def _write(family: str, machine: Row, rows: dict[Any, Row], by: list[str], folder: Path) -> str:
    from inductor_quant.kernels import measured

    path = folder / f"{family}_sm{machine['arch']}.json"
    kept = {gemm: entry for gemm, row in rows.items() if (entry := table_row(row)) is not None}
    said = f"{path.name}: {len(rows)} GEMMs measured, a rule is beaten in {len(kept)}"
    if path.exists():
        old = json.loads(path.read_text())
        made = {**old["measured"], "num_sms": old["num_sms"]}
        if any(made[name] != machine[name] for name in CARD):
            raise SystemExit(f"{path} is of {made}; sweep its GEMMs again, or remove it")
        others = {tuple(row[name] for name in GEMM): row for row in old["rows"]}
        kept |= {gemm: row for gemm, row in others.items() if gemm not in rows}
        by = [*made["by"].split("; "), *by]
    if not kept:  # a table without rows is not wanted
        path.unlink(missing_ok=True)
        return f"{said}; no table"
    head = {
        "family": family,
        "arch": machine["arch"],
        "num_sms": machine["num_sms"],
        "measured": {name: machine[name] for name in ("gpu", "torch", "triton", "date")}
        | {"by": "; ".join(dict.fromkeys(by))},
    }
    entries = sorted(kept.values(), key=lambda row: [row[name] for name in ("key", "n", "k", "m")])
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    text = json.dumps(head)[:-1] + f',\n "rows": [\n{lines}\n ]}}\n'
    measured.parse(json.loads(text))
    path.write_text(text)
    return f"{said}; {path} has {len(kept)} rows"


def parser_of(description: str | None, family: str) -> argparse.ArgumentParser:
    """Options of a sweep."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--family", choices=list(GRIDS), default=family)
    parser.add_argument("--m", type=int, nargs="+", help="instead of the family's rows")
    parser.add_argument("--nk", type=int, nargs=2, action="append", help="instead of its grid")
    parser.add_argument("--seconds", type=float, default=540, help="the rest is left out")
    parser.add_argument("--json", type=Path, help="results; GEMMs that are there are kept")
    parser.add_argument("--most", type=int, help="configurations of a GEMM, to try the script")
    parser.add_argument("--workers", type=int, help="processes; default: by the cores")
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda")
    return parser


def main() -> int:
    parser = parser_of(__doc__, "weight_only")
    parser.add_argument("--table", type=Path, nargs="+", help="results to merge into tables")
    parser.add_argument("--out", type=Path, default=CONFIGS, help="folder of the tables")
    options = parser.parse_args()
    if options.table is None:
        return measure(options)
    print("\n".join(merge(options.table, options.out)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
