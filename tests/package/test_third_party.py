"""Patterns registered from outside: they are tried, and nothing is cached while one is there."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config

from inductor_quant import collect, patterns
from inductor_quant.options import Options
from inductor_quant.patterns import Pattern
from inductor_quant.patterns.graph_pass import for_options
from inductor_quant.patterns.recognizers import w8a8
from inductor_quant.simulate import generate
from inductor_quant.spec.decisions import Rejection, RejectionCode

pytestmark = pytest.mark.compiles

aten = torch.ops.aten


@pytest.fixture
def registered(monkeypatch):
    """A third party's pattern, which looks at ``aten.mm``; the nodes that it was shown."""
    monkeypatch.setattr(patterns, "_patterns", list(patterns._patterns))
    shown = []

    def recognize(node):
        shown.append(node.name)
        return Rejection(RejectionCode.DTYPE, "not this one", node.name)

    patterns.register(Pattern("their_mm", "w8a8", (aten.mm.default,), recognize))
    return shown


def both(a, b, a_scale, x):
    return torch._int_mm(a, b) * a_scale, x @ x


def make_inputs(device):
    return (
        torch.zeros(32, 64, dtype=torch.int8, device=device),
        torch.zeros(64, 48, dtype=torch.int8, device=device),
        torch.ones(32, 1, device=device),
        torch.ones(16, 16, device=device),
    )


def test_a_registered_pattern_is_shown_its_anchors_and_ours_still_works(registered):
    with collect() as report:
        generate(both, make_inputs, backend="inductor_quant")
    assert registered == ["mm"]
    assert [item.detail for item in report.rejections] == ["not this one"]
    assert len(report.matches) == 1


def test_a_registered_pattern_stands_behind_ours(registered):
    names = [pattern.name for pattern in patterns.patterns()]
    assert names.index(w8a8.PATTERN.name) < names.index("their_mm")


def test_a_pattern_on_one_of_our_anchors_is_tried_where_ours_does_not_match(registered):
    shown = []

    def recognize(node):
        shown.append(node.name)
        return Rejection(RejectionCode.DTYPE, "theirs", node.name)

    def fn(a, b, a_scale, x):
        return torch._int_mm(a, b) * a_scale, torch._int_mm(a, b + 1)

    patterns.register(Pattern("their_int_mm", "w8a8", (aten._int_mm.default,), recognize))
    with collect() as report:
        generate(fn, make_inputs, backend="inductor_quant")
    [match], [rejection] = report.matches, report.rejections
    assert shown == ["_int_mm_1"]
    assert match.node not in shown
    assert rejection.code == RejectionCode.NO_SCALE  # the reason of the first that looked


def test_a_name_can_be_registered_once(registered):
    with pytest.raises(ValueError, match="'their_mm' is registered already"):
        patterns.register(Pattern("their_mm", "w8a8", (), lambda node: None))


def test_the_pass_can_be_cached_without_a_third_party():
    assert not patterns.has_third_party()
    assert for_options(Options()).uuid()


def test_the_pass_cannot_be_cached_with_a_third_party(registered):
    assert patterns.has_third_party()
    assert for_options(Options()).uuid() is None


def counts_of_the_cache():
    """What Inductor's cache did in two compilations of the same function."""
    counters.clear()
    for _ in range(2):
        with config.patch(fx_graph_cache=True):
            generate(
                both,
                make_inputs,
                backend="inductor_quant",
                config={"force_disable_caches": False},
            )
    found = counters["inductor"]
    return {name: found[f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}


def test_inductors_cache_is_used_without_a_third_party():
    assert counts_of_the_cache()["bypass"] == 0


def test_inductors_cache_is_bypassed_with_a_third_party(registered):
    counts = counts_of_the_cache()
    assert counts["hit"] == counts["miss"] == 0
    assert counts["bypass"] == 2
