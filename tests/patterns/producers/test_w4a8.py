"""Layers of QQQ and QServe: the int8 weight that their graphs make of int4 is never written."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.options import Options
from tests.support.graphs.post_grad import calls, capture, count, rewrite_graph
from tests.support.producers.w4a8 import LAYERS, QQQGroup, QQQTorch, QServe

W4A8 = torch.ops.inductor_quant.w4a8.default
slow = pytest.mark.slow
OFTEN = ("QQQGroup", "QServe", "QServeWide", "QServeBytes", "QQQTorchGroup")


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


class Halved(QQQGroup):
    """Bits of the int8."""

    def integers(self):
        return (super().integers().contiguous().view(torch.uint8) >> 1).view(torch.int8)


class Unsigned(QServe):
    """uint8 wraps around at other numbers."""

    def integers(self):
        q = self.nibbles().view(self.n, self.k // 128, 128)
        w = (q - self.zero[..., None].view(torch.uint8)) * self.group_scale[..., None].view(
            torch.uint8
        )
        return (w >> 1).to(torch.int8).view(self.n, self.k).t()


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(cls, marks=() if cls is RoundedTwice else slow)
        for cls in (Unclamped, RoundedTwice, Floored, Narrower, Wider, Halved, Unsigned)
    ],
)
def test_what_is_rounded_otherwise_is_left(layer: type[QQQGroup]) -> None:
    torch.manual_seed(0)
    model, x = layer(64, 256), torch.randn(20, 256).to(torch.float16)
    result, [rewrite] = capture(model, [x])
    assert count(rewrite.after, W4A8) == 0
    assert torch.equal(result, model(x))


def test_a_table_may_be_copied_to_the_weights_device() -> None:
    """As where a layer holds it on the CPU."""
    order = QQQTorch(64, 256).places.tolist()

    def fn(a, words, scale):  # type: ignore[no-untyped-def]
        codes = torch.stack([words >> 4 * i & 15 for i in range(8)], -1).reshape(-1, 1024)
        codes = codes[:, torch.tensor(order)].reshape(16, 4, 16, 16).permute(0, 2, 1, 3)
        return torch._int_mm(a, (codes.reshape(256, 64) - 8).to(torch.int8)).float() * scale

    a = torch.randint(-128, 128, (20, 256)).to(torch.int8)
    words = torch.randint(-(1 << 31), 1 << 31, (16, 128)).int()
    _, [rewrite] = capture(fn, [a, words, torch.rand(20, 1)])
    graph = rewrite.before.graph
    [index] = calls(rewrite.before, torch.ops.aten.index.Tensor)
    table = index.args[1][1]
    with graph.inserting_before(index):
        copy = graph.call_function(torch.ops.prims.device_put.default, (table, a.device))
    copy.meta = dict(table.meta)
    index.replace_input_with(table, copy)
    rewrite_graph(graph, Options(on_error="raise"))
    assert count(rewrite.before, W4A8) == 1
