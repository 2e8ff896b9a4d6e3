"""Recognition of experts whose rows are quantized too: every spelling, near misses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.ops import scaled_experts as op
from inductor_quant.patterns.products import stock
from inductor_quant.patterns.recognizers import scaled_experts
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import bf16, route
from tests.support.producers.scaled_experts import LAYERS, ScaledExperts, by_row_int8, dequantized
from tests.support.sampling import sampled

aten, e4m3 = torch.ops.aten, torch.float8_e4m3fn
ENDS = torch.tensor([1, 3, 3, 9], dtype=torch.int32)


def check(format: str, form: str, tokens: int = 6) -> None:
    torch.manual_seed(0)
    model, args = ScaledExperts(format, form, i=96), route(tokens, 4)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (model, *args))
        want = model(*args)
    matches = rewrite.report.matches
    assert [match.family for match in matches] == ["scaled_experts"] * 2
    assert [match.site.experts for match in matches] == [4, 4]
    assert [(match.n, match.k) for match in matches] == [(192, 64), (64, 96)]
    is_block = format == "fp8_block"
    assert all((match.spec.group_size == 32) == is_block for match in matches)
    # a dequantized row is not rounded to bf16, nor is a scale that is cast after it is gathered
    assert (got - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize(("format", "form"), sampled(LAYERS, 6, ids="-".join))
def test_every_spelling(format, form):
    check(format, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows_first", "of_ids"])
def test_one_token(form):
    check("fp8_block", form, 1)


def test_a_symbolic_number_of_tokens():
    torch.manual_seed(0)
    model, tensors = ScaledExperts("fp8_block", "rows_first"), route(6, 4)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=6)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (model, *tensors))
        want = model(*tensors)
    assert [match.family for match in rewrite.report.matches] == ["scaled_experts"] * 2
    assert all(isinstance(match.m, str) for match in rewrite.report.matches)
    assert (got - want).norm() <= 0.03 * want.norm()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("format", "has_fp8", "least", "is_ours", "is_symbolic"),
    [
        ("int8", False, 128, True, False),
        ("fp8_block", True, 32, True, True),
        ("fp8_block", True, 64, False, True),
        ("fp8_block", False, 32, False, False),
    ],
)
def test_many_rows_are_ours_where_their_type_is_multiplied(
    format, has_fp8, least, is_ours, is_symbolic, monkeypatch
):
    """Else a stack that is written once in bf16 may be faster."""
    monkeypatch.setattr(stock, "has_fp8", lambda anchor: has_fp8)
    monkeypatch.setattr(scaled_experts, "_MIN_BLOCK", least)  # the layer's blocks have 32
    torch.manual_seed(0)
    form = "scaled_behind" if format == "int8" else "rows_first"
    model, tensors = ScaledExperts(format, form), route(6 if is_symbolic else 200, 4)
    for tensor in tensors if is_symbolic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    _, [rewrite] = capture(lambda m, *a: m(*a), (model, *tensors))
    families = [match.family for match in rewrite.report.matches]
    assert families == ["scaled_experts"] * 2 * is_ours
    assert rewrite.codes == ["many_rows"] * 2 * (not is_ours)


def spread(scales: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Of [E, few, few], or of rows, for all columns and all of K."""
    rows = scales if scales.dim() == 2 else scales.repeat_interleave(n // scales.shape[1], 1)
    return rows.repeat_interleave(k // rows.shape[-1], -1)


@pytest.mark.parametrize(
    ("of_rows", "of_stack", "scale_dtype", "form", "block"),
    [
        ((1,), (2, 1), torch.float32, "whole", (0, 1)),
        ((1,), (2, 2), torch.float32, "whole", (128, 128)),  # repeated for each block
        ((2,), (2, 2), torch.float32, "by_position", (128, 128)),
        ((1,), (2, 2), torch.float32, "masked", (128, 128)),
        ((1,), (2, 1), torch.float8_e8m0fnu, "whole", (256, 128)),  # which takes no whole rows
        ((1,), (2, 1), torch.bfloat16, "one", (0, 1)),
        ((1,), (0, 0), torch.bfloat16, "one", (0, 1)),
    ],
)
def test_scales_of_rows_and_stacks_that_have_few(of_rows, of_stack, scale_dtype, form, block):
    torch.manual_seed(0)
    e, n, k, offsets = 4, 256, 256, ENDS
    stack, rows = torch.randn(e, n, k).to(e4m3), torch.randn(9, k).to(e4m3)
    s = (torch.rand(() if form == "one" else (9, *of_rows)) + 0.5).to(scale_dtype)
    t = torch.rand(e, *of_stack) + 0.5
    order, mask = torch.randperm(9), torch.rand(9, 1) < 0.3

    def product(stack, rows, s, t, order, mask):
        if form == "one":
            scales = s.float()
        elif form == "by_position":
            scales = s[:, torch.arange(k) // (k // 2)]
        else:
            scales = spread(s.float(), n, k)
        x = (rows.float() * scales).to(bf16)
        if form == "masked":
            x = x[order].masked_fill(mask, 0.0)
        w = (stack.float() * spread(t, n, k) if t.numel() else stack).to(bf16)
        return torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)

    inputs = (stack, rows, s, t, order, mask)
    got, [rewrite] = capture(product, inputs)
    [match] = rewrite.report.matches
    [call] = calls(rewrite.after, op.op)
    assert match.family == "scaled_experts"
    assert (call.kwargs["block_k"], call.kwargs["block_n"]) == block
    want = product(*inputs)
    assert (got - want).norm() <= 0.01 * want.norm()


# ------------------------------------------------------------------------------------------
# near misses: of x [5, 32] and q [4, 24, 32], both int8, s [5, 1] and t [4, 24, 1]

torch.manual_seed(0)
x, s = by_row_int8(torch.randn(5, 32))
q, t = torch.randint(-9, 9, (4, 24, 32), dtype=torch.int8), torch.rand(4, 24, 1)
offsets = torch.tensor([1, 1, 4, 5], dtype=torch.int32)


@dataclasses.dataclass(frozen=True)
class Given:
    x: torch.Tensor
    s: torch.Tensor
    q: torch.Tensor
    t: torch.Tensor


def stack(g: Given) -> torch.Tensor:
    return (g.q.to(bf16) * g.t.to(bf16)).transpose(1, 2)


def as_it_should_be(g):
    return torch._grouped_mm(dequantized(g.x, g.s), stack(g), offs=offsets)


def a_scale_for_each_k(g):
    rows = g.x.to(bf16) * g.t[0, :1].to(bf16) * g.t[:1].expand(1, 24, 32)[0, :1].to(bf16)
    return torch._grouped_mm(rows * torch.linspace(0.5, 2, 32).to(bf16), stack(g), offs=offsets)


def the_scales_of_other_experts(g):
    w = (g.q.to(bf16) * g.t.flip(0).to(bf16)).transpose(1, 2)
    return torch._grouped_mm(dequantized(g.x, g.s), w, offs=offsets)


def the_weights_of_other_experts(g):
    w = (g.q.flip(0).to(bf16) * g.t.to(bf16)).transpose(1, 2)
    return torch._grouped_mm(dequantized(g.x, g.s), w, offs=offsets)


def rows_in_another_order(g):
    return torch._grouped_mm(dequantized(g.x.flip(0), g.s), stack(g), offs=offsets)


def a_part_of_the_rows(g):
    half = dequantized(g.x, g.s)[:, :16].contiguous()
    return torch._grouped_mm(half, stack(g)[:, :16].contiguous(), offs=offsets)


def one_side_alone(g):
    return torch._grouped_mm(g.s.expand(5, 32).to(bf16).contiguous(), stack(g), offs=offsets)


def added_to(g):
    return torch._grouped_mm(dequantized(g.x, g.s) + 1, stack(g), offs=offsets)


def written(g):
    out = as_it_should_be(g)
    g.q.zero_()
    return out


# Another order is one of other tensors, which the graph computes.
COMPUTED = (the_scales_of_other_experts, the_weights_of_other_experts, rows_in_another_order)
MISSES = (a_scale_for_each_k, a_part_of_the_rows, one_side_alone, added_to, written)


@pytest.mark.parametrize(
    "product", sampled([*MISSES, as_it_should_be, *COMPUTED], ids=lambda fn: str(fn.__name__))
)
def test_near_misses_keep_their_value(product):
    tensors = (x, s, q, t)
    want = product(Given(*(tensor.clone() for tensor in tensors)))
    copies = tuple(tensor.clone() for tensor in tensors)
    got, [rewrite] = capture(lambda *given: product(Given(*given)), copies)
    assert bool(calls(rewrite.after, op.op)) == (product not in MISSES)
    assert (got - want).norm() <= 0.01 * want.norm()


ORDER = torch.tensor([3, 9, 0, 5, 7, 1, 8, 2, 6, 4])


def repeated(rows, order):
    return rows.repeat_interleave(2, 0)[order]


def expanded(rows, order):
    return rows[:, None].expand(-1, 2, -1).reshape(10, 32)[order]


def repeated_and_masked(rows, order):
    return repeated(rows, order).masked_fill((order < 3)[:, None], 0)


def masked_by_rows(rows, order):
    chosen = rows[order // 2]
    return torch.where((order < 3)[:, None], torch.zeros_like(chosen), chosen)


def masked_by_a_row(rows, order):
    return torch.where((order < 3)[:, None], torch.zeros(32, dtype=bf16), rows[order // 2])


@pytest.mark.parametrize(
    "choose", [repeated, expanded, repeated_and_masked, masked_by_rows, masked_by_a_row]
)
def test_rows_that_are_repeated_and_gathered(choose):
    """Or masked by more than a number: then the weight alone may be read as quantized."""

    def fn(x, s, q, t, order):
        w = (q.to(bf16) * t.to(bf16)).transpose(1, 2)
        return torch._grouped_mm(choose(dequantized(x, s), order), w, offs=2 * offsets)

    args = x, s, q, t, ORDER
    got, [rewrite] = capture(fn, args)
    [match] = rewrite.report.matches
    is_masked = choose in (masked_by_rows, masked_by_a_row)
    assert match.family == ("experts" if is_masked else "scaled_experts")
    want = fn(*args)
    assert (got - want).norm() <= 0.01 * want.norm()


def test_ids_may_be_computed_once_for_codes_and_once_for_scales():
    def fn(x, s, q, t, ids):
        w = q[ids.flatten()].to(bf16) * t[ids.flatten()].to(bf16)
        return torch.bmm(dequantized(x, s)[:, None], w.transpose(1, 2))

    args = x[:4], s[:4], q, t, torch.tensor([[2, 3], [0, 2]])
    got, [rewrite] = capture(fn, args)
    assert calls(rewrite.after, op.op)
    want = fn(*args)
    assert (got - want).norm() <= 0.01 * want.norm()


@pytest.mark.parametrize("times", [1, 2])
def test_the_number_of_rows_may_be_a_sum(times):
    """Of those that several processes send, for example."""

    def fn(a, b, q, t, offsets):
        rows = dequantized(*by_row_int8(torch.cat([a, b] * times)))
        return torch._grouped_mm(rows, (q.to(bf16) * t.to(bf16)).transpose(1, 2), offs=offsets)

    args = torch.randn(2, 32), torch.randn(3, 32), q, t, times * offsets
    for rows in args[:2]:
        torch._dynamo.mark_dynamic(rows, 0)
    got, [rewrite] = capture(fn, args)
    [match] = rewrite.report.matches
    assert match.family == "scaled_experts"
    assert "+" in str(match.m)
    want = fn(*args)
    assert (got - want).norm() <= 0.01 * want.norm()
