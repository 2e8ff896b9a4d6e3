"""The kernels of ``w4a8`` on a GPU, in every configuration, and whole layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.kernels.problem import DECODE_M
from inductor_quant.kernels.w4a8.direct.kernel import W4A8_DIRECT
from inductor_quant.kernels.w4a8.mm.kernel import CONFIGS, W4A8_MM
from inductor_quant.kernels.w4a8.mm_sm90.kernel import W4A8_MM_SM90
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.w4a8 import Case, assert_close, described, gemm, make_inputs, reference
from tests.support.producers.w4a8 import LAYERS

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

f32 = torch.float32


@pytest.fixture(autouse=True)
def settings(monkeypatch):
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
        Case("nibble_pairs", 60, 4096, 8192, a_dtype=torch.float8_e4m3fn),
        Case("int4_words", 64, 4104, 4096, a_dtype=torch.float8_e4m3fn),
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
    ("name", "m", "to_int8"),
    [
        *(("nibble_pairs", 1, ""), ("gptq", 16, ""), ("int4_words", 17, ""), ("awq", 100, "")),
        *(("nibble_pairs", 256, ""), ("nibble_pairs", 2, "round"), ("gptq", 12, "wrap")),
        *(("gptq", 64, "round"), ("nibble_pairs", 200, "wrap"), ("nibble_pairs", 130, "round")),
    ],
)
def test_sums_of_integers_are_exact_bit_for_bit(name, m, to_int8):
    case = Case(name, m, 1024, 8192, f32, scales=("none", "none"), bias=False)
    case = dataclasses.replace(case, groups=to_int8 != "", to_int8=to_int8)
    inputs = make_inputs(case, "cuda")
    want = gemm(case)(*inputs)
    config, *_ = configs_of(case)
    got, report = run(gemm(case), inputs, config)
    assert report.kernels[-1].chosen == config
    assert torch.equal(got, want)


MM_CASES = (
    Case("nibble_pairs", 1, 2051, 4096),
    Case("gptq", 130, 2056, 1152, zero="float", sums=True),
    Case("awq", 61, 1032, 1152, groups=False, zero="int", sums=True),
    Case("int4_words", 300, 2051, 4096, times=16),
    Case("shift_table", 70, 1029, 1152),
    Case("nibble_pairs", 200, 515, 1152, layout="every_second"),
    Case("nibble_pairs", 100, 2051, 4096, a_dtype=torch.float8_e4m3fn),
    Case("awq", 100, 1032, 4096, groups=False, a_dtype=torch.float8_e4m3fn),
)


def pinned(case):
    """Every tile of ``w4a8_mm`` that is legal, and one that shares out K."""
    spec, problem = described(case)
    split = dataclasses.replace(CONFIGS[0], split_k=2)
    for config in (*CONFIGS, split):
        if W4A8_MM.config_rejection(spec, problem, config, device(90)) is None:
            yield f"{W4A8_MM.name} {config}"


@pytest.mark.parametrize("case", MM_CASES, ids=str)
def test_every_tile_of_the_general_kernel_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    want = reference(case, inputs)
    for config in pinned(case):
        got, report = run(gemm(case), inputs, config)
        assert report.kernels[-1].chosen == config
        assert_close(got.cpu(), want)


@pytest.mark.parametrize(
    ("name", "to_int8"),
    [
        *((name, "") for name in ("nibble_pairs", "gptq", "awq", "int4_words", "shift_table")),
        *((name, kind) for name in ("nibble_pairs", "gptq", "awq") for kind in ("round", "wrap")),
    ],
)
def test_every_tile_of_the_general_kernel_is_exact(name, to_int8):
    torch.manual_seed(0)
    case = Case(name, 150, 1032, 1152, f32, scales=("none", "none"), bias=False)
    case = dataclasses.replace(case, groups=to_int8 != "", to_int8=to_int8)
    inputs = make_inputs(case, "cuda")
    want = gemm(case)(*inputs)
    for config in pinned(case):
        got, report = run(gemm(case), inputs, config)
        assert report.kernels[-1].chosen == config
        assert torch.equal(got, want), config


@pytest.mark.parametrize(
    "case",
    [
        Case("nibble_pairs", 256, 1024, 4096),
        Case("gptq", 8, 1024, 4096),
        Case("shift_table", 8, 1024, 4096),
        Case("nibble_pairs", 2048, 1024, 4096, groups=False, zero="int"),
        *(
            Case("nibble_pairs", m, 1024, 4096, groups=groups, a_dtype=torch.float8_e4m3fn)
            for m, groups in ((5, True), (9, False), (400, False))
        ),
        # written once
        Case("nibble_pairs", 1600, 4104, 4096),
        Case("gptq", 1600, 4104, 4096),
        *(
            Case(name, 1100, 4104, 4096, a_dtype=torch.float8_e4m3fn)
            for name in ("nibble_pairs", "awq")
        ),
    ],
    ids=str,
)
def test_what_no_kernel_takes_is_right(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    got, _ = run(gemm(case), inputs)
    assert_close(got.cpu(), reference(case, inputs), slack=2.0)


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_plain_pytorch(name, m):
    torch.manual_seed(0)
    layer = LAYERS[name](2048, 4096).cuda()
    x = torch.randn(m, 4096, dtype=torch.float16, device="cuda")
    # At a maximum of 127/32 each 32nd number is halfway between two integers, and eager mode's
    # quotient, a product with 1/127, is not the exact one. At 6 none but 3 is.
    x[:, 0] = 6
    got, report = run(layer, (x,))
    assert [match.family for match in report.matches] == ["w4a8"]
    rows = torch.cat([x, x.new_zeros(max(0, 32 - m), 4096)])  # _int_mm needs 17
    assert_close(got.cpu(), layer(rows)[:m].cpu().double(), slack=4.0)  # eager mode rounds twice
    assert all("8 bits in each call" not in kernel.chosen for kernel in report.kernels)
