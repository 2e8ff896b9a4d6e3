"""What ``weight_only_mm_sm90`` takes, which thread holds what, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.codegen.digits import pair_lookup
from inductor_quant.kernels.codegen.digits.words import as_words
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.kernel import ColumnOrder
from inductor_quant.kernels.problem import Groups, Weight, WeightTensor
from inductor_quant.kernels.weight_only.digit_tiles import loads_scales, plan_of, words_in_parts
from inductor_quant.kernels.weight_only.mm_sm90.cost import Costs
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.mm_sm90.loop import boxed
from inductor_quant.ops import weight_only
from inductor_quant.spec.weight_format import DequantOp, Field, WeightFormat
from tests.support import in_flight
from tests.support.gemms import formats
from tests.support.gemms.generated import device, generate, hardest
from tests.support.gemms.weight_only import (
    Case,
    described,
    gemm,
    generate_case,
    loadable,
    make_inputs,
)

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

bf16, f16 = torch.bfloat16, torch.float16
BESIDE_LOOP = 8  # bytes that may be spilled there


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("awq", (17, 1024)),
        ("nibble_pairs", (16, 4096)),
        ("hqq", (16, 1024)),
        ("int8_group", (17, 4096)),
        ("int8_channel", (17, 4096)),
        ("nf4", (16, 4096)),
        ("mxfp4", (16, 4096)),
        ("nvfp4", (16, 4096)),  # one number divides
        ("uint2", (17, 4096)),
        ("fp8_row", (17, 4096)),
        ("fp8_block", (17, 4096)),
        ("e5m2_group", (17, 4096)),
        ("act_order", (16, 256)),  # the group of each k is data
        ("int8_divisor", None),
        ("int4_in_int64", None),
        ("shift_table", None),
    ],
)
def test_it_takes_the_rows_at_which_it_is_faster_than_the_library(name, rows, large_groups):
    taken = []
    for m in (1, 16, 17, 64, 128, 256, 512, 1024, 4096):
        spec, problem = loadable(Case(name, m, 11008, 4096, f16 if name == "awq" else bf16))
        if WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90)) is not None:
            continue
        if WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90)):
            taken.append(m)
    assert ((taken[0], taken[-1]) if taken else None) == rows


@pytest.mark.parametrize(
    ("name", "n", "k", "is_taken"),
    [
        ("nibble_pairs", 5120, 12288, True),
        ("nibble_pairs", 1536, 8960, False),  # few columns: tiles leave SMs idle
        ("awq", 24576, 1536, False),  # a word holds values of eight columns
        ("nibble_pairs", 24576, 1536, True),
        ("nf4", 5120, 13824, True),
        ("nibble_pairs", 7168, 2048, True),  # seven rounds of the library's tiles
    ],
)
def test_the_library_takes_what_costs_more_at_2048_rows(name, n, k, is_taken):
    spec, problem = loadable(Case(name, 2048, n, k, f16 if name == "awq" else bf16))
    configs = WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90))
    assert bool(configs) == is_taken


def test_products_of_256_rows_hide_a_table_if_other_rows_read_w_too():
    config = GemmConfig(256, 128, 64, 8, 4)
    experts = Groups(8, is_sorted=True)
    for m, groups, is_hidden in ((256, None, False), (257, None, True), (257, experts, False)):
        _, problem = loadable(Case("nf4", m, 4096, 4096, bf16))
        problem = dataclasses.replace(problem, groups=groups)
        costs = [Costs(problem, device(90), True, factor).whole(config) for factor in (1, 1.12)]
        assert (costs[0] == costs[1]) == is_hidden


def test_a_tile_that_tables_are_slow_in_is_not_offered(large_groups):
    for name, is_offered in (("nf4", False), ("mxfp4", False), ("nibble_pairs", True)):
        spec, problem = loadable(Case(name, 24, 10240, 8192, bf16))
        configs = WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90))
        tiles = {(c.block_m, c.block_n, c.block_k) for c in configs}
        assert ((32, 128, 64) in tiles) == is_offered


def test_a_small_layer_is_left_to_the_library_by_the_kernels_after_it_too():
    """512 x 1216 x 1216: the tiles of weight_only_mm, which takes 512 rows of int8, are slower."""
    for m, chosen in ((128, ["weight_only_mm_sm90"]), (512, [])):
        spec, problem = loadable(Case("int8_channel", m, 1216, 1216, bf16))
        found = candidates("weight_only", spec, problem, device(90))
        assert [kernel.name for kernel, _ in found][:1] == chosen
    rejected = []
    assert not list(candidates("weight_only", spec, problem, device(90), rejected=rejected))
    assert rejected[-1][0] is WEIGHT_ONLY_MM_SM90
    assert "faster" in rejected[-1][1].detail
    symbolic = dataclasses.replace(problem, m_is_static=False, m_is_bounded=False)
    assert list(candidates("weight_only", spec, symbolic, device(90)))


@pytest.mark.parametrize(
    ("half", "block_k", "part"), [(512, 64, 32), (512, 128, 64), (544, 64, 32)]
)
def test_a_tile_has_the_values_of_a_word_that_are_far_apart_along_k(half, block_k, part):
    """The two halves of K in one byte: without another order of K it is not known within a tile
    which half it is."""
    element = Field(
        0, (formats.form(("n0", 1)), formats.form(("k1", 1))), formats.form(("k0", 4)), 4
    )
    format = WeightFormat((2, half), (64,), element)
    weight = Weight(format, (WeightTensor(torch.uint8, (64, half)),))
    config = GemmConfig(64, 64, block_k, 4, 4)
    assert plan_of(as_words(weight), config) is None
    view, order = words_in_parts(weight, block_k)
    assert plan_of(view, config) is not None
    assert order.neighbours(block_k) == part
    position = "position"
    places = eval(f"[{order.place_within(position, block_k)} for position in range({block_k})]")
    assert places == [at // part * half + at % part for at in range(block_k)]


def test_halves_of_k_that_no_parts_divide_are_left_to_others():
    """K / 2 = 2152 is a multiple of 8 alone: tiles would end within the other half."""
    element = Field(
        0, (formats.form(("n0", 1)), formats.form(("k1", 1))), formats.form(("k0", 4)), 4
    )
    weight = Weight(
        WeightFormat((2, 2152), (64,), element), (WeightTensor(torch.uint8, (64, 2152)),)
    )
    view, order = words_in_parts(weight, 64)
    assert order is None
    assert plan_of(view, GemmConfig(64, 64, 64, 4, 4)) is None


@pytest.mark.parametrize("is_pair", [True, False])
def test_values_of_a_table_are_looked_up_in_pairs_if_both_are_in_one_byte(is_pair):
    """[N, K / 2], two a byte; or [K, N], one a byte: then its neighbour along K is in another."""
    if is_pair:
        code = Field(
            0, (formats.form(("n0", 1)), formats.form(("k0", 1))), formats.form(("k1", 4)), 4
        )
        format, shape = WeightFormat((512, 2), (256,), code), (256, 512)
    else:
        code = Field(0, (formats.form(("k0", 1)), formats.form(("n0", 1))), formats.form(), 4)
        format, shape = WeightFormat((1024,), (256,), code), (1024, 256)
    table = Field(1, (formats.form(data=code),))
    format = dataclasses.replace(format, element=table)
    weight = Weight(format, (WeightTensor(torch.uint8, shape), WeightTensor(bf16, (16,))))
    plan = plan_of(as_words(weight), GemmConfig(64, 64, 64, 4, 4))
    found = pair_lookup.places_of(as_words(weight).weight, plan)
    assert found == ((0, 4) if is_pair else None)


def test_rows_of_x_must_be_aligned_and_the_card_sm90():
    spec, problem = loadable(Case("hqq", 80, 1024, 4096))
    unaligned = dataclasses.replace(problem, has_aligned_rows=False)
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90)) is None
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, unaligned, device(90)) is not None
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(80)) is not None


def test_the_relay_computes_what_columns_share(monkeypatch):
    """Scales and zero points of each k: of tiles with one group of columns."""
    monkeypatch.setattr(formats, "GROUP", 64)
    spec, problem = loadable(Case("groups_of_n", 64, 4096, 4096, bf16))
    narrow, wide = GemmConfig(64, 64, 64, 4, 8), GemmConfig(64, 128, 64, 8, 8)
    assert WEIGHT_ONLY_MM_SM90.codegen(spec, problem, narrow).lists == 2
    assert not loads_scales(problem.weight, narrow)
    assert loads_scales(problem.weight, wide)


@pytest.mark.parametrize(
    ("name", "m", "n", "is_stored_in_order"),
    [
        ("groups_of_n", 64, 4096, True),  # columns of a tile are 64 apart
        ("groups_of_n", 33, 2048, False),  # a launch for the sum takes longer
        ("nibble_pairs", 512, 4096, False),
    ],
)
def test_outputs_whose_stores_are_slow_are_stored_in_the_order_of_tiles(
    name, m, n, is_stored_in_order, monkeypatch
):
    monkeypatch.setattr(formats, "GROUP", 64)
    spec, problem = loadable(Case(name, m, n, 4096, bf16))
    config, card = GemmConfig(64, 64, 64, 4, 8), device(90)
    order = WEIGHT_ONLY_MM_SM90.column_order(spec, problem, config, card)
    assert (order is not None) == is_stored_in_order
    assert (
        WEIGHT_ONLY_MM_SM90.constants(spec, problem, config, card)["TILE_ORDER"]
        == is_stored_in_order
    )
    if order is not None:  # a tile has 32 x 2 columns, 64 and 2048 apart
        assert order == ColumnOrder((64, 32, 2), (2, 1, 0))
    unbounded = dataclasses.replace(problem, m_is_static=False, m_is_bounded=False)
    assert WEIGHT_ONLY_MM_SM90.column_order(spec, unbounded, config, card) is None


def test_tiles_in_their_order_are_read_once_by_a_residual_and_a_norm(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case("groups_of_n", 64, 4096, 4096, bf16)

    def make(device):
        residual = torch.empty(case.m, case.n, dtype=bf16, device=device)
        return residual, *make_inputs(case, device)

    def fn(residual, *inputs):
        hidden = gemm(case)(*inputs) + residual
        return torch.nn.functional.rms_norm(hidden, (case.n,))

    assert len(generate(fn, make).kernels) == 2  # one more if each reads the partial


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("gptq", (8, 128, 1024)),  # words along K, rows of N
        ("awq", (64, 16, 128)),  # words along N
        ("nibble_pairs", (128, 8, 128)),  # bytes along K as words
        ("hqq", (64, 16, 256)),  # two halves of N in a byte
        ("nf4", (128, 8, 128)),  # one row of memory
        ("int8_zero_channel", (64, 32, 256)),  # [K, N]
    ],
)
def test_the_words_of_a_tile_are_a_box(name, box, large_groups):
    _, problem = described(Case(name, 64, 1024, 1024, bf16))
    found = boxed(problem.weight, GemmConfig(64, 128, 64, 4, 4))
    assert found is not None
    _, words = found
    assert (words.rows, words.columns, words.pitch) == box
    assert words.width * words.height * 4 == nbytes(problem.weight)


@pytest.mark.parametrize(
    ("name", "tile", "iterations"),
    [
        ("int8_channel", "64x128x64_w8_s8_g8", 2),  # rows of 64 bytes along K
        ("hqq", "64x128x64_w8_s8_g8", 2),
        ("nibble_pairs", "64x128x64_w8_s8_g8", 2),  # 32 bytes
        ("int8_channel", "64x128x128_w8_s8_g8", 1),  # whole lines
        ("awq", "64x128x64_w8_s8_g8", 1),  # 64 bytes along N
        ("int8_channel", "64x128x64_w8_s4_g8", 1),  # two pairs of stages
        ("nibble_pairs", "32x128x128_w4_s6_g8", 2),
        ("int8_channel", "256x64x64_w4_s6_g8", 1),  # many rows of x
    ],
)
def test_two_iterations_that_share_lines_of_memory_are_loaded_together(
    name, tile, iterations, large_groups
):
    _, problem = described(Case(name, 64, 1024, 4096, bf16))
    config = parse_config(tile)
    constants = WEIGHT_ONLY_MM_SM90.own_constants(problem, config, device(90))
    assert constants["TOGETHER"] == iterations


def test_the_box_of_a_slice_ends_where_the_slice_does(large_groups):
    """As of q, k and v in one tensor: rows are three times as far apart as they are long."""
    _, problem = described(Case("gptq", 64, 1024, 1024, bf16))
    weight = problem.weight
    source = weight.format.code.source
    tensors = list(weight.tensors)
    tensors[source] = dataclasses.replace(tensors[source], stride=(3 * 1024, 1))
    found = boxed(Weight(weight.format, tuple(tensors)), GemmConfig(64, 128, 64, 4, 4))
    assert found is not None
    _, words = found
    assert (words.height, words.width, words.pitch) == (128, 1024, 3072)


def nbytes(weight):
    tensor = weight.tensors[weight.format.code.source]
    return math.prod(tensor.shape) * tensor.dtype.itemsize


@pytest.mark.parametrize("name", ["int8_channel", "nibble_pairs", "hqq", "int8_zero_channel"])
def test_bytes_read_as_words_are_the_same_weight(name):
    packed = Case(name, 1, 64, 128).packed
    _, problem = described(Case(name, 1, 64, 128))
    view = as_words(problem.weight)
    tensors = packed.make()
    source = view.weight.format.code.source
    words = tensors[source].view(torch.int32)
    assert view.dim is not None
    want = weight_only.dequantize(packed.format, tensors)
    got = weight_only.dequantize(
        view.weight.format, [words if i == source else t for i, t in enumerate(tensors)]
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "group", "is_offered"),
    [
        ("gptq", 32, False),
        ("gptq", 64, True),
        ("nibble_pairs", 32, True),
        ("quarters_of_k", 128, False),  # one of each quarter
    ],
)
def test_tiles_of_128_of_k_have_zero_points_of_two_groups(name, group, is_offered, monkeypatch):
    monkeypatch.setattr(formats, "GROUP", group)
    spec, problem = loadable(Case(name, 128, 28672, 4096, f16 if name == "gptq" else bf16))
    configs = WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90))
    tiles = {(config.block_m, config.block_k) for config in configs}
    assert ((128, 128) in tiles) == is_offered
    assert (64, 128) in tiles


@pytest.mark.parametrize(
    ("name", "tile", "iterations"),
    [
        ("quarters_of_k", (64, 64, 128, 4, 4), 2),  # of four groups, two columns a thread
        ("halves_of_k", (64, 64, 128, 4, 4), 4),
        ("quarters_of_k", (256, 128, 64, 8, 4), 2),
        ("halves_of_k", (256, 128, 64, 8, 4), 4),
        ("hqq", (256, 128, 64, 8, 4), 4),  # K is not in parts
    ],
)
def test_a_turn_is_short_if_its_iterations_have_groups_of_many_parts(
    name, tile, iterations, large_groups
):
    _, problem = described(Case(name, 1024, 4096, 4096, bf16))
    constants = WEIGHT_ONLY_MM_SM90.own_constants(problem, GemmConfig(*tile), device(90))
    assert constants["UNROLLED"] == iterations


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    [
        ("hqq", 64, bf16),
        ("halves_of_k", 128, bf16),
        ("quarters_of_k", 512, bf16),
        pytest.param("awq", 64, f16, marks=pytest.mark.slow),
        pytest.param("int8_group", 128, bf16, marks=pytest.mark.slow),
    ],
)
def test_no_configuration_spills_or_waits_for_its_products(name, m, dtype, large_groups):
    case = Case(name, m, 4096, 4096, dtype)
    spec, problem = loadable(case)
    assert choose_name(spec, problem) == WEIGHT_ONLY_MM_SM90.name
    for config in hardest(WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90)), 1):
        generated = generate_case(case, f"{WEIGHT_ONLY_MM_SM90.name} {config}")
        named = next(item for item in generated.kernels.items() if "x_stages" in item[1])
        kernel = simulate.compile_kernel(*named)
        assert kernel.spill_stores <= BESIDE_LOOP
        assert in_flight.spills(in_flight.machine_code(kernel.ptx)) == []
        assert not kernel.is_serialized


def test_the_stages_of_shared_tiles_are_in_uniform_registers(large_groups):
    """As warps wait for others' sums without diverging: a vector register for each would have to be
    moved for each product."""
    case = Case("int8_channel", 128, 8192, 4096, bf16)
    tile = f"{WEIGHT_ONLY_MM_SM90.name} 128x128x64_w8_s8_g8"
    [named] = generate_case(case, tile).kernels.items()
    assert "await_signals" in named[1]
    loop = in_flight.loop(in_flight.machine_code(simulate.compile_kernel(*named).ptx))
    assert sum("HGMMA" in each for each in loop) == 16
    assert not [each for each in loop if "R2UR" in each]


def test_a_zero_point_that_is_a_number_is_no_second_literal_of_a_multiply_add(
    large_groups, monkeypatch
):
    def subtracted(k, n):
        packed = formats.nibble_pairs(k, n)
        element = dataclasses.replace(packed.format.element, add=0)
        ops = (DequantOp("sub", 8.0), *packed.format.dequant_ops)
        format = dataclasses.replace(packed.format, element=element, dequant_ops=ops)
        return dataclasses.replace(packed, format=format)

    monkeypatch.setitem(formats.FORMATS, "nibble_pairs", subtracted)
    case = Case("nibble_pairs", 64, 4096, 4096, bf16)
    generated = generate_case(case, f"{WEIGHT_ONLY_MM_SM90.name} 64x128x128_w8_s4_g8")
    named = next(item for item in generated.kernels.items() if "x_stages" in item[1])
    code = in_flight.machine_code(simulate.compile_kernel(*named).ptx)
    assert in_flight.products(code) > 0
    assert len(in_flight.literals_in_loops(code)) < 8  # for 32 pairs of values


def choose_name(spec, problem):
    return next(candidates("weight_only", spec, problem, device(90)))[0].name
