"""Sorts of experts' ids become counts, or narrow; sums over the experts of a token are marked."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.ops.experts import op
from inductor_quant.ops.fusion import expert_routing as ops
from inductor_quant.options import Options
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import Experts, bf16

aten = torch.ops.aten
E, K, N = 6, 32, 24
SORTS = (aten.sort.default, aten.sort.stable)
torch.manual_seed(0)
# Exact, in any order.
q, s = torch.randint(-3, 4, (E, N, K), dtype=torch.int8), torch.full((E, N, 1), 0.5, dtype=bf16)


def ends_of(values):
    return torch.histc(values.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)


def ends_cast(values):
    return torch.histc(values.int().float(), E, 0, E - 1).cumsum(0).to(torch.int32)


def product(x, order, ends):
    return torch._grouped_mm(x[order], (q.to(bf16) * s).transpose(1, 2), ends)


def scattered(x, ids):
    """As ``transformers``: the inverse is written by the order."""
    values, order = ids.sort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    out = product(x, order, ends_of(values))
    return out.masked_fill((values >= E)[:, None], 0)[place]


def sorted_twice(x, ids):
    values, order = torch.sort(ids, stable=True)
    return product(x, order, ends_of(values))[order.argsort()]


def counted_in_floats(x, ids):
    values, order = ids.sort(stable=True)
    return product(x, order, ends_cast(values)), values


def order_alone(x, ids):
    values, order = ids.sort(stable=True)
    return product(x, order, ends_of(values)), values


def routed(fn, count: int = 40, ids=None, dynamic: bool = False):
    """The targets of the rewritten graph, whose value is that of ``fn``."""
    x = torch.randint(-2, 3, (count, K)).to(bf16)
    ids = torch.randint(0, E, (count,)) if ids is None else ids
    for each in (x, ids) if dynamic else ():
        torch._dynamo.mark_dynamic(each, 0, min=2, max=60)
    got, [rewrite] = capture(fn, (x, ids))
    want = fn(x, ids)
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert torch.equal(one, other)
    assert calls(rewrite.after, op)
    return rewrite.after


def sorts(graph) -> list[torch.dtype]:
    return [node.args[0].meta["val"].dtype for each in SORTS for node in calls(graph, each)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fn", [scattered, sorted_twice, counted_in_floats])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_few_ids_are_counted(fn, dtype):
    graph = routed(fn, ids=torch.randint(0, E, (40,), dtype=dtype))
    assert not sorts(graph)
    assert not calls(graph, aten.histc.default)
    assert len(calls(graph, ops.places_op)) == len(calls(graph, ops.order_op)) == 1


def test_ids_of_other_processes_are_last():
    ids = torch.randint(0, E + 3, (64,))
    assert not sorts(routed(scattered, 64, ids))


def test_many_ids_are_sorted_by_their_last_bytes(monkeypatch):
    monkeypatch.setattr(ops, "MAX_IDS", 39)
    graph = routed(scattered, ids=torch.randint(0, E + 200, (40,)))
    assert sorts(graph) == [torch.int8]
    assert not calls(graph, ops.places_op)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fn", [scattered, sorted_twice])
def test_a_bounded_number_of_ids_is_counted(fn, monkeypatch):
    graph = routed(fn, dynamic=True)
    assert not sorts(graph)
    assert calls(graph, ops.places_op)
    monkeypatch.setattr(ops, "MAX_IDS", 59)
    assert torch.int8 in sorts(routed(fn, dynamic=True))


def added(x, ids):
    values, order = ids.sort()
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    return torch.zeros(len(x), N, dtype=bf16).index_add_(0, order, out)


def by_topk(x, ids):
    """Of no id that an expert has not."""
    scores = torch.nn.functional.one_hot(ids.clamp_max(E - 1), E).float()
    return order_alone(x, scores.topk(1).indices.flatten())


def other_offsets(x, ids):
    """Experts that are in another stack."""
    values, order = ids.sort(stable=True)
    ends = torch.histc(values.float(), 8, 0, 7).cumsum(0, dtype=torch.int32)
    first, second = (product(x, order, each) for each in (ends_of(values), ends[2:]))
    out = torch.where((values < E)[:, None], first, second)
    return torch.zeros_like(out).index_put((order,), out)


def masked(x, ids):
    values, order = ids.sort(stable=True)
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    return out, order


def numbered(x, ids):
    """The number of a row is used."""
    values, order = ids.sort(stable=True)
    number = torch.arange(len(ids), dtype=bf16)[:, None]
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0) + number
    return torch.zeros_like(out).index_put((order,), out)


def numbered_by_place(x, ids):
    values, order = ids.sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    return out[place], place


def of_another_row(x, ids):
    values, order = ids.sort(stable=True)
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    return torch.zeros_like(out).index_put((order,), out + x[order][:, :N].flip(0))


def gathered_again(x, ids):
    values, order = ids.sort(stable=True)
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    return torch.zeros_like(out).index_put((order,), out + x[order][order][:, :N])


def chosen_by_mask(x, ids):
    """All rows, in the order of the sort."""
    values, order = ids.sort(stable=True)
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    return torch.zeros_like(out).index_put((order >= 0,), out + x[order][:, :N])


def spread_along_columns(x, ids):
    values, order = ids.sort(stable=True)
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    numbers = torch.zeros(len(x), len(x)).index_put((order,), values.float())
    return torch.zeros_like(out).index_put((order,), out), numbers


def times_the_number_of_rows(x, ids):
    values, order = ids.sort(stable=True)
    out = product(x, order, ends_of(values)).masked_fill((values >= E)[:, None], 0)
    return torch.zeros_like(out).index_put((order,), out * x.shape[0])


def counted_in_bytes(x, ids):
    """Which wrap around."""
    values, order = ids.sort(stable=True)
    ends = torch.histc(values.float(), E, 0, E - 1).cumsum(0, dtype=torch.uint8).to(torch.int32)
    return product(x, order, ends)[:0], ends


IDS = torch.tensor([7, 6, 0, 7, 1, 6, 5, 7, 6, 2] * 4)


@pytest.mark.parametrize("fn", [scattered, added, by_topk])
def test_many_ids_are_sorted_by_their_last_bytes_if_that_changes_nothing(fn, monkeypatch):
    monkeypatch.setattr(ops, "MAX_IDS", 39)
    assert torch.int8 in sorts(routed(fn, ids=IDS))


@pytest.mark.parametrize(
    "fn",
    [
        *(masked, other_offsets, numbered, numbered_by_place),
        *(of_another_row, gathered_again, chosen_by_mask, spread_along_columns),
    ],
)
def test_where_rows_of_no_expert_are_is_not_changed_if_something_tells(fn, monkeypatch):
    """Ids above the experts keep their order."""
    monkeypatch.setattr(ops, "MAX_IDS", 39)
    assert set(sorts(routed(fn, ids=IDS))) == {torch.int64}


def test_rows_of_an_unknown_number_are_computed_with_it(monkeypatch):
    monkeypatch.setattr(ops, "MAX_IDS", 39)
    assert torch.int8 in sorts(routed(times_the_number_of_rows, ids=IDS, dynamic=True))


def test_ids_of_few_bytes_are_sorted_as_they_are(monkeypatch):
    monkeypatch.setattr(ops, "MAX_IDS", 39)
    assert sorts(routed(scattered, ids=IDS.to(torch.int8))) == [torch.int8]
    assert ops.key_dtype(128) == torch.int16
    assert not calls(routed(scattered, ids=IDS.to(torch.int8)), ops.keys_op)


def descending(x, ids):
    values, order = ids.sort(descending=True)
    return product(x, order, ends_of(values))


def other_bins(x, ids):
    values, order = ids.sort()
    ends = torch.histc(values.float(), E, 0, E).cumsum(0, dtype=torch.int32)
    return product(x, order, ends)


def other_ids(x, ids):
    return product(x, ids.sort()[1], ends_of(ids // 2))


def written(x, ids):
    values, order = ids.sort(stable=True)
    ends = ends_of(values)
    values += 1
    return product(x, order, ends), values


@pytest.mark.parametrize("miss", [descending, other_bins, other_ids, counted_in_bytes])
def test_near_misses_stay(miss):
    graph = routed(miss)
    assert sorts(graph) == [torch.int64]
    assert not calls(graph, ops.places_op)


def test_values_are_those_of_the_ids():
    assert not sorts(routed(order_alone))
    assert not sorts(routed(written))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("numerics", ["default", "strict"])
def test_sums_over_the_experts_of_a_token(numerics):
    pytest.importorskip("transformers.integrations.moe")
    model = Experts("int8", "transformers_grouped", e=8)
    args = torch.randn(5, 64).to(bf16), torch.randint(0, 8, (5, 2)), torch.rand(5, 2).to(bf16)
    options = Options(on_error="raise", numerics=numerics)
    with torch.no_grad():
        _, [rewrite] = capture(model, args, options=options)
    assert len(calls(rewrite.after, ops.sum_op)) == (numerics == "default")


@pytest.mark.parametrize(("dim", "count"), [(0, 4), (2, 4), (1, 20)])
def test_other_sums_stay(dim, count):
    def fn(x, ids):
        return scattered(x, ids).view(-1, count, N).sum(dim)

    assert not calls(routed(fn), ops.sum_op)


def test_a_sum_of_what_is_no_product_stays():
    def fn(x, ids):
        return scattered(x, ids), x.view(-1, 4, K).sum(1)

    assert not calls(routed(fn), ops.sum_op)
