"""Graphs that look like a scaled GEMM but are none.

Each is declined with its code and unchanged, or the walk ends early and the shorter match is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.w8a8 import assert_close
from tests.support.graphs.post_grad import Float64Epilogue, calls, capture
from tests.support.spellings.int8 import bf16, f32, f64, gemm, i64, integers, mm, scale

B, S, M, N = 2, 3, 6, 24
Fn = Callable[..., Any]


# name -> (code, function of a, w and the further inputs, these inputs)
REFUSED: dict[str, tuple[RejectionCode, Fn, list[torch.Tensor]]] = {
    # axes
    "a factor per element": (RejectionCode.SCALE_AXIS, lambda a, w, s: mm(a, w) * s, [scale(M, N)]),
    "a factor per batch": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w).reshape(B, S, N) * s,
        [scale(B, 1, 1)],
    ),
    "a factor per position": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w).reshape(B, S, N) * s,
        [scale(S, 1)],
    ),
    "a factor per batch and column": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w).reshape(B, S, N) * s,
        [scale(B, 1, N)],
    ),
    "a factor that adds a batch": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w) * s,
        [scale(5, 1, 1)],
    ),
    "a factor that adds rows": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a[:1], w) * s,
        [scale(5, 1)],
    ),
    "a factor that adds columns": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w[:, :1]) * s,
        [scale(1, N)],
    ),
    "columns moved before the scale": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w).reshape(N, M) * s,
        [scale(M)],
    ),
    "columns flattened": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w).reshape(-1) * s,
        [scale(1)],
    ),
    "columns in groups": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w).reshape(M, 3, N // 3) * s,
        [scale(3, 1)],
    ),
    "a factor that adds a dimension": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a, w) * s,
        [scale(1, 1, N)],
    ),
    "one value expanded to more rows": (
        RejectionCode.SCALE_AXIS,
        lambda a, w, s: mm(a[:1], w) * s.expand(5, 1),
        [scale(1, 1)],
    ),
    "the square of a column": (
        RejectionCode.SCALE_AXIS,
        lambda a, w: (lambda y: y * y)(mm(a, w[:, :1]).float()),
        [],
    ),
    "the square": (
        RejectionCode.SCALE_AXIS,
        lambda a, w: (lambda y: y * y)(mm(a, w).float()),
        [],
    ),
    # types
    "an fp64 scale": (
        RejectionCode.SCALE_DTYPE,
        lambda a, w, s: mm(a, w) * s,
        [scale(N, dtype=f64)],
    ),
    "an fp64 sum": (RejectionCode.SCALE_DTYPE, lambda a, w, s: mm(a, w).double() * s, [scale(N)]),
    "an integer factor": (RejectionCode.SCALE_DTYPE, lambda a, w: mm(a, w) * 3, []),
    "an integer scale": (
        RejectionCode.SCALE_DTYPE,
        lambda a, w, s: mm(a, w).float() * s,
        [torch.arange(N)],
    ),
    "a bool scale": (
        RejectionCode.SCALE_DTYPE,
        lambda a, w, s: mm(a, w).float() * s,
        [torch.arange(N) > 3],
    ),
    "a cast to int8": (
        RejectionCode.SCALE_DTYPE,
        lambda a, w, s: mm(a, w).to(torch.int8) * s,
        [scale(N)],
    ),
    "infinity": (RejectionCode.SCALE_DTYPE, lambda a, w: mm(a, w).float() * float("inf"), []),
    "nan": (RejectionCode.SCALE_DTYPE, lambda a, w: mm(a, w).float() * float("nan"), []),
    "a number beyond fp32": (RejectionCode.SCALE_DTYPE, lambda a, w: mm(a, w).float() * 1e39, []),
    # no scale
    "the integers": (RejectionCode.NO_SCALE, lambda a, w: mm(a, w), []),
    "integers as floats": (RejectionCode.NO_SCALE, lambda a, w: mm(a, w).float(), []),
    "a factor of one": (RejectionCode.NO_SCALE, lambda a, w: mm(a, w).float() * 2 * 0.5, []),
    "a divisor": (RejectionCode.NO_SCALE, lambda a, w, s: s / mm(a, w), [scale(N)]),
    "a division by nothing": (RejectionCode.SCALE_DTYPE, lambda a, w: mm(a, w) / 0, []),
    "a division by each": (RejectionCode.SCALE_AXIS, lambda a, w, s: mm(a, w) / s, [scale(M, N)]),
    "a floor division": (RejectionCode.NO_SCALE, lambda a, w, s: mm(a, w) // s, [scale(N)]),
    "a subtraction first": (RejectionCode.NO_SCALE, lambda a, w, s: (mm(a, w) - 1) * s, [scale(N)]),
    "a wide integer bias first": (
        RejectionCode.NO_SCALE,
        lambda a, w, b, s: (mm(a, w) + b) * s,
        [torch.arange(N, dtype=i64), scale(N)],
    ),
    "a float bias first": (
        RejectionCode.NO_SCALE,
        lambda a, w, b, s: (mm(a, w).float() + b) * s,
        [scale(N), scale(N)],
    ),
    "a sum": (RejectionCode.NO_SCALE, lambda a, w, s: mm(a, w).sum(-1) * s, [scale(M)]),
    "a transpose": (RejectionCode.NO_SCALE, lambda a, w, s: mm(a, w).t() * s, [scale(M)]),
    "an activation function first": (
        RejectionCode.NO_SCALE,
        lambda a, w, s: mm(a, w).relu() * s,
        [scale(N)],
    ),
    # other users
    "integers returned as well": (
        RejectionCode.EXTRA_USER,
        lambda a, w, s: (lambda y: (y, y * s))(mm(a, w)),
        [scale(N)],
    ),
    "integers scaled twice": (
        RejectionCode.EXTRA_USER,
        lambda a, w, s, t: (lambda y: (y * s, y * t))(mm(a, w)),
        [scale(N), scale(M, 1)],
    ),
    "a scale made of the result": (
        RejectionCode.EXTRA_USER,
        lambda a, w: (lambda y: y * y.abs().amax(-1, keepdim=True))(mm(a, w).float()),
        [],
    ),
    "an outer product with the result": (
        RejectionCode.EXTRA_USER,
        lambda a, w, s: (lambda y: y * (y * s))(mm(a, w).float()),
        [scale(N)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_and_stays_as_it_was(name: str) -> None:
    code, fn, inputs = REFUSED[name]
    _, [rewrite] = capture(fn, [*gemm(), *inputs], dynamic=False)
    assert [rejection.code for rejection in rewrite.report.rejections] == [code]
    assert not rewrite.report.matches
    assert rewrite.is_untouched


# name -> (spec of the part that is taken, function, further inputs)
TAKEN_IN_PART: dict[str, tuple[str, Fn, list[torch.Tensor]]] = {
    "a factor after the bias": (
        "(a=i8, b=i8/channel:f32, out=f32+bias)",
        lambda a, w, s, b, t: (mm(a, w) * s + b) * t,
        [scale(N), scale(N), scale(M, 1)],
    ),
    "a number after the bias": (
        "(a=i8, b=i8/channel:f32, out=f32+bias)",
        lambda a, w, s, b: (mm(a, w) * s + b) * 0.5,
        [scale(N), scale(N)],
    ),
    "a second bias": (
        "(a=i8, b=i8/channel:f32, out=f32+bias)",
        lambda a, w, s, b, c: mm(a, w) * s + b + c,
        [scale(N), scale(N), scale(N)],
    ),
    "a bias per row": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, b: mm(a, w) * s + b,
        [scale(N), scale(M, 1)],
    ),
    "a residual": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, b: mm(a, w) * s + b,
        [scale(N), scale(M, N)],
    ),
    "a residual that adds rows": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, b: mm(a, w) * s + b,
        [scale(N), scale(5, 1, N)],
    ),
    "a bias expanded to more rows": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, b: mm(a[:1], w) * s + b.expand(5, N),
        [scale(N), scale(1, N)],
    ),
    "a bias that is scaled": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, b: torch.add(mm(a, w) * s, b, alpha=2),
        [scale(N), scale(N)],
    ),
    "an fp64 bias": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, b: mm(a, w) * s + b,
        [scale(N), scale(N, dtype=f64)],
    ),
    "an integer bias": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, b: mm(a, w) * s + b,
        [scale(N), torch.arange(N)],
    ),
    "a third scale": (
        "(a=i8/token:f32, b=i8/channel:f32, out=f32)",
        lambda a, w, s, t, u: mm(a, w) * s * t * u,
        [scale(M, 1), scale(N), scale(N)],
    ),
    "a factor per element": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, u: mm(a, w) * s * u,
        [scale(N), scale(M, N)],
    ),
    "a second factor that adds a batch": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, u: mm(a, w) * s * u,
        [scale(N), scale(5, 1, 1)],
    ),
    "an outer product of two second scales": (
        "(a=i8, b=i8/channel:f32, out=f32)",
        lambda a, w, s, t, u: mm(a, w) * s * (t * u),
        [scale(N), scale(M, 1), scale(N)],
    ),
    "a division after the scale": (
        "(a=i8/token:f32, b=i8, out=f32)",
        lambda a, w, s, t: mm(a, w) * s / t,
        [scale(M, 1), scale(N)],
    ),
    "a scaled value used twice": (
        "(a=i8/token:f32, b=i8, out=f32)",
        lambda a, w, s, t: (lambda y: y * t + y.abs())(mm(a, w) * s),
        [scale(M, 1), scale(N)],
    ),
    "a square of the scaled value": (
        "(a=i8/token:f32, b=i8, out=f32)",
        lambda a, w, s: torch.square(mm(a, w) * s),
        [scale(M, 1)],
    ),
    "the scaled value twice": (
        "(a=i8/token:f32, b=i8, out=f32)",
        lambda a, w, s: (lambda y: y + y)(mm(a, w) * s),
        [scale(M, 1)],
    ),
    "a wider result": (
        "(a=i8/token:f32, b=i8, out=bf16)",
        lambda a, w, s: (mm(a, w) * s).to(bf16).to(f32),
        [scale(M, 1)],
    ),
    "an integer result": (
        "(a=i8/token:f32, b=i8, out=f32)",
        lambda a, w, s: (mm(a, w) * s).to(i64),
        [scale(M, 1)],
    ),
    "columns moved after the scale": (
        "(a=i8/token:f32, b=i8, out=f32)",
        lambda a, w, s, t: (mm(a, w) * s).reshape(N, M) * t,
        [scale(M, 1), scale(M)],
    ),
    "numbers whose product leaves fp32": (
        "(a=i8, b=i8, out=f32)",
        lambda a, w: mm(a, w).float() * 1e-30 * 1e-9,
        [],
    ),
    "nan after the scale": (
        "(a=i8/token:f32, b=i8, out=f32)",
        lambda a, w, s: (mm(a, w) * s * float("nan")).isnan().to(f32),
        [scale(M, 1)],
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TAKEN_IN_PART)
def test_the_part_that_is_taken_is_right(name: str) -> None:
    spec, fn, inputs = TAKEN_IN_PART[name]
    result, [rewrite] = capture(fn, [*gemm(), *inputs], dynamic=False)
    assert [str(match.spec) for match in rewrite.report.matches] == [spec]
    [before] = rewrite.before(*rewrite.inputs)
    assert result.dtype == before.dtype
    if not result.is_floating_point() or "wider" in name:
        assert torch.equal(result, before)
        return
    [exact] = Float64Epilogue(rewrite.before).run(*rewrite.inputs)
    assert_close(result, exact.double(), f32, slack=2)


def test_a_rejection_names_the_node_that_stopped_the_walk() -> None:
    _, [rewrite] = capture(lambda a, w, s: mm(a, w) * s, [*gemm(), scale(M, N)])
    [rejection] = rewrite.report.rejections
    assert rejection.node in {node.name for node in rewrite.before.graph.nodes}
    assert str(rejection).startswith("scale_axis at ")
    assert not calls(rewrite.after)


def test_codes_that_may_wrap_around_are_refused_with_the_remedy() -> None:
    def fn(x: Any, q: Any, zero: Any, wide: torch.dtype) -> Any:
        return x @ (q.to(wide) - zero.to(wide)).float().t()

    inputs = torch.randint(-4, 5, (4, 32)).float(), integers(16, 32), integers(16, 1)
    _, [rewrite] = capture(fn, (*inputs, torch.int8))
    [rejection] = rewrite.report.rejections
    assert rejection.code is RejectionCode.COMPUTED_WEIGHT
    assert rejection.detail.endswith("in int8, where it may wrap around: compute it in int32")
    got, [rewrite] = capture(fn, (*inputs, torch.int32))
    assert [match.family for match in rewrite.report.matches] == ["weight_only"]
    assert torch.equal(got, fn(*inputs, torch.int32))


def test_a_weight_that_is_joined_of_several_is_refused_as_such() -> None:
    def fn(x: Any, first: Any, second: Any) -> Any:
        return x @ torch.cat([first, second]).float().t()

    _, [rewrite] = capture(fn, (torch.randn(4, 32), integers(16, 32), integers(8, 32)))
    [rejection] = rewrite.report.rejections
    assert rejection.code is RejectionCode.WEIGHT_FORM
    assert rejection.detail == "several stored elements at its end"
