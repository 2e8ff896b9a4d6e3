"""Counts the spellings of int8 activations and epilogues that are recognized, and wrong results.

    python -m tests.support.programs.activation --programs 1000 --near-misses 500

draws functions of an activation, a weight and scales: how the activation is quantized (or quantized
and back), where its zero point is taken out, in which order scales and bias follow. A near miss is
such a function with one thing changed that no W8A8 GEMM means, or that means another one. Each is
compiled up to our pass, and what the rewritten graph computes is compared with the graph as it was.
The number of wrong results must be 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.support.graphs.post_grad import EagerBackend

Tensor = torch.Tensor
f32, bf16, f16, i8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
MATCH, PART, REJECTED, WRONG, CRASH = "match", "partial match", "rejected", "WRONG", "crash"
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (f32, f32, f32, bf16),
    "lead": ((7,), (1,), (2, 3), (33,)),
    "k": (32, 40),
    "n": (24, 40),
    "activation": (
        *("given", "dynamic", "dynamic", "asymmetric", "asymmetric", "asymmetric"),
        *("static", "static_tensor", "fake", "fake", "fake_asymmetric", "fake_bytes"),
    ),
    "statistic": ("amax", "aminmax"),
    "divisor": (127, 127.5, 128),
    "guard": ("clamp_min", "maximum", "where", "add", "none"),
    "applied": ("div", "reciprocal", "one_over"),
    "clamped": ("round_first", "clamp_first", "minimum", "none"),
    "layout": ("rows", "columns"),
    "zero": ("int8", "int32", "float"),
    "removed": ("before", "between", "behind", "added", "prepared"),
    "sums": ("int64", "int32", "float", "given"),
    "column": ("[N]", "[N,1]", "[1,N]", "number", "none"),
    "order": ("row_first", "column_first", "outer"),
    "pre_scale": ("none", "none", "mul", "div"),
    "bias": ("none", "flat", "behind_reshape", "int32"),
    "out": ("none", "bf16", "relu", "int8"),
}
MUTATIONS = (
    *("other_sums", "rows_summed", "other_scale", "sign", "reversed", "no_round", "wide_range"),
    *("half_zero", "per_k", "grouped_weight", "second_user", "squared_sums", "bias_first"),
    *("scale_of_k", "transposed", "nonlinear"),
)


@dataclasses.dataclass(frozen=True)
class Spelling:
    """The value of each of AXES, and a near miss's mutation."""

    choices: tuple[tuple[str, Any], ...]
    mutation: str = ""

    def __getitem__(self, axis: str) -> Any:
        return dict(self.choices)[axis]

    def __str__(self) -> str:
        text = ", ".join(f"{name}={value}".replace("torch.", "") for name, value in self.choices)
        return f"{self.mutation or 'legal'}: {text}"

    @property
    def is_fake(self) -> bool:
        return str(self["activation"]).startswith("fake")

    @property
    def has_zero(self) -> bool:
        return self["activation"] == "asymmetric"


def draw(seed: object, *, mutated: bool = False) -> Spelling:
    rng = random.Random(str(seed))
    drawn = {name: rng.choice(values) for name, values in AXES.items()}
    mutation = rng.choice(MUTATIONS) if mutated else ""
    if mutation in ("other_sums", "rows_summed", "sign", "reversed", "squared_sums"):
        drawn["activation"] = "asymmetric"
    if mutation in ("half_zero", "per_k", "grouped_weight", "no_round", "wide_range", "scale_of_k"):
        drawn["activation"] = rng.choice(["fake", "fake_asymmetric"])
    if mutation == "other_scale":
        drawn["activation"], drawn["removed"] = "asymmetric", rng.choice(["between", "behind"])
    if mutation in ("rows_summed", "transposed"):
        drawn["k"] = drawn["n"] = 40
    if drawn["bias"] == "int32" and (drawn["activation"] in ("asymmetric",) or mutation):
        drawn["bias"] = "flat"
    if drawn["removed"] == "behind" and drawn["column"] == "none":
        drawn["column"] = "[N]"
    return Spelling(tuple(drawn.items()), mutation)


def inputs(spelling: Spelling, seed: object) -> list[Tensor]:
    """x, w [N, K], column scale, bias, a scale per tensor, sums, smoothing factors."""
    generator = torch.Generator().manual_seed(random.Random(str(seed)).randrange(2**31))
    k, n, dtype = spelling["k"], spelling["n"], spelling["dtype"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = (normal(*spelling["lead"], k) + 0.4).to(dtype)
    if spelling["activation"] == "given":
        x = torch.randint(-128, 128, x.shape, dtype=i8, generator=generator)
    w = torch.randint(-128, 128, (n, k), dtype=i8, generator=generator)
    column = torch.rand(n, generator=generator) * 0.02 + 0.001
    bias = normal(n) if spelling["bias"] != "int32" else (normal(n) * 1000).int()
    smooth = torch.rand(k, generator=generator) + 0.5
    other = torch.randint(-128, 128, (n, k), dtype=i8, generator=generator)
    return [x, w, column, bias, torch.tensor([0.04]), w.sum(1).int(), smooth.to(dtype), other]


def function(spelling: Spelling) -> Callable[..., Tensor]:
    """The function to compile."""

    def fn(x: Tensor, w: Tensor, column: Tensor, bias: Tensor, static: Tensor, sums: Tensor,
           smooth: Tensor, other: Tensor) -> Any:  # fmt: skip
        if spelling["activation"] != "given":
            x = {"none": x, "mul": x * smooth, "div": x / smooth}[spelling["pre_scale"]]
        if spelling.is_fake:
            y = _fake(spelling, x, w, column, bias, static)
            return _finished(spelling, y, bias, static)
        q, scale, zero = _quantized(spelling, x, static)
        flat = q.reshape(-1, q.shape[-1])
        b = w.t() if spelling["layout"] == "rows" else w.t().contiguous()
        if spelling.mutation == "transposed":
            b = w
        acc = torch._int_mm(flat, b)
        row = (
            None if scale is None else scale.reshape(-1, 1) if isinstance(scale, Tensor) else scale
        )
        y = _scaled(spelling, acc, w, row, column, zero, bias, sums, other)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        result = _finished(spelling, y, bias, static)
        return (result, acc) if spelling.mutation == "second_user" else result

    return fn


def _scale(spelling: Spelling, x: Tensor) -> Tensor:
    steps = spelling["divisor"]
    if spelling["statistic"] == "amax":
        top = x.abs().amax(-1, keepdim=True)
    else:
        top = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    return _guarded(spelling, top / steps)


def _guarded(spelling: Spelling, scale: Tensor) -> Tensor:
    guard = spelling["guard"]
    if guard == "clamp_min":
        return scale.clamp_min(1e-5)
    if guard == "maximum":
        return torch.maximum(scale, torch.full_like(scale, 1e-5))
    if guard == "where":
        return torch.where(scale == 0, torch.full_like(scale, 1.0), scale)
    return scale + 1e-6 if guard == "add" else scale


def _divided(spelling: Spelling, x: Tensor, scale: Tensor) -> Tensor:
    if spelling["applied"] == "div":
        return x / scale
    if spelling["applied"] == "reciprocal":
        return x * scale.reciprocal()
    return x * (1.0 / scale)


def _integers(spelling: Spelling, x: Tensor, low: float = -128, high: float = 127) -> Tensor:
    """Rounded and clamped, in floats."""
    if spelling.mutation == "wide_range":
        low, high = low * 1.5, high * 1.5
        x = x * 1.5
    how = spelling["clamped"]
    if spelling.mutation == "no_round":
        return x.clamp(low, high)
    if how == "clamp_first":
        return x.clamp(low, high).round()
    if how == "minimum":
        return torch.minimum(torch.maximum(x.round(), x.new_full((), low)), x.new_full((), high))
    # A cast is undefined beyond int8; only an absmax scale stays within it.
    if how == "none" and spelling["divisor"] == 127 and spelling["activation"] == "dynamic":
        return x.round()
    return x.round().clamp(low, high)


def _quantized(spelling: Spelling, x: Tensor, static: Tensor) -> tuple[Tensor, Any, Any]:
    """Integers, scale and zero point (None: none)."""
    kind = spelling["activation"]
    if kind == "given":
        return x, static, None
    if kind == "static":
        return _integers(spelling, (x * 25.0).clamp(-200, 200)).to(i8), 0.04, None
    if kind == "static_tensor":
        return _integers(spelling, _divided(spelling, x, static)).to(i8), static, None
    if kind == "dynamic":
        scale = _scale(spelling, x)
        return _integers(spelling, _divided(spelling, x, scale)).to(i8), scale, None
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    scale = _guarded(spelling, (high - low) / 255).clamp_min(1e-4)
    zero = -128 - low / scale
    if spelling["zero"] != "float":
        zero = zero.round().clamp(-128, 127).to(i8 if spelling["zero"] == "int8" else torch.int32)
    q = _integers(spelling, _divided(spelling, x, scale) + zero)
    return q.to(i8), scale, zero.reshape(-1, 1)


def _column(spelling: Spelling, column: Tensor) -> Any:
    kinds = {"[N]": column, "[N,1]": column[:, None].t(), "[1,N]": column[None], "number": 0.01}
    return kinds.get(spelling["column"])


def _scaled(spelling: Spelling, acc: Tensor, w: Tensor, row: Any, column: Tensor, zero: Any,
            bias: Tensor, sums: Tensor, other: Tensor) -> Tensor:  # fmt: skip
    by_column = _column(spelling, column)
    if spelling["bias"] == "int32":
        acc = acc + bias
    if spelling.mutation == "bias_first":
        return (acc + bias.float()).tanh() * row
    if spelling.mutation == "nonlinear":
        return acc.float().relu() * row
    if zero is not None:
        return _corrected(spelling, acc, w, row, by_column, zero, sums, other)
    factors = [factor for factor in (row, by_column) if factor is not None]
    if spelling["order"] == "column_first":
        factors.reverse()
    if spelling["order"] == "outer" and len(factors) == 2:
        factors = [factors[0] * factors[1]]
    y = acc.float()
    for factor in factors:
        y = y * factor
    return y


def _corrected(spelling: Spelling, acc: Tensor, w: Tensor, row: Tensor, by_column: Any, zero: Any,
               sums: Tensor, other: Tensor) -> Tensor:  # fmt: skip
    total = {
        "int64": lambda: w.sum(1),
        "int32": lambda: w.sum(1, dtype=torch.int32),
        "float": lambda: w.float().sum(1),
        "given": lambda: sums,
    }[spelling["sums"]]()
    if spelling.mutation == "other_sums":
        total = other.sum(1)
    if spelling.mutation == "rows_summed":
        total = w.sum(0)
    if spelling.mutation == "squared_sums":
        total = total * total
    column = 1.0 if by_column is None else by_column
    removed = spelling["removed"]
    wrong = row + 0.25 if spelling.mutation == "other_scale" else row
    if spelling.mutation == "sign":
        return (acc + zero * total) * row * column
    if spelling.mutation == "reversed":
        return (zero * total - acc) * row * column
    if removed == "between":
        return (acc * row - (zero * wrong) * total) * column
    if removed == "behind":
        return acc * row * column - (zero * wrong) * (total * column)
    if removed == "added":
        return (acc.float() + (-zero * total.float())) * row * column
    if removed == "prepared":
        return (acc - (zero * total)) * (row * column)
    return (acc - zero * total) * row * column


def _fake(spelling: Spelling, x: Tensor, w: Tensor, column: Tensor, bias: Tensor,
          static: Tensor) -> Tensor:  # fmt: skip
    kind = spelling["activation"]
    if kind == "fake":
        scale = _scale(spelling, x)
        x = _integers(spelling, _divided(spelling, x, scale)) * scale
        if spelling.mutation == "half_zero":
            x = x - 0.5 * scale
    elif kind == "fake_asymmetric":
        high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
        scale = _guarded(spelling, (high - low) / 255).clamp_min(1e-4)
        zero = (-low / scale).round().clamp(0, 255)
        q = _integers(spelling, x / scale + zero, 0, 255)
        if spelling.mutation == "half_zero":
            q = q * 0.5
        x = (q - zero) * scale
    else:
        q = (x * 25.0 + 100).round().clamp(0, 255).to(torch.uint8)
        x = (q.to(x.dtype) - 100) * 0.04
    if spelling.mutation == "per_k":
        x = x - torch.arange(x.shape[-1], device=x.device)
    if spelling.mutation == "scale_of_k":
        x = x * torch.linspace(0.5, 1.5, x.shape[-1]).to(x.dtype)
    weight = w.to(x.dtype)
    if spelling.mutation == "grouped_weight":
        groups = weight.reshape(weight.shape[0], -1, 8)
        ramp = torch.arange(1, groups.shape[1] + 1)[None, :, None] * 0.01
        weight = (groups * ramp.to(x.dtype)).reshape(weight.shape)
    by_column = None if spelling["column"] == "none" else _column(spelling, column)
    if isinstance(by_column, Tensor):
        by_column = by_column.reshape(-1, 1).to(x.dtype)
    weight = weight if by_column is None else weight * by_column
    if spelling.mutation == "nonlinear":
        weight = weight.relu()
    has_bias = spelling["bias"] == "flat"
    return torch.nn.functional.linear(x, weight, bias.to(x.dtype) if has_bias else None)


def _finished(spelling: Spelling, y: Tensor, bias: Tensor, static: Tensor) -> Tensor:
    if spelling["bias"] in ("flat", "behind_reshape") and not (
        spelling.is_fake and spelling["bias"] == "flat"
    ):
        y = y + bias
    if spelling["out"] == "bf16":
        return y.to(bf16)
    if spelling["out"] == "relu":
        return y.relu()
    if spelling["out"] == "int8":
        return (y / static).round().clamp(-128, 127).to(i8)
    return y


# ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    outcome: str
    detail: str = ""


def verdict(spelling: Spelling, seed: object) -> Verdict:
    """Compiles a spelling, runs the graph before and after, and compares every element."""
    arguments = inputs(spelling, seed)
    torch._dynamo.reset()
    backend = EagerBackend()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(function(spelling), backend=backend, dynamic=False)(*arguments)
    except Exception:
        return Verdict(CRASH, traceback.format_exc(limit=-3))
    [rewrite] = backend.rewrites
    is_w8a8 = [match.family == "w8a8" for match in rewrite.report.matches]
    before, after = (gm(*rewrite.inputs) for gm in (rewrite.before, rewrite.after))
    for want, got in zip(before, after, strict=True):
        problem = difference(spelling, want, got)
        if problem:
            return Verdict(WRONG, problem)
    if not any(is_w8a8):
        return Verdict(REJECTED, ", ".join(map(str, rewrite.report.rejections)))
    left = {str(n.target) for n in rewrite.after.graph.nodes} & {"aten.sum.dim_IntList"}
    return Verdict(PART if left else MATCH)


def difference(spelling: Spelling, want: Tensor, got: Tensor) -> str:
    """A description of two results that differ by more than rounding; "" if they do not."""
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"{got.dtype} {list(got.shape)}, not {want.dtype} {list(want.shape)}"
    if want.dtype in (torch.int32, torch.int64):
        return "" if torch.equal(want, got) else "integers differ"
    # A 16-bit program rounds intermediate values, even before a difference of large terms; we do
    # not, so its results only show gross errors. Three in four programs compute in fp32.
    is_narrow = spelling["dtype"] == bf16 or want.dtype == bf16
    error, size = (want.double() - got.double()).abs(), want.double().square().mean().sqrt()
    if want.dtype == i8:  # one step, if a sum is at a rounding boundary
        share = (error > 0).double().mean().item()
        is_far = share > 0.6 if is_narrow else error.max() > 1 or share > 0.05
        return f"{share:.0%} of the int8 differ, by up to {error.max():.0f}" if is_far else ""
    limit = 0.15 if is_narrow else 2e-5
    worst = (error.max() / size.clamp_min(1e-20)).item()
    return "" if worst <= limit or size == 0 else f"an element differs by {worst:.1e} of the RMS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--near-misses", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    wrong = 0
    for name, count, mutated in (
        ("programs", args.programs, False),
        ("near misses", args.near_misses, True),
    ):
        outcomes: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        shown: Counter[str] = Counter()
        for seed in range(args.seed, args.seed + count):
            spelling = draw((name, seed), mutated=mutated)
            found = verdict(spelling, seed)
            outcomes[found.outcome] += 1
            kinds[f"{spelling.mutation or spelling['activation']}: {found.outcome}"] += 1
            is_bad = found.outcome in (WRONG, CRASH)
            wrong += is_bad
            is_missed = not mutated and found.outcome == REJECTED
            if (is_bad or is_missed) and shown[found.outcome] < 8:
                shown[found.outcome] += 1
                print(f"{found.outcome} {seed}: {spelling}\n    {found.detail}")
        parts = ", ".join(f"{outcome} {n}" for outcome, n in outcomes.most_common())
        print(f"{name}: {count} ({parts})")
        print("   ", ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())))
    print(f"WRONG: {wrong}  ({time.perf_counter() - start:.0f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
