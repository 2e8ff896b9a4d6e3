"""Layers of experts whose rows are written in the order of lanes, for both products."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.virtualized import V

from inductor_quant._compat import gluon, not_stored
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.producers import experts
from tests.support.producers.experts import as_function, to_generate

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.mark.one_in(4)
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


def test_a_long_activation_is_computed_once_in_the_order_of_lanes():
    """gpt-oss's, with a bias: Inductor gives it a buffer before the product that reads it."""
    pytest.importorskip("transformers.integrations.moe")
    from examples.benchmarks.experts import Model
    from examples.benchmarks.workers.expert_layers import Experts

    with torch.device("meta"):
        model = Experts(Model(16, 4, 512, 512, is_gpt_oss=True), "int4")
    with collect() as report:
        generated = generate(*as_function(model, tokens=280, top_k=4, h=512))
    found = [len(choice.weight[0].k) for choice in report.kernels if choice.weight]
    assert len(found) == 2
    assert min(found) > 3
    assert sum("tl.sigmoid(" in text for text in generated.kernels.values()) == 1
    assert len(generated.kernels) == 7


def test_a_constant_or_a_value_that_is_computed_later_is_known_by_its_layout():
    graph = torch.fx.Graph()
    later, unknown = graph.placeholder("later"), graph.placeholder("unknown")
    constant = graph.create_node("get_attr", "tables.first")
    later.meta["val"] = torch.empty(4, 6, dtype=torch.int8).t()
    module = SimpleNamespace(tables=SimpleNamespace(first=torch.zeros(16)))
    with V.set_graph_handler(SimpleNamespace(env={}, module=module)):
        known = not_stored.lowered(later), not_stored.lowered(constant)
        assert not_stored.lowered(unknown) is None
    sizes = [(list(map(int, x.get_size())), list(map(int, x.get_stride()))) for x in known]
    assert sizes == [([6, 4], [1, 6]), ([16], [1])]
    assert [x.get_dtype() for x in known] == [torch.int8, torch.float32]
