"""The weights of QQQ's and QServe's layers, as their graphs unpack them, interpreted."""

from __future__ import annotations

import re

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.ops import w4a8
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.w4a8 import LAYERS

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]
slow = pytest.mark.slow


def like(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        return (torch.rand(value.shape) * 20).to(value.dtype)
    info = torch.iinfo(value.dtype)
    return torch.randint(info.min, info.max, value.shape).to(value.dtype)


@pytest.mark.parametrize(
    ("name", "m", "arch"),
    [
        ("QQQTorchGroup", 3, 90),
        ("QQQTorchGroup", 20, 80),  # w4a8_mm
        *(
            pytest.param(name, m, arch, marks=slow)
            for name, m, arch in (
                *(("QQQTorch", 5, 90), ("QQQTorchGroup", 40, 90), ("QQQGroup", 33, 90)),
                *(("QServe", 20, 90), ("QServe", 40, 90), ("QServeWide", 40, 90)),
                *(("QServeBytes", 1, 90), ("QServeBytes", 40, 90)),
                *((name, 19, 80) for name in LAYERS),
            )
        ),
    ],
)
def test_the_layers_weight_is_read_packed_and_exact(name: str, m: int, arch: int) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](128, 512), torch.randn(m, 512).half()
    _, [rewrite] = capture(layer, [x], read_tables=True)
    [node] = calls(rewrite.after, w4a8.op)
    weight = [like(source.meta["val"]) for source in node.args[1]]
    a = torch.randint(-128, 128, (m, 512)).to(torch.int8)
    text = node.kwargs["format"]

    def fn(a: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        options = {"format": text, "out_dtype": torch.float32}
        return w4a8.op(a, list(weight), None, None, None, **options)

    def make(device: str) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in (a, *weight))

    generated = generate(fn, make, arch=arch)
    [chosen] = [choices[0].name for choices in generated.choices]
    most = 32 if arch == 90 else 16
    expected = "w4a8_direct" if m <= most else "w4a8_mm_sm90" if arch == 90 else "w4a8_mm"
    assert re.search(rf"inductor_quant_{expected}_\d+$", chosen)
    assert torch.equal(simulate.interpret(generated, (a, *weight)), fn(a, *weight))
