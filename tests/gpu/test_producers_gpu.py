"""Layers of every weight-only producer, compiled for the GPU: matched, fused, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

from inductor_quant.backend import inductor_quant_backend
from inductor_quant.report.events import collect
from tests.support.producers.registry import PRODUCERS, Producer, need

pytestmark = pytest.mark.gpu

K, N = 1024, 512
# optimum-quanto packs these for Marlin as soon as they are on a GPU.
REPACKED = ("quanto_qfloat8_wo", "quanto_qint4_wo")
OPTIONS: dict[str, Any] = {"inductor_quant.on_error": "raise"}


def move(module: nn.Module) -> nn.Module:
    """The module on the GPU, with the tensors that are plain attributes (or in lists)."""
    module = module._apply(lambda tensor: tensor.cuda())  # HQQ's cuda() is a method of its own
    for part in module.modules():
        for name, value in list(vars(part).items()):
            vars(part)[name] = _moved(value)
    return module


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if type(value) is dict:
        return {key: _moved(item) for key, item in value.items()}
    return value


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("producer", PRODUCERS.values(), ids=str)
def test_a_layer_is_fused_and_right(producer: Producer, rows: int) -> None:
    need(producer)
    if producer.name in REPACKED:
        pytest.skip("on a GPU it has another layout")
    if producer.max_rows is not None and rows > producer.max_rows:
        pytest.skip("this form is for few rows")
    torch._dynamo.reset()
    module = producer.make(k=K, n=N, bias=False)
    dense = producer.dense(module).cuda().t()
    module = move(module)
    x = torch.randn(rows, K, device="cuda").to(producer.dtypes[0])
    # A graph from the cache is not seen by the pass, so nothing would be reported.
    with torch.no_grad(), collect() as report, config.patch(force_disable_caches=True):
        compiled = torch.compile(module, backend=inductor_quant_backend, options=OPTIONS)
        y = compiled(x)
        eager = module(x)
    assert len(report.matches) == producer.expected_matches
    assert len(report.kernels) == producer.expected_matches
    if not producer.expected_matches:  # stock may round otherwise than eager mode
        stock = torch.compile(module)
        with torch.no_grad():
            assert torch.equal(y, stock(x))
        return
    exact = x.double() @ dense.double()
    # A single row has N samples of the rounding of the result, which is most of the error.
    slack = 1.02 if rows > 16 else 1.10
    assert relative_error(y, exact) <= slack * relative_error(eager, exact) + 1e-6
