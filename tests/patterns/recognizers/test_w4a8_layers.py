"""Layers of QQQ and QServe: the int8 weight that their graphs make of int4 is never written."""

from __future__ import annotations

import pytest
import torch

from tests.support.graphs.post_grad import capture, count
from tests.support.producers.w4a8 import LAYERS, QQQGroup, QServe

W4A8 = torch.ops.inductor_quant.w4a8.default
slow = pytest.mark.slow
OFTEN = ("QQQGroup", "QServe", "QQQTorchGroup")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else slow) for name in LAYERS]
)
def test_a_layer_is_one_gemm_of_its_packed_weight(name: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](64, 256), torch.randn(20, 256).to(torch.float16)
    result, [rewrite] = capture(layer, [x], read_tables=True)
    [match] = rewrite.report.matches
    assert match.family == "w4a8"
    assert count(rewrite.after, W4A8) == 1
    for op in (torch.ops.aten._int_mm.default, torch.ops.aten.mm.default):
        assert count(rewrite.after, op) == 0
    assert torch.equal(result, layer(x))


class Unclamped(QQQGroup):
    """A cast of what may not fit is not defined."""

    def integers(self):
        q = self.nibbles().view(self.n, self.k // 128, 128).float() - 8
        w = (q * self.group_scale.float()[..., None] / 8).round().clamp(-130, 127)
        return w.to(torch.int8).view(self.n, self.k).t()


class RoundedTwice(QQQGroup):
    """The product in fp16 is rounded before it is rounded to an integer."""

    def integers(self):
        q = self.nibbles().view(self.n, self.k // 128, 128).half() - 8
        w = (q * self.group_scale[..., None]).float().round().clamp(-128, 127)
        return w.to(torch.int8).view(self.n, self.k).t()


class Floored(QQQGroup):
    def integers(self):
        q = self.nibbles().view(self.n, self.k // 128, 128).float() - 8
        w = (q * self.group_scale.float()[..., None]).floor().clamp(-128, 127)
        return w.to(torch.int8).view(self.n, self.k).t()


class Narrower(QQQGroup):
    def integers(self):
        q = self.nibbles().view(self.n, self.k // 128, 128).float() - 8
        w = (q * self.group_scale.float()[..., None]).round().clamp(-127, 127)
        return w.to(torch.int8).view(self.n, self.k).t()


class Wider(QServe):
    """The product is clamped where int8 would wrap around."""

    def integers(self):
        q = self.nibbles().view(self.n, self.k // 128, 128).to(torch.int32)
        w = (q - self.zero[..., None]) * self.group_scale[..., None]
        return w.clamp(-128, 127).to(torch.int8).view(self.n, self.k).t()


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(cls, marks=() if cls is RoundedTwice else slow)
        for cls in (Unclamped, RoundedTwice, Floored, Narrower, Wider)
    ],
)
def test_what_is_rounded_otherwise_is_left(layer: type[QQQGroup]) -> None:
    torch.manual_seed(0)
    model, x = layer(64, 256), torch.randn(20, 256).to(torch.float16)
    result, [rewrite] = capture(model, [x])
    assert count(rewrite.after, W4A8) == 0
    assert torch.equal(result, model(x))
