"""Operands that are quantized and dequantized in floats: what can be proved, and what cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.graphs.post_grad import W8A8, calls, capture, count
from tests.support.spellings.int8 import bf16, f32

M, N, K = 6, 24, 40
i8, u8 = torch.int8, torch.uint8
Fn = Callable[..., Any]


def inputs(dtype: torch.dtype = f32) -> list[torch.Tensor]:
    """x, w [N, K], scales of rows and columns, bias."""
    return [
        torch.randn(M, K, dtype=dtype) * 40,
        torch.randint(-128, 128, (N, K), dtype=i8),
        (torch.rand(M, 1) * 0.02 + 0.01).to(dtype),
        (torch.rand(N, 1) * 0.02 + 0.01).to(dtype),
        torch.randn(N, dtype=dtype),
    ]


def q(x: torch.Tensor, low: float = -128, high: float = 127) -> torch.Tensor:
    return x.round().clamp(low, high)


def ramp(*shape: int) -> torch.Tensor:
    """Different values, the same on each call."""
    return torch.linspace(0.1, 1, math.prod(shape)).reshape(shape)


TAKEN: dict[str, tuple[Fn, str]] = {
    "linear": (lambda x, w, s, c, b: F.linear(q(x) * s, w * c, b), ""),
    "no bias": (lambda x, w, s, c, b: F.linear(q(x) * s, w * c), ""),
    "matmul": (lambda x, w, s, c, b: (q(x) * s) @ (w.float() * c).t(), ""),
    "a weight per tensor": (lambda x, w, s, c, b: F.linear(q(x) * s, w * c.mean()), ""),
    "an activation per tensor": (lambda x, w, s, c, b: F.linear(q(x) * s[:1], w * c), ""),
    "a number": (lambda x, w, s, c, b: F.linear(q(x) * 0.02, w * c, b), ""),
    "no scale": (lambda x, w, s, c, b: F.linear(q(x), w.float()), ""),
    "scales behind": (lambda x, w, s, c, b: F.linear(q(x), w.float()) * s * c.t(), ""),
    "divided by a scale": (lambda x, w, s, c, b: F.linear(q(x) / s, w * c, b), ""),
    "divided for all rows": (lambda x, w, s, c, b: F.linear(q(x) / s[:1], w.float()) * s, ""),
    "divided by a number": (lambda x, w, s, c, b: F.linear(q(x) / 51, w * c, b), ""),
    "divided behind": (lambda x, w, s, c, b: F.linear(q(x), w.float()) / (c[0] * s) + b, ""),
    "one behind": (lambda x, w, s, c, b: F.linear(q(x) * s, w.float()) * c.t() + b, ""),
    "through int8": (lambda x, w, s, c, b: F.linear(q(x).to(i8).float() * s, w * c), ""),
    "a zero point": (lambda x, w, s, c, b: F.linear((q(x) - q(s * 99)) * s, w * c), "int"),
    "a float zero point": (lambda x, w, s, c, b: F.linear((q(x) - s * 99) * s, w * c), "float"),
    "bytes": (lambda x, w, s, c, b: F.linear((q(x, 0, 255) - 100) * s, w * c), "const"),
    "bytes without a zero": (lambda x, w, s, c, b: F.linear(q(x, 0, 255) * s, w * c), "const"),
    "three dimensions": (
        lambda x, w, s, c, b: F.linear((q(x) * s).reshape(2, 3, K), w * c, b), ""),
    "a batch": (
        lambda x, w, s, c, b: torch.bmm(
            (q(x) * s).reshape(2, 3, K), (w * c).t()[None].expand(2, K, N)), ""),
    "one row": (lambda x, w, s, c, b: F.linear(q(x[:1]) * s[:1], w * c), ""),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TAKEN)
def test_both_are_taken(name: str) -> None:
    fn, zero = TAKEN[name]
    result, [rewrite] = capture(fn, inputs())
    [match] = rewrite.report.matches
    assert (match.family, match.spec.a.zero) == ("w8a8", zero)
    [call] = calls(rewrite.after)
    assert call.args[0].meta["val"].dtype == i8
    [before] = rewrite.before(*rewrite.inputs)
    assert result.dtype == before.dtype
    assert torch.allclose(result, before, rtol=1e-4, atol=1e-4 * before.abs().max().item())


def test_a_product_that_inductor_spells_as_a_sum_is_taken() -> None:
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        x, w, s, c, _ = inputs(bf16)
        fn = lambda x, w, s, c: F.linear(q(x) * s, w.to(bf16) * c)  # noqa: E731
        result, [rewrite] = capture(fn, [x[:1], w, s[:1], c])
    assert count(rewrite.after, W8A8) == 1
    [before] = rewrite.before(*rewrite.inputs)
    assert torch.allclose(result, before, rtol=0.05, atol=0.05 * before.abs().max().item())


LEFT: dict[str, Fn] = {
    "not rounded": lambda x, w, s, c, b: F.linear(x.clamp(-128, 127) * s, w * c),
    "not clamped": lambda x, w, s, c, b: F.linear(x.round() * s, w * c),
    "clamped too late": lambda x, w, s, c, b: F.linear((x.round() * s).clamp(-128, 127), w * c),
    "half a step": lambda x, w, s, c, b: F.linear((q(x) - 0.5) * s, w * c),
    "a bound between": lambda x, w, s, c, b: F.linear(q(x, -127.5, 127) * s, w * c),
    "nine bits": lambda x, w, s, c, b: F.linear(q(x * 3, -256, 255) * s, w * c),
    "both ranges": lambda x, w, s, c, b: F.linear(q(x * 3, -128, 255) * s, w * c),
    "rounded to bf16": lambda x, w, s, c, b: F.linear(
        x.clamp(-128, 127.9).to(bf16).round().float() * s, w * c
    ),
    "to tenths": lambda x, w, s, c, b: F.linear(
        x.round(decimals=1).clamp(-128, 127) * s, w * c
    ),
    "a scale of k": lambda x, w, s, c, b: F.linear(q(x) * torch.arange(K), w * c),
    "a scale of each": lambda x, w, s, c, b: F.linear(q(x) * (s * c[:1].exp() + x), w * c),
    "two scales": lambda x, w, s, c, b: F.linear(q(x) * s * s.exp(), w * c),
    "groups of the weight": lambda x, w, s, c, b: F.linear(
        q(x) * s, (w.reshape(N, 5, 8) * ramp(N, 5, 1)).reshape(N, K)
    ),
    "a scale of k in the weight": lambda x, w, s, c, b: F.linear(q(x) * s, w * ramp(K)),
    "a weight of floats": lambda x, w, s, c, b: F.linear(q(x) * s, ramp(N, K)),
    "a computed weight": lambda x, w, s, c, b: F.linear(q(x) * s, q(ramp(N, K) * 99) * c),
    "a sum behind the scale": lambda x, w, s, c, b: F.linear(q(x) * s + 1, w * c),
    "the square": lambda x, w, s, c, b: F.linear(q(x) * q(x) * s, w * c),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_proved_is_left(name: str) -> None:
    result, [rewrite] = capture(LEFT[name], inputs())
    assert count(rewrite.after, W8A8) == 0
    [before] = rewrite.before(*rewrite.inputs)
    assert torch.allclose(result, before, rtol=1e-3, atol=1e-3 * before.abs().max().item())


RIGHT_ANYHOW: dict[str, Fn] = {
    "divided by another behind": lambda x, w, s, c, b: F.linear(q(x) / s, w * c) / s,
    "divided behind a bias": lambda x, w, s, c, b: F.linear(q(x), w.float(), b) / s,
    "divided, and a zero point": lambda x, w, s, c, b: F.linear((q(x) - 3) / s, w * c),
    "divided by another": lambda x, w, s, c, b: F.linear(q(x) * s, w * c) / s,
    "a sum of columns behind": lambda x, w, s, c, b: F.linear(q(x) * s, w.float()) - s * w.sum(1),
    "a zero point behind the scale": lambda x, w, s, c, b: F.linear(q(x) * s - 3 * s, w * c),
    "twice": lambda x, w, s, c, b: F.linear((q(x) - 3) * s - 2, w * c),
    "a wide zero point": lambda x, w, s, c, b: F.linear((q(x) - 300) * s, w * c),
    "of the result": lambda x, w, s, c, b: q(F.linear(q(x) * s, w * c) / s) * s,
}


@pytest.mark.parametrize("name", RIGHT_ANYHOW)
def test_whatever_is_taken_the_value_stays(name: str) -> None:
    result, [rewrite] = capture(RIGHT_ANYHOW[name], inputs())
    [before] = rewrite.before(*rewrite.inputs)
    assert torch.allclose(result, before, rtol=1e-4, atol=1e-4 * before.abs().max().item())


def test_a_stored_weight_that_is_written_to_is_left() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        y = F.linear(q(x) * s, w * c)
        w.zero_()
        return y + 1

    x, w, s, c, _ = inputs()
    want = fn(x, w.clone(), s, c)
    got, [rewrite] = capture(fn, [x, w, s, c])
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-2)
    assert count(rewrite.after, W8A8) == 0


def test_k_that_overflows_with_zero_points_is_refused() -> None:
    k = 65794
    fn = lambda x, w, s: F.linear((q(x) - 3) * s, w.float())  # noqa: E731
    args = [torch.randn(2, k), torch.zeros(3, k, dtype=i8), torch.rand(2, 1)]
    _, [rewrite] = capture(fn, args)
    assert count(rewrite.after, W8A8) == 0
