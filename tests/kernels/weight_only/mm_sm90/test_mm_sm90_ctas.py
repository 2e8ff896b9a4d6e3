"""What the CTAs of ``weight_only_mm_sm90``, and the consumers of one, share of tiles and of K."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.codegen.digits import pair_lookup
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import (
    Case,
    generate_case,
    loadable,
)

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

bf16, f16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("n", [2048, 4096])
def test_few_tiles_split_k_until_most_sms_have_one(n, large_groups):
    spec, problem = loadable(Case("awq", 64, n, 8192, f16))
    config, *_ = WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90))
    ctas = -(-n // config.block_n) * -(-64 // config.block_m) * config.split_k
    is_shared = WEIGHT_ONLY_MM_SM90.scratch(spec, problem, config, device(90)) > 0
    assert is_shared or ctas >= 0.7 * device(90).num_sms


@pytest.mark.parametrize(
    ("m", "n", "k", "is_shared"),
    [
        (256, 11008, 4096, True),  # 86 tiles
        (256, 16896, 4096, False),  # 132
        (256, 16384, 1024, False),  # 128
        (4096, 11008, 4096, True),  # 1376, ten rounds and a half
        (2048, 3584, 14336, True),  # 224, and x is larger than the L2 cache
    ],
)
def test_tiles_are_shared_if_they_leave_sms_idle_for_long(m, n, k, is_shared, large_groups):
    spec, problem = loadable(Case("nibble_pairs", m, n, k))
    config = GemmConfig(256, 128, 64, 8, 4)
    assert (WEIGHT_ONLY_MM_SM90.scratch(spec, problem, config, device(90)) > 0) == is_shared


@pytest.mark.parametrize(
    ("m", "n", "split_k", "changes", "slices"),
    [
        (64, 4096, 4, {}, 4),  # 32 tiles
        (64, 4096, 3, {}, 3),
        (64, 2048, 6, {}, 6),
        (64, 2048, 7, {}, 0),
        (64, 4224, 4, {}, 4),  # 33 tiles
        (64, 4352, 4, {}, 0),  # 34 tiles: more CTAs than SMs
        (256, 4096, 2, {}, 0),  # as many tiles, of 64 rows
        (64, 8192, 2, {}, 2),
        (64, 4096, 4, {"m_is_static": False}, 0),
    ],
)
def test_slices_exchange_sums_if_all_ctas_run_at_once(m, n, split_k, changes, slices):
    spec, problem = loadable(Case("nibble_pairs", m, n, 4096))
    problem = dataclasses.replace(problem, **changes)
    config = GemmConfig(64, 128, 128, 8, 4, split_k=split_k)
    gemm = spec, problem, config, device(90)
    constants = WEIGHT_ONLY_MM_SM90.constants(*gemm)
    assert constants["EXCHANGED_SLICES"] == slices
    assert WEIGHT_ONLY_MM_SM90.partials(*gemm) == (1 if slices else split_k)
    if slices:  # parts of sums, and a signal of 8 bytes for each warp and peer
        tiles = n // 128
        assert WEIGHT_ONLY_MM_SM90.scratch(*gemm) == tiles * slices * (64 * 128 + slices * 8 * 2)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "split_k", "changes", "reason"),
    [
        ("nibble_pairs", 128, 4096, 4096, 2, {}, ""),
        ("nibble_pairs", 128, 4224, 4096, 2, {}, ""),  # 66 tiles
        ("nibble_pairs", 128, 4288, 4096, 2, {}, "several tiles"),
        ("nibble_pairs", 512, 2048, 256, 1, {}, ""),
        ("nibble_pairs", 128, 2048, 256, 2, {}, "takes more of K"),
        ("nibble_pairs", 128, 4096, 4096, 2, {"m_is_static": False}, "several tiles"),
        ("nibble_pairs", 256, 4096, 4096, 2, {"tile": (256, 64, 64, 8, 8)}, "sums"),
        ("nibble_pairs", 128, 4096, 4096, 2, {"tile": (128, 128, 64, 16, 8)}, "a warpgroup"),
        ("nibble_pairs", 128, 4096, 4096, 2, {"tile": (64, 64, 64, 16, 8)}, "2 consumers"),
        ("nibble_pairs", 128, 4096, 4096, 2, {"tile": (128, 64, 128, 8, 4)}, "the size of"),
        ("nf4", 128, 4096, 4096, 2, {}, "a table"),
        ("groups_of_n", 128, 4096, 4096, 2, {}, "what each k has"),
    ],
)
def test_consumers_take_turns_if_a_cta_has_one_tile(name, m, n, k, split_k, changes, reason):
    spec, problem = loadable(Case(name, m, n, k))
    tile = changes.pop("tile", (128, 64, 64, 8, 8))
    problem = dataclasses.replace(problem, **changes)
    config = GemmConfig(*tile, split_k=split_k)
    refused = WEIGHT_ONLY_MM_SM90.config_rejection(spec, problem, config, device(90))
    assert reason in refused.detail if reason else refused is None
    if refused is None:
        found = WEIGHT_ONLY_MM_SM90.constants(spec, problem, config, device(90))
        assert (found["CONSUMERS"], found["UNROLLED"], found["SHARES_TILES"]) == (2, 2, False)
        assert WEIGHT_ONLY_MM_SM90.launched_warps(config) == 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "tile", "ctas"),
    [
        ("nibble_pairs", (64, 64, 128, 4, 4), 2),
        ("nf4", (64, 64, 128, 4, 4), 1),  # two tables of 32 KB: a few hundred bytes too much
        ("nf4", (64, 64, 64, 4, 8), 1),
        ("nf4", (64, 128, 64, 4, 4), 2),
    ],
)
def test_an_sm_runs_as_many_ctas_as_have_shared_memory(name, tile, ctas, large_groups):
    case = Case(name, 64, 4096, 4096, bf16)
    spec, problem = loadable(case)
    config, card = GemmConfig(*tile), device(90)
    found = WEIGHT_ONLY_MM_SM90.constants(spec, problem, config, card)
    assert found["NUM_CTAS"] == ctas * card.num_sms
    generated = generate_case(case, f"{WEIGHT_ONLY_MM_SM90.name} {config}")
    named = next(item for item in generated.kernels.items() if "x_stages" in item[1])
    # Beside what Triton counts: the table, warps' barriers, and what each CTA reserves.
    beside = (pair_lookup.MEMORY if name == "nf4" else 0) + 1024 + 1024
    memory = simulate.compile_kernel(*named).shared_bytes + beside
    assert (2 * memory <= card.shared_memory + 1024) == (ctas == 2)


@pytest.mark.compiles
def test_more_barriers_than_a_warp_has_lanes_are_initialized():
    """Of 36 stages, which a user may pin."""
    case, pin = Case("gptq", 32, 128, 4096, f16), "weight_only_mm_sm90 16x128x64_w8_s36_g8"
    [(name, source)] = generate_case(case, pin).kernels.items()
    ptx = simulate.compile_kernel(name, source).ptx
    found = re.findall(r"setp.lt.u32 is_one, lane, (%r\d+|\d+)", ptx)
    values = dict(re.findall(r"mov.b32 \t?(%r\d+), (\d+);", ptx))
    counts = sorted(int(values.get(each, each)) for each in found)
    assert counts == [4, 4, 32, 32]


def test_few_sms_exchange_nothing():
    spec, problem = loadable(Case("nibble_pairs", 64, 1024, 4096))
    config = GemmConfig(64, 128, 128, 8, 4, split_k=4)
    card = dataclasses.replace(device(90), num_sms=114)
    assert WEIGHT_ONLY_MM_SM90.constants(spec, problem, config, card)["EXCHANGED_SLICES"] == 0


@pytest.mark.parametrize(
    ("n", "k", "split_k", "copied"),
    [
        (4096, 4096, 1, 4),  # 256 of K
        (4096, 192, 1, 3),  # all
        (4096, 576, 4, 2),  # nine iterations, five turns: the first slice has one
        (4160, 4096, 1, 0),  # the last tile ends beyond N
    ],
)
def test_each_cta_copies_what_its_first_part_has(n, k, split_k, copied):
    spec, problem = loadable(Case("int8_channel", 64, n, k))
    config = GemmConfig(64, 128, 64, 8, 4, split_k=split_k)
    assert WEIGHT_ONLY_MM_SM90.constants(spec, problem, config, device(90))["COPIED"] == copied


@pytest.mark.parametrize(
    ("config", "copied"), [("256x128x64_w8_s4_g8", 2), ("128x64x64_w4_s4_g8", 2)]
)
def test_the_ctas_of_an_sm_copy_a_limited_number_of_bytes(config, copied):
    """One CTA with stages of 40 KB, two with 20 KB each."""
    spec, problem = loadable(Case("int8_channel", 256, 4096, 4096))
    found = WEIGHT_ONLY_MM_SM90.constants(spec, problem, parse_config(config), device(90))
    assert found["COPIED"] == copied
