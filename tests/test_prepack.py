"""``prepack_``: the same function, in a layout that the kernel for bytes reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import inductor_quant
from inductor_quant import simulate
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.prepack import PrepackedLinear
from inductor_quant.report import collect
from tests.support.producers import PRODUCERS

bf16 = torch.bfloat16
K = 256
LAYERS = {
    "awq_autoawq_g64": "4 bits along N, packed zeros",
    "gptq_4b_autogptq": "shifts in a buffer, zeros less one",
    "int4_along_n": "signed",
    "int8_stored_by_k": "int8 [K, N]",
}
KEPT = ("int8_channel_in_f32", "gptq_4b_act_order", "int4_folded")


def model_of(names):
    layers = [PRODUCERS[name].make(bf16, K, K, bias=i % 2 == 0) for i, name in enumerate(names)]
    return nn.Sequential(*layers, nn.Linear(K, 8, dtype=bf16))


@pytest.mark.compiles
def test_layers_are_repacked_in_place_and_compute_the_same():
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
            torch.testing.assert_close(layer(want[i]), want[i + 1], rtol=2e-2, atol=2e-2)
            out = K // 2 if layer.is_halves else K
            assert layer.qdata.shape == (out, K)
    assert inductor_quant.prepack_(model, x) == []  # once


@pytest.mark.compiles
def test_what_is_repacked_is_read_by_the_kernel_for_bytes():
    model = model_of(["awq_autoawq_g64"])[0]
    repacked = nn.Sequential(model)
    with torch.no_grad():
        inductor_quant.prepack_(repacked, torch.randn(2, K, dtype=bf16))

    def fn(x, qdata, zeros, scales, bias):
        tensors = {"qdata": qdata, "zeros": zeros, "scales": scales, "bias": bias}
        return torch.func.functional_call(repacked[0], tensors, x)

    state = list(repacked[0].state_dict().values())

    def make(device):
        x = torch.empty(3, K, dtype=bf16, device=device)
        return x, *(torch.empty(t.shape, dtype=t.dtype, device=device) for t in state)

    with collect() as report:
        simulate.generate(fn, make, backend=inductor_quant_backend)
    assert report.kernels[0].chosen.startswith("weight_only_bytes")
