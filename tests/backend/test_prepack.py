"""``prepack_``: the same function in the layout that our kernels read fastest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm

import inductor_quant
from inductor_quant.prepack import PrepackedLinear
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.producers.registry import PRODUCERS

bf16 = torch.bfloat16
K = 256
LAYERS = {
    "awq_autoawq_g64": "along N, packed zeros, fp16",
    "int4_along_n": "signed",
    "hqq_like": "halves of N in a byte, float zeros",
    "int8_stored_by_k": "int8 [K, N]",
}
KEPT = ("int8_channel_in_f32", "gptq_4b_act_order", "gptq_4b_list")


class HqqLike(nn.Module):
    def __init__(self):
        super().__init__()
        groups = K // 64
        self.register_buffer("halves", torch.randint(0, 256, (K // 2, K), dtype=torch.uint8))
        self.register_buffer("zeros", torch.rand(K, groups, 1).to(bf16) * 15)
        self.register_buffer("scales", torch.rand(K, groups, 1).to(bf16) * 0.01)

    def forward(self, x):
        q = torch.cat([self.halves >> 4, self.halves & 15]).to(bf16).unflatten(1, (-1, 64))
        return x @ ((q - self.zeros) * self.scales).flatten(1).t()


def model_of(names):
    layers = [
        HqqLike() if name == "hqq_like" else PRODUCERS[name].make(bf16, K, K, bias=i % 2 == 0)
        for i, name in enumerate(names)
    ]
    return nn.Sequential(*layers, nn.Linear(K, 8, dtype=bf16))


@pytest.mark.compiles
def test_layers_are_replaced_in_place_and_compute_the_same():
    model = model_of([*LAYERS, *KEPT])
    x = torch.randn(2, 3, K, dtype=bf16)
    with torch.no_grad():
        want = [x]
        for layer in model:
            want.append(layer(want[-1]))
        assert inductor_quant.prepack_(model, x) == [str(i) for i in range(len(LAYERS))]
        for i in range(len(LAYERS)):
            layer = model[i]
            assert isinstance(layer, PrepackedLinear)
            error = (layer(want[i]) - want[i + 1]).float().norm() / want[i + 1].float().norm()
            assert error < 5e-3, i
            assert layer.qdata.nbytes == K * K * layer.bits // 8
            assert layer.bits == (8 if i == 3 else 4)
    assert inductor_quant.prepack_(model, x) == []  # once


@pytest.mark.compiles
def test_a_layer_that_inductor_would_pad_is_prepacked(monkeypatch):
    """On a GPU a benchmark decides whether M is padded; here it always is."""
    monkeypatch.setattr(pad_mm, "check_device", lambda *tensors: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    model = nn.Sequential(HqqLike())
    with inductor_config.patch(force_shape_pad=True):
        assert inductor_quant.prepack_(model, torch.randn(3, K, dtype=bf16)) == ["0"]


class OfThreeDimensions(HqqLike):
    def forward(self, x):
        out = super().forward(x)
        return out.mean(1, keepdim=True) if out.dim() == 3 else out


class Scaled(HqqLike):
    def forward(self, x, scale=None):
        out = super().forward(x)
        return out if scale is None else out * scale


class ScalesByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Scaled()

    def forward(self, x):
        return self.layer(x) + self.layer(x, scale=2.0)


@pytest.mark.compiles
def test_a_module_that_is_more_than_its_layer_stays():
    hooked = HqqLike()
    hooked.register_forward_hook(lambda module, inputs, out: out * 2)
    model = nn.Sequential(hooked, ScalesByName(), OfThreeDimensions())
    x = torch.randn(2, 3, K, dtype=bf16)
    with torch.no_grad():
        want = model(x)
        assert inductor_quant.prepack_(model, x) == []
        assert torch.equal(model(x), want)


@pytest.mark.compiles
def test_a_prepacked_layer_is_read_by_the_kernels_for_packed_weights():
    model = model_of(["awq_autoawq_g64"])[0].half()
    prepacked = nn.Sequential(model)
    with torch.no_grad():
        inductor_quant.prepack_(prepacked, torch.randn(2, K).half())
    names, state = zip(*prepacked[0].state_dict().items(), strict=True)
    assert names == ("qdata", "qzeros", "scales", "bias")

    def fn(x, *state):
        return torch.func.functional_call(prepacked[0], dict(zip(names, state, strict=True)), x)

    def make(device):
        x = torch.empty(rows, K, dtype=torch.float16, device=device)
        return x, *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in state)

    for rows, kernel in ((3, "weight_only_small_m"), (64, "weight_only_medium_m")):  # noqa: B007
        with collect() as report:
            generate(fn, make)
        assert report.kernels[0].chosen.startswith(kernel)
