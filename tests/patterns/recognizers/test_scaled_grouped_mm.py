"""Recognition of both versions of ``_scaled_grouped_mm``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_quant.ops import scaled_experts as op
from inductor_quant.patterns.products import stock
from tests.support.graphs.handmade import rewritten
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.experts import bf16

aten, e4m3 = torch.ops.aten, torch.float8_e4m3fn
ENDS = torch.tensor([1, 3, 3, 9], dtype=torch.int32)
needs_version_2 = pytest.mark.skipif(
    not hasattr(aten, "_scaled_grouped_mm_v2"), reason="this torch has one version"
)

OWN = {"out_dtype": bf16, "use_fast_accum": True}


def operands(rows: int = 9, n: int = 48) -> dict[str, torch.Tensor]:
    """Those of a product of ``rows`` with four experts."""
    return {
        "a": torch.zeros(rows, 32).to(e4m3),
        "b": torch.zeros(4, n, 32).to(e4m3),
        "of_a": torch.ones(rows),
        "of_b": torch.ones(4, n),
        "offsets": ENDS,
    }


def scaled_product(rows: int = 9, n: int = 48, user: Any = lambda call, product: product):
    """``user(call, product)``: the result of the graph."""

    def body(call, a, b, of_a, of_b, offsets):
        stack = call(aten.permute.default, b, [0, 2, 1])
        args = (a, stack, of_a, of_b, offsets)
        return user(call, call(aten._scaled_grouped_mm.default, *args, **OWN))

    return rewritten(body, list(operands(rows, n).values()))


def version_2(rows: int = 9, **others: Any):
    """``_scaled_grouped_mm_v2``, which no torch before 2.15 traces, by rows. ``others``: operands
    or arguments in place of the usual ones."""
    given = {key: others.pop(key, tensor) for key, tensor in operands(rows).items()}

    def body(call, a, b, of_a, of_b, offsets):
        stack = call(aten.permute.default, b, [0, 2, 1])
        like = [call(aten.zeros.default, [9, 48], dtype=others.pop("out_dtype", bf16))]
        arguments = {"scale_a": [of_a], "recipe_a": [1], "swizzle_a": []}
        arguments |= {"scale_b": [of_b], "recipe_b": [1], "swizzle_b": [], "offs": offsets}
        if others.pop("has_two_scales", False):
            arguments["scale_a"] = [of_a, of_a]
        product = like[0]
        product.target = aten._scaled_grouped_mm_v2.default
        product.args, product.kwargs = (a, stack), {**arguments, "use_fast_accum": True, **others}
        product.meta["val"] = product.meta["val"].new_empty(rows, 48)
        return product

    return rewritten(body, list(given.values()))


PRODUCTS = [scaled_product, pytest.param(version_2, marks=needs_version_2)]


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_that_says_so_itself(product, monkeypatch):
    assert product(65).codes == ["many_rows"]
    with monkeypatch.context() as patched:
        patched.setattr(stock, "is_tuned", lambda anchor: True)
        assert product(65).codes == []
    rewrite = product(9)
    [match] = rewrite.report.matches
    assert match.family == "scaled_experts"
    assert match.spec.fast_accum
    assert (match.m, match.n, match.k, match.site.experts) == (9, 48, 32, 4)
    [call] = calls(rewrite.after, op.op)
    assert call.kwargs == {"block_k": 0, "block_n": 1, "out_dtype": bf16, "fast_accum": True}
    assert [node.args[0].name for node in call.args[2:4]] == ["x2", "x3"]


def test_any_number_of_rows_where_tiles_were_measured(monkeypatch):
    monkeypatch.setattr(stock, "is_tuned", lambda anchor: True)
    torch.manual_seed(0)
    given = operands() | {"a": torch.randn(9, 32).to(e4m3), "b": torch.randn(4, 48, 32).to(e4m3)}
    given |= {"of_a": torch.rand(9), "of_b": torch.rand(4, 48)}
    for name in ("a", "of_a"):
        torch._dynamo.mark_dynamic(given[name], 0)

    def product(a, b, of_a, of_b, offsets):
        return torch._scaled_grouped_mm(a, b.transpose(1, 2), of_a, of_b, offs=offsets, **OWN)

    got, [rewrite] = capture(product, tuple(given.values()))
    [match] = rewrite.report.matches
    assert isinstance(match.m, str)
    a = given["a"].double() * given["of_a"][:, None]
    b = given["b"].double() * given["of_b"][..., None]
    want = [row @ b[expert].t() for row, expert in zip(a, (0, 1, 1, *[3] * 6), strict=True)]
    assert (got - torch.stack(want)).abs().max() <= 2**-7 * torch.stack(want).abs().max()


@needs_version_2
@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("scale_axis", {"recipe_a": [3]}),
        ("scale_axis", {"recipe_b": [0]}),
        ("scale_axis", {"swizzle_a": [1]}),
        ("scale_axis", {"swizzle_b": [1]}),
        ("scale_axis", {"has_two_scales": True}),
        ("scale_axis", {"contraction_dim": [0, 1]}),
        ("scale_axis", {"of_a": torch.ones(1)}),
        ("scale_axis", {"of_b": torch.ones(48, 4)}),
        ("scale_axis", {"of_b": torch.ones(4, 24)}),
        ("scale_axis", {"offsets": ENDS[:3]}),
        ("dtype", {"offsets": ENDS.long()}),
        ("dtype", {"of_a": torch.ones(9, dtype=bf16)}),
        ("dtype", {"a": torch.zeros(9, 32, dtype=bf16)}),
        ("dtype", {"b": torch.zeros(4, 48, 32).to(torch.float8_e5m2)}),
        ("dtype", {"out_dtype": torch.float16}),
    ],
    ids=str,
)
def test_the_second_version_of_what_the_library_refuses_stays(code, others):
    """Nothing is checked when it is traced."""
    assert version_2(**others).codes == [code]


@needs_version_2
def test_the_dimensions_that_are_summed_may_be_named():
    assert version_2(contraction_dim=[-1, -2]).codes == []


@pytest.mark.parametrize(("n", "codes"), [(20, ["strides"]), (24, [])])
def test_a_result_with_gaps_that_is_read_by_its_strides_stays(n, codes):
    """The library's rows begin at multiples of 16 bytes, ours have no gaps."""
    width = -(-n // 8) * 8

    def user(call, product):  # torch knows of the gaps if it is built with CUDA
        product.meta["val"] = product.meta["val"].new_empty_strided((9, n), (width, 1))
        rows = call(aten.slice.Tensor, product, 0, 1)
        return call(aten.as_strided.default, rows, [5, 4], [width, 1])

    assert scaled_product(n=n, user=user).codes == codes
    assert scaled_product(n=n).codes == []
