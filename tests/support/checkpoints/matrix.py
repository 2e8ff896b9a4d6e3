"""The compatibility matrix: each library and configuration on tiny random models.

    python -m tests.support.checkpoints.matrix [PART OF A NAME ...] [--archs llama qwen3]
    python -m tests.support.checkpoints.matrix --write    # into inductor_quant/prepare/README.md

A row: GEMMs matched by ``explain`` on the virtual H100 of those expected, graphs and graph breaks,
codes of near misses, and the logits of the whole model against the library's own on the CPU. A
package that is not installed leaves its rows out."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path

import torch

import inductor_quant
from inductor_quant.report import advice
from tests.support.checkpoints import models
from tests.support.checkpoints.libraries import CASES, Case, linears

README = Path(__file__).parents[3] / "inductor_quant/prepare/README.md"
ARCHITECTURES = ("llama", "qwen3")
_BEGIN, _END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"


@dataclasses.dataclass(frozen=True)
class Result:
    """One case on one architecture. ``eager_equal``: the prepared model, not compiled, against the
    library's own, bit for bit."""

    case: Case
    architecture: str
    matched: int
    expected: int
    graphs: int
    breaks: int
    codes: tuple[str, ...]
    kernels: int
    distance: models.Distance
    is_equal: bool

    @property
    def is_good(self) -> bool:
        if not self.case.family:
            return self.matched == 0 and bool(self.codes)
        all_of_it = self.matched == self.kernels == self.expected and (
            self.graphs,
            self.breaks,
        ) == (1, 0)
        return all_of_it and self.distance.rms <= self.case.rms

    def cells(self) -> list[str]:
        rms, kl, top1 = dataclasses.astuple(self.distance)
        note = "prepare_" if self.case.prepares else ""
        return [
            self.case.library,
            self.case.name,
            self.architecture,
            note,
            f"{self.matched} of {self.expected} {self.case.family}".strip(),
            f"{self.graphs}, {self.breaks}",
            ", ".join(self.codes),
            f"{rms:.1e}",
            f"{kl:.0e}",
            f"{top1:.0%}",
        ]


HEADER = ["library", "configuration", "model", "call", "matched", "graphs, breaks", "codes",
          "rms", "KL", "top-1"]  # fmt: skip


def run(case: Case, architecture: str, *, explains: bool = True) -> Result:
    with models.quiet(), case.context():
        # its first call may change a model: a second one is compiled
        reference = models.eager(case.build(models.tiny(architecture)))
        model = models.tiny(architecture)
        expected = len(list(linears(model)))
        model = case.build(model)
        if case.prepares:
            inductor_quant.prepare_(model)
        # code of layers that run between the graphs
        left = ("opaque",) if any(advice.left(model)) else ()
        is_equal = torch.equal(models.eager(model), reference)
        found = models.compiled(model)
        matched = sum(family == case.family for family in found.families)
        kernels = matched
        if explains and case.prepares:
            report = models.explained(model)
            kernels = sum(match.family == case.family for match in report.matches)
    distance = models.Distance.of(found.logits, reference)
    counts = (found.graphs, found.breaks)
    codes = tuple(sorted({*found.codes, *left}))
    return Result(case, architecture, matched, expected, *counts, codes, kernels, distance,
                  is_equal)  # fmt: skip


def is_installed(case: Case) -> bool:
    if case.needs == "stand-in":
        return True
    try:
        importlib.import_module(case.needs)
    except ImportError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--archs", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, bad = [HEADER], []
    for case in CASES:
        if (args.names and not any(name in str(case) for name in args.names)) or not is_installed(
            case
        ):
            continue
        for architecture in args.archs:
            result = run(case, architecture)
            rows.append(result.cells())
            print("ok   " if result.is_good else "BAD  ", " | ".join(rows[-1]), flush=True)
            if not result.is_good:
                bad.append(result)
    table = [f"| {' | '.join(row)} |\n" for row in rows]
    table.insert(1, "|" + "---|" * len(HEADER) + "\n")
    if args.write:
        text = README.read_text(encoding="utf-8")
        before, after = text.split(_BEGIN)[0], text.split(_END)[1]
        README.write_text(before + _BEGIN + "\n" + "".join(table) + "\n" + _END + after, "utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
