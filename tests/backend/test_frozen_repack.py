"""Frozen weights in slow layouts are repacked, once, as ``prepack_`` does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config

import inductor_quant
from examples.benchmarks.workers.formats import FORMATS, Source
from inductor_quant.patterns.fusion import repack_weights
from tests.backend.test_freezing import WEIGHT_ONLY, K, N, constants, run
from tests.support.graphs.post_grad import calls

pytestmark = pytest.mark.compiles


class Dequantized(torch.nn.Module):
    """A linear layer of a benchmark's weight format."""

    def __init__(self, name):
        super().__init__()
        self.format = FORMATS[name]
        stored = self.format.make(Source("cpu"), N, 2 * K)
        self.names = [f"stored{i}" for i in range(len(stored))]
        for each, tensor in zip(self.names, stored, strict=True):
            self.register_buffer(each, tensor)

    def forward(self, x):
        stored = [getattr(self, name) for name in self.names]
        return F.linear(x, self.format.dequantize(x.shape[-1], *stored))


def formats_of(gm):
    return [call.kwargs["format"] for call in calls(gm, WEIGHT_ONLY)]


def check_that_it_stays(graphs, module, rows):
    plain, _ = run(module, rows, freezing=False)
    [before] = formats_of(graphs[-1])
    frozen, _ = run(module, rows)
    assert formats_of(graphs[-1]) == [before]
    assert torch.equal(frozen, plain)


@pytest.mark.one_in(2)
@pytest.mark.quick
@pytest.mark.parametrize("name", ["awq", "gptq_act_order", "hqq", "halves_of_k"])
def test_a_frozen_weight_in_a_slow_layout_is_repacked_as_by_prepack(graphs, name):
    module, rows = Dequantized(name), torch.randn(20, 2 * K).to(FORMATS[name].dtype)
    plain, _ = run(module, rows, freezing=False)
    [before] = formats_of(graphs[-1])
    frozen, report = run(module, rows)
    [after] = formats_of(graphs[-1])
    assert len(report.matches) == 1
    assert after != before
    assert torch.equal(frozen, plain)
    stored = {buffer.data_ptr() for buffer in module.buffers()}
    assert not stored & {tensor.data_ptr() for tensor in constants(graphs[-1])}
    model = torch.nn.Sequential(module)
    assert inductor_quant.prepack_(model, rows) == ["0"]
    run(model, rows, freezing=False)
    assert formats_of(graphs[-1]) == [after]


class Halves(torch.nn.Module):
    """Two values of few bits in a byte, halves of N, in groups along K."""

    def __init__(self, k, group, bits=4):
        super().__init__()
        count, self.bits = 8 // bits, bits
        shape = (N // count, k // group, group)
        self.register_buffer("packed", torch.randint(0, 256, shape, dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(N, k // group, 1).half() + 0.5)

    def weight(self):
        mask, shifts = (1 << self.bits) - 1, range(0, 8, self.bits)
        q = torch.cat([self.packed >> shift & mask for shift in reversed(shifts)])
        return (q.half() * self.scale).flatten(1)

    def forward(self, x):
        return F.linear(x, self.weight())


@pytest.mark.parametrize(
    ("k", "group", "bits"),
    [
        (288, 36, 4),  # a word would reach into another group
        (512, 64, 2),  # would grow
    ],
)
def test_a_frozen_weight_that_words_do_not_suit_stays(graphs, k, group, bits):
    module, rows = Halves(k, group, bits), torch.randn(20, k).half()
    check_that_it_stays(graphs, module, rows)


def test_a_weight_that_the_graph_returns_is_read_anew(graphs):
    class Returning(Dequantized):
        def forward(self, x):
            return super().forward(x), getattr(self, self.names[0]).view(-1)

    module, rows = Returning("awq"), torch.randn(20, 2 * K).half()
    as_if_triton = mock.patch("inductor_quant._compat.inductor.runs_triton", return_value=True)
    torch._dynamo.reset()
    with torch.no_grad(), config.patch(freezing=True, force_disable_caches=True), as_if_triton:
        compiled = torch.compile(module, backend="inductor_quant")
        compiled(rows)
        module.stored0.copy_(module.stored0.flip(0))
        got, _ = compiled(rows)
    assert torch.allclose(got, module(rows)[0], rtol=0.05, atol=0.05)


def test_compilations_share_what_was_repacked(graphs):
    module = Dequantized("awq")
    found = []
    for count in (20, 40):
        run(module, torch.randn(count, 2 * K).half())
        found.append({t.data_ptr() for t in constants(graphs[-1]) if t.dtype == torch.int32})
    assert found[0] == found[1]
    module.stored0.add_(1)
    run(module, torch.randn(20, 2 * K).half())
    assert not found[0] <= {t.data_ptr() for t in constants(graphs[-1])}


def test_a_weight_that_cannot_be_repacked_for_want_of_memory_stays(graphs, monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError

    module, rows = Dequantized("awq"), torch.randn(20, 2 * K).half()
    plain, _ = run(module, rows, freezing=False)
    monkeypatch.setattr(repack_weights.repack, "repacked", fails)
    frozen, report = run(module, rows)
    assert len(report.matches) == 1
    assert torch.equal(frozen, plain)


@pytest.mark.parametrize("name", ["gptq", "words", "gptq_2bit", "hqq_axis0", "nf4", "int8", "e4m3"])
def test_other_frozen_weights_stay(graphs, name):
    module, rows = Dequantized(name), torch.randn(20, 2 * K).to(FORMATS[name].dtype)
    check_that_it_stays(graphs, module, rows)


def test_a_weight_that_is_verified_is_not_repacked(graphs):
    module, rows = Dequantized("awq"), torch.randn(20, 2 * K).half()
    run(module, rows, freezing=False, verify=True)
    [before] = formats_of(graphs[-1])
    run(module, rows, verify=True)
    assert formats_of(graphs[-1]) == [before]


def test_two_layers_of_one_weight_have_one_repacked(graphs):
    module = Dequantized("awq")
    rows = torch.randn(20, 2 * K).half()
    run(module, rows)
    once = len(constants(graphs[-1]))

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, x):
            return self.layer(x), self.layer(x[:3] * 2)

    (first, second), _ = run(Twice(), rows)
    assert len(calls(graphs[-1], WEIGHT_ONLY)) == 2
    assert len({*constants(graphs[-1])}) == once
    assert torch.equal(first, run(module, rows, freezing=False)[0])
    assert torch.equal(second, run(module, rows[:3] * 2, freezing=False)[0])
