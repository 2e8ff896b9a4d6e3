"""Values of graphs that are compiled for ranges of M: the bits of a static compilation."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.fx.experimental import _config as fx_config

from inductor_quant import simulate
from tests.support.producers.packed import Gptq
from tests.support.ranges import Attention
from tests.support.spellings.quantizers import TorchaoLinear

pytestmark = [pytest.mark.interp, pytest.mark.slow]

bf16 = torch.bfloat16
TOPS = (1, 4, 8, 16, 64)


class Block(nn.Module):
    """Two GEMMs of one activation, an epilogue, and one whose activation a kernel computes."""

    def __init__(self, layer, k, n):
        super().__init__()
        self.gate, self.up, self.down = layer(k, n), layer(k, n), layer(n, k)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def w8a8(k, n):
    return TorchaoLinear(k, n, bias=False)


def gptq(k, n):
    return Gptq(bf16, k, n, False)


def call(model, x):
    return model(x)


def made(layer, sizes, *, is_dynamic):
    def make(device):
        torch.manual_seed(0)
        with torch.device(device):
            model, x = Block(layer, 512, 384).eval(), torch.randn(*sizes, 512, dtype=bf16)
        for dim in range(len(sizes) if is_dynamic else 0):
            torch._dynamo.mark_dynamic(x, dim)
        return model, x

    return make


def compiled(layer, sizes, *, is_dynamic, **options):
    settings = {f"inductor_quant.{name}": value for name, value in options.items()}
    with fx_config.patch(backed_size_oblivious=is_dynamic):
        return simulate.generate(
            call,
            made(layer, sizes, is_dynamic=is_dynamic),
            backend="inductor_quant",
            options={"inductor_quant.on_error": "raise", **settings},
            dynamic=None if is_dynamic else False,
        )


@pytest.mark.parametrize("layer", [w8a8, gptq])
def test_each_range_gives_the_bits_of_a_static_compilation(layer):
    ahead = {"row_buckets": TOPS, "compile_buckets": "ahead"}
    dynamic = compiled(layer, (16,), is_dynamic=True, **ahead)
    for m in (1, 3, 4, 7, 9, 16, 40, 70):
        inputs = made(layer, (m,), is_dynamic=False)("cpu")
        static = compiled(layer, (m,), is_dynamic=False)
        want = simulate.interpret(static, inputs)
        assert want.isfinite().all()
        assert torch.equal(simulate.interpret(dynamic, inputs), want), m


def test_padded_rows_give_the_bits_of_a_static_compilation():
    def make(device, m=8, *, is_dynamic=False):
        torch.manual_seed(0)
        with torch.device(device):
            model, x = Attention(), torch.randn(m, 512, dtype=bf16)
        if is_dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        return model, x

    dynamic = simulate.generate(
        call, functools.partial(make, is_dynamic=True), backend="inductor_quant"
    )
    assert "1664" in dynamic.wrapper
    for m in (8, 3):
        static = simulate.generate(
            call, functools.partial(make, m=m), backend="inductor_quant", dynamic=False
        )
        want = simulate.interpret(static, make("cpu", m))
        assert want.isfinite().all()
        assert torch.equal(simulate.interpret(dynamic, make("cpu", m)), want), m
