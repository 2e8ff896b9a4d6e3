"""What ``weight_only_direct`` takes, which thread holds what, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.weight_only.digit_tiles import plan_of, words_in_order
from inductor_quant.kernels.weight_only.direct.kernel import WEIGHT_ONLY_DIRECT
from inductor_quant.kernels.weight_only.direct.operands import scales_sums
from inductor_quant.spec.formulas import int4pack_mm
from tests.support import in_flight
from tests.support.gemms import formats
from tests.support.gemms.generated import device, generate, hardest
from tests.support.gemms.weight_only import (
    Case,
    aligned,
    compiled_in_direct,
    described,
    generate_case,
)

pytestmark = [
    pytest.mark.usefixtures("large_groups"),
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
bf16, f16 = torch.bfloat16, torch.float16


def test_x_in_shared_memory_has_up_to_32_rows():
    for name, m, rows in (("awq", 32, {32}), ("awq", 64, set()), ("hqq", 64, {32, 64})):
        spec, problem = aligned(Case(name, m, 1024, 1024, f16))
        found = WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))
        assert {config.block_m for config in found} == rows


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "tile"),
    [
        ("nibble_pairs", 1, 2048, 2048, (16, 128)),  # as many CTAs as SMs
        ("nibble_pairs", 16, 3840, 1280, (16, 64)),
        ("nibble_pairs", 16, 28672, 4096, (32, 128)),  # x is read by fewer CTAs
        ("int8_folded", 1, 2048, 2048, (16, 128)),
        ("int8_channel", 1, 2048, 2080, (64, 32)),  # slices of 64 do not divide K
        ("awq", 1, 2048, 2048, (64, 64)),
    ],
)
def test_small_layers_have_tiles_of_few_columns(name, m, n, k, tile):
    spec, problem = aligned(Case(name, m, n, k, f16))
    config, *_ = WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))
    assert (config.block_n, config.block_k // config.num_warps) == tile


def test_w_is_dequantized_where_no_tile_whose_sums_are_scaled_fits(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    spec, problem = aligned(Case("hqq", 1, 1024, 64, bf16))
    found = WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))
    assert found
    assert not any(scales_sums(spec, problem.weight, each) for each in found)


def test_k_need_not_be_a_multiple_of_what_the_warps_share():
    spec, problem = aligned(Case("nibble_pairs", 4, 4096, 11008, bf16))
    config, *_ = WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))
    assert 11008 % (config.block_k * config.split_k)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("m", "is_shared"), [(8, False), (16, True)])
def test_lanes_load_whole_lines_of_x_for_words_in_the_order_of_fragments(m, is_shared):
    """As tinygemm has them: a lane multiplies two neighbours along K, a word has 4 of 32 such."""

    def make(device):
        sizes = (m, 4096), (128, 32, 32, 4), (32, 1024, 2)
        dtypes = bf16, torch.int32, bf16
        made = zip(sizes, dtypes, strict=True)
        return tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in made)

    def linear(x, words, scales_and_zeros):
        return int4pack_mm(x, words, 128, scales_and_zeros)

    [source] = [each for each in generate(linear, make).kernels.values() if "X_MMA" in each]
    assert ("X_LOADED" in source) == is_shared


@pytest.mark.parametrize("name", ["gptq", "awq", "hqq", "nibble_pairs", "int8_group", "nf4"])
@pytest.mark.parametrize("tile", [(32, 128), (64, 64), (128, 32)])
def test_a_thread_holds_an_operand_of_mma(name, tile):
    """Of each 16 x 16: lanes and two registers of k, lanes and one register of n."""
    _, problem = described(Case(name, 8, 1024, 1024, bf16))
    config = GemmConfig(8, tile[0], 4 * tile[1], 4, 1)
    plan = plan_of(words_in_order(problem.weight)[0], config, own=True)
    if plan is None:
        pytest.skip("values of a word do not fit into the tile")
    kinds = [digit.name[0] for digit in plan.digits]

    def axes(part):
        return sorted(kinds[next(i for i, step in enumerate(basis) if step)] for basis in part)

    assert axes(plan.layout.lanes) == ["k", "k", "n", "n", "n"]
    assert axes(plan.layout.warps) == ["w", "w"]
    held = axes(plan.layout.registers)
    assert held.count("n") >= 1
    assert held.count("k") + held.count("p") >= 2
    assert sorted(plan.rows) == list(range(len(plan.rows)))
    assert sorted(plan.depth) == list(range(len(plan.depth)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    [
        ("hqq", 16, bf16),
        ("int8_group", 64, bf16),
        ("crossing", 16, f16),
        pytest.param("awq", 8, f16, marks=pytest.mark.slow),
        pytest.param("int8_group", 8, bf16, marks=pytest.mark.slow),
        *(
            pytest.param(name, m, bf16, marks=pytest.mark.slow)
            for name in (
                *("gptq", "nibble_pairs", "hqq", "nf4", "fp8_row", "uint2", "int8_channel"),
                *("shards", "crossing"),
            )
            for m in (32, 64)
        ),
    ],
)
def test_no_configuration_spills(name, m, dtype):
    case = Case(name, m, 1024, 4096 if m <= 16 else 1024, dtype)
    spec, problem = aligned(case)
    for config in hardest(WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90)), 1):
        generated = generate_case(case, f"{WEIGHT_ONLY_DIRECT.name} {config}")
        named = next(item for item in generated.kernels.items() if "partials" in item[1])
        # a word, in one of 246 instructions
        most = 4 if (name, m) == ("fp8_row", 32) and TRITON >= (3, 9) else 0
        assert simulate.compile_kernel(*named).spill_stores <= most


def test_zero_points_of_small_groups_spill_nothing_with_16_warps(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case("hqq", 8, 4096, 4096, bf16)
    generated = generate_case(case, f"{WEIGHT_ONLY_DIRECT.name} 8x32x2048_w16_s1_g8")
    named = next(item for item in generated.kernels.items() if "partials" in item[1])
    assert simulate.compile_kernel(*named).spill_stores == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("m", "group", "zeros", "values"),
    [
        (16, 32, bf16, 64),
        (16, 64, bf16, 64),
        (8, 64, torch.float32, 64),
        (16, 128, bf16, 64),
        (8, 64, bf16, 64),
    ],
)
def test_float_zero_points_spill_nothing(m, group, zeros, values, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    monkeypatch.setattr(formats, "bf16", zeros)  # and scales
    case = Case("hqq", m, 4096, 4096, bf16)
    config, *_ = WEIGHT_ONLY_DIRECT.configs(*aligned(case), device(90))
    assert config.block_n * config.block_k == values * 32 * config.num_warps
    generated = generate_case(case, f"{WEIGHT_ONLY_DIRECT.name} {config}")
    named = next(item for item in generated.kernels.items() if "partials" in item[1])
    # three words, of two iterations a turn
    most = 12 if TRITON >= (3, 9) and (m, group, values) == (16, 64, 64) else 0
    assert simulate.compile_kernel(*named).spill_stores <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "k", "most"), [(13824, 5120, 0), (14336, 4096, 32), (8192, 8192, 40)]
)
def test_tiles_of_64_columns_spill_little(n, k, most, monkeypatch):
    """Of this layout, which is not HQQ's own (direct/README.md)."""
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case("hqq", 8, n, k, bf16)
    config, *_ = WEIGHT_ONLY_DIRECT.configs(*aligned(case), device(90))
    assert config.block_n == 64
    assert compiled_in_direct(case, config).spill_stores <= most


@pytest.mark.parametrize(
    ("name", "m", "group", "config", "ops"),
    [
        ("hqq", 8, 64, "8x32x512_w8_s1_g8", ("sub", "mul")),
        ("hqq", 8, 64, "8x32x1024_w8_s1_g8", ()),  # a tile has two groups
        ("hqq", 16, 64, "16x32x512_w8_s1_g8", ("sub", "mul")),
        ("hqq", 16, 64, "16x64x512_w8_s1_g8", ()),  # too many sums
        ("hqq", 16, 128, "16x32x1024_w8_s1_g8", ()),  # and values
        ("hqq", 32, 64, "32x32x512_w8_s1_g8", ()),
        ("nibble_pairs", 8, 128, "8x32x512_w8_s1_g8", ("mul",)),  # in 16 bits
        ("nibble_pairs", 8, 128, "8x32x2048_w8_s1_g8", ()),
        ("nibble_pairs", 16, 128, "16x32x512_w8_s1_g8", ()),
        ("gptq", 8, 128, "8x32x1024_w8_s1_g8", ("mul",)),  # zero points are integers
        ("int8_group", 8, 128, "8x32x512_w8_s1_g8", ()),
        ("nf4", 8, 128, "8x32x512_w8_s1_g8", ()),
        ("fp8_block", 8, 128, "8x32x512_w8_s1_g8", ("mul",)),
        ("fp8_block", 16, 128, "16x32x512_w8_s1_g8", ()),
        ("fp8_words", 8, 128, "8x32x512_w8_s1_g8", ()),  # columns have scales of their own
        ("e5m2_group", 8, 128, "8x32x512_w8_s1_g8", ()),
        ("act_order", 8, 128, "8x32x512_w8_s1_g8", ()),
    ],
)
def test_what_is_applied_to_sums(name, m, group, config, ops, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    spec, problem = aligned(Case(name, m, 4096, 4096, bf16))
    codegen = WEIGHT_ONLY_DIRECT.codegen(spec, problem, parse_config(config))
    assert tuple(op.kind for op in codegen.sum_ops) == ops


def test_scales_that_may_overflow_stay_in_the_loop(monkeypatch):
    """fp32, times the divisor of W."""
    monkeypatch.setattr(formats, "bf16", torch.float32)
    spec, problem = aligned(Case("nibble_pairs", 8, 4096, 4096, bf16))
    codegen = WEIGHT_ONLY_DIRECT.codegen(spec, problem, parse_config("8x32x512_w8_s1_g8"))
    assert not codegen.sum_ops


@pytest.mark.parametrize(("m", "arch", "is_wide"), [(1, 90, True), (16, 90, False), (1, 80, False)])
def test_wide_tiles_are_for_few_rows_of_bytes(m, arch, is_wide):
    spec, problem = aligned(Case("int8_channel", m, 28672, 4096, bf16))
    found = WEIGHT_ONLY_DIRECT.configs(spec, problem, device(arch))
    assert (
        (32, 128) in [(each.block_n, each.block_k // each.num_warps) for each in found]
    ) == is_wide


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["nibble_pairs", "int8_channel"])
def test_only_with_few_rows_words_are_read_once(name):
    """And rows beyond M are not loaded; else words stay in the L2 cache, for other rows' CTAs."""
    case = Case(name, 5, 4096, 4096, bf16)
    for m, has_few in ((5, True), (32, False)):
        config = WEIGHT_ONLY_DIRECT.configs(*aligned(dataclasses.replace(case, m=m)), device(90))[0]
        generated = generate_case(
            dataclasses.replace(case, m=m), f"{WEIGHT_ONLY_DIRECT.name} {config}"
        )
        [source] = [each for each in generated.kernels.values() if "partials" in each]
        assert ("evict_first" in source) == ("mask=has_x" in source) == has_few


@pytest.mark.parametrize("name", formats.FORMATS)
@pytest.mark.parametrize(("m", "group"), [(8, 64), (16, 128)])
@pytest.mark.parametrize("scales", [None, torch.float32])
def test_tiles_are_chosen_for_what_is_generated(name, m, group, scales, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    if scales is not None:
        monkeypatch.setattr(formats, "bf16", scales)
        monkeypatch.setattr(formats, "f16", scales)
    spec, problem = aligned(Case(name, m, 4096, 4096, bf16))
    refused = WEIGHT_ONLY_DIRECT.rejection(spec, problem, device(90))
    if refused is not None:
        pytest.skip(refused.detail)
    configs = WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))
    if not configs:
        pytest.skip("no tile suits the format")
    found = WEIGHT_ONLY_DIRECT.codegen(spec, problem, configs[0])
    has_zero = len(found.sum_ops) > 1
    assert has_zero == scales_sums(spec, problem.weight, configs[0]) == (name == "hqq")


@pytest.mark.parametrize("m", [1, 8, 16])
def test_tiles_of_float_zero_points_are_within_a_group(m, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    for n, k in ((4096, 4096), (28672, 4096), (2048, 8192)):
        spec, problem = aligned(Case("hqq", m, n, k, bf16))
        for config in WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90)):
            assert config.block_k // config.num_warps == 64


@pytest.mark.parametrize(
    ("m", "n", "dtype"),
    [
        pytest.param(16, 4096, f16, marks=pytest.mark.slow),
        pytest.param(8, 14336, bf16, marks=pytest.mark.slow),
        pytest.param(32, 14336, f16, marks=pytest.mark.slow),
        pytest.param(64, 14336, f16, marks=pytest.mark.slow),
    ],
)
def test_listed_groups_spill_nothing(m, n, dtype):
    """And neighbours along n, of which a thread has 4 or 8, are loaded together."""
    case = Case("act_order", m, n, 4096, dtype)
    for config in WEIGHT_ONLY_DIRECT.configs(*aligned(case), device(90))[:2]:
        generated = generate_case(case, f"{WEIGHT_ONLY_DIRECT.name} {config}")
        named = next(item for item in generated.kernels.items() if "partials" in item[1])
        kernel = simulate.compile_kernel(*named)
        assert kernel.spill_stores == 0
        code = in_flight.machine_code(kernel.ptx)
        assert not [text for _, text in code if "LDG" in text and "U16" in text]


def test_listed_groups_are_those_of_neighbouring_columns():
    spec, problem = aligned(Case("act_order", 1, 1024, 1024, f16))
    tensors = problem.weight.tensors
    for changed in (0, 1, 2):  # words, zero points, scales
        rows, _ = tensors[changed].shape
        transposed = dataclasses.replace(tensors[changed], stride=(1, rows))
        others = (*tensors[:changed], transposed, *tensors[changed + 1 :])
        weight = dataclasses.replace(problem.weight, tensors=others)
        found = dataclasses.replace(problem, weight=weight)
        assert WEIGHT_ONLY_DIRECT.rejection(spec, found, device(90)) is not None
    assert WEIGHT_ONLY_DIRECT.rejection(spec, problem, device(90)) is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("scales", "n", "group"),
    [
        (f16, 4096, 128),
        (bf16, 4096, 128),
        pytest.param(f16, 14336, 128, marks=pytest.mark.slow),
        pytest.param(f16, 14336, 32, marks=pytest.mark.slow),
    ],
)
def test_words_along_n_spill_next_to_nothing_with_16_rows(scales, n, group, monkeypatch):
    monkeypatch.setattr(formats, "f16", scales)
    monkeypatch.setattr(formats, "GROUP", group)
    case = Case("awq", 16, n, 4096, bf16)
    spec, problem = aligned(case)
    config, *_ = WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))
    kernel = compiled_in_direct(case, config)
    most, most_in_loop = (0, 0) if group == 128 else (28, 10) if TRITON < (3, 9) else (36, 14)
    assert kernel.spill_stores <= most
    # of 578 instructions and more
    assert len(in_flight.spilled_in_loops(in_flight.machine_code(kernel.ptx))) <= most_in_loop


@pytest.mark.skipif(TRITON < (3, 9), reason="how many iterations there are is not hidden")
@pytest.mark.parametrize(
    ("name", "m", "n", "dtype", "config"),
    [
        ("nibble_pairs", 4, 4096, f16, "8x32x2048_w16_s1_g8"),
        ("nibble_pairs", 8, 4096, f16, "8x32x2048_w16_s1_g8"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("nibble_pairs", 4, 4096, bf16, "8x32x2048_w16_s1_g8"),
                ("hqq", 16, 4096, bf16, "16x32x2048_w16_s1_g8"),
                ("hqq", 4, 14336, bf16, "8x32x512_w4_s1_g8"),
                ("nf4", 4, 4096, bf16, "8x32x2048_w16_s1_g8"),
                ("nf4", 16, 4096, bf16, "16x32x2048_w16_s1_g8"),
            )
        ),
    ],
)
def test_few_iterations_spill_little(name, m, n, dtype, config, monkeypatch):
    """Two with 16 warps: all of W was loaded before the loop."""
    monkeypatch.setattr(formats, "GROUP", 32)
    kernel = compiled_in_direct(Case(name, m, n, 4096, dtype), config)
    is_full = dtype == f16 and m < 8  # rows that are not loaded take the last registers
    assert kernel.spill_stores <= 16 * is_full
    assert len(in_flight.spilled_in_loops(in_flight.machine_code(kernel.ptx))) <= 2 * is_full


@pytest.mark.parametrize("n", [4096, 2000])  # of the second the last tile is partial
@pytest.mark.parametrize("m", [8, 16, 32])
def test_a_launch_asks_for_no_more_registers_than_there_are(n, m):
    spec, problem = aligned(Case("nibble_pairs", m, n, 4096, bf16))
    for warps in (2, 4, 8, 16):
        config = parse_config(f"{m}x32x{64 * warps}_w{warps}_s1_g8")
        assert WEIGHT_ONLY_DIRECT.config_rejection(spec, problem, config, device(90)) is None
        most = WEIGHT_ONLY_DIRECT.codegen(spec, problem, config).max_registers
        assert 32 * warps * most <= 65536


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "m", "config", "is_moved"),
    [
        ("nibble_pairs", 8, "8x32x512_w4_s1_g8", False),
        ("int4_words", 4, "8x32x1024_w8_s1_g8", False),
        ("nibble_pairs", 16, "16x32x512_w4_s1_g8", True),  # x is as large as W
    ],
)
def test_halves_of_a_word_are_unpacked_without_moving_them(name, m, config, is_moved):
    """4 pairs of W for each product take a ``prmt`` each, or two pairs of x for two products."""
    code = in_flight.machine_code(compiled_in_direct(Case(name, m, 4096, 4096, bf16), config).ptx)
    moves, products = (sum(each in text for _, text in code) for each in ("PRMT", "HMMA"))
    assert moves >= 2 * products if is_moved else moves < 3 * products


@pytest.mark.parametrize(
    ("name", "m", "group", "in_halves"),
    [
        ("awq", 16, 128, True),
        ("awq", 8, 128, False),
        ("awq", 16, 32, True),  # each half has scales of its own
        ("awq", 16, 16, False),  # of two groups
        ("gptq", 16, 128, False),
        ("nibble_pairs", 16, 128, False),
    ],
)
def test_large_tiles_of_words_along_n_are_multiplied_in_halves(
    name, m, group, in_halves, monkeypatch
):
    monkeypatch.setattr(formats, "GROUP", group)
    spec, problem = aligned(Case(name, m, 4096, 4096, f16))
    tile = "64x512" if name == "awq" else "32x1024"
    config = parse_config(f"{8 if m == 8 else 16}x{tile}_w8_s1_g8")
    assert WEIGHT_ONLY_DIRECT.config_rejection(spec, problem, config, device(90)) is None
    codegen = WEIGHT_ONLY_DIRECT.codegen(spec, problem, config)
    assert codegen.multiplied(lambda *_: "0", lambda *_: "0").count("mma_v2") == 1 + in_halves


def test_tiles_of_many_columns_are_for_8_rows_of_words_along_n():
    for m, is_offered in ((8, True), (16, False)):
        spec, problem = aligned(Case("awq", m, 4096, 4096, f16))
        columns = {
            config.block_n for config in WEIGHT_ONLY_DIRECT.configs(spec, problem, device(90))
        }
        assert (128 in columns) == is_offered


def test_a_k_of_one_tile_compiles():
    """The loop is gone then, and so must be the code in it that never runs."""
    [(name, source)] = generate_case(Case("awq", 1, 64, 128)).kernels.items()
    assert "partials" in source
    simulate.compile_kernel(name, source)


def test_a_long_table_compiles():
    """More bits than an integer has."""
    case = Case("int8_shuffled", 1, 256, 256)
    [(name, source)] = generate_case(
        case, f"{WEIGHT_ONLY_DIRECT.name} 8x32x256_w4_s1_g8"
    ).kernels.items()
    assert "gl.where" in source
    simulate.compile_kernel(name, source)
