"""Products that Inductor overlaps with collectives are left to it."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config

from tests.support.graphs.handmade import rewritten

aten, prims = torch.ops.aten, torch.ops.prims
c10d = torch.ops._c10d_functional
bf16 = torch.bfloat16


def gathered(call, x, q, s):
    whole = call(c10d.wait_tensor.default, call(c10d.all_gather_into_tensor.default, x, 2, "0"))
    return product(call, call(aten.reshape.default, whole, [16, 64]), q, s)


def scattered(call, x, q, s):
    whole = call(aten.reshape.default, product(call, x, q, s), [8, 48])
    part = call(c10d.reduce_scatter_tensor.default, whole, "sum", 2, "0")
    return call(c10d.wait_tensor.default, part)


def reduced(call, x, q, s):
    """Not one that Inductor overlaps."""
    whole = call(c10d.all_reduce.default, product(call, x, q, s), "sum", "0")
    return call(c10d.wait_tensor.default, whole)


def product(call, x, q, s):
    w = call(aten.mul.Tensor, call(prims.convert_element_type.default, q, bf16), s)
    return call(aten.mm.default, x, call(aten.permute.default, w, [1, 0]))


def codes(body, *, overlaps):
    inputs = [
        torch.randn(8, 64, dtype=bf16),
        torch.ones(48, 64, dtype=torch.int8),
        torch.ones(48, 1, dtype=bf16),
    ]
    with config.patch(_micro_pipeline_tp=overlaps):
        report = rewritten(body, inputs).report
    return [str(each.code) for each in report.rejections], len(report.matches)


@pytest.mark.parametrize("body", [gathered, scattered])
def test_a_product_beside_a_collective_is_left_to_inductor_if_it_overlaps_them(body):
    assert codes(body, overlaps=True) == (["collective"], 0)
    assert codes(body, overlaps=False) == ([], 1)


def test_another_product_is_rewritten_all_the_same():
    assert codes(reduced, overlaps=True) == ([], 1)
