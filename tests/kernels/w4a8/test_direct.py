"""What ``w4a8_direct`` takes, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.w4a8.direct.kernel import W4A8_DIRECT
from tests.support.gemms import formats
from tests.support.gemms.generated import device, hardest
from tests.support.gemms.w4a8 import Case, described, generate_case

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


@pytest.mark.parametrize(
    ("name", "groups", "is_taken"),
    [
        ("nibble_pairs", True, True),
        ("nibble_pairs", False, True),
        ("int4_words", False, True),
        ("awq", False, True),
        ("gptq", False, True),
        ("gptq", True, False),  # kernels of weight_only may be faster
        ("shift_table", False, False),
    ],
)
def test_it_takes_few_rows_of_what_it_unpacks(name, groups, is_taken):
    for m in (1, 16, 17, 32, 33):
        spec, problem = described(Case(name, m, 1024, 4096, groups=groups))
        for arch, most in ((90, 32), (80, 16), (100, 0)):
            found = [kernel for kernel, _ in candidates("w4a8", spec, problem, device(arch))]
            assert (found[:1] == [W4A8_DIRECT]) == (is_taken and m <= most)


def test_small_groups_and_unaligned_rows_are_left(monkeypatch):
    spec, problem = described(Case("nibble_pairs", 1, 1024, 4096))
    unaligned = dataclasses.replace(problem, has_aligned_rows=False)
    assert W4A8_DIRECT.rejection(spec, problem, device(90)) is None
    assert W4A8_DIRECT.rejection(spec, unaligned, device(90)) is not None
    monkeypatch.setattr(formats, "GROUP", 64)
    assert W4A8_DIRECT.rejection(*described(Case("nibble_pairs", 1, 1024, 4096)), device(90))


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 8192, 8192, "8x32x1024_w8_s1_g8"),
        (1, 6144, 4096, "8x32x1024_w8_s1_g8"),
        (16, 8192, 8192, "16x32x1024_w8_s1_g8"),
        (20, 8192, 8192, "32x16x512_w4_s1_g8"),
        (1, 28672, 4096, "8x32x512_w4_s1_g8"),  # many CTAs: smaller ones
        (1, 4096, 14336, "8x32x2048_w16_s1_g8"),  # few: larger ones
    ],
)
def test_the_warps_of_all_ctas_fill_the_sms(m, n, k, config):
    spec, problem = described(Case("nibble_pairs", m, n, k))
    assert str(W4A8_DIRECT.configs(spec, problem, device(90))[0]) == config


def test_at_most_8_warps_have_32_rows():
    """With 16, 32 x 4096 x 14336 took 0.97 of W8A8's time, with 8 0.66 (H100)."""
    spec, problem = described(Case("nibble_pairs", 32, 4096, 14336, groups=False))
    assert W4A8_DIRECT.configs(spec, problem, device(90))[0].num_warps == 8


def test_partials_of_integers_are_exact_in_fp32():
    config = GemmConfig(8, 32, 512, 4, 1, split_k=2)
    for groups, k, may_split in ((False, 14, True), (False, 15, False), (True, 15, True)):
        spec, problem = described(Case("nibble_pairs", 1, 64, 1 << k, groups=groups))
        refused = W4A8_DIRECT.config_rejection(spec, problem, config, device(90))
        assert (refused is None) == may_split


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (Case("nibble_pairs", 16, 1024, 4096), 90),
        pytest.param(Case("gptq", 8, 1024, 4096, groups=False), 90, marks=pytest.mark.slow),
        *(
            pytest.param(case, 90, marks=pytest.mark.slow)
            for case in (
                Case("nibble_pairs", 32, 1024, 4096),
                Case("nibble_pairs", 32, 1024, 4096, groups=False),
                Case("nibble_pairs", 32, 1024, 4096, to_int8="round"),
                Case("awq", 32, 1024, 4096, groups=False),
            )
        ),
        pytest.param(Case("awq", 16, 1024, 4096, groups=False), 80, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_configuration_spills(case, arch):
    spec, problem = described(case)
    for config in hardest(W4A8_DIRECT.configs(spec, problem, device(arch)), 1):
        generated = generate_case(case, f"{W4A8_DIRECT.name} {config}", arch=arch)
        named = next(item for item in generated.kernels.items() if "partials" in item[1])
        kernel = simulate.compile_kernel(*named)
        assert kernel.spill_stores == 0
        assert all("m16n8k32" in name for name in kernel.matrix_instructions())


def test_a_k_of_one_tile_compiles():
    """The loop is gone then, and so must be the code in it that never runs."""
    [(name, source)] = generate_case(Case("int4_words", 1, 64, 128, torch.float16)).kernels.items()
    assert "partials" in source
    simulate.compile_kernel(name, source)
