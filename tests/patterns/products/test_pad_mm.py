"""Products that Inductor padded match as if unpadded; others are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import capture
from tests.support.spellings.int8 import bf16, f32

M, N, K = 6, 19, 41
i8 = torch.int8
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


def q(x: torch.Tensor) -> torch.Tensor:
    return x.round().clamp(-128, 127)


def p(x: torch.Tensor, columns: int, rows: int, value: float = 0.0) -> torch.Tensor:
    return F.pad(x, (0, columns, 0, rows), value=value)


def padded_bias(b: torch.Tensor, n: int = 5) -> torch.Tensor:
    return torch.cat([b, b.new_zeros(n)])


TAKEN: dict[str, tuple[str, Fn]] = {
    "rows": ("w8a8", lambda x, w, s, c, b: (p(q(x) * s, 0, 2) @ (w * c).t())[:-2]),
    "columns": ("w8a8", lambda x, w, s, c, b: ((q(x) * s) @ p((w * c).t(), 5, 0))[:, :-5]),
    "k": ("w8a8", lambda x, w, s, c, b: p(q(x) * s, 7, 0) @ p((w * c).t(), 0, 7)),
    "all": (
        "w8a8", lambda x, w, s, c, b: (p(q(x) * s, 7, 2) @ p((w * c).t(), 5, 7))[:-2, :-5]),
    "a bias": (
        "w8a8", lambda x, w, s, c, b: torch.addmm(
            padded_bias(b), p(q(x) * s, 7, 2), p((w * c).t(), 5, 7))[:-2, :-5]),
    "weight only": (
        "weight_only", lambda x, w, s, c, b: (p(x, 7, 2) @ p((w * c).t(), 5, 7))[:-2, :-5]),
    "a batch": (
        "weight_only", lambda x, w, s, c, b: torch.bmm(
            F.pad(x.reshape(2, 3, K), (0, 7, 0, 1)),
            F.pad((w * c).t()[None].expand(2, K, N), (0, 5, 0, 7)))[:, :-1, :-5]),
    "an epilogue": (
        "w8a8", lambda x, w, s, c, b: (p(q(x), 7, 2) @ p(w.t().float(), 5, 7))[:-2, :-5] * s * c.t()
        + b),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TAKEN)
def test_a_padded_product_is_the_product(name: str) -> None:
    family, fn = TAKEN[name]
    result, [rewrite] = capture(fn, inputs())
    [match] = rewrite.report.matches
    assert match.family == family
    assert (match.n, match.k) == (N, K)
    targets = {node.target for node in rewrite.after.graph.nodes}
    assert torch.ops.aten.constant_pad_nd.default not in targets
    assert torch.ops.aten.slice.Tensor not in targets
    [before] = rewrite.before(*rewrite.inputs)
    assert torch.allclose(result, before, rtol=1e-4, atol=1e-4 * before.abs().max().item())


LEFT: dict[str, Fn] = {
    "by another number": lambda x, w, s, c, b: p(x, 7, 0, 1.0) @ p((w * c).t(), 0, 7, 1.0),
    "in front": lambda x, w, s, c, b: F.pad(x, (7, 0)) @ F.pad((w * c).t(), (0, 0, 7, 0)),
    "on both sides": lambda x, w, s, c, b: F.pad(x, (7, 0)) @ p((w * c).t(), 0, 7),
    "and kept": lambda x, w, s, c, b: x @ p((w * c).t(), 5, 0),
    "and kept in part": lambda x, w, s, c, b: (x @ p((w * c).t(), 5, 0))[:, :-4],
    "and its end is taken": lambda x, w, s, c, b: (x @ p((w * c).t(), 5, 0))[:, 5:],
    "and read twice": lambda x, w, s, c, b: (lambda y: (y[:, :-5], y[:, -5:].sum()))(
        x @ p((w * c).t(), 5, 0)),
    "with a bias there": lambda x, w, s, c, b: torch.addmm(
        torch.cat([b, b[:5]]), x, p((w * c).t(), 5, 0))[:, :-5],
    "with a bias of the first row": lambda x, w, s, c, b: torch.addmm(
        torch.cat([b[None], b.new_zeros(M + 1, N)]), p(x, 7, 2), p((w * c).t(), 0, 7))[:-2],
    "with a bias of the first column": lambda x, w, s, c, b: torch.addmm(
        padded_bias(b[:1], N - 1), p(x, 7, 0), p((w * c).t(), 0, 7)),
    "with a bias of all rows": lambda x, w, s, c, b: torch.addmm(
        x.new_ones(M + 2, N) * b.sin(), p(x, 7, 2), p((w * c).t(), 0, 7))[:-2],
    "of floats": lambda x, w, s, c, b: (p(x, 7, 2) @ p(w.float().sin().t(), 5, 7))[:-2, :-5],
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_another_padding_is_left(name: str) -> None:
    _, [rewrite] = capture(LEFT[name], inputs())
    assert not rewrite.report.matches
    assert rewrite.is_untouched
    assert len(rewrite.report.rejections) == 1


@pytest.mark.compiles
def test_what_inductor_pads_is_matched() -> None:
    """On a GPU Inductor pads if a benchmark says so; here always."""

    def fn(x: Any, w: Any, s: Any, c: Any, b: Any) -> Any:
        return F.linear(q(x) * s, w * c, b), (x[:2] @ (w * c).t()).relu()

    def make(device: str) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in inputs(bf16))

    with collect() as report:
        code = generate(fn, make, config={"shape_padding": True, "force_shape_pad": True})
    assert [match.family for match in report.matches] == ["w8a8", "weight_only"], report
    assert "constant_pad_nd" not in code.wrapper
