"""Recognition of quantized experts: every format in every form, near misses, reports."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import fx

from inductor_quant.ops import experts as op
from inductor_quant.ops.dequantize import dequantize
from inductor_quant.options import Options
from inductor_quant.patterns.products import stock
from inductor_quant.spec.weight_format import WeightFormat
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import FORMATS, FORMS, Experts, bf16, route

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers has two of the forms"
)


class _Calls(fx.Interpreter):
    """Runs a graph; keeps the arguments of the op."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[tuple[Any, dict[str, Any]]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == op.op:
            self.found.append((args, kwargs))
        return super().call_function(target, args, kwargs)


def stacks_of(rewrite):
    """The dequantized stack [E, N, K] of each call, in bf16."""
    runner = _Calls(rewrite.after)
    with torch.no_grad():
        runner.run(*rewrite.inputs)
    for (_, weight, *_), kwargs in runner.found:
        dense = dequantize(WeightFormat.decode(kwargs["format"]), weight)
        yield dense.transpose(1, 2).to(bf16)


def check(format: str, form: str, tokens: int) -> None:
    torch.manual_seed(0)
    model, args = Experts(format, form), route(tokens, 4)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (model, *args))
        want = model(*args)
    assert [match.family for match in rewrite.report.matches] == ["experts"] * 2
    assert not any(match.spec.b.lut and format != "mxfp4" for match in rewrite.report.matches)
    assert [match.site.experts for match in rewrite.report.matches] == [4, 4]
    assert [(match.n, match.k) for match in rewrite.report.matches] == [(128, 64), (64, 64)]
    assert [match.format for match in rewrite.report.matches] == ["mxfp4" * (format == "mxfp4")] * 2
    assert (got - want).norm() <= 0.02 * want.norm()
    # a scale that is cast after the gather is not rounded
    is_exact = form != "gather_first" or format not in ("int8", "fp8")
    for found, name in zip(stacks_of(rewrite), ("up", "down"), strict=True):
        stack = model.stack(name)
        assert torch.equal(found, stack) or not is_exact
        torch.testing.assert_close(found, stack, rtol=0.02, atol=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("format", ["int8", "mxfp4"])
def test_every_form(format, form):
    check(format, form, 6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", ["transformers_grouped", "gather_first"])
@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ("int8", "mxfp4")])
def test_every_format(format, form):
    check(format, form, 6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["transformers_grouped", "transformers_batched", "gather_first"])
def test_one_token(form):
    check("int4_words", form, 1)


def test_ids_are_no_codes_of_a_table():
    """One token: a product whose columns are those of the chosen experts."""
    torch.manual_seed(0)
    model, args = Experts("int8", "einsum"), route(1, 4)
    _, [rewrite] = capture(lambda m, *a: m(*a), (model, *args))
    assert rewrite.report.matches
    assert not any(match.spec.b.lut for match in rewrite.report.matches)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("form", "bounds"),
    [("transformers_grouped", {"min": 2, "max": 6}), ("transformers_batched", {})],
)
def test_a_symbolic_number_of_tokens(form, bounds):
    torch.manual_seed(0)
    model, tensors = Experts("int4_words", form), route(6, 4)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0, **bounds)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (model, *tensors))
        want = model(*tensors)
    assert [match.family for match in rewrite.report.matches] == ["experts"] * 2
    assert all(isinstance(match.m, str) for match in rewrite.report.matches)
    assert (got - want).norm() <= 0.02 * want.norm()


def test_a_number_of_sorted_rows_without_a_bound_may_be_large():
    """Then the graph as it is may be faster."""
    model, tensors = Experts("int4_words", "grouped"), route(6, 4)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    _, [rewrite] = capture(lambda m, *a: m(*a), (model, *tensors))
    assert rewrite.codes == ["many_rows"] * 2


def test_the_fallback_of_transformers_for_other_dtypes():
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    q, s = torch.randint(-9, 9, (4, 24, 32), dtype=torch.int8), torch.rand(4, 24, 1)
    x, offsets = torch.randn(9, 32), torch.tensor([2, 2, 8, 9], dtype=torch.int32)

    def fn(x, q, s, offsets):
        stack = (q * s).transpose(1, 2)
        return torch.ops.transformers.grouped_mm_fallback(x, stack, offsets)

    got, [rewrite] = capture(fn, (x, q, s, offsets))
    assert [match.family for match in rewrite.report.matches] == ["experts"]
    torch.testing.assert_close(got, fn(x, q, s, offsets))


# ------------------------------------------------------------------------------------------
# near misses

q, s = torch.randint(-9, 9, (4, 24, 32), dtype=torch.int8), torch.rand(4, 24, 1).to(bf16)
x, ids = torch.randn(5, 32).to(bf16), torch.tensor([3, 0, 0, 2, 1])
offsets = torch.tensor([1, 1, 4, 5], dtype=torch.int32)


def by_two_tensors(x, q, s, ids):
    return torch.bmm(q[ids].to(bf16) * s[ids.flip(0)], x.unsqueeze(2))


def scaled_by_row(x, q, s, ids):
    return torch.bmm(q[ids].to(bf16) * s[:1] * x[:, :1, None], x.unsqueeze(2))


def several_rows_each(x, q, s, ids):
    return torch.bmm(q[ids].to(bf16) * s[ids], x[:, None, :].repeat(1, 2, 1).transpose(1, 2))


def computed_codes(x, q, s, ids):
    return torch.bmm((q + q.flip(0))[ids].to(bf16) * s[ids], x.unsqueeze(2))


def written(x, q, s, ids):
    out = torch.bmm(q[ids].to(bf16) * s[ids], x.unsqueeze(2))
    q.zero_()
    return out


def not_quantized(x, q, s, ids):
    return torch.bmm((s * x[0])[ids], x.unsqueeze(2))


def other_columns(x, q, s, ids):
    """Rows choose a column of each weight, not a weight."""
    return torch.bmm(q.to(bf16)[:, :, ids].permute(2, 1, 0) * s[0], x[:, :4].unsqueeze(2))


@pytest.mark.parametrize(
    "of", [lambda ids: ids.reshape(-1), lambda ids: ids.reshape(-1) - 1], ids=["view", "shifted"]
)
def test_ids_may_be_computed_once_for_codes_and_once_for_scales(of):
    """Also where the experts of a rank are counted from its first one."""

    def fn(x, q, s, ids):
        return torch.bmm(x[:, None], (q[of(ids)].to(bf16) * s[of(ids)]).transpose(1, 2))

    torch.manual_seed(0)
    args = torch.randn(4, 32).to(bf16), q, s, torch.tensor([[1, 3], [2, 1]])
    got, [rewrite] = capture(fn, args)
    x, chosen = args[0].double(), of(args[3])
    want = torch.bmm(x[:, None], (q[chosen].double() * s[chosen].double()).transpose(1, 2))
    assert [match.family for match in rewrite.report.matches] == ["experts"]
    assert not any("aten.index" in str(node.target) for node in rewrite.after.graph.nodes)
    rms = float(want.square().mean().sqrt())
    torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.01 * rms)


MISSES = {
    by_two_tensors: "batched_weight weight_form",
    scaled_by_row: "weight_form batched_weight",
    several_rows_each: "batched_weight",
    computed_codes: "computed_weight weight_form",
    written: "mutated_operand",
    not_quantized: "not_quantized computed_weight batched_weight",
    other_columns: "",
}


@pytest.mark.parametrize("miss", MISSES)
def test_near_misses_keep_their_value(miss):
    args = (x, q.clone(), s, ids)
    want = miss(x, q.clone(), s, ids)
    got, [rewrite] = capture(miss, args)
    assert not calls(rewrite.after, op.op) or not MISSES[miss]
    if MISSES[miss]:
        assert set(rewrite.codes) <= set(MISSES[miss].split())
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


def dense_stack(x, s, offsets):
    stack = s.expand(4, 24, 32).contiguous().transpose(1, 2)
    return torch._grouped_mm(x, stack, offs=offsets)


def many_rows(x, q, s, offsets):
    return torch._grouped_mm(x, (q.to(bf16) * s).transpose(1, 2), offs=offsets)


def test_grouped_products_that_are_left_alone():
    _, [rewrite] = capture(dense_stack, (x, s, offsets))
    [rejection] = rewrite.report.decisions
    assert rejection.code.value == "not_quantized"
    assert rejection.site.experts == 4
    _, [rewrite] = capture(many_rows, (x.repeat(60, 1), q, s, offsets))
    assert rewrite.codes == ["many_rows"]
    assert rewrite.is_untouched


@pytest.mark.parametrize(("tokens", "is_ours"), [(60, True), (1 << 11, False)])
def test_many_rows_are_ours_on_the_card_that_was_tuned(tokens, is_ours, monkeypatch):
    monkeypatch.setattr(stock, "is_tuned", lambda anchor: True)
    wide = torch.zeros(4, 24, 128, dtype=torch.int8)
    rows = torch.zeros(len(x) * tokens, 128, dtype=bf16)
    _, [rewrite] = capture(many_rows, (rows, wide, s, offsets))
    assert rewrite.codes == ["many_rows"] * (not is_ours)


def rows_of_a_mask(x, q, s, offsets, mask):
    rows = x.index_select(0, mask.nonzero().squeeze(1))
    return torch._grouped_mm(rows, (q.to(bf16) * s).transpose(1, 2), offs=offsets)


@pytest.mark.parametrize(
    ("tokens", "is_bounded", "is_tuned", "is_ours"),
    [
        (5, True, False, True),
        (300, True, False, False),
        (5, False, False, False),
        (5, False, True, True),
        (1 << 14, True, True, False),
    ],
)
def test_a_number_of_rows_that_the_graph_computes(
    tokens, is_bounded, is_tuned, is_ours, monkeypatch
):
    """By its bound. If there is none, ours where kernels are as fast as the graph for many rows."""
    monkeypatch.setattr(stock, "is_tuned", lambda anchor: is_tuned)
    wide = torch.ones(4, 24, 128, dtype=torch.int8)
    rows, mask = torch.randn(tokens, 128).to(bf16), torch.arange(tokens) % 5 > 0
    if not is_bounded:
        for tensor in (rows, mask):
            torch._dynamo.mark_dynamic(tensor, 0)
    args = rows, wide, s, torch.tensor([1, 1, 3, 4], dtype=torch.int32), mask
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got, [rewrite] = capture(rows_of_a_mask, args)
    assert rewrite.codes == ["many_rows"] * (not is_ours)
    want = rows_of_a_mask(*args)
    assert (got[:4] - want[:4]).norm() <= 0.01 * want[:4].norm()  # others are of no expert


@pytest.mark.parametrize(("most", "is_ours"), [(256, True), (257, False)])
def test_a_bound_of_the_number_of_rows_is_enough(most, is_ours):
    rows = torch.randn(6, 32).to(bf16)
    torch._dynamo.mark_dynamic(rows, 0, min=2, max=most)
    _, [rewrite] = capture(many_rows, (rows, q, s, offsets))
    assert rewrite.codes == ["many_rows"] * (not is_ours)


def returned_stack(x, q, s, offsets):
    stack = (q.to(bf16) * s).transpose(1, 2)
    return torch._grouped_mm(x, stack, offs=offsets), stack


def test_a_stack_that_is_dequantized_anyway():
    _, [rewrite] = capture(returned_stack, (x, q, s, offsets))
    assert rewrite.codes == ["extra_user"]
    model, (tokens, *routing) = Experts("int8", "grouped"), route(6, 4)
    out, [*rewrites] = capture(lambda m, *a: m(*a), (model, tokens.requires_grad_(), *routing))
    out.float().sum().backward()
    assert [r.codes for r in rewrites if not r.is_backward] == [["extra_user"] * 2]


def test_the_family_can_be_turned_off():
    model, args = Experts("int8", "grouped"), route(6, 4)
    options = Options(families=("weight_only",), on_error="raise")
    _, [rewrite] = capture(lambda m, *a: m(*a), (model, *args), options=options)
    assert set(rewrite.codes) == {"family_disabled"}
