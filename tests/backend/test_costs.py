"""What the plugin adds to a compilation is counted: kernels that are launched, graphs compiled."""

from __future__ import annotations

import re

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from inductor_quant import simulate


class Int8Linear(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.register_buffer("weight", torch.ones(n, k, dtype=torch.int8))
        self.register_buffer("scale", torch.full((n,), 0.01))

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        q = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return torch._int_mm(q, self.weight.t()) * scale * self.scale


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = Int8Linear(256, 512), Int8Linear(256, 512)
        self.down = Int8Linear(512, 256)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def make_inputs(device):
    with torch.device(device):
        return Mlp(), torch.ones(32, 256)


def launches(backend):
    generated = simulate.generate(lambda model, x: model(x), make_inputs, backend=backend)
    return len(re.findall(r"^ +(?:\w+\.run|extern_kernels\.\w+)\(", generated.wrapper, re.M))


@pytest.mark.compiles
def test_an_mlp_launches_fewer_kernels_than_without_us():
    # Stock: two quantizations, three products, the last scales. Ours: the quantizations
    # (the second with silu * up), gate and up in one launch, down.
    assert (launches("inductor_quant"), launches("inductor")) == (4, 6)


def graphs(backend):
    """How many graphs Dynamo compiles while the number of rows changes."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(Int8Linear(256, 512), backend=backend)
    with torch.no_grad():
        for rows in (32, 32, 48, 64, 17, 1, 1):
            compiled(torch.ones(rows, 256))
    return counters["stats"]["unique_graphs"]


def test_no_call_compiles_again_that_would_not_without_us():
    """Inductor alone compiles as often as Dynamo asks for."""
    assert graphs("inductor_quant") == graphs("aot_eager") == 3


def plain_mlp(device):
    with torch.device(device):
        layers = [nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 256)]
        return nn.Sequential(*layers), torch.ones(32, 256)


@pytest.mark.compiles
def test_the_code_of_a_model_without_quantized_products_is_that_without_us():
    """So a call costs the host nothing more."""

    def wrapper(backend):
        torch._dynamo.reset()
        made = simulate.generate(lambda model, x: model(x), plain_mlp, backend=backend)
        # the count of graphs in this process, and where its kernels lie
        return re.sub(r"(AOT ID|kernel path): .*", "", made.wrapper)

    assert wrapper("inductor_quant") == wrapper("inductor")
