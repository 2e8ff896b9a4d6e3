"""Ids of ``topk`` are read without their clamp, and only those that are within range."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_quant.ops.experts import op
from inductor_quant.ops.scaled_experts import op as scaled
from inductor_quant.patterns.fusion.experts.ids import read_ids_of_topk
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import Experts, bf16

aten = torch.ops.aten
TOKENS, E, TOP = 3, 4, 2
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
torch.manual_seed(0)
q, s = torch.randint(-9, 9, (E, 24, 32), dtype=torch.int8), torch.rand(E, 24, 1).to(bf16)
x, scores = torch.randn(TOKENS, 32).to(bf16), torch.randn(TOKENS, E)


def product(x, ids):
    weight = (q.to(bf16) * s)[ids]
    return torch.bmm(weight, x.repeat_interleave(TOP, 0).unsqueeze(-1)).squeeze(-1)


def clamps(fn, *args) -> int:
    """How many are left; the value is that of ``fn``."""
    want, (got, [rewrite]) = fn(*args), capture(fn, args)
    assert calls(rewrite.after, op)
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)
    return sum(len(calls(rewrite.after, each)) for each in CLAMPS)


def chosen(scores, count: int = TOP) -> torch.Tensor:
    return scores.topk(count, -1)[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.reshape(-1).clamp(0, E - 1),
        lambda ids: ids.clamp(-3, E + 1).reshape(-1),
        lambda ids: ids.clamp_min(0).view(-1).clamp_max(E - 1),
        lambda ids: ids.reshape(-1).clamp(max=E - 1),
    ],
)
def test_a_clamp_that_changes_nothing_goes(change):
    assert clamps(lambda x, scores: product(x, change(chosen(scores))), x, scores) == 0


def test_a_layer_of_transformers():
    pytest.importorskip("transformers.integrations.moe")
    model = Experts("int8", "transformers_batched", e=8)

    def layer(x, scores):
        weights, ids = scores.softmax(-1).topk(2, -1)
        return model(x, ids, weights.to(bf16))

    with torch.no_grad():
        _, [rewrite] = capture(layer, (torch.randn(1, 64).to(bf16), torch.randn(1, 8)))
    assert len(calls(rewrite.after, op)) == 2
    assert not any(calls(rewrite.after, each) for each in CLAMPS)


def above(x, scores):
    return product(x, chosen(scores).reshape(-1).clamp(1, E - 1))


def below(x, scores):
    return product(x, chosen(scores).reshape(-1).clamp(0, E - 2))


def of_more_experts(x, scores):
    """Of which some are another process's."""
    return product(x, chosen(torch.cat([scores, scores], 1)).reshape(-1).clamp(0, E - 1))


def twice(x, scores):
    return product(x, chosen(scores).reshape(-1).clamp(0, E - 1).clamp(0, 1))


def not_of_topk(x, scores):
    return product(x, scores.reshape(-1)[: TOKENS * TOP].long().clamp(0, E - 1))


def of_values(x, scores):
    return product(x, scores.long().topk(TOP, -1)[0].reshape(-1).clamp(0, E - 1))


def second_of_another_op(x, scores):
    return product(x, torch.frexp(scores[:, :TOP])[1].reshape(-1).clamp(0, E - 1))


@pytest.mark.parametrize(
    "miss",
    [above, below, of_more_experts, twice, not_of_topk, of_values, second_of_another_op],
)
def test_near_misses_stay(miss):
    assert clamps(miss, x, 3 * scores) > 0


def test_another_user_keeps_the_clamp():
    def fn(x, scores):
        ids = chosen(scores).reshape(-1).clamp(0, E - 1)
        return product(x, ids), ids

    assert clamps(fn, x, scores) > 0


@pytest.mark.parametrize("is_written", [True, False])
def test_clamped_ids_that_are_written_to_are_read_so(is_written):
    def fn(scores, a, b):
        ids = scores.topk(TOP, -1)[1].clamp(0, E - 1)
        flat = ids.view(-1)
        if is_written:
            ids.fill_(1)
        return scaled(a, b, None, None, None, flat, out_dtype=torch.float32)

    args = scores, q[0, : TOKENS * TOP].contiguous(), q.transpose(1, 2)
    module = make_fx(fn, tracing_mode="fake")(*args)
    assert read_ids_of_topk(module.graph) == (not is_written)
    module.recompile()
    assert torch.equal(module(*args), fn(*args))
