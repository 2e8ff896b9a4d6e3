"""One graph for every M on a GPU: each range is compiled once, and right, also as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from examples.benchmarks.dynamic_m import FORMATS
from inductor_quant import collect
from tests.support.producers.packed import Gptq
from tests.support.spellings.quantizers import TorchaoLinear

pytestmark = pytest.mark.gpu

bf16 = torch.bfloat16
K, N = 1024, 1536
ROWS = (16, 3, 40, 300, 100, 1000, 2, 16, 40)  # of calls that follow each other


class Block(nn.Module):
    """Two GEMMs of one activation, and one whose activation a kernel computes."""

    def __init__(self, layer):
        super().__init__()
        self.gate, self.up, self.down = layer(K, N), layer(K, N), layer(N, K)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def of_benchmark(name):
    return lambda k, n: FORMATS[name](nn.Linear(k, n, bias=False, dtype=bf16))


# Another rounding of an activation flips one value of FP8 in thirty, by 6 %.
LAYERS = {
    "w8a8": (lambda k, n: TorchaoLinear(k, n, bias=False), 0.02),
    "gptq": (lambda k, n: Gptq(bf16, k, n, False), 0.02),
    "fp8": (of_benchmark("fp8"), 0.03),
    "fp8_block": (of_benchmark("fp8_block"), 0.03),
}


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_size_is_right_with_one_graph(layer, mode):
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device("cuda"):
        make, limit = LAYERS[layer]
        model = Block(make).eval()
        inputs = {m: torch.randn(m, K, dtype=bf16) for m in set(ROWS)}
    counters.clear()
    options = {"inductor_quant.on_error": "raise", "inductor_quant.row_buckets": True}
    if mode is not None:
        options["triton.cudagraphs"] = True
    compiled = torch.compile(model, backend="inductor_quant", options=options)
    ranges = []
    with torch.no_grad():
        for m in ROWS:
            x = inputs[m].clone()
            torch._dynamo.mark_dynamic(x, 0)
            with collect() as report:
                out = compiled(x).clone()
            ranges += [bucket.rows for bucket in report.buckets]
            # _int_mm needs 17 rows, cuBLASLt four at a time with scales of blocks
            padded = nn.functional.pad(inputs[m], (0, 0, 0, 32 + -m % 4))
            want = model(padded)[:m].double()
            error = (out.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
            assert error < limit, (m, error)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(ranges) == len({bucket_of(m, ranges) for m in ROWS})


def bucket_of(m, ranges):
    """The range that has m."""
    for name in ranges:
        bounds, _, step = name.partition(" by ")
        low, _, high = bounds.partition("..")
        is_within = int(low) <= m <= (int(high) if high else m if ".." in name else int(low))
        if is_within and not (m - int(low)) % int(step or 1):
            return name
    return None
