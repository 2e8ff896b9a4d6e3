"""Casts of a GEMM's result are written once for each reader."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inductor_quant.options import Options
from inductor_quant.patterns.readers import MAX_READERS, MAX_ROWS
from tests.support.graphs import capture
from tests.support.group import words

bf16 = torch.bfloat16
CAST = torch.ops.prims.convert_element_type.default


def rotate(x):
    """Each cast once, as where equal nodes were merged."""
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return wide * 0.5 + torch.cat([-high, low], -1) * 0.25


def behind(fn, rows=2, *, grouped=False):
    """Results with the plugin and without, and the numbers of readers of each cast behind the GEMM
    of what is rewritten."""
    torch.manual_seed(0)
    layers = nn.ModuleList([words(64, 32), words(64, 16)] if grouped else [words(64, 32)])
    x = torch.randn(rows, 64, dtype=bf16)

    def whole(x):
        return [fn(layer(x).view(rows, -1, 16)) for layer in layers]

    with torch.no_grad():
        result, [rewrite] = capture(whole, [x], options=Options(on_error="raise"))
        want = whole(x)
    gemms = ("weight_only.default", "weight_only_group.default")
    found = set()
    todo = [n for n in rewrite.after.graph.nodes if str(n.target).endswith(gemms)]
    assert todo
    while todo:
        node = todo.pop()
        found |= {node} if node.target is CAST else set()
        todo += node.users
    for got, right in zip(result, want, strict=True):
        torch.testing.assert_close(got, right, rtol=0.05, atol=0.2)
    rewrite.after.graph.lint()
    return sorted(len(node.users) for node in found if node.meta["val"].dtype == torch.float32)


@pytest.mark.parametrize("grouped", [False, True])
def test_each_reader_has_a_cast_of_its_own(grouped):
    """The whole and both halves."""
    assert behind(rotate, grouped=grouped) == [1] * (6 if grouped else 3)


def test_only_few_rows():
    assert behind(rotate, MAX_ROWS) == [1, 1, 1]
    assert behind(rotate, MAX_ROWS + 1) == [2]


def test_only_few_readers():
    def of(count):
        def read(y):
            wide = y.float()
            return sum(torch.cumsum(wide + i, -1) for i in range(count))

        return read

    assert behind(of(MAX_READERS)) == [1] * MAX_READERS
    assert behind(of(MAX_READERS + 1)) == [MAX_READERS + 1]


def test_what_is_returned_stays_one_tensor():
    def fn(y):
        wide = y.float()
        return wide, wide.exp(), wide.sin()

    layer, x = words(64, 32), torch.randn(2, 64, dtype=bf16)
    with torch.no_grad():
        got, [rewrite] = capture(lambda x: fn(layer(x)), [x])
        want = fn(layer(x))
    casts = [node for node in rewrite.after.graph.nodes if node.target is CAST]
    assert sum(node.meta["val"].dtype == torch.float32 for node in casts) == 1
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.2)
