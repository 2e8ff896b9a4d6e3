"""What is generated before and after experts, and what it computes."""

from __future__ import annotations

import re

import pytest
import torch

from inductor_quant.ops.fusion import expert_routing as ops
from tests.support.gemms.generated import generate
from tests.support.producers.experts import bf16, to_generate

E = 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 7, 256])
def test_places(count, dtype):
    torch.manual_seed(count)
    ids = torch.randint(-2, E + 3, (count,), dtype=dtype)

    def fn(ids):
        places = ops.places_op(ids, E)
        return places, ops.order_op(places[:-E])

    got, want = torch.compile(fn, dynamic=False)(ids), fn(ids)
    assert all(map(torch.equal, got, want))
    values, order = ids.sort(stable=True)
    assert torch.equal(order, want[1])
    assert torch.equal(ids[order], values)
    assert torch.equal(torch.arange(count), want[0][:-E][order].long())
    within = torch.histc(values.float(), E, 0, E - 1).cumsum(0)
    assert torch.equal(within, want[0][-E:].float())


def test_places_of_any_number_of_ids():
    run = torch.compile(lambda ids: ops.places_op(ids, E), dynamic=True)
    for count in (3, 40):
        ids = torch.randint(0, E, (count,))
        assert torch.equal(run(ids), ops.places_op(ids, E))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("count", [2, 8, 16, 17])
@pytest.mark.parametrize("keepdim", [True, False])
def test_a_sum(count, keepdim):
    x = torch.randn(5, count, 24).to(bf16)
    run = torch.compile(lambda x: ops.sum_op(x * 2, keepdim, torch.float32))
    torch.testing.assert_close(run(x), (x * 2).sum(1, keepdim, dtype=torch.float32))


@pytest.mark.compiles
def test_a_layer_has_five_launches():
    """Without a sort, and with eight experts added in one thread."""
    pytest.importorskip("transformers.integrations.moe")
    made = to_generate("int4_words", "transformers_grouped", tokens=16, top_k=8, h=256, i=128)
    generated = generate(*made)
    called = generated.wrapper.split("def call", 1)[1]
    assert len(re.findall(r"triton_\w+\.run\(", called)) == 5
    assert "aten.sort" not in called
    assert "extern_kernels" not in called
    assert not any("tl.sort" in source for source in generated.kernels.values())
    [last] = [source for name, source in generated.kernels.items() if "sum" in name]
    assert "tl.sum" not in last
