"""Which kernel multiplies rows by their experts, and in which tiles."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch

from inductor_quant._compat import gluon
from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.experts.direct.kernel import EXPERTS_DIRECT
from inductor_quant.kernels.experts.mm.kernel import EXPERTS_MM
from inductor_quant.kernels.experts.mm_sm90 import kernel as mm_sm90
from inductor_quant.kernels.experts.mm_sm90.kernel import EXPERTS_MM_SM90
from inductor_quant.kernels.experts.rules import ExpertsKernel, expected_tiles
from inductor_quant.kernels.problem import Groups, Problem, Weight, WeightTensor
from inductor_quant.kernels.weight_only.digit_tiles import has_zeros, packed_zeros
from inductor_quant.kernels.weight_only.mm_sm90 import loop
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.ops import experts, weight_only
from inductor_quant.spec import row_ranges
from tests.support.gemms import formats
from tests.support.gemms.experts import SHARED, Case, gemm, make_inputs, packed_of, stacked
from tests.support.gemms.generated import device, generate

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

bf16 = torch.bfloat16
E = 32
# A table that is looked up, and zero points that are no bits of words.
SLOW_16 = ("nf4", "hqq", "int8_zero_channel", "int8_folded", "groups_of_n")
MANY_ROWS = (
    *("awq", "fp8_words", "gptq", "hqq", "int4_words", "int8_channel", "int8_folded"),
    *("int8_group", "int8_zero_channel", "mxfp4", "nf4", "nibble_pairs", "nvfp4", "uint2"),
)


@pytest.fixture(autouse=True)
def _groups(large_groups):
    """Of 128."""


def described(
    name: str,
    rows: int,
    *,
    is_sorted: bool = True,
    n: int = 1536,
    k: int = 2048,
    x_dtype: torch.dtype = bf16,
):
    packed = packed_of(name, k, n)
    format = stacked(packed, E)
    spec = weight_only.make_spec(
        format,
        [dtype for _, _, dtype in packed.tensors],
        x_dtype=x_dtype,
        column_scale=None,
        out_dtype=x_dtype,
        bias=False,
    )
    tensors = tuple(
        WeightTensor(dtype, shape if kind in SHARED else (E, *shape))
        for kind, shape, dtype in packed.tensors
    )
    weight, groups = Weight(format, tensors), Groups(E, is_sorted)
    problem = Problem(rows, n, k, weight=weight, has_aligned_rows=True, groups=groups)
    return spec, problem


def first(name: str, rows: int, **options):
    return next(candidates("experts", *described(name, rows, **options), device(90)))


@pytest.mark.parametrize(
    ("name", "rows", "kernel", "block_m"),
    [
        ("nibble_pairs", 8, EXPERTS_DIRECT, 8),
        ("nibble_pairs", E, EXPERTS_DIRECT, 8),
        ("nibble_pairs", 2 * E, EXPERTS_DIRECT, 16),
        ("nibble_pairs", 16 * E, EXPERTS_DIRECT, 16),
        ("nibble_pairs", 64 * E, EXPERTS_MM, 64),
        *((name, 5 * E, EXPERTS_DIRECT, 8) for name in SLOW_16),
        *((name, 6 * E, EXPERTS_DIRECT, 16) for name in SLOW_16),
        ("int8_channel", 8, EXPERTS_DIRECT, 8),
        ("int8_channel", 16 * E, EXPERTS_MM, 16),
        ("fp8_row", 8, EXPERTS_MM, 16),
        ("act_order", 8, EXPERTS_MM, 16),
    ],
)
def test_the_kernel_follows_from_the_rows_an_expert_has_in_the_mean(name, rows, kernel, block_m):
    chosen, config = first(name, rows)
    assert (chosen, config.block_m) == (kernel, block_m)


def test_zero_points_are_stored_where_integers_are_subtracted_from_codes_too():
    plain, zeros = (described(name, E)[1].weight.format for name in ("nibble_pairs", "gptq"))
    element = dataclasses.replace(plain.element, minus=packed_zeros(zeros))
    assert has_zeros(dataclasses.replace(plain, element=element))
    assert has_zeros(zeros)
    assert not has_zeros(plain)


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_few_rows_of_one_expert_are_not_those_of_a_layer(name):
    """Which ``weight_only_mm_sm90`` takes, of tables."""
    spec, problem = described(name, 12)
    one = dataclasses.replace(problem, has_weight_descriptors=True, groups=Groups(1, True))
    assert next(candidates("experts", spec, one, device(90)))[0] is EXPERTS_DIRECT


@pytest.mark.parametrize("name", ["nibble_pairs", "nf4", "int8_channel", "fp8_row"])
def test_a_range_of_rows_has_one_kernel(name):
    tops = row_ranges.tops([row_ranges.kind_of("experts", E)])
    draw, found = random.Random(0), []
    for rows in sorted(draw.randint(1, 64 * E) for _ in range(40)):
        _, high = row_ranges.range_of(rows, tops)
        found.append(first(name, rows))
        assert found[-1] == first(name, high)
    assert len({str(config) for _, config in found}) > 1


@pytest.mark.parametrize(
    ("name", "rows", "kernel"),
    [
        ("nibble_pairs", 8 * E, EXPERTS_DIRECT),
        ("nibble_pairs", 9 * E, EXPERTS_MM_SM90),
        ("int8_channel", 8 * E, EXPERTS_DIRECT),
        ("int8_channel", 9 * E, EXPERTS_MM_SM90),
        ("fp8_row", 8 * E, EXPERTS_MM),
        ("fp8_row", 9 * E, EXPERTS_MM_SM90),
        ("nf4", 9 * E, EXPERTS_MM_SM90),
        *((name, 12 * E, EXPERTS_DIRECT) for name in ("mxfp4", "nvfp4")),  # which it computes
        *((name, 13 * E, EXPERTS_MM_SM90) for name in ("mxfp4", "nvfp4")),
        ("nf4", 256 * E, EXPERTS_MM_SM90),
        ("fp8_row", 256 * E, EXPERTS_MM_SM90),
        ("act_order", 256 * E, EXPERTS_MM),  # scales of each value
    ],
)
def test_many_rows_an_expert_are_for_tma(name, rows, kernel):
    def chosen(arch=90, n=1536, **changes):
        spec, problem = described(name, rows, n=n)
        changes = {"has_weight_descriptors": True} | changes
        problem = dataclasses.replace(problem, **changes)
        return next(candidates("experts", spec, problem, device(arch)))[0]

    assert chosen() is kernel
    if kernel is EXPERTS_MM_SM90:
        for change in (
            {"arch": 89},
            {"has_weight_descriptors": False},
            {"groups": Groups(E, is_sorted=False)},
            {"n": 2**25},  # 64-bit positions
        ):
            assert chosen(**change) is not EXPERTS_MM_SM90


def test_a_table_that_is_looked_up_either_way_is_for_tma():
    """MXFP4's exponents as scales of fp16 are multiplied in fp32."""
    for x_dtype, kernel in ((bf16, EXPERTS_DIRECT), (torch.float16, EXPERTS_MM_SM90)):
        spec, problem = described("mxfp4", 12 * E, x_dtype=x_dtype)
        problem = dataclasses.replace(problem, has_weight_descriptors=True)
        assert next(candidates("experts", spec, problem, device(90)))[0] is kernel


@pytest.mark.parametrize(
    ("name", "group", "stages"),
    [
        ("nibble_pairs", 128, {4, 6}),
        ("int8_channel", 128, {4}),
        ("nibble_pairs", 64, set()),  # two groups of 128
        ("nvfp4", 128, set()),  # of a table
        ("awq", 128, set()),  # rows along N
    ],
)
def test_rows_of_packed_weights_are_long(name, group, stages, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    spec, problem = described(name, 16 * E, n=1536)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    offered = EXPERTS_MM_SM90.configs(spec, problem, device(90))
    found = {config.num_stages for config in offered if str(config).startswith("32x128x128")}
    assert found == stages
    assert str(offered[0]).startswith("32x128x128") == bool(stages)


@pytest.mark.parametrize("rows", [20 * E, 25 * E])
def test_parts_of_lines_of_wide_values_are_slow(rows):
    def is_before(name, first, second):
        spec, problem = described(name, rows)
        problem = dataclasses.replace(problem, has_weight_descriptors=True)
        found = [str(config) for config in EXPERTS_MM_SM90.configs(spec, problem, device(90))]
        return found.index(first) < found.index(second)

    for name, is_slow in (("int8_channel", True), ("nibble_pairs", False)):
        assert is_before(name, "64x128x128_w8_s4_g8", "64x128x64_w4_s4_g8") == is_slow


@pytest.mark.parametrize(("mean", "rows_of_tile"), [(160, 256), (240, 256), (256, 128)])
def test_products_of_one_tile_an_expert_hide_a_table(mean, rows_of_tile):
    spec, problem = described("mxfp4", mean * E, n=4096)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    assert EXPERTS_MM_SM90.configs(spec, problem, device(90))[0].block_m == rows_of_tile


def test_a_choice_holds_for_uneven_routing(monkeypatch):
    """Tiles of 96 rows are the fastest only if no expert has many more than the mean of 64."""
    spec, problem = described("nibble_pairs", 64 * E, n=16384, k=5120)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)

    def rows_of_tile():
        return EXPERTS_MM_SM90.configs(spec, problem, device(90))[0].block_m

    assert rows_of_tile() == 128
    monkeypatch.setattr(mm_sm90, "SPREADS", (0.0,))
    assert rows_of_tile() == 96


@pytest.mark.parametrize(
    ("name", "k", "stages"),
    [
        ("nibble_pairs", 2048, (8, 6, 4)),
        ("mxfp4", 2048, (6, 4)),  # beside a table
        ("mxfp4", 2880, (4,)),  # 128 does not divide it
        ("quarters_of_k", 2048, (4,)),  # words in parts
        ("awq", 2048, (4,)),  # rows along N
        ("int8_channel", 2048, (6, 4)),  # for more the stages are too large
    ],
)
def test_stages_are_more_where_words_of_two_iterations_are_a_box(name, k, stages):
    spec, problem = described(name, 64 * E, n=1536, k=k)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    offered = EXPERTS_MM_SM90.configs(spec, problem, device(90))
    found = {config.num_stages for config in offered if str(config).startswith("64x128x64_w4_")}
    assert found == set(stages)


@pytest.mark.parametrize(
    ("name", "group", "is_offered"),
    [
        ("nibble_pairs", 128, True),
        ("uint2", 32, True),  # groups of more
        ("nibble_pairs", 32, False),
        ("gptq", 128, False),  # zero points that are stored
        ("mxfp4", 128, False),  # looked up
        ("int8_channel", 128, False),
    ],
)
def test_tiles_of_96_rows_are_those_of_weights_that_do_not_spill(
    name, group, is_offered, monkeypatch
):
    monkeypatch.setattr(formats, "GROUP", group)
    spec, problem = described(name, 64 * E, n=6144)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    offered = EXPERTS_MM_SM90.configs(spec, problem, device(90))
    assert any(config.block_m == 96 for config in offered) == is_offered
    if name == "nibble_pairs" and is_offered:
        assert offered[0].block_m == 96


def test_tiles_of_96_rows_are_those_of_experts():
    spec, problem = described("nibble_pairs", 96 * E)
    single = dataclasses.replace(problem, has_weight_descriptors=True, groups=None)
    for rows in (96, 80, 48, 24):
        tile, is_taken = f"{rows}x128x64_w4_s4_g8", rows == 96
        config = parse_config(tile)
        refused = EXPERTS_MM_SM90.config_rejection(spec, problem, config, device(90))
        assert (refused is None) == is_taken
        refused = WEIGHT_ONLY_MM_SM90.config_rejection(spec, single, config, device(90))
        assert "tiles of two products" in str(refused)


def test_no_tile_is_expected_where_there_are_no_rows():
    assert expected_tiles(0.0, 96, 64) == pytest.approx((0, 0), abs=1e-5)


def test_gates_with_a_bias_have_no_tiles_of_96_rows():
    """They spill."""
    case = Case("nibble_pairs", (64,) * E, 6144, 2048, gate="clamped")
    for has_bias in (False, True):
        case = dataclasses.replace(case, has_bias=has_bias)
        make = functools.partial(make_inputs, case)
        [*_, text] = generate(gemm(case), make).kernels.values()
        assert ("BLOCK_M : tl.constexpr = 96" in text) != has_bias


@pytest.mark.parametrize("mean", [3.0, 40.0, 300.0])
@pytest.mark.parametrize(("block_m", "few"), [(32, 0), (64, 32), (96, 64)])
@pytest.mark.parametrize("spread", [0.0, 0.75])
def test_tiles_are_expected_as_random_routing_has_them(mean, block_m, few, spread):
    generator = torch.Generator().manual_seed(0)
    means = torch.exp(spread * torch.randn(200_000, generator=generator, dtype=torch.float64))
    drawn = torch.poisson(mean * means / means.mean(), generator).long()
    left = drawn % block_m
    large = float((drawn // block_m + (left > few)).double().mean())
    small = float(((left > 0) & (left <= few)).double().mean())
    error = 0.04 if spread else 0.01  # of 16 means
    found = expected_tiles(mean, block_m, few, spread)
    assert found == pytest.approx((large, small), abs=error, rel=error)


@pytest.mark.parametrize("tile", ["64x64x128_w4_s4_g8", "64x64x64_w4_s8_g8"])
def test_a_tile_that_fits_once_beside_a_table_is_taken_whatever_the_experts(tile):
    spec, problem = described("nf4", 40 * E)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    config, gpu = parse_config(tile), device(90)
    assert EXPERTS_MM_SM90.config_rejection(spec, problem, config, gpu) is None
    most = loop.memory_of_cta(problem.weight, config)
    assert most == loop.memory_of_tile(problem.weight, config) + 8 * E <= gpu.shared_memory


@pytest.mark.parametrize("name", ["int8_channel", "fp8_row"])
def test_bytes_beyond_32_bits_are_read_as_words_within(name):
    """DeepSeek-V3 in int8: 256 experts of 4096 x 7168 are 7.5e9 bytes."""
    spec, problem = described(name, 128 * E, n=2**16)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    assert next(candidates("experts", spec, problem, device(90)))[0] is EXPERTS_MM_SM90


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_a_format_that_is_taken_at_many_rows_has_the_kernel_for_them(name):
    spec, problem = described(name, 256 * E)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    dtypes = [tensor.dtype for tensor in problem.weight.tensors]
    given = problem.weight.format, dtypes, bf16
    most = experts.max_mean_rows(*given, is_sm90=True)
    assert (most > experts.MAX_MEAN_ROWS) == (name in MANY_ROWS)
    assert experts.max_mean_rows(*given, is_sm90=False) == experts.MAX_MEAN_ROWS
    if name in MANY_ROWS:
        kernels = [kernel for kernel, _ in candidates("experts", spec, problem, device(90))]
        assert kernels[0] is EXPERTS_MM_SM90


@pytest.mark.parametrize("name", ["mxfp4", "nibble_pairs", "fp8_words"])
def test_k_is_any_number_of_blocks(name, monkeypatch):
    """gpt-oss has K = 2880; the last turn of the loop goes beyond."""
    monkeypatch.setattr(formats, "GROUP", 64)
    spec, problem = described(name, 512 * E, n=5760, k=2880)
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    dtypes = [tensor.dtype for tensor in problem.weight.tensors]
    most = experts.max_mean_rows(problem.weight.format, dtypes, bf16, is_sm90=True)
    assert most > experts.MAX_MEAN_ROWS
    kernels = [kernel for kernel, _ in candidates("experts", spec, problem, device(90))]
    assert EXPERTS_MM_SM90 in kernels


def test_tiles_of_many_rows_follow_from_their_mean():
    def rows(mean):
        spec, problem = described("nibble_pairs", mean * E)
        problem = dataclasses.replace(problem, has_weight_descriptors=True)
        return next(candidates("experts", spec, problem, device(90)))[1].block_m

    assert rows(33) <= 64
    assert rows(256) >= 128
    assert rows(2048) == 256


def test_rows_in_any_order_are_a_tile_each():
    assert first("nibble_pairs", 64 * E, is_sorted=False)[0] is EXPERTS_DIRECT


@pytest.mark.parametrize(("rows", "has_few"), [(8, True), (64, False)])
def test_few_rows_in_any_order_are_those_of_one_token(rows, has_few):
    """Experts that several rows choose stay in the L2 cache."""
    spec, problem = described("nibble_pairs", rows, is_sorted=False)
    config, *_ = EXPERTS_DIRECT.configs(spec, problem, device(90))
    codegen = EXPERTS_DIRECT.codegen(spec, problem, config)
    assert codegen.masks_rows == bool(codegen.word_policy) == bool(codegen.sum_ops) == has_few


def test_sorted_rows_are_few_if_a_tile_has_few():
    """Rows that lack in a tile of 16 are not loaded; scales are applied to the sums of 8."""
    for rows, block_m in ((E, 8), (8 * E, 16)):
        spec, problem = described("nibble_pairs", rows)
        config, *_ = EXPERTS_DIRECT.configs(spec, problem, device(90))
        codegen = EXPERTS_DIRECT.codegen(spec, problem, config)
        assert config.block_m == block_m
        assert codegen.word_policy
        assert codegen.masks_rows == (block_m == 16)
        assert bool(codegen.sum_ops) == (block_m == 8)
    spec, problem = described("nibble_pairs", 20 * E)  # two tiles of an expert read the same words
    assert not EXPERTS_DIRECT.codegen(spec, problem, config).word_policy


@pytest.mark.parametrize(
    ("name", "mean", "is_sorted", "config", "has_both"),
    [
        ("nibble_pairs", 7, True, "", True),
        ("nibble_pairs", 1, True, "", False),  # tiles of 8 rows
        ("nibble_pairs", 7, False, "experts_direct 16x32x512_w4_s1_g8", False),
        ("mxfp4", 8, True, "", True),
        ("nf4", 8, True, "", False),  # a table is looked up
    ],
)
def test_a_cta_with_few_of_16_rows_has_a_loop_for_8(name, mean, is_sorted, config, has_both):
    case = Case(name, (mean,) * E, 512, 2048, is_sorted=is_sorted)
    configs = [config] if config else []
    generated = generate(gemm(case), lambda device: make_inputs(case, device), *configs)
    assert "experts_direct" in generated.choices[0][0].name
    [source] = generated.kernels.values()
    assert ("few_rows(" in source) == has_both
    assert ("pid_n = pid % columns" in source) == is_sorted  # all columns, then the next tile


def test_no_more_than_a_share_of_k_is_wasted():
    _, config = first("nibble_pairs", 8, k=768)
    assert 768 % config.block_k == 0
    _, config = first("nibble_pairs", 8, k=2048)
    assert config.num_warps == 4


@pytest.mark.parametrize(
    ("name", "rows", "n", "k", "tile"),
    [
        ("mxfp4", 4, 5760, 2880, "8x64x256_w4_s1_g8"),  # 32 columns take more than a round
        ("mxfp4", 4, 2880, 2880, "8x32x256_w4_s1_g8"),
        ("nibble_pairs", 2, 4096, 14336, "8x32x1024_w8_s1_g8"),  # 2 CTAs an SM
        ("nibble_pairs", 8, 7168, 2048, "8x32x512_w4_s1_g8"),  # many rounds: whatever is idle
    ],
)
def test_tiles_of_few_rows_in_any_order_leave_no_warps_idle(name, rows, n, k, tile):
    _, config = first(name, rows, n=n, k=k, is_sorted=False)
    assert str(config) == tile
    _, config = first(name, rows, n=n, k=k)
    assert (config.block_n, config.num_warps) == (32, 4)  # sorted


@pytest.mark.parametrize(
    ("name", "group", "columns", "slice_k"),
    [
        ("gptq", 128, 32, 128),
        ("gptq", 32, 32, 64),  # zero points of several groups
        ("awq", 128, 64, 32),  # of each column of a word
        ("hqq", 32, 32, 128),  # no bits of words
        ("nibble_pairs", 32, 32, 128),  # none
    ],
)
def test_many_stored_zero_points_have_a_small_tile(name, group, columns, slice_k, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    spec, problem = described(name, 8)
    config, *others = EXPERTS_DIRECT.configs(spec, problem, device(90))
    assert (config.block_n, config.block_k // config.num_warps) == (columns, slice_k)
    most = max(c.block_n * c.block_k // c.num_warps for c in (config, *others))
    assert most == (64 if columns * slice_k == 2048 else 128) * 32


@pytest.mark.parametrize(("mean", "block_m"), [(1, 8), (16, 16)])
def test_a_tile_whose_sums_are_scaled_is_within_a_group(mean, block_m, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    spec, problem = described("hqq", mean * E)
    config, *_ = EXPERTS_DIRECT.configs(spec, problem, device(90))
    tile = config.block_m, config.block_n, config.block_k // config.num_warps
    assert tile == (block_m, 32, 64)
    assert EXPERTS_DIRECT.codegen(spec, problem, config).sum_ops


@pytest.mark.parametrize(
    ("name", "is_sorted", "is_ahead"),
    [("gptq", True, True), ("gptq", False, False), ("nibble_pairs", False, True)],
)
def test_x_is_not_loaded_ahead_with_zero_points_and_one_row(name, is_sorted, is_ahead):
    spec, problem = described(name, 8, is_sorted=is_sorted)
    config, *_ = EXPERTS_DIRECT.configs(spec, problem, device(90))
    assert EXPERTS_DIRECT.codegen(spec, problem, config).loads_x_early == is_ahead


@pytest.mark.parametrize(("rows", "tiles"), [(0, 0), (8, 8), (40, 38), (512, 97)])
def test_the_grid_is_that_of_the_worst_case(rows, tiles):
    """A tile of 8 rows for each expert and one more, and one for each 8 rows; or one a row."""
    meta = {"EXPERTS": E, "IS_SORTED": True, "BLOCK_M": 8, "BLOCK_N": 32}
    ceil = lambda a, b: -(-a // b)  # noqa: E731
    assert ExpertsKernel.grid(rows, 96, meta, cdiv=ceil) == (3 * tiles, 1, 1)
    meta |= {"IS_SORTED": False, "NUM_CTAS": 132}
    assert ExpertsKernel.grid(rows, 96, meta, cdiv=ceil) == (3 * rows, 1, 1)
    assert EXPERTS_MM_SM90.grid(rows, 96, meta, cdiv=ceil) == (min(3 * tiles, 132), 1, 1)
