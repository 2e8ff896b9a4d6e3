"""Kernels of packed weights on a GPU, in every configuration."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.kernels.weight_only.decode.kernel import WEIGHT_ONLY_DECODE
from inductor_quant.kernels.weight_only.medium_m.kernel import WEIGHT_ONLY_MEDIUM_M
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.small_m.kernel import WEIGHT_ONLY_SMALL_M
from inductor_quant.kernels.weight_only.small_m_sm90.kernel import WEIGHT_ONLY_SMALL_M_SM90
from inductor_quant.ops import weight_only
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, assert_right, described, gemm, make_inputs

pytestmark = pytest.mark.gpu

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS = {"inductor_quant.on_error": "raise"}
FORMATS = ("gptq", "awq", "nibble_pairs", "int4_words", "uint2")


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def run(case, inputs, **options):
    torch._dynamo.reset()
    with collect() as report:
        compiled = torch.compile(
            gemm(case), backend="inductor_quant", dynamic=False, options={**OPTIONS, **options}
        )
        got = compiled(*inputs)
    return got, report.kernels[-1].chosen


@pytest.mark.parametrize("m", [1, 7, 16, 32])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_small_m(name, m, dtype):
    torch.manual_seed(0)
    case = Case(name, m, 1024, 2048, dtype, bias=True, column_scale="channel")
    inputs = make_inputs(case, "cuda")
    got, chosen = run(case, inputs)
    packed = ("weight_only_decode", "weight_only_small_m", "weight_only_direct")
    assert chosen.startswith((*packed, "weight_only_mm_sm90"))
    assert_right(got, case, inputs)


@pytest.mark.parametrize("m", [33, 64, 128])
@pytest.mark.parametrize(("name", "dtype"), [("gptq", f16), ("awq", f16), ("nibble_pairs", bf16)])
def test_medium_m(name, dtype, m):
    torch.manual_seed(0)
    case = Case(name, m, 6144, 4096, dtype, bias=True)  # smaller ones run in ``direct``
    inputs = make_inputs(case, "cuda")
    got, chosen = run(case, inputs)
    assert chosen.startswith("weight_only_mm_sm90")
    assert_right(got, case, inputs)


@pytest.mark.parametrize("name", FORMATS)
def test_large_m(name):
    torch.manual_seed(0)
    case = Case(name, 600, 1000 if name == "uint2" else 1024, 2048, bf16, bias=True)
    inputs = make_inputs(case, "cuda")
    got, chosen = run(case, inputs)
    assert chosen.startswith("dequantize")
    # cuBLAS rounds its product (perhaps its partials too) to bf16 before per_channel scales.
    assert_right(got, case, inputs, slack=3)


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("kernel", "m"),
    [
        *((WEIGHT_ONLY_SMALL_M, m) for m in (8, 16, 32)),
        *((WEIGHT_ONLY_MEDIUM_M, m) for m in (64, 128)),
    ],
    ids=lambda given: getattr(given, "name", str(given)),
)
def test_every_configuration_gives_the_weight_bit_for_bit(name, kernel, m):
    """Identity rows; in fp16 both kernels round W as the reference does."""
    case = Case(name, m, 512, 1024, f16)
    _, _, _, *weight = make_inputs(case, "cuda")
    want = weight_only.dequantize(case.packed.format, weight).to(f16)
    spec, problem = described(case)
    for config in kernel.configs(spec, problem, device(90)):
        for split in sorted({1, config.split_k}):
            text = str(config).split("_k")[0] + (f"_k{split}" if split > 1 else "")
            x = torch.zeros(m, 1024, dtype=f16, device="cuda")
            at = 7 * torch.arange(m, device="cuda")
            x[torch.arange(m), at] = 1
            pinned = {"inductor_quant.configs": (f"{kernel.name} {text}",)}
            got, chosen = run(case, (x, None, None, *weight), **pinned)
            assert chosen == f"{kernel.name} {text}"
            assert torch.equal(got, want[at]), text


@pytest.mark.parametrize(
    ("kernel", "m", "n", "dtype"),
    [
        *((WEIGHT_ONLY_DECODE, 1, n, f16) for n in (3072, 8192)),
        *((WEIGHT_ONLY_DECODE, m, n, bf16) for m, n in ((7, 16384), (13, 6144))),
        *((WEIGHT_ONLY_SMALL_M_SM90, m, 22016, dtype) for m, dtype in ((9, f16), (16, bf16))),
        *((WEIGHT_ONLY_SMALL_M_SM90, m, 22016, dtype) for m, dtype in ((19, bf16), (32, f16))),
        *((WEIGHT_ONLY_MM_SM90, m, n, bf16) for m, n in ((20, 14336), (64, 1024), (256, 6144))),
        *((WEIGHT_ONLY_MM_SM90, m, n, f16) for m, n in ((17, 1024), (100, 14336), (500, 16384))),
    ],
    ids=lambda given: getattr(given, "name", str(given)),
)
def test_every_configuration_in_gluon_gives_the_weight_bit_for_bit(
    kernel, m, n, dtype, monkeypatch
):
    """Identity rows; then random ones, where a race would show."""
    monkeypatch.setattr(formats, "f16", dtype)  # of scales
    k = 4096
    case = Case("gptq", m, n, k, dtype)
    x, _, _, *weight = make_inputs(case, "cuda")
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)
    spec, problem = described(case)
    configs = kernel.configs(spec, problem, device(90))
    assert configs
    for config in configs:
        pinned = {"inductor_quant.configs": (f"{kernel.name} {config}",)}
        rows = torch.zeros(m, k, dtype=dtype, device="cuda")
        at = 7 * torch.arange(m, device="cuda") % k
        rows[torch.arange(m), at] = 1
        got, chosen = run(case, (rows, None, None, *weight), **pinned)
        assert chosen == f"{kernel.name} {config}"
        assert torch.equal(got, want[at]), config
        got, _ = run(case, (x, None, None, *weight), **pinned)
        assert_right(got, case, (x, None, None, *weight))
