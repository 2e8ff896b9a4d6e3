"""Experts read rows where they are: every spelling of a gather, and near misses."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_quant.ops import experts, scaled_experts
from inductor_quant.patterns.fusion.experts.rows import gather_in_experts
from tests.support.gemms.experts import Case, make_inputs
from tests.support.gemms.experts import gemm as packed_gemm
from tests.support.gemms.generated import generate
from tests.support.graphs.handmade import results, rewritten
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import Experts, bf16, route
from tests.support.producers.scaled_experts import ScaledExperts, by_row_int8

aten = torch.ops.aten
TOKENS, TIMES, K = 5, 2, 32
torch.manual_seed(0)
x = torch.randn(TOKENS, K).to(bf16)
q, s = torch.randint(-9, 9, (4, 24, K), dtype=torch.int8), torch.rand(4, 24, 1).to(bf16)
perm = torch.randperm(TOKENS * TIMES)
offsets = torch.tensor([1, 4, 4, TOKENS * TIMES], dtype=torch.int32)


def product(rows: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(rows, (q.to(bf16) * s).transpose(1, 2), offs=offsets[-4:])


def repeated(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(TIMES, 0)


# what is gathered -> whether by a tensor, and how often each row is
GATHERS = {
    "divided": (lambda x, i: x[i // TIMES], True, 2),
    "selected": (lambda x, i: x.index_select(0, i // TIMES), True, 2),
    "repeated_first": (lambda x, i: repeated(x)[i], True, 2),
    "both": (lambda x, i: repeated(x)[i // 3], True, 6),
    "chosen": (lambda x, i: x[i % TOKENS], True, 1),
    "duplicates": (lambda x, i: x[i * 0 + 3], True, 1),
    "int32": (lambda x, i: x[i.int() // TIMES], True, 2),
    "repeated": (lambda x, i: repeated(x), False, 2),
    "expanded": (lambda x, i: x[:, None].expand(-1, TIMES, -1).flatten(0, 1), False, 2),
    "negative": (lambda x, i: x[(i - TOKENS * TIMES) // TIMES], True, 2),
    "truncated": (lambda x, i: x[torch.div(i - 9, TIMES, rounding_mode="trunc")], True, 1),
    "shifted": (lambda x, i: x[i >> 1], True, 1),
}


def check(fn, *args, rows=False, repeats=1, op=experts.op):
    """The value, and how the one call of ``op`` gathers."""
    want = fn(*(arg.clone() for arg in args))
    got, [rewrite] = capture(fn, args)
    [call] = calls(rewrite.after, op)
    assert (len(call.args) > 4 and call.args[-1] is not None) == (rows and op is experts.op)
    assert call.kwargs.get("repeats", 1) == repeats
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)
    return rewrite, call


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", GATHERS)
def test_every_spelling(name):
    gather, has_rows, repeats = GATHERS[name]
    rewrite, call = check(
        lambda x, i: product(gather(x, i)), x, perm, rows=has_rows, repeats=repeats
    )
    assert call.args[0].op == "placeholder"
    assert not calls(rewrite.after, aten.index.Tensor)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("form", ["transformers_grouped", "transformers_batched", "einsum"])
def test_layers(form, tokens):
    """The first product reads tokens; the second one reads what the first one wrote."""
    if form.startswith("transformers"):
        pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model, args = Experts("int4_words", form, e=8), route(tokens, 8, 4)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (model, *args))
        want = model(*args)
    found = calls(rewrite.after, experts.op)
    assert [call.kwargs.get("repeats", 1) for call in found] == [4, 1][-len(found) :]
    assert (got - want).norm() <= 0.02 * want.norm()


def test_a_symbolic_number_of_tokens():
    torch.manual_seed(0)
    model, tensors = Experts("int8", "gather_first"), route(6, 4)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (model, *tensors))
        want = model(*tensors)
    assert [call.kwargs.get("repeats", 1) for call in calls(rewrite.after, experts.op)] == [2, 1]
    assert (got - want).norm() <= 0.02 * want.norm()


# ------------------------------------------------------------------------------------------
# near misses


def of_columns(x, i):
    return product(x.repeat(TIMES, 1)[:, i.repeat(4)[:K]])


def the_whole_repeated(x, i):
    return product(x[None].expand(TIMES, -1, -1).flatten(0, 1))


def of_parts(x, i):
    """Rows of another width."""
    return product(x.view(2 * TOKENS, K // 2)[torch.stack([i, i.flip(0)], 1)].flatten(1))


def read_by_another(x, i):
    rows = x[i // TIMES]
    return product(rows), rows


def masked_where_the_result_is_not(x, i):
    return product(torch.where(i[:, None] > 7, 0.0, x[i // TIMES]))


def masked_where_the_result_is_elsewhere(x, i):
    y = product(torch.where(i[:, None] > 7, 0.0, x[i // TIMES]))
    return torch.where(i[:, None] > 6, 0.0, y)


def masked_where_the_result_is_kept(x, i):
    mask = i[:, None] > 7
    return torch.where(mask, product(torch.where(mask, 0.0, x[i // TIMES])), 0.0)


def masked_where_the_result_is_read_before(x, i):
    mask = i[:, None] > 7
    y = product(torch.where(mask, 0.0, x[i // TIMES])).abs()
    return torch.where(mask, 0.0, y), y[:1]


def masked_where_the_result_replaces_it(x, i):
    mask = i[:, None] > 7
    y = product(torch.where(mask, 0.0, x[i // TIMES]))
    return torch.where(mask, y * 2, y)


def masked_by_element(x, i):
    mask = (i[:, None] > 7).expand(-1, K).contiguous()
    return product(torch.where(mask, 0.0, x[i // TIMES]))


def columns_of_one_row(x, i):
    """Its columns are the rows that are gathered."""
    row = x.reshape(-1, 1)[i.repeat(4)[:K]].reshape(1, K)
    return torch.bmm((q.to(bf16) * s)[i[:1] % 4], row.unsqueeze(2)).squeeze(2)


def columns_of_one_row_repeated(x, i):
    row = x[0, : K // TIMES].reshape(-1, 1, 1).expand(-1, TIMES, 1).reshape(1, K)
    return torch.bmm((q.to(bf16) * s)[i[:1] % 4], row.unsqueeze(2)).squeeze(2)


MISSES = [
    *(of_columns, the_whole_repeated, of_parts, read_by_another, masked_by_element),
    *(columns_of_one_row, columns_of_one_row_repeated),
]
MASKED = [value for name, value in dict(globals()).items() if name.startswith("masked_where")]


@pytest.mark.parametrize("miss", [*MISSES, *MASKED])
def test_near_misses_stay(miss):
    want, (got, [rewrite]) = miss(x, perm), capture(miss, (x, perm))
    [call] = calls(rewrite.after, experts.op)
    assert len(call.args) == 4
    assert "repeats" not in call.kwargs
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_mask_goes_if_the_result_has_it_too(has_bias):
    def fn(x, i):
        mask = (i > 7).unsqueeze(1)
        y = product(torch.where(mask, 0.0, x[i // TIMES]))
        return torch.where(mask, 0.0, y + s[:, :, 0][i % 4] if has_bias else y)

    rewrite, _ = check(fn, x, perm, rows=True, repeats=2)
    assert len(calls(rewrite.after, aten.where.self)) == 1


def test_rows_are_repeated_as_a_view_has_them():
    def fn(halves, i):
        return product(halves.view(TOKENS, 1, K).expand(-1, TIMES, -1).reshape(-1, K)[i])

    halves = x.view(2 * TOKENS, K // 2)
    want, (got, [rewrite]) = fn(halves, perm), capture(fn, (halves, perm))
    [call] = calls(rewrite.after, experts.op)
    assert call.kwargs["repeats"] == TIMES
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


def test_a_tensor_that_is_written_to_is_gathered_before():
    def body(call, x, i, w, ends):
        rows = call(aten.index.Tensor, x, [i])
        y = call(
            aten._grouped_mm.default,
            rows,
            call(torch.ops.prims.convert_element_type.default, w, bf16),
            ends,
        )
        call(aten.mul_.Scalar, x, 0)
        return y

    stack = q.transpose(1, 2).contiguous()
    rewrite = rewritten(body, [x.clone(), perm // TIMES, stack, offsets])
    assert not any(len(call.args) > 4 for call in calls(rewrite.after, experts.op))
    before, after = results(rewrite)
    torch.testing.assert_close(after, before, rtol=0.02, atol=0.05)


# ------------------------------------------------------------------------------------------
# rows of 8 bits


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ["int8", "fp8_block"])
def test_scales_are_read_where_their_rows_are(format):
    torch.manual_seed(0)
    model, args = ScaledExperts(format, "rows_first"), route(6, 4)
    with torch.no_grad():
        got, [rewrite] = capture(lambda m, *a: m(*a), (model, *args))
        want = model(*args)
    first, second = calls(rewrite.after, scaled_experts.op)
    assert first.args[6] is not None
    assert first.kwargs["repeats"] == 2
    assert len(second.args) == 6
    assert (got - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize("is_same", [True, False])
def test_scales_of_other_rows_are_gathered_before(is_same):
    def fn(a, b, of_a, of_b, offsets, i, j):
        rows = a[i], b, of_a[j], of_b
        return scaled_experts.op(*rows, offsets, None, out_dtype=torch.float32)

    codes, scale = by_row_int8(x)
    i, j = perm // TIMES, perm % TOKENS
    args = (codes, q.transpose(1, 2), scale, s.transpose(1, 2), offsets, i, i if is_same else j)
    module = make_fx(fn, tracing_mode="fake")(*args)
    assert gather_in_experts(module.graph) == is_same
    module.recompile()
    assert torch.equal(module(*args), fn(*args))


@pytest.mark.parametrize("is_written", [True, False])
def test_a_mask_that_is_written_to_stays(is_written):
    def fn(a, b, mask, offsets, i):
        rows = torch.where(mask, offsets.new_zeros((), dtype=a.dtype), a[i])
        y = scaled_experts.op(rows, b, None, None, offsets, None, out_dtype=torch.float32)
        if is_written:
            torch.ops.aten.fill_.Scalar(mask.view(-1), 0)
        return torch.ops.aten.where.self(mask, offsets.new_zeros((), dtype=y.dtype), y)

    args = (by_row_int8(x)[0], q.transpose(1, 2), perm[:, None] > 7, offsets, perm // TIMES)
    module = make_fx(fn, tracing_mode="fake")(*args)
    assert gather_in_experts(module.graph) == (not is_written)
    module.recompile()
    again = (*args[:2], args[2].clone(), *args[3:])
    assert torch.equal(module(*again), fn(*args))


def test_scales_of_a_longer_tensor_are_gathered_before():
    """A row that counts from the end is another one there."""

    def fn(a, b, of_a, offsets, i):
        return scaled_experts.op(a[i], b, of_a[i], None, offsets, None, out_dtype=torch.float32)

    codes, scale = by_row_int8(x)
    longer = torch.cat([scale, scale.flip(0)])
    args = (codes, q.transpose(1, 2), longer, offsets, perm // TIMES - TOKENS)
    module = make_fx(fn, tracing_mode="fake")(*args)
    assert gather_in_experts(module.graph) == 0
    module.recompile()
    assert torch.equal(module(*args), fn(*args))


# ------------------------------------------------------------------------------------------
# kernels


@pytest.mark.compiles
@pytest.mark.parametrize(("rows", "launches"), [(16, 1), (1 << 12, 2)])
def test_a_kernel_that_reads_by_tma_has_its_rows_gathered_before(rows, launches):
    case = Case("nibble_pairs", (rows // 4,) * 4, 512, 1024, has_rows=True, repeats=2)
    generated = generate(packed_gemm(case), lambda device: make_inputs(case, device))
    [text] = [text for name, text in generated.kernels.items() if "_tem_" in name]
    assert ("arg_ROWS" in text) == (launches == 1)
    assert len(generated.kernels) == launches
