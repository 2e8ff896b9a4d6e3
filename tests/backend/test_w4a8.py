"""int4 weights and 8-bit activations through the plugin's other ways: frozen, verified, prepacked,
in shards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import inductor_quant
from inductor_quant.options import Options
from inductor_quant.report import events
from tests.backend.test_freezing import constants, run
from tests.support.graphs.post_grad import capture
from tests.support.producers.w4a8 import LAYERS, Layer, QQQChannel, QQQGroup

pytestmark = pytest.mark.compiles

K, N = 256, 128
slow = pytest.mark.slow


class E4M3(Layer):
    """An e4m3 activation; the weight is cast to e4m3 and multiplied by the library."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 448
        a = (x.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn)
        w = (self.nibbles().view(self.n, self.k).float() - 8).to(torch.float8_e4m3fn)
        return torch._scaled_mm(a, w.t(), scale_a=s, scale_b=self.scale, out_dtype=torch.bfloat16)


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = E4M3(N, K) if name == "E4M3" else LAYERS[name](N, K)
    return layer, torch.randn(32, K).to(torch.bfloat16)


@pytest.mark.parametrize(
    "name", ["QQQGroup", pytest.param("QServe", marks=slow), pytest.param("E4M3", marks=slow)]
)
def test_a_frozen_weight_stays_packed(graphs, name):
    layer, x = made(name)
    plain, report = run(layer, x, freezing=False)
    frozen, frozen_report = run(layer, x)
    assert [match.family for match in frozen_report.matches] == ["w4a8"]
    assert str(frozen_report.matches[0].spec) == str(report.matches[0].spec)
    assert torch.equal(frozen, plain)
    assert max(t.nbytes for t in constants(graphs[-1])) == K * N // 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow) for name in ("QQQChannel", "QQQGroup", "E4M3")]
)
def test_it_is_as_near_to_fp64_as_its_graph(name):
    layer, x = made(name)
    with torch.no_grad(), events.collect() as report:
        capture(layer, [x], options=Options(on_error="raise", verify=True))
    [found] = report.verifications
    assert found.is_good
    assert found.ours_rms <= 1.02 * found.graph_rms + 1e-5  # fp32 sums


def test_prepack_leaves_it():
    """Its kernels read the layouts as they are."""
    layer, x = made("QQQGroup")
    model = nn.Sequential(copy.deepcopy(layer))
    assert inductor_quant.prepack_(model, x) == []
    assert torch.equal(model(x), layer(x))


def shards(layer: QQQChannel) -> list[QQQChannel]:
    """Halves of the columns."""
    found = [copy.deepcopy(layer) for _ in range(2)]
    for i, shard in enumerate(found):
        rows = slice(i * N // 2, (i + 1) * N // 2)
        shard.n = N // 2
        shard.qweight = layer.qweight[rows]
        shard.scale = layer.scale[:, rows]
        if isinstance(layer, QQQGroup):
            shard.group_scale = layer.group_scale[rows]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["QQQGroup", "QQQChannel"])
def test_shards_of_columns_are_gemms_of_their_own(name):
    layer, x = made(name)
    parts = []
    for shard in shards(layer):
        part, [rewrite] = capture(shard, [x])
        assert [match.family for match in rewrite.report.matches] == ["w4a8"]
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1), layer(x))
