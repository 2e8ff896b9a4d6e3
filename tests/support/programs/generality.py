"""Counts the dequantization programs that are recognized, and those recognized wrongly.

    python -m tests.support.programs.generality --programs 2000 --near-misses 1000
    python -m tests.support.programs.generality --fields --programs 3000 --near-misses 1500

draws programs and near misses (as many that leave the family, and as many that may not; the second
command: numbers of several fields and packed scales), reads each weight, and compares what was
decoded with what the program computes, for several contents of its inputs. Prints how often each
value of each axis came up, the counts, and the smallest program of each kind of failure. The number
that must be 0 is that of wrong matches.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
import time
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import fx

from inductor_quant.ops.weight_only import dequantize
from inductor_quant.patterns.weights.decode import Weight
from inductor_quant.spec.decisions import Rejection
from tests.support.graphs.reading import read_weight, tensors_of
from tests.support.programs.axes import Axes, histogram
from tests.support.programs.builder import aten
from tests.support.programs.dequantization import Program, draw_program
from tests.support.programs.edits import same_bits
from tests.support.programs.field_misses import field_miss
from tests.support.programs.fields import draw_field_program
from tests.support.programs.mutations import FUNCTION, OTHER, OUTSIDE, near_miss

MOVES = (
    *(aten.view.dtype, aten.permute.default, aten.clone.default, aten.reshape.default),
    *(aten.slice.Tensor, aten.unsqueeze.default),
)
MATCH, REJECTED, WRONG, CRASH = "match", "rejected", "WRONG MATCH", "crash"
ROUNDED = "match in fp64"  # of a mutant: right except for the number of roundings
ALLOWED = {
    OUTSIDE: (REJECTED,),
    OTHER: (REJECTED, MATCH, ROUNDED),
    FUNCTION: (MATCH, ROUNDED, REJECTED),
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of one program. ``cause`` identifies failures of one kind."""

    outcome: str
    cause: str = ""


def verdict(program: Program, seed: object) -> Verdict:
    """Reads the program's weight, and evaluates it for several contents of the inputs."""
    try:
        weight = read_weight(program.output, transposed=program.is_transposed)
    except Exception as error:
        return Verdict(CRASH, f"{type(error).__name__}: {error}")
    if isinstance(weight, Rejection):
        cause = re.sub(r" at \w+", "", str(weight))
        return Verdict(REJECTED, re.sub(r"\d+", "#", re.sub(r"\w+_\d+\b", "node", cause)))
    problem = _difference(program, weight, random.Random(str(seed)))
    if (
        problem
        and program.mutation
        and not _difference_in_fp64(program, weight, random.Random(str(seed)))
    ):
        return Verdict(ROUNDED)
    if problem:
        return Verdict(WRONG, f"{problem}: {weight.format}")
    if not _reads_the_words(weight):
        return Verdict(REJECTED, "decoded to a computed tensor, which stands for itself")
    return Verdict(MATCH)


def _difference(program: Program, weight: Weight, rng: random.Random) -> str:
    """Whether the decoded weight differs from the program's for any contents."""
    for filled in (program, *program.refilled(rng)):
        problem = _compared(weight, filled.values, filled.weight)
        if problem:
            return problem
    return ""


def _difference_in_fp64(program: Program, weight: Weight, rng: random.Random) -> str:
    """The same in fp64: a mutant's values may not fit its dtypes exactly."""
    for filled in (program, *program.refilled(rng)):
        values = filled.run(filled.data, in_fp64=True)
        problem = _compared(weight, values, filled.oriented(values[program.output]))
        if problem:
            return problem
    return ""


def _compared(weight: Weight, values: dict[fx.Node, Any], expected: torch.Tensor) -> str:
    try:
        sources = tensors_of(weight, values)
        # Nothing but the last cast rounds.
        decoded = dequantize(weight.format, sources, torch.float64).to(expected.dtype)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if same_bits(decoded, expected):
        return ""
    return f"{(decoded != expected).double().mean().item():.1%} of W differ"


def _reads_the_words(weight: Weight) -> bool:
    """Whether the quantized values are an input, at most permuted, and not computed."""
    node = weight.sources[weight.format.code.source]
    assert isinstance(node, fx.Node)
    while node.target in MOVES:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "placeholder"


@dataclasses.dataclass
class Measurement:
    """Verdicts on programs, and on near misses that may be formats again or cannot be."""

    axes: list[Axes] = dataclasses.field(default_factory=list)
    counts: dict[str, Counter[str]] = dataclasses.field(
        default_factory=lambda: defaultdict(Counter)
    )
    mutations: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: dict[tuple[str, str], list[Program]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )

    def add_programs(self, seeds: range) -> None:
        for seed in seeds:
            program = draw_program(seed)
            self.axes.append(program.axes)
            self._add("programs", program, verdict(program, seed), (MATCH,))

    def add_straddling(self, seeds: range) -> None:
        """Programs whose words straddle groups: a format in no mixed radix, which may be rejected
        and must not be taken for another one."""
        for seed in seeds:
            program = draw_program(seed, is_mixed_radix=False)
            found = verdict(program, seed)
            self._add("programs in no mixed radix", program, found, (REJECTED, MATCH))

    def add_near_misses(self, seeds: range) -> None:
        for seed in seeds:
            for group, allowed in ALLOWED.items():
                mutant = near_miss(seed, group)
                self.mutations[f"{mutant.mutation.split(' at ')[0]} ({group})"] += 1
                self._add(group, mutant, verdict(mutant, seed), allowed)

    def add_fields(self, seeds: range) -> None:
        for seed in seeds:
            program, _ = draw_field_program(seed)
            self._add("programs of fields", program, verdict(program, seed), (MATCH,))

    def add_field_misses(self, seeds: range) -> None:
        for seed in seeds:
            program = field_miss(seed)
            self.mutations[program.mutation] += 1
            allowed = (REJECTED,) if program.must_reject else (REJECTED, MATCH)
            self._add("near misses of fields", program, verdict(program, seed), allowed)

    def _add(self, group: str, program: Program, found: Verdict, allowed: tuple[str, ...]) -> None:
        self.counts[group][found.outcome] += 1
        if found.outcome not in allowed:
            self.failures[group, f"{found.outcome}: {found.cause}"].append(program)

    @property
    def wrong_matches(self) -> int:
        return sum(counter[WRONG] for counter in self.counts.values())

    def print_counts(self) -> None:
        for group, counter in self.counts.items():
            parts = ", ".join(f"{outcome} {count}" for outcome, count in counter.most_common())
            print(f"{group}: {sum(counter.values())} ({parts})")
        print(f"WRONG MATCHES: {self.wrong_matches}")

    def print_histogram(self) -> None:
        for axis, counter in histogram(self.axes).items():
            parts = ", ".join(f"{value} {count}" for value, count in counter.most_common())
            print(f"{axis:14} {parts}")
        print("mutations:", ", ".join(f"{name} {n}" for name, n in self.mutations.most_common()))

    def print_failures(self, *, has_programs: bool = True) -> None:
        by_size = sorted(self.failures.items(), key=lambda item: -len(item[1]))
        for (group, cause), programs in by_size:
            print(f"\n==== {len(programs)} of {group}: {cause}")
            drawn = [program.axes for program in programs if isinstance(program.axes, Axes)]
            for axis, counter in histogram(drawn).items():
                for value, count in counter.most_common(1):
                    if count == len(programs) > 3 and value != "-":
                        print(f"#    always {axis}={value}")
            kinds = Counter(program.mutation.split(" at ")[0] for program in programs)
            if any(kinds):
                print("#   ", dict(kinds))
            if has_programs:
                print(min(programs, key=lambda program: len(program.values)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--near-misses", type=int, default=1000, help="of either kind")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--fields", action="store_true", help="programs of several fields")
    parser.add_argument("--brief", action="store_true", help="print no programs")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small
    found = Measurement()
    programs = range(args.seed, args.seed + args.programs)
    near_misses = range(args.seed, args.seed + args.near_misses)
    start = time.perf_counter()
    if args.fields:
        found.add_fields(programs)
    else:
        found.add_programs(programs)
        found.add_straddling(programs[: args.programs // 10])
    half = time.perf_counter()
    if args.fields:
        found.add_field_misses(near_misses)
    else:
        found.add_near_misses(near_misses)
    end = time.perf_counter()
    found.print_histogram()
    found.print_failures(has_programs=not args.brief)
    print()
    found.print_counts()
    print(f"programs {half - start:.0f} s, near misses {end - half:.0f} s")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
