"""Frozen weights in slow layouts run in the kernels of the layout that they are repacked to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config

from examples.benchmarks.workers.formats import FORMATS, Source
from inductor_quant.report.events import collect

pytestmark = pytest.mark.gpu

K, N = 1024, 2048


class Layer(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.format = FORMATS[name]
        stored = self.format.make(Source("cuda"), N, K)
        self.names = [f"stored{i}" for i in range(len(stored))]
        for each, tensor in zip(self.names, stored, strict=True):
            self.register_buffer(each, tensor)

    def weight(self):
        return self.format.dequantize(K, *(getattr(self, name) for name in self.names))

    def forward(self, x):
        return F.linear(x, self.weight())


@pytest.mark.parametrize("rows", [1, 16, 80])
@pytest.mark.parametrize("name", ["awq", "gptq_act_order", "hqq", "halves_of_k"])
def test_a_frozen_layer_is_right(name, rows):
    torch._dynamo.reset()
    layer = Layer(name)
    x = torch.randn(rows, K, device="cuda").to(layer.format.dtype)
    options = {"inductor_quant.on_error": "raise"}
    frozen = config.patch(freezing=True, force_disable_caches=True)
    with torch.no_grad(), frozen, collect() as report:
        got = torch.compile(layer, backend="inductor_quant", options=options)(x)
    want = x.double() @ layer.weight().double().t()
    assert (got - want).norm() < 6e-3 * want.norm()
    [choice] = report.kernels
    _, tensors = choice.weight
    assert tensors[0] == (torch.int32, (K // 8, N))  # GPTQ's words
