"""Random terms subtracted from an integer product; most are no zero points.

    python -m tests.support.programs.zero_point --programs 500

Factors, casts, reshapes and signs are put together at random, with sizes that are equal where that
confuses. The rewritten graph must compute what the graph computes, whatever was taken.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.graphs.post_grad import W8A8, EagerBackend, calls

f32, i8, i32, i64 = torch.float32, torch.int8, torch.int32, torch.int64
Tensor = torch.Tensor
NAMES = ("a", "w", "zero", "row", "column", "sums", "one", "other")


def inputs(rng: random.Random) -> list[Tensor]:
    torch.manual_seed(rng.randrange(2**31))
    m, n, k = rng.choice([(6, 24, 40), (16, 16, 16), (1, 24, 40), (4, 8, 8), (6, 6, 40)])

    def integers(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, dtype=i8)

    return [
        integers(m, k), integers(k, n), integers(m, 1), torch.rand(m, 1) + 0.5,
        torch.rand(n) + 0.5, torch.randint(-5000, 5000, (n,), dtype=i32),
        torch.rand(1) + 0.5, integers(k, n),
    ]  # fmt: skip


LEAVES = (
    *("zero", "zero", "row", "column", "sums", "w.sum", "w.sum", "w.sum1", "other.sum", "one"),
    *("number", "a.sum", "zero_f"),
)
DRAWS = 60  # more than any program has decisions


def leaf(t: dict[str, Tensor], draws: Iterator[int]) -> Any:
    kind = LEAVES[next(draws) % len(LEAVES)]
    if kind == "w.sum":
        return t["w"].sum(0, dtype=i32) if next(draws) % 2 else t["w"].sum(0)
    if kind == "w.sum1":  # of the other axis: only fits where K is N
        return t["w"].sum(1) if t["w"].shape[0] == t["w"].shape[1] else t["w"].sum(0)
    if kind == "other.sum":
        return t["other"].sum(0)
    if kind == "a.sum":
        return t["a"].sum(1, keepdim=True)
    if kind == "zero_f":
        return t["zero"].float()
    return (2, -1, 0.5)[next(draws) % 3] if kind == "number" else t[kind]


def changed(x: Any, draws: Iterator[int]) -> Any:
    """The same values in another shape or type."""
    how = next(draws) % 6
    if not isinstance(x, Tensor):
        return x
    if how == 0:
        return x.to(f32 if x.dtype.is_floating_point or next(draws) % 2 else i64)
    if how == 1:
        return -x
    if how == 2:
        return x.reshape(-1).reshape(x.shape)
    return x[None] if how == 3 and x.dim() == 1 else x


def program(seed: object) -> tuple[Callable[..., Tensor], list[Tensor]]:
    rng = random.Random(str(seed))
    given = inputs(rng)
    drawn = tuple(rng.randrange(60) for _ in range(DRAWS))

    def fn(*tensors: Tensor) -> Tensor:
        draws = iter(drawn)
        t = dict(zip(NAMES, tensors, strict=True))
        y: Any = torch._int_mm(t["a"], t["w"])
        if next(draws) % 3 == 0:
            y = y.float()
        before = [name for name in ("row", "column", "one") if next(draws) % 3 == 0]
        for name in before:
            y = y * t[name]
        term: Any = changed(leaf(t, draws), draws)
        for _ in range(1 + next(draws) % 3):
            term = changed(term * changed(leaf(t, draws), draws), draws)
        for name in before:
            if next(draws) % 5:
                term = term * t[name]
        # of rank 1 over both axes, if it was not
        if not isinstance(term, Tensor) or term.shape[-1:] != y.shape[-1:]:
            term = term * t["w"].sum(0)
        sign = next(draws) % 7
        y = term - y if sign == 0 else y + term if sign < 3 else y - term
        for name in ("row", "column"):
            if name not in before and next(draws) % 5 < 3:
                y = y * t[name]
        return y * 0.5 if not y.dtype.is_floating_point else y

    return fn, given


def outcome(seed: object) -> str:
    fn, given = program(seed)
    torch._dynamo.reset()
    backend = EagerBackend()
    torch.compile(fn, backend=backend, dynamic=False)(*given)
    [rewrite] = backend.rewrites
    [want], [got] = (gm(*rewrite.inputs) for gm in (rewrite.before, rewrite.after))
    if want.dtype != got.dtype or want.shape != got.shape:
        return "WRONG: another type or shape"
    # Both round to fp32 before a difference of large terms: error in units of the largest.
    size = max(want.abs().max().item(), 1e6)
    if not (want.double() - got.double()).abs().max().item() <= 1e-4 * size:
        return f"WRONG by {(want.double() - got.double()).abs().max():.3g} of {size:.3g}"
    found = calls(rewrite.after, W8A8)
    return f"zero={rewrite.report.matches[0].spec.a.zero or 'none'}" if found else "rejected"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.programs):
        found = outcome(seed)
        outcomes[found.split(" by ")[0]] += 1
        if found.startswith("WRONG"):
            print(seed, found)
    print(", ".join(f"{name} {count}" for name, count in outcomes.most_common()))
    return any(name.startswith("WRONG") for name in outcomes)


if __name__ == "__main__":
    sys.exit(main())
