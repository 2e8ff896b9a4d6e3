"""Tokens are quantized before they are gathered: the same bits, and near misses."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_quant.ops.scaled_experts import op
from inductor_quant.patterns import graph_pass
from inductor_quant.patterns.fusion.experts.quantize_tokens import quantize_tokens_once
from tests.support.graphs.post_grad import calls, capture, count
from tests.support.producers.experts import bf16, route
from tests.support.producers.scaled_experts import (
    QUANTIZERS,
    ScaledExperts,
    by_row_int8,
    dequantized,
)

aten, cast = torch.ops.aten, torch.ops.prims.convert_element_type
TOKENS, TIMES, K = 5, 2, 32
torch.manual_seed(0)
x = torch.randn(TOKENS, K).to(bf16)
q, t = torch.randint(-9, 9, (4, 24, K), dtype=torch.int8), torch.rand(4, 24, 1)
perm = torch.randperm(TOKENS * TIMES)
offsets = torch.tensor([1, 4, 4, TOKENS * TIMES], dtype=torch.int32)


def product(rows: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor = offsets):
    stack = (q.to(bf16) * t.to(bf16)).transpose(1, 2)
    return torch._grouped_mm(dequantized(rows, scale), stack, offs=offsets)


def quantized(rows: torch.Tensor) -> torch.Tensor:
    return product(*by_row_int8(rows))


def both(fn, args):
    """The rewritten graph, and results with and without the pass."""
    with torch.no_grad():
        got, [rewrite] = capture(fn, args)
        with mock.patch.object(graph_pass, "quantize_tokens_once", return_value=0):
            kept, [other] = capture(fn, args)
    assert len(calls(rewrite.after, op)) == len(calls(other.after, op))
    return rewrite, got, kept


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", QUANTIZERS)
def test_each_token_is_quantized_once(format):
    torch.manual_seed(0)
    model, args = ScaledExperts(format, "gathered_first"), route(6, 4)
    rewrite, got, kept = both(lambda m, *a: m(*a), (model, *args))
    assert torch.equal(got, kept)
    first, _ = calls(rewrite.after, op)
    assert first.kwargs["repeats"] == 2
    assert first.args[0].meta["val"].shape == (6, 64)
    assert first.args[2].meta["val"].shape[0] == 6
    reduced = {
        node.args[0].meta["val"].shape[0] for node in calls(rewrite.after, aten.amax.default)
    }
    assert reduced == {6, 12}  # tokens, and what the second product reads


def test_a_symbolic_number_of_tokens():
    torch.manual_seed(0)
    model, tensors = ScaledExperts("fp8_block", "gathered_first"), route(6, 4)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=6)
    rewrite, got, kept = both(lambda m, *a: m(*a), (model, *tensors))
    assert torch.equal(got, kept)
    assert calls(rewrite.after, op)[0].kwargs["repeats"] == 2


def test_rows_without_an_expert_may_be_masked():
    def fn(x, i):
        mask = (i > 7).unsqueeze(1)
        y = quantized(torch.where(mask, 0.0, x[i // TIMES]))
        return torch.where(mask, 0.0, y)

    rewrite, got, kept = both(fn, (x, perm))
    assert torch.equal(got, kept)
    [call] = calls(rewrite.after, op)
    assert call.kwargs["repeats"] == 2
    assert count(rewrite.after, aten.where.self) == 1


# ------------------------------------------------------------------------------------------
# near misses


def fewer_rows_than_tokens(x, i):
    return product(*by_row_int8(x[i[:4] % TOKENS]), torch.tensor([1, 3, 3, 4], dtype=torch.int32))


def a_factor_for_each_row(x, i):
    return quantized(x[i // TIMES] * (1 + i.to(bf16)).unsqueeze(1))


def read_by_another(x, i):
    rows = x[i // TIMES]
    return quantized(rows), rows


def codes_read_by_another(x, i):
    codes, scale = by_row_int8(x[i // TIMES])
    return product(codes, scale), codes


def scales_behind_the_product(x, i):
    """They are read once for each row."""
    codes, scale = by_row_int8(x[i // TIMES])
    return product(codes, torch.ones_like(scale)).float() * scale


def masked_where_the_result_is_not(x, i):
    return quantized(torch.where((i > 7).unsqueeze(1), 0.0, x[i // TIMES]))


def masked_by_a_wider_dtype(x, i):
    """Rows are divided in fp32, tokens would be in bf16."""
    mask = (i > 7).unsqueeze(1)
    rows = torch.where(mask, torch.zeros(K), x[i // TIMES])
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    codes = (rows / scale).round().clamp(-127, 127).to(torch.int8)
    return torch.where(mask, 0.0, product(codes, scale.float()))


MISSES = [
    *(fewer_rows_than_tokens, a_factor_for_each_row, read_by_another, codes_read_by_another),
    *(scales_behind_the_product, masked_where_the_result_is_not, masked_by_a_wider_dtype),
]


@pytest.mark.parametrize("miss", MISSES)
def test_near_misses_stay(miss):
    rewrite, got, kept = both(miss, (x, perm))
    [call] = calls(rewrite.after, op)
    assert len(call.args) == 6
    want = miss(x, perm)
    results = [value if isinstance(value, tuple) else (value,) for value in (got, kept, want)]
    for one, other, plain in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert (one.double() - plain.double()).norm() <= 0.02 * plain.double().norm()


def by_one_scale(rows):
    scale = rows.abs().amax().expand(len(rows), 1)
    return rows / scale, scale


def by_each_column(rows):
    return rows / rows.abs().amax(0, keepdim=True), rows.abs().amax(1, keepdim=True)


def by_two_rows(rows):
    pairs = rows.unflatten(0, (-1, 2))
    scale = pairs.abs().amax((1, 2), keepdim=True)
    return (pairs / scale).flatten(0, 1), scale.expand(-1, 2, 1).reshape(-1, 1)


def in_pairs(rows):
    """By themselves, but not one after the other."""
    pairs = rows.unflatten(0, (-1, 2))
    scale = pairs.abs().amax(2, keepdim=True)
    return (pairs / scale).flatten(0, 1), scale.reshape(-1, 1)


def across(rows):
    parts = rows.reshape(TOKENS * TIMES, TOKENS * TIMES, -1)
    scale = parts.abs().amax(0).amax(1, keepdim=True)
    return rows / scale, scale


def by_neighbours(rows):
    scale = rows.abs().amax(1, keepdim=True)
    return rows / scale.flip(0), scale


def by_differences(rows):
    """Of each row from each."""
    scale = (rows[:, None] - rows).abs().amax((1, 2), keepdim=True).squeeze(1)
    return rows / scale, scale


def by_all_rows(rows):
    every = rows.expand(len(rows), -1, -1)
    scale = every.abs().amax((1, 2), keepdim=True).squeeze(1)
    return rows / scale, scale


def by_each_row(rows):
    scale = rows.abs().amax(1, keepdim=True)
    return rows / scale, scale


@pytest.mark.parametrize(
    "quantize",
    [
        *(by_one_scale, by_each_column, by_two_rows, in_pairs, across, by_neighbours),
        *(by_differences, by_all_rows, by_each_row),
    ],
)
def test_rows_that_are_not_quantized_by_themselves(quantize):
    def fn(x, b, i, ends):
        rows, scale = quantize(cast(x[i], torch.float32))
        codes = cast(rows * 100, torch.int8)
        return op(codes, b, scale, None, ends, None, out_dtype=torch.float32)

    tokens = torch.randn(TOKENS, 40).to(bf16)
    stack = torch.randint(-9, 9, (4, 40, 24), dtype=torch.int8)
    args = tokens, stack, perm // TIMES, offsets
    module = make_fx(fn, tracing_mode="fake")(*args)
    assert quantize_tokens_once(module.graph) == (quantize is by_each_row)
    module.recompile()
    assert torch.equal(module(*args), fn(*args))


def test_a_factor_that_is_written_to_stays_before():
    def fn(x, factor, b, i, ends):
        rows = x[i] * factor
        scale = rows.abs().amax(1, keepdim=True)
        codes = cast(rows / scale * 100, torch.int8)
        factor.mul_(3)
        return op(codes, b, scale, None, ends, None, out_dtype=torch.float32)

    tokens, factor = torch.randn(TOKENS, 40), torch.rand(40)
    stack = torch.randint(-9, 9, (4, 40, 24), dtype=torch.int8)
    args = tokens, factor, stack, perm // TIMES, offsets
    module = make_fx(fn, tracing_mode="fake")(*args)
    assert quantize_tokens_once(module.graph) == 0
