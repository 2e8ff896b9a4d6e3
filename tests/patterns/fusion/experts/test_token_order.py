"""What is computed by expert, and gathered by token, is computed by token."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.ops.experts import op
from inductor_quant.ops.fusion import expert_routing as routing
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import bf16

aten = torch.ops.aten
E, K, N, TOKENS, TOP = 6, 32, 24, 20, 2
torch.manual_seed(0)
# Exact, in any order.
q, s = torch.randint(-3, 4, (E, N, K), dtype=torch.int8), torch.full((E, N, 1), 0.5, dtype=bf16)
bias = torch.randint(-4, 5, (E, N)).to(bf16)


def layer(combine):
    """``combine(products, weights, ids, order)`` by expert, then by token."""

    def fn(x, ids, weights):
        values, order = ids.reshape(-1).sort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        ends = torch.histc(values.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)
        out = torch._grouped_mm(x[order // TOP], (q.to(bf16) * s).transpose(1, 2), ends)
        return combine(out, weights.reshape(-1), values, order)[place].view(-1, TOP, N).sum(1)

    return fn


def weighted(out, weights, ids, order):
    return out * weights[order].unsqueeze(-1)


def masked_and_biased(out, weights, ids, order):
    out = out + bias[ids.clamp(max=E - 1)]
    return (out.float() * weights[order][:, None]).masked_fill((ids >= E)[:, None], 0).to(bf16)


def of_all_rows(out, weights, ids, order):
    return out * weights[order].cumsum(0)[:, None]


def of_columns(out, weights, ids, order):
    return out * weights[order][:N]


def by_place(out, weights, ids, order):
    return out * weights[order.argsort()].unsqueeze(-1)


def rewritten(combine, most=None, monkeypatch=None):
    if most is not None:
        monkeypatch.setattr(routing, "MAX_IDS", most)
    x = torch.randint(-2, 3, (TOKENS, K)).to(bf16)
    ids = torch.randint(0, E + (combine is masked_and_biased), (TOKENS, TOP))
    weights = torch.randint(0, 3, (TOKENS, TOP)).to(bf16)
    got, [rewrite] = capture(layer(combine), (x, ids, weights))
    assert torch.equal(got, layer(combine)(x, ids, weights))
    assert calls(rewrite.after, op)
    return [node.args[0].target for node in calls(rewrite.after, aten.index.Tensor)]


@pytest.mark.parametrize("combine", [weighted, masked_and_biased])
@pytest.mark.parametrize("most", [routing.MAX_IDS, 1])
def test_only_products_and_tables_are_gathered(combine, most, monkeypatch):
    gathered = rewritten(combine, most, monkeypatch)
    assert op in gathered
    # and the ids, for a histogram
    assert len(gathered) == 1 + (combine is masked_and_biased) + (most == 1)


@pytest.mark.parametrize("combine", [of_all_rows, of_columns, by_place])
def test_near_misses_are_right(combine):
    assert op not in rewritten(combine)
