"""Where ``weight_only_direct`` is chosen, and where another kernel."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from inductor_quant._compat import gluon
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.weight_only import digit_tiles
from inductor_quant.kernels.weight_only.bytes.kernel import WEIGHT_ONLY_BYTES
from inductor_quant.kernels.weight_only.direct import cost
from inductor_quant.kernels.weight_only.direct.kernel import WEIGHT_ONLY_DIRECT
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, aligned, loadable

pytestmark = [
    pytest.mark.usefixtures("large_groups"),
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

bf16, f16 = torch.bfloat16, torch.float16


def chosen(case, arch=90):
    spec, problem = aligned(case)
    problem = dataclasses.replace(problem, has_weight_descriptors=arch == 90)
    found = candidates("weight_only", spec, problem, device(arch))
    return next((kernel for kernel, _ in found), None)


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("awq", True),
        ("nibble_pairs", True),
        ("hqq", True),
        ("int8_group", True),
        ("int8_zero_channel", True),
        ("nf4", True),
        ("uint2", True),
        ("gptq", False),  # weight_only_decode is faster
        ("int8_channel", True),
        ("fp8_block", True),
        ("act_order", True),
        ("int8_divisor", False),
        ("int4_in_int64", False),
    ],
)
def test_it_takes_what_no_kernel_for_one_format_takes(name, is_taken):
    for m in (1, 16):
        assert (chosen(Case(name, m, 4096, 4096, bf16)) is WEIGHT_ONLY_DIRECT) == is_taken


@pytest.mark.parametrize(
    ("n", "k", "is_taken"),
    [
        (2112, 7168, True),  # few tiles
        (2048, 2048, True),
        (5120, 1280, True),  # ten slices of K for eight warps
        (3072, 8192, False),
        (4096, 4096, False),
    ],
)
def test_gptq_words_that_leave_sms_or_warps_idle_are_taken(n, k, is_taken):
    for m in (1, 16):
        assert (chosen(Case("gptq", m, n, k, f16)) is WEIGHT_ONLY_DIRECT) == is_taken


def test_whole_bytes_of_a_k_that_64_does_not_divide_have_another_kernel():
    assert chosen(Case("int8_channel", 8, 1152, 4304, bf16)) is WEIGHT_ONLY_BYTES
    assert chosen(Case("int8_channel", 8, 1152, 4288, bf16)) is WEIGHT_ONLY_DIRECT
    assert chosen(Case("int8_channel", 9, 1152, 4304, bf16)) is WEIGHT_ONLY_MM_SM90
    for name in ("fp8_row", "int8_zero_channel"):
        assert chosen(Case(name, 1, 1152, 4304, bf16)) is WEIGHT_ONLY_MM_SM90
        assert chosen(Case(name, 1, 1152, 4288, bf16)) is WEIGHT_ONLY_DIRECT
    for name in ("nibble_pairs", "mxfp4", "int8_group"):  # not timed in the other kernel
        assert chosen(Case(name, 8, 1152, 4320, bf16)) is WEIGHT_ONLY_DIRECT
        spec, problem = loadable(Case(name, 8, 1152, 4320, bf16))
        assert WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90)) is not None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["nf4", "mxfp4", "nvfp4"])
def test_tables_have_the_kernel_that_costs_less_from_nine_rows_on(name):
    for m, n, k, kernel in (
        (8, 5120, 13824, WEIGHT_ONLY_DIRECT),
        (9, 5120, 13824, WEIGHT_ONLY_MM_SM90),
        (16, 5120, 13824, WEIGHT_ONLY_MM_SM90),
        (16, 1024, 3072, WEIGHT_ONLY_DIRECT),
    ):
        assert chosen(Case(name, m, n, k, bf16)) is kernel
        spec, problem = aligned(Case(name, m, n, k, bf16))
        assert WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))  # without TMA
    assert chosen(Case("int8_channel", 16, 5120, 13824, bf16)) is WEIGHT_ONLY_DIRECT


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["gptq", "nibble_pairs", "hqq", "int8_channel", "fp8_row", "nf4"])
def test_it_takes_more_rows_of_small_layers(name):
    for m in (17, 33, 64, 100):
        assert chosen(Case(name, m, 1024, 1024, bf16)) is WEIGHT_ONLY_DIRECT
        assert chosen(Case(name, m, 28672, 4096, bf16)) is not WEIGHT_ONLY_DIRECT
        assert chosen(Case(name, m, 1024, 1024, bf16), arch=80) is not WEIGHT_ONLY_DIRECT
    assert chosen(Case(name, 1000, 1024, 1024, bf16)) is not WEIGHT_ONLY_DIRECT


@pytest.mark.parametrize("name", ["shards", "crossing"])
def test_numbers_of_several_fields_have_no_other_kernel_at_any_size(name):
    for m in (17, 33, 64):
        assert chosen(Case(name, m, 28672, 4096, bf16)) is WEIGHT_ONLY_DIRECT
    assert chosen(Case(name, 512, 28672, 4096, bf16)) is None  # W is written once


def test_listed_groups_have_few_rows_or_small_layers():
    for m, n, kernel in (
        (8, 14336, WEIGHT_ONLY_DIRECT),
        (16, 14336, WEIGHT_ONLY_MM_SM90),
        (64, 1024, WEIGHT_ONLY_DIRECT),
        (64, 14336, WEIGHT_ONLY_MM_SM90),
        (256, 14336, WEIGHT_ONLY_MM_SM90),
        (2048, 14336, None),  # W is written once, as it is without us
    ):
        assert chosen(Case("act_order", m, n, 4096, f16)) is kernel


def test_listed_groups_of_small_layers_are_not_left_to_the_library():
    """The library is predicted to take less than either kernel."""
    case = Case("act_order", 10, 344, 1152, f16)
    assert chosen(case) is WEIGHT_ONLY_DIRECT


def test_listed_groups_take_longer_than_instructions_say_with_more_than_8_rows(monkeypatch):
    cycles = []
    for factor in (1.0, 2.0):
        monkeypatch.setattr(cost, "LISTED_WAIT", factor)
        for m in (8, 16):
            _, problem = aligned(Case("act_order", m, 14336, 4096, f16))
            config = GemmConfig(m, 64, 256, 8, 1)
            cycles.append(cost.of_few_rows(problem, config, device(90)))
    assert cycles[2] == cycles[0]
    assert cycles[3] - cost.LAYER.launch == pytest.approx(2 * (cycles[1] - cost.LAYER.launch))


def test_a_tile_is_planned_once(monkeypatch):
    """Dozens of configurations are listed, checked and compared."""
    planned = Counter()

    def tile_plan(weight, code, n, k, *, warps, own, in_pairs, **kwargs):
        planned[tuple(n), tuple(k), warps, own, in_pairs] += 1
        return plan_tile(weight, code, n, k, warps=warps, own=own, in_pairs=in_pairs, **kwargs)

    plan_tile = digit_tiles.tile_plan
    monkeypatch.setattr(digit_tiles, "tile_plan", tile_plan)
    assert chosen(Case("gptq", 64, 1152, 1024, bf16)) is WEIGHT_ONLY_DIRECT  # N of no other test
    assert len(planned) > 10
    assert set(planned.values()) == {1}
