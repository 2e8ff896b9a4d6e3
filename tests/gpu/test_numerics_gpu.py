"""Strict numerics and verification with the kernels of a GPU."""

from __future__ import annotations

import pytest
import torch

import inductor_quant
from tests.support.producers.activation import FakeQuantized
from tests.support.producers.registry import PRODUCERS
from tests.support.spellings.quantizers import TorchaoLinear

pytestmark = pytest.mark.gpu

CHAINS = {
    "two scales": lambda a, b, row, column, bias: torch._int_mm(a, b) * row * column,
    "bias": lambda a, b, row, column, bias: torch._int_mm(a, b) * row * column + bias,
    "to bf16": lambda a, b, row, column, bias: (torch._int_mm(a, b) * row * column).bfloat16(),
    "to fp16": lambda a, b, row, column, bias: (torch._int_mm(a, b) * row).half(),
}


@pytest.mark.parametrize(("m", "n", "k"), [(32, 64, 64), (40, 136, 200), (2048, 2048, 1024)])
@pytest.mark.parametrize("name", CHAINS)
def test_strict_is_eager_mode_bit_for_bit(name, m, n, k):
    generator = torch.Generator("cuda").manual_seed(m)

    def rand(*shape):
        return torch.rand(shape, generator=generator, device="cuda") * 0.01 + 0.001

    a, b = (
        torch.randint(-128, 128, shape, generator=generator, device="cuda").to(torch.int8)
        for shape in ((m, k), (n, k))
    )
    args = (a, b.t(), rand(m, 1), rand(n), 100 * rand(n))
    options = {"inductor_quant.numerics": "strict", "inductor_quant.on_error": "raise"}
    with inductor_quant.collect() as report:
        result = torch.compile(CHAINS[name], backend="inductor_quant", options=options)(*args)
    assert len(report.matches) == len(report.kernels) == 1
    assert torch.equal(result, CHAINS[name](*args))


@pytest.mark.parametrize("family", ["w8a8", "bytes", "gptq", "act_order"])
def test_verification_passes(family):
    torch.manual_seed(0)
    if family == "bytes":  # quantized and back, in bf16
        layer = FakeQuantized("bytes")
        module, x = layer.cuda(), torch.randn(64, 256, dtype=torch.bfloat16)
    elif family == "w8a8":
        module, x = TorchaoLinear(512, 256).cuda(), torch.randn(64, 512, dtype=torch.bfloat16)
    else:
        name = "gptq_gm_4b_g64_base" if family == "gptq" else "gptq_4b_act_order"
        module, x = (
            PRODUCERS[name].make(torch.float16, 512, 256).cuda(),
            torch.randn(64, 512).half(),
        )
    options = {"inductor_quant.verify": True, "inductor_quant.on_error": "raise"}
    with torch.no_grad(), inductor_quant.collect() as report:
        f = torch.compile(module, backend="inductor_quant", options=options)
        for _ in range(2):
            f(x.cuda())
    [found] = report.verifications
    assert found.is_exact
    assert found.is_good
