"""A weight that lies along N is copied where that pays, and the product stays what it was. (Of
constants: tests/test_freezing.py.)"""

from __future__ import annotations

import pytest
import torch

from inductor_quant.ops import w8a8
from inductor_quant.patterns import graph, repack
from tests.support.graphs import capture

K, N = 64, 48


def layer(a, w, scale):
    return (torch._int_mm(a, w).float() * scale).to(torch.bfloat16)


def captured(m, w):
    a = torch.randint(-128, 128, (m, K), dtype=torch.int8)
    inputs = (a, w, torch.rand(N))
    result, [rewrite] = capture(layer, inputs, dynamic=False)
    [call] = [node for node in rewrite.after.graph.nodes if node.target is w8a8.op]
    assert torch.equal(result, layer(*inputs))
    return call


@pytest.mark.parametrize(
    ("rows", "along", "stride"),
    [
        (repack.MIN_ROWS, "n", (1, K)),
        (repack.MIN_ROWS - 1, "n", (N, 1)),
        (repack.MIN_ROWS, "k", (1, K)),
    ],
)
def test_a_weight_along_n_is_copied_for_many_rows(rows, along, stride):
    w = torch.randint(-128, 128, (K, N), dtype=torch.int8)
    call = captured(rows, w if along == "n" else w.t().contiguous().t())
    b = call.args[1]
    assert graph.value(b).stride() == stride
    assert graph.is_stored(b) == (along == "k" or rows < repack.MIN_ROWS)
