"""Products that Inductor overlaps with collectives are left to it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.distributed import _symmetric_memory

from tests.support.graphs.handmade import rewritten

aten, prims = torch.ops.aten, torch.ops.prims
c10d = torch.ops._c10d_functional
bf16 = torch.bfloat16


def gather(call, x):
    return call(c10d.wait_tensor.default, call(c10d.all_gather_into_tensor.default, x, 2, "0"))


def gathered(call, x, q, s):
    rows = call(aten.reshape.default, gather(call, x), [16, 64])
    return call(aten.reshape.default, product(call, rows, q, s), [4, 4, 48])


def scattered(call, x, q, s):
    rows = call(aten.reshape.default, x, [8, 64])
    whole = call(aten.reshape.default, product(call, rows, q, s), [2, 4, 48])
    part = call(c10d.reduce_scatter_tensor.default, whole, "sum", 2, "0")
    return call(c10d.wait_tensor.default, part)


def reduced(call, x, q, s):
    """Not one that Inductor overlaps."""
    rows = call(aten.reshape.default, x, [8, 64])
    whole = call(c10d.all_reduce.default, product(call, rows, q, s), "sum", "0")
    return call(c10d.wait_tensor.default, whole)


def product(call, x, q, s):
    w = call(aten.mul.Tensor, call(prims.convert_element_type.default, q, bf16), s)
    return call(aten.mm.default, x, call(aten.permute.default, w, [1, 0]))


def fp8_gathered(call, x, q, s):
    return scaled_product(call, gather(call, x), q, s)


def fp8_scattered(call, x, q, s):
    part = call(c10d.reduce_scatter_tensor.default, scaled_product(call, x, q, s), "sum", 2, "0")
    return call(c10d.wait_tensor.default, part)


def scaled_product(call, x, q, s):
    scale = call(aten.full.default, [x.meta["val"].shape[0], 1], 0.5)
    by_columns = call(aten.permute.default, s, [1, 0])
    weight = call(aten.permute.default, q, [1, 0])
    return call(aten._scaled_mm.default, x, weight, scale, by_columns, None, None, bf16)


def int8_weight():
    return [
        torch.randn(2, 4, 64, dtype=bf16),
        torch.ones(48, 64, dtype=torch.int8),
        torch.ones(48, 1, dtype=bf16),
    ]


def fp8():
    e4m3 = torch.float8_e4m3fn
    return [torch.randn(8, 64).to(e4m3), torch.ones(48, 64).to(e4m3), torch.ones(48, 1)]


BESIDE = {gathered: int8_weight, scattered: int8_weight, fp8_gathered: fp8, fp8_scattered: fp8}


def rewrite(body, inputs, *, overlaps):
    with config.patch(_micro_pipeline_tp=overlaps):
        return rewritten(body, inputs)


def codes(body, inputs, *, overlaps):
    report = rewrite(body, inputs, overlaps=overlaps).report
    return [str(each.code) for each in report.rejections], len(report.matches)


@pytest.mark.parametrize("body", BESIDE, ids=lambda body: body.__name__)
def test_a_product_beside_a_collective_is_left_to_inductor_if_it_overlaps_them(body):
    inputs = BESIDE[body]()
    assert codes(body, inputs, overlaps=True) == (["collective"], 0)
    assert codes(body, inputs, overlaps=False) == ([], 1)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("body", BESIDE, ids=lambda body: body.__name__)
def test_inductor_then_overlaps_it(body, overlaps):
    """Its own pass, which runs after ours, as for a group with symmetric memory."""
    after = rewrite(body, BESIDE[body](), overlaps=overlaps).after
    with (
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        _symmetric_memory._test_mode(),
    ):
        micro_pipeline_tp.micro_pipeline_tp_pass(after.graph)
    fused = [str(node.target) for node in after.graph.nodes if "symm_mem" in str(node.target)]
    assert len(fused) == overlaps


def test_another_product_is_rewritten_all_the_same():
    assert codes(reduced, int8_weight(), overlaps=True) == ([], 1)
