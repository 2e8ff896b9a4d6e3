"""Recognition of experts whose rows are quantized too: every spelling, near misses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.ops import scaled_experts as op
from inductor_quant.patterns.products import stock
from inductor_quant.patterns.recognizers import scaled_experts
from tests.support.graphs.handmade import rewritten
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import bf16, route
from tests.support.producers.scaled_experts import LAYERS, ScaledExperts, by_row_int8, dequantized
from tests.support.sampling import sampled

aten, e4m3 = torch.ops.aten, torch.float8_e4m3fn
needs_version_2 = pytest.mark.skipif(
    not hasattr(aten, "_scaled_grouped_mm_v2"), reason="this torch has one version"
)


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


def scaled_product(rows: int, version_2: dict | None = None):
    """``version_2``: other arguments of ``_scaled_grouped_mm_v2``, which no torch before 2.15
    traces."""

    def body(call, a, b, of_a, of_b, offsets):
        stack = call(aten.permute.default, b, [0, 2, 1])
        own = {"out_dtype": bf16, "use_fast_accum": True}
        product = call(aten._scaled_grouped_mm.default, a, stack, of_a, of_b, offsets, **own)
        if version_2 is not None:
            product.target = aten._scaled_grouped_mm_v2.default
            scales = {"scale_a": [of_a], "recipe_a": [1], "swizzle_a": []}
            scales |= {"scale_b": [of_b], "recipe_b": [1], "swizzle_b": []}
            product.args = (a, stack, *(scales | version_2).values(), offsets)
            product.kwargs = own
        return product

    a, b = torch.zeros(rows, 32).to(e4m3), torch.zeros(4, 48, 32).to(e4m3)
    ends = torch.tensor([1, 3, 3, rows], dtype=torch.int32)
    return rewritten(body, [a, b, torch.ones(rows), torch.ones(4, 48), ends])


def test_a_product_that_says_so_itself(monkeypatch):
    assert scaled_product(65).codes == ["many_rows"]
    with monkeypatch.context() as patched:
        patched.setattr(stock, "is_tuned", lambda anchor: True)
        assert scaled_product(65).codes == []
    rewrite = scaled_product(9)
    [match] = rewrite.report.matches
    assert match.family == "scaled_experts"
    assert match.spec.fast_accum
    assert (match.m, match.n, match.k, match.site.experts) == (9, 48, 32, 4)
    [call] = calls(rewrite.after, op.op)
    assert call.kwargs == {"block_k": 0, "block_n": 1, "out_dtype": bf16, "fast_accum": True}


@needs_version_2
def test_the_second_version_by_rows():
    first, second = scaled_product(9), scaled_product(9, {})
    assert second.codes == []
    [[one], [other]] = (calls(rewrite.after, op.op) for rewrite in (first, second))
    assert str((other.args, other.kwargs)) == str((one.args, one.kwargs))
    assert second.report.matches[0].spec == first.report.matches[0].spec


@needs_version_2
@pytest.mark.parametrize(
    "other", [{"recipe_a": [3]}, {"recipe_b": [0]}, {"swizzle_a": [1]}, {"swizzle_b": [1]}]
)
def test_other_scales_of_the_second_version_stay(other):
    assert scaled_product(9, other).codes == ["scale_axis"]


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
