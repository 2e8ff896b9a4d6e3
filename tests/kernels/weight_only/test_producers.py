"""The kernels of producers' layers, compiled for sm_90: what a compiler refuses shows here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.ops import weight_only
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import calls, capture
from tests.support.producers.registry import PRODUCERS, Producer, need

pytestmark = [pytest.mark.compiles, pytest.mark.filterwarnings("ignore")]

K, N, ROWS = 1024, 512, (1, 16, 100)
IN_CI = {("gguf_q8_0", 1)}  # bytes that form no words
CASES = [
    pytest.param(
        producer,
        rows,
        marks=() if (producer.name, rows) in IN_CI else pytest.mark.slow,
        id=f"{producer}-{rows}",
    )
    for producer in PRODUCERS.values()
    if producer.expected_matches
    for rows in ROWS
    if producer.max_rows is None or rows <= producer.max_rows
]


def like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """An empty tensor that is laid out in the same way."""
    size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    storage = torch.empty(last + 1, dtype=tensor.dtype, device=device)
    return storage.as_strided(size, stride, offset)


@pytest.mark.parametrize(("producer", "rows"), CASES)
def test_the_kernel_compiles(producer: Producer, rows: int) -> None:
    need(producer)
    torch._dynamo.reset()
    module = producer.make(k=K, n=N, bias=False)
    with torch.no_grad():
        x = torch.randn(rows, K).to(producer.dtypes[0])
        _, [rewrite] = capture(module, [x], read_tables=True)
    [node] = calls(rewrite.after, torch.ops.inductor_quant.weight_only.default)
    tensors = [source.meta["val"] for source in node.args[1]]
    options = dict(node.kwargs)

    def fn(x: torch.Tensor, *weight: torch.Tensor) -> Any:
        return weight_only.op(x, list(weight), None, None, **options)

    def make(device: str) -> tuple[Any, ...]:
        return like(x, device), *(like(tensor, device) for tensor in tensors)

    kernels = generate(fn, make).kernels
    assert any("weight_only" in name for name in kernels)
    for name, source in kernels.items():
        simulate.compile_kernel(name, source)
