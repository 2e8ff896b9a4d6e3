"""A weight that is contiguous along N is copied where that pays, with the same product. (Of
constants: tests/backend/test_freezing.py.)"""

from __future__ import annotations

import pytest
import torch

from inductor_quant.ops import w8a8
from inductor_quant.patterns import fx_utils
from inductor_quant.patterns.fusion import weight_k_major
from tests.support.graphs.post_grad import capture

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
        (weight_k_major.MIN_M, "n", (1, K)),
        (weight_k_major.MIN_M - 1, "n", (N, 1)),
        (weight_k_major.MIN_M, "k", (1, K)),
    ],
)
def test_a_weight_along_n_is_copied_for_large_m(rows, along, stride):
    w = torch.randint(-128, 128, (K, N), dtype=torch.int8)
    call = captured(rows, w if along == "n" else w.t().contiguous().t())
    b = call.args[1]
    assert fx_utils.value(b).stride() == stride
    assert fx_utils.is_stored(b) == (along == "k" or rows < weight_k_major.MIN_M)
