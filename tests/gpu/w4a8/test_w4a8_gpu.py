"""``w4a8_direct`` and ``w4a8_mm_sm90`` on a GPU, in every configuration, and whole layers."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.kernels.problem import DECODE_M
from inductor_quant.kernels.w4a8.direct.kernel import W4A8_DIRECT
from inductor_quant.kernels.w4a8.mm_sm90.kernel import W4A8_MM_SM90
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.w4a8 import Case, assert_close, described, gemm, make_inputs, reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

f32 = torch.float32


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "force_disable_caches", True)
    monkeypatch.setattr(formats, "GROUP", 128)


def run(fn, inputs, *configs):
    torch._dynamo.reset()
    options = {"inductor_quant.on_error": "raise", "inductor_quant.configs": configs}
    compiled = torch.compile(fn, backend="inductor_quant", dynamic=False, options=options)
    with collect() as report:
        got = compiled(*inputs)
    return got, report


def configs_of(case):
    kernel = W4A8_DIRECT if case.m <= DECODE_M else W4A8_MM_SM90
    found = kernel.configs(*described(case), device(90))
    assert found
    return [f"{kernel.name} {config}" for config in found]


@pytest.mark.parametrize(
    "case",
    [
        Case("nibble_pairs", 1, 2048, 4096),
        Case("nibble_pairs", 16, 2000, 14336, zero="int", sums=True),
        Case("nibble_pairs", 40, 4096, 14336, zero="float", sums=True),
        Case("awq", 13, 2048, 4096, groups=False),
        Case("int4_words", 200, 6144, 4096, zero="const", sums=True),
    ],
    ids=str,
)
def test_every_configuration_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    want = reference(case, inputs)
    for config in configs_of(case):
        got, report = run(gemm(case), inputs, config)
        assert report.kernels[-1].chosen == config
        assert_close(got.cpu(), want)


@pytest.mark.parametrize(
    ("name", "m"),
    [("nibble_pairs", 1), ("gptq", 16), ("int4_words", 17), ("awq", 100), ("nibble_pairs", 256)],
)
def test_sums_without_groups_are_those_of_the_integers_bit_for_bit(name, m):
    case = Case(name, m, 1024, 8192, f32, groups=False, scales=("none", "none"), bias=False)
    inputs = make_inputs(case, "cuda")
    want = gemm(case)(*inputs)
    config, *_ = configs_of(case)
    got, report = run(gemm(case), inputs, config)
    assert report.kernels[-1].chosen == config
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "case",
    [
        Case("nibble_pairs", 256, 1024, 4096),
        Case("gptq", 8, 1024, 4096),
        Case("shift_table", 8, 1024, 4096),
        Case("nibble_pairs", 2048, 1024, 4096, groups=False, zero="int"),
    ],
    ids=str,
)
def test_what_no_kernel_takes_is_right(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    got, _ = run(gemm(case), inputs)
    assert_close(got.cpu(), reference(case, inputs), slack=2.0)


class QQQChannel(torch.nn.Module):
    """Two int4 in a byte, in the high halves of int8: 16 times the weight."""

    def __init__(self, n, k):
        super().__init__()
        self.n, self.k = n, k
        self.register_buffer("qweight", torch.randint(0, 256, (n, k // 2), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(1, n) * 0.01 + 0.001)

    def forward(self, x):
        s = x.abs().amax(-1, keepdim=True).float() / 127
        xq = (x.float() / s).round().clamp(-128, 127).to(torch.int8)
        pairs = torch.stack([self.qweight << 4, self.qweight & 0xF0], -1)
        high = pairs.view(self.n, self.k).view(torch.int8)
        return (torch._int_mm(xq, high.t()).float() * (self.scale / 16) * s).to(x.dtype)


@pytest.mark.parametrize("m", [1, 64])
def test_a_layer_of_plain_pytorch(m):
    layer = QQQChannel(2048, 4096).cuda()
    x = torch.randn(m, 4096, dtype=torch.float16, device="cuda")
    # At a maximum of 127/32 each 32nd number is halfway between two integers, and eager mode's
    # quotient, a product with 1/127, is not the exact one. At 6 none but 3 is.
    x[:, 0] = 6
    got, report = run(layer, (x,))
    assert [match.family for match in report.matches] == ["w4a8"]
    rows = torch.cat([x, x.new_zeros(max(0, 32 - m), 4096)])  # _int_mm needs 17
    assert_close(got.cpu(), layer(rows)[:m].cpu().double(), slack=4.0)  # eager mode rounds twice
    assert all("int8 in each call" not in kernel.chosen for kernel in report.kernels)
