"""What ``w4a8_mm_sm90`` takes, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.w4a8 import rules
from inductor_quant.kernels.w4a8.mm_sm90.kernel import W4A8_MM_SM90
from inductor_quant.ops import w4a8
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.w4a8 import Case, described, generate_case

INT8, E4M3 = w4a8.INT8, w4a8.E4M3

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


@pytest.mark.parametrize(
    ("name", "groups", "a_dtype", "rows"),
    [
        ("nibble_pairs", True, INT8, (33, 1536)),
        ("nibble_pairs", True, E4M3, (33, 256)),
        ("nibble_pairs", False, INT8, (17, 1024)),
        ("int4_words", False, INT8, (17, 1024)),
        ("gptq", True, INT8, None),
        ("shift_table", False, INT8, None),
    ],
)
def test_it_takes_the_rows_at_which_it_was_faster(name, groups, a_dtype, rows):
    taken = []
    for m in (1, 16, 17, 32, 33, 64, 65, 256, 257, 1024, 1025, 1536, 1537):
        spec, problem = described(Case(name, m, 8192, 8192, groups=groups, a_dtype=a_dtype))
        if W4A8_MM_SM90.rejection(spec, problem, device(90)) is None:
            taken.append(m)
            assert W4A8_MM_SM90.configs(spec, problem, device(90))
    assert ((taken[0], taken[-1]) if taken else None) == rows


@pytest.mark.parametrize(
    ("changes", "is_taken", "is_written"),
    [
        ({"m": 1537}, False, True),
        ({"m": 1536}, True, False),
        ({"k": 3968}, True, False),
        ({"zero": "int", "sums": True}, True, False),
        # zero points of groups, which no kernel of the family takes
        ({"name": "awq", "m": 1025}, False, True),
        ({"name": "awq", "m": 1024}, False, False),
        ({"a_dtype": E4M3, "m": 1025}, False, True),
        ({"a_dtype": E4M3, "m": 1024}, False, False),  # no kernel of the family either
        ({"a_dtype": E4M3, "name": "awq"}, False, True),
    ],
)
def test_many_rows_of_groups_are_for_a_weight_written_once(changes, is_taken, is_written):
    given = {"name": "nibble_pairs", "m": 2048, "n": 8192, "k": 8192}
    spec, problem = described(Case(**given | changes))
    refused = W4A8_MM_SM90.rejection(spec, problem, device(90))
    assert (refused is None) == is_taken
    assert rules.is_written_in_groups(spec, problem, device(90)) == is_written
    assert ("written once" in str(rules.rejection(spec, problem, device(90)))) == is_written


def test_a_weight_that_is_scaled_to_int8_is_taken_up_to_256_rows():
    for m, is_taken in ((17, True), (256, True), (257, False)):
        spec, problem = described(Case("nibble_pairs", m, 8192, 8192, to_int8="round"))
        assert (W4A8_MM_SM90.rejection(spec, problem, device(90)) is None) == is_taken


def test_an_iteration_never_overwrites_what_the_product_before_reads():
    for k, is_taken in ((4096, True), (4096 + 128, True), (128, False)):
        spec, problem = described(Case("nibble_pairs", 64, 1024, k))
        found = W4A8_MM_SM90.configs(spec, problem, device(90))
        assert bool(found) == is_taken
        constants = (W4A8_MM_SM90.constants(spec, problem, each, device(90)) for each in found)
        assert all(each["UNROLLED"] > 1 for each in constants)


def test_m_must_be_bounded_the_card_sm90_and_operands_aligned():
    spec, problem = described(Case("nibble_pairs", 64, 1024, 4096))
    assert W4A8_MM_SM90.rejection(spec, problem, device(90)) is None
    assert W4A8_MM_SM90.rejection(spec, problem, device(80)) is not None
    for change in ("m_is_bounded", "has_aligned_rows", "has_weight_descriptors"):
        other = dataclasses.replace(problem, **{change: False})
        assert W4A8_MM_SM90.rejection(spec, other, device(90)) is not None


@pytest.mark.parametrize(
    ("m", "n", "k", "groups", "config"),
    [
        (64, 8192, 8192, False, "64x64x128_w4_s6_g8"),
        (64, 6144, 4096, True, "64x64x128_w4_s6_g8"),
        (128, 6144, 4096, True, "128x64x128_w4_s4_g8"),
        (256, 28672, 4096, True, "128x64x128_w4_s4_g8"),
        (400, 13888, 9984, True, "128x128x128_w8_s5_g8 shared"),  # no multiple of 256
        (1024, 8192, 8192, True, "128x128x128_w8_s5_g8"),
        (256, 8192, 8192, False, "128x128x128_w8_s5_g8"),
        (64, 4096, 14336, False, "64x64x128_w4_s6_g8 shared"),  # half of the SMs have no tile
        (256, 4096, 14336, False, "128x128x128_w8_s5_g8 shared"),
    ],
)
def test_the_tile_is_the_one_that_was_fastest(m, n, k, groups, config):
    spec, problem = described(Case("nibble_pairs", m, n, k, groups=groups))
    found = W4A8_MM_SM90.configs(spec, problem, device(90))[0]
    shares = W4A8_MM_SM90.constants(spec, problem, found, device(90))["SHARES_TILES"]
    assert (f"{found} shared" if shares else str(found)) == config


def test_a_range_has_the_tile_of_most_of_its_rows():
    """Not that of 256, a multiple of 256."""
    spec, problem = described(Case("nibble_pairs", 256, 28672, 4096))
    for is_static, columns in ((True, 64), (False, 128)):
        given = dataclasses.replace(problem, m_is_static=is_static)
        assert W4A8_MM_SM90.configs(spec, given, device(90))[0].block_n == columns


def test_twelve_ctas_do_not_share_a_tile():
    """One of them would add the sums of the others."""
    spec, problem = described(Case("nibble_pairs", 96, 1376, 9344, groups=False))
    found = W4A8_MM_SM90.configs(spec, problem, device(90))[0]
    assert not W4A8_MM_SM90.constants(spec, problem, found, device(90))["SHARES_TILES"]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("nibble_pairs", 64, 1024, 4096), "64x64x128_w4_s6_g8"),
        *(
            pytest.param(case, config, marks=pytest.mark.slow)
            for case, config in (
                (Case("nibble_pairs", 256, 1024, 4096, groups=False), "128x128x128_w8_s5_g8"),
                (Case("nibble_pairs", 256, 1024, 4096, groups=False), "128x64x128_w4_s4_g8"),
                (Case("int4_words", 64, 1024, 4096), "64x64x128_w4_s6_g8"),
                (Case("nibble_pairs", 256, 1024, 4096), "128x128x128_w8_s5_g8"),
                (Case("nibble_pairs", 256, 1024, 4096), "128x64x128_w4_s4_g8"),
                *(
                    (Case("nibble_pairs", m, 1024, 4096, a_dtype=E4M3), config)
                    for m, config in (
                        (64, "64x64x128_w4_s6_g8"),
                        (256, "128x64x128_w4_s4_g8"),
                        (256, "128x128x128_w8_s5_g8"),
                    )
                ),
            )
        ),
    ],
    ids=str,
)
def test_no_configuration_spills_or_waits_for_its_products(case, config):
    generated = generate_case(case, f"{W4A8_MM_SM90.name} {config}")
    named = next(item for item in generated.kernels.items() if "x_stages" in item[1])
    kernel = simulate.compile_kernel(*named)
    assert kernel.spill_stores == 0
    assert not kernel.is_serialized
    types = "f32.e4m3.e4m3" if case.a_dtype == E4M3 else "s32.s8.s8"
    assert all(types in name for name in kernel.matrix_instructions())
