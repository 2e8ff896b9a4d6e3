"""``weight_only_direct`` on a GPU, in every configuration."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.kernels.weight_only.direct.kernel import WEIGHT_ONLY_DIRECT
from inductor_quant.ops import weight_only
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, assert_right, described, gemm, make_inputs

pytestmark = pytest.mark.gpu

bf16, f16 = torch.bfloat16, torch.float16
NAME = WEIGHT_ONLY_DIRECT.name


@pytest.fixture(autouse=True)
def no_caches(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "force_disable_caches", True)


def run(case, inputs, *configs):
    torch._dynamo.reset()
    options = {"inductor_quant.on_error": "raise", "inductor_quant.configs": configs}
    with collect() as report:
        compiled = torch.compile(
            gemm(case), backend="inductor_quant", dynamic=False, options=options
        )
        got = compiled(*inputs)
    assert report.kernels[-1].chosen.startswith(NAME)
    return got


def configs_of(case):
    spec, problem = described(case)
    problem = dataclasses.replace(problem, has_aligned_rows=True, has_weight_descriptors=True)
    return WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    [
        *(("awq", m, f16) for m in (1, 9)),
        *(("hqq", m, bf16) for m in (1, 16)),
        *(("int8_group", m, bf16) for m in (3, 16)),
        *(("nf4", m, f16) for m in (2, 12)),
        ("int8_folded", 5, bf16),
        ("int8_zero_channel", 7, f16),
        ("uint2", 8, bf16),
    ],
)
def test_every_configuration_is_close_to_fp64(name, m, dtype, group, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    torch.manual_seed(0)
    case = Case(name, m, 2048, 4096, dtype, bias=True, column_scale="channel")
    inputs = make_inputs(case, "cuda")
    for config in configs_of(case):
        assert_right(run(case, inputs, f"{NAME} {config}"), case, inputs)


@pytest.mark.parametrize("name", ["gptq", "nibble_pairs", "awq", "hqq", "int8_group", "nf4"])
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_one_hot_rows_give_the_weight_bit_for_bit(name, dtype, monkeypatch):
    """Groups of 32, which no other kernel prefers; scales of x's dtype and of another one."""
    monkeypatch.setattr(formats, "GROUP", 32)
    m = 16
    case = Case(name, m, 512, 1024, dtype)
    _, _, _, *weight = make_inputs(case, "cuda")
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)
    rows = torch.zeros(m, 1024, dtype=dtype, device="cuda")
    at = 61 * torch.arange(m, device="cuda")
    rows[torch.arange(m), at] = 1
    for config in configs_of(case):
        got = run(case, (rows, None, None, *weight), f"{NAME} {config}")
        assert torch.equal(got, want[at]), config
