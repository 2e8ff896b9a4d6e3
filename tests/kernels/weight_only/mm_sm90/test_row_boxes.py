"""In how many boxes the rows of x of a tile are loaded."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.problem import Groups, Problem
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.row_boxes import LEAST_ROWS, MAX_BEYOND, RowBoxes
from tests.support.gemms.weight_only import Case, described, generate_case


@pytest.mark.parametrize("block_m", [32, 64, 128, 256])
def test_every_row_is_loaded_and_few_beyond_the_last(block_m):
    for m in range(1, 3 * block_m):
        boxes = RowBoxes.of(Problem(m, 1, 1), block_m)
        assert boxes.rows >= LEAST_ROWS
        assert block_m % boxes.rows == 0
        counts = set()
        for first in range(0, m, block_m):
            rows = min(m - first, block_m)
            counts.add(math.ceil(rows / boxes.rows))
            loaded = boxes.rows * math.ceil(rows / boxes.rows)
            assert rows <= loaded <= rows + max(MAX_BEYOND * block_m, LEAST_ROWS)
        assert tuple(sorted(counts)) == boxes.counts


def test_a_tile_without_rows_beyond_m_is_one_box():
    assert RowBoxes.of(Problem(256, 1, 1), 128) == RowBoxes(128)
    assert RowBoxes.of(Problem(250, 1, 1), 128) == RowBoxes(128)


def test_any_number_of_rows_has_any_number_of_boxes():
    boxes = RowBoxes.of(Problem(256, 1, 1, m_is_static=False), 128)
    assert boxes == RowBoxes(32, (1, 2, 3, 4))


def test_rows_beyond_those_of_an_expert_are_rows():
    problem = Problem(33, 1, 1, groups=Groups(8, True))
    assert RowBoxes.of(problem, 64) == RowBoxes(64)
    assert RowBoxes.of(problem, 64, has_halves=True) == RowBoxes(32, (1, 2))
    assert RowBoxes.of(problem, 96, has_halves=True) == RowBoxes(32, (1, 2, 3))


@pytest.mark.parametrize(("tile", "parts"), [("64x64x128_w4_s4_g8", 2), ("64x64x64_w4_s8_g8", 1)])
def test_a_box_has_the_columns_of_one_swizzle(tile, parts):
    """Those of the next follow all rows of the tile."""
    spec, problem = described(Case("nibble_pairs", 33, 1024, 1024))
    codegen = WEIGHT_ONLY_MM_SM90.codegen(spec, problem, parse_config(tile))
    assert (codegen.part_k, codegen.parts) == (64, parts)
    whole = dataclasses.replace(problem, m=64)
    codegen = WEIGHT_ONLY_MM_SM90.codegen(spec, whole, parse_config(tile))
    assert codegen.parts == 1


@pytest.mark.parametrize(("m", "loads"), [(33, 5), (64, 1)])
def test_the_kernel_loads_the_boxes(m, loads):
    """Of two K iterations at a time."""
    case = Case("nibble_pairs", m, 1024, 1024, torch.float16)
    [source] = generate_case(case, "64x128x64_w8_s8_g8").kernels.values()
    produces_x = source.split("def produce_x")[1].split("def produce_w")[0]
    assert produces_x.count("x_tiles,") == 2 * loads
