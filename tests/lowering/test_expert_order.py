"""Layers of experts whose rows are written in the order of lanes, for both products."""

from __future__ import annotations

import pytest

from inductor_quant._compat import gluon
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.producers import experts
from tests.support.producers.experts import to_generate

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("format", "is_ordered"), [("int4_words", True), ("nibbles", True), ("int8", False)]
)
@pytest.mark.parametrize("form", ["grouped", "transformers_grouped"])
@pytest.mark.parametrize("tokens", [280, 1000])
def test_k_of_both_products_is_in_the_order_of_lanes(form, format, is_ordered, tokens, monkeypatch):
    """What gathers the rows of the first writes them so, and its gate stores columns so."""
    monkeypatch.setattr(experts, "GROUP", 128)
    if form.startswith("transformers"):
        pytest.importorskip("transformers.integrations.moe")
    made = to_generate(format, form, tokens=tokens, top_k=4, h=512, i=256)
    with collect() as report:
        generated = generate(*made)
    products = [text for text in generated.kernels.values() if "gl.warp_specialize" in text]
    assert len(products) == 2
    assert "gl.exp" in products[0]  # the gate
    # Digits of groups, and others of a word; in order those of lanes and of halves, too.
    found = [len(choice.weight[0].k) for choice in report.kernels if choice.weight]
    assert len(found) == 2
    assert all((digits > 3) == is_ordered for digits in found), found
