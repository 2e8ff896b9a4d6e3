"""FSDP2 (``fully_shard``): the graphs of its modules hold gathered weights."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.graphs.post_grad import capture


class PackedLinear(nn.Module):
    """int8 [N, K] with a bf16 scale for each channel: parameters, which FSDP shards."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(n).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(x.dtype) * self.scale[:, None]
        return nn.functional.linear(x, weight)


@pytest.mark.slow
@torch.no_grad()
def test_shards_are_gathered_and_matched() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(PackedLinear(64, 96), nn.ReLU(), PackedLinear(96, 64))
    x = torch.randn(5, 96).bfloat16()
    expected = model(x)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            for module in (model[0], model[2], model):
                fully_shard(module, mesh=mesh)
            out, rewrites = capture(model, [x])
        finally:
            dist.destroy_process_group()
    families = [match.family for rewrite in rewrites for match in rewrite.report.matches]
    assert families == ["weight_only"] * 2
    # one rounding to bf16 in each layer
    error = (out - expected).double().norm() / expected.double().norm()
    assert error < 2**-8
