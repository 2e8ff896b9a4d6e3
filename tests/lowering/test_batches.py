"""Rows of several batches: [B, S, K] is one matrix of B * S rows, without a copy."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate

E4M3 = torch.float8_e4m3fn


def int8_linear(x, w, b_scale):
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-5) / 127
    a = (x / scale).round().to(torch.int8).reshape(-1, x.shape[-1])
    out = torch._int_mm(a, w.t()).float() * scale.reshape(-1, 1) * b_scale
    return out.to(x.dtype).reshape(*x.shape[:-1], -1)


def float_linear(x, w, b_scale):
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-5) / 448
    a = (x / scale).to(E4M3).reshape(-1, x.shape[-1])
    out = torch._scaled_mm(
        a, w.view(E4M3).t(), scale.reshape(-1, 1), b_scale, out_dtype=x.dtype, use_fast_accum=True
    )
    return torch.relu(out).reshape(*x.shape[:-1], -1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layer", [int8_linear, float_linear])
@pytest.mark.parametrize(
    ("length", "k"),
    [
        (1500, 256),  # the scales of a batch, 6000 bytes, would be padded
        (1031, 960),  # and its quantized values
        (1031, 1040),  # rows of values are padded, which merges
    ],
)
def test_rows_of_batches_are_one_matrix(layer, length, k):
    def make(device):
        x = torch.empty(2, length, k, dtype=torch.bfloat16, device=device)
        w = torch.empty(512, k, dtype=torch.int8, device=device)
        return x, w, torch.empty(1, 512, device=device)

    with collect() as report:
        generated = generate(layer, make)
    assert len(report.kernels) == 1
    assert len(generated.kernels) == 2, list(generated.kernels)
