"""A stack of weights with as many rows of each: ``bmm`` of all experts, as in Llama 4."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_quant.ops import experts as op
from inductor_quant.patterns.products import stock
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import FORMATS, Tensors, bf16

E, N, K = 3, 96, 64


class Layer(nn.Module):
    """x [E, T, K] times a stack, in one of the orders of a product."""

    def __init__(self, format: str, form: str = "x_first") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.format, self.form = FORMATS[format], form
        for name, tensor in self.format.make(E, N, K).items():
            self.register_buffer(name, tensor)

    def stack(self) -> torch.Tensor:
        """[E, N, K]."""
        return self.format.dequantize(dict(self.named_buffers()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "weight_first":
            return torch.bmm(self.stack(), x.transpose(1, 2))
        if self.form == "einsum":
            return torch.einsum("etk,enk->etn", x, self.stack())
        if self.form == "grouped":
            return torch._grouped_mm(x, self.stack().transpose(1, 2))
        return torch.bmm(x, self.stack().transpose(1, 2))


def x_of(tokens: int) -> torch.Tensor:
    return torch.randn(E, tokens, K, generator=torch.Generator().manual_seed(tokens)).to(bf16)


def check(layer: nn.Module, x: torch.Tensor) -> tuple[object, object]:
    """Matched, and right; returns offsets and ids."""
    want = layer(x)
    got, [rewrite] = capture(layer, (x,))
    [match] = rewrite.report.matches
    assert (match.family, match.n, match.k) == ("experts", N, K)
    assert (match.site.batch, match.site.experts) == (E, E)  # all weights are read
    [call] = calls(rewrite.after, op.op)
    assert got.shape == want.shape
    assert (got - want).norm() <= 0.02 * want.norm()
    return call.args[2:4]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format: str) -> None:
    offsets, ids = check(Layer(format), x_of(5))
    assert (offsets is not None, ids is not None) == (True, False)


@pytest.mark.parametrize(
    ("format", "form"),
    [
        *((format, "x_first") for format in FORMATS),
        *(("int8", f) for f in ("weight_first", "einsum")),
    ],
)
def test_one_row_of_each(format: str, form: str) -> None:
    """A tile is a row."""
    offsets, ids = check(Layer(format, form), x_of(1))
    assert (offsets is not None, ids is not None) == (False, True)


def test_grouped_without_offsets() -> None:
    check(Layer("int8", "grouped"), x_of(5))


def test_rows_that_are_elsewhere() -> None:
    check(Layer("int8"), torch.randn(7, E, K).to(bf16).transpose(0, 1))


def test_a_symbolic_number_of_rows() -> None:
    x = x_of(7)
    torch._dynamo.mark_dynamic(x, 1, min=2, max=60)
    check(Layer("gptq"), x)


@pytest.mark.parametrize(("is_tuned", "most"), [(True, 256), (False, 64)])
def test_many_rows_of_each_are_left(is_tuned: bool, most: int, monkeypatch) -> None:
    monkeypatch.setattr(stock, "is_tuned", lambda _: is_tuned)
    check(Layer("int4_words"), x_of(most))
    _, [rewrite] = capture(Layer("int4_words"), (x_of(most + 1),))
    assert [rejection.code.value for rejection in rewrite.report.rejections] == ["many_rows"]


def test_a_symbolic_number_of_weights_is_left() -> None:
    """Keys of a cache, say, with a dynamic batch."""
    inputs = x_of(4), q.clone(), s.clone()
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=8)
    _, [rewrite] = capture(lambda x, q, s: torch.bmm(x, (q.to(bf16) * s).mT), inputs)
    assert [rejection.code.value for rejection in rewrite.report.rejections] == ["batched_weight"]


def test_many_weights() -> None:
    codes, scales = (
        torch.randint(-9, 9, (12, N, K), dtype=torch.int8),
        torch.rand(12, N, 1).to(bf16),
    )
    x = torch.randn(12, 3, K).to(bf16)
    want = torch.bmm(x, (codes.to(bf16) * scales).mT)
    got, [rewrite] = capture(lambda x: torch.bmm(x, (codes.to(bf16) * scales).mT), (x,))
    assert calls(rewrite.after, op.op)
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("is_expanded", [True, False])
def test_no_rows(is_expanded: bool) -> None:
    x = x_of(1).expand(E, 0, K) if is_expanded else x_of(0)
    got, [rewrite] = capture(lambda x: torch.bmm(x, (q.to(bf16) * s).mT), (x,))
    assert got.shape == (E, 0, N)
    assert calls(rewrite.after, op.op)


def test_one_weight_is_no_stack() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x[:1], (q[:1].to(bf16) * s[:1]).mT)

    _, [rewrite] = capture(product, (x_of(4),))
    assert [match.family for match in rewrite.report.matches] == ["weight_only"]


def test_the_experts_of_llama4() -> None:
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = llama4.Llama4TextConfig(hidden_size=K, intermediate_size=N, num_local_experts=E)
    layer = llama4.Llama4TextExperts(config)
    stacks = [FORMATS["int8"].make(E, n, k) for n, k in ((2 * N, K), (K, N))]

    def run(layer: nn.Module, x: torch.Tensor, *stored: Tensors) -> torch.Tensor:
        dense = [FORMATS["int8"].dequantize(each).transpose(1, 2) for each in stored]
        named = dict(zip(("gate_up_proj", "down_proj"), dense, strict=True))
        return torch.func.functional_call(layer, named, (x,))

    x = x_of(4).reshape(-1, K)
    want = run(layer, x, *stacks)
    got, [rewrite] = capture(run, (layer, x, *stacks))
    first, second = calls(rewrite.after, op.op)
    assert first.kwargs.get("gate")
    assert not second.kwargs.get("gate")
    assert (got - want).norm() <= 0.02 * want.norm()


# ------------------------------------------------------------------------------------------
# near misses

q, s = torch.randint(-9, 9, (E, N, K), dtype=torch.int8), torch.rand(E, N, 1).to(bf16)
ids = torch.tensor([2, 0, 0, 1])


def shared_codes(x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, (q[0].to(bf16) * s).transpose(1, 2))


def chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x[ids], (q[ids].to(bf16) * s[ids]).transpose(1, 2))


def dense(x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, s.expand(E, N, K).transpose(1, 2))


def both_are_quantized(x: torch.Tensor) -> torch.Tensor:
    w = q.to(bf16) * s
    return torch.bmm(w, w.transpose(1, 2)) * x.amax()


def read_too(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    w = q.to(bf16) * s
    return torch.bmm(x, w.transpose(1, 2)), w


@pytest.mark.parametrize("miss", [shared_codes, chosen, dense, both_are_quantized, read_too])
def test_near_misses_keep_their_value(miss) -> None:
    x = x_of(4)
    want = miss(x)
    got, [rewrite] = capture(miss, (x,))
    assert not calls(rewrite.after, op.op)
    for a, b in zip(
        *((each if isinstance(each, tuple) else (each,)) for each in (got, want)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.compiles
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_kernel_reads_where_rows_end(tokens: int) -> None:
    """A constant of the graph: no kernel computes it."""

    layer = Layer("int4_words")

    def product(x: torch.Tensor, *stored: torch.Tensor) -> torch.Tensor:
        named = dict(zip(dict(layer.named_buffers()), stored, strict=True))
        return F.relu(torch.func.functional_call(layer, named, (x,)))

    def make(device: str) -> tuple[torch.Tensor, ...]:
        likes = (x_of(tokens), *layer.buffers())
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in likes)

    [name] = generate(product, make).kernels
    assert "experts" in name
