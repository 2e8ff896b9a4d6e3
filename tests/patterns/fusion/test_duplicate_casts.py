"""Each user of a cast GEMM result gets its own cast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inductor_quant.options import Options
from inductor_quant.patterns.fusion.duplicate_casts import MAX_M, MAX_USERS
from tests.support.gemms.horizontal import words
from tests.support.graphs.post_grad import capture

bf16 = torch.bfloat16
CAST = torch.ops.prims.convert_element_type.default


def rotate(x):
    """A rotary embedding with one cast, as after common subexpressions are merged."""
    wide = x.float()
    low, high = wide.chunk(2, -1)
    return wide * 0.5 + torch.cat([-high, low], -1) * 0.25


def users_of_casts(fn, rows=2, *, grouped=False):
    """Compares results with the plugin and without. Returns the number of users of each cast after
    the GEMM in the rewritten graph."""
    torch.manual_seed(0)
    layers = nn.ModuleList([words(64, 32), words(64, 16)] if grouped else [words(64, 32)])
    x = torch.randn(rows, 64, dtype=bf16)

    def whole(x):
        return [fn(layer(x).view(rows, -1, 16)) for layer in layers]

    with torch.no_grad():
        result, [rewrite] = capture(whole, [x], options=Options(on_error="raise"))
        want = whole(x)
    gemms = ("weight_only.default", "weight_only_horizontal.default")
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
def test_each_user_has_its_own_cast(grouped):
    """The whole and both halves."""
    assert users_of_casts(rotate, grouped=grouped) == [1] * (6 if grouped else 3)


def test_only_small_m():
    assert users_of_casts(rotate, MAX_M) == [1, 1, 1]
    assert users_of_casts(rotate, MAX_M + 1) == [2]


def test_only_few_users():
    def of(count):
        def read(y):
            wide = y.float()
            return sum(torch.cumsum(wide + i, -1) for i in range(count))

        return read

    assert users_of_casts(of(MAX_USERS)) == [1] * MAX_USERS
    assert users_of_casts(of(MAX_USERS + 1)) == [MAX_USERS + 1]


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
