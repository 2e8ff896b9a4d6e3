"""Numbers that cross words, from the fields that a graph joins them from."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant.kernels.codegen.digits.words import words_of_runs
from inductor_quant.kernels.codegen.runs import parts_of, run_of
from inductor_quant.kernels.problem import Weight, WeightTensor
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field
from tests.support.gemms.formats import build

PACKED = build("crossing", 256, 64)
FORMAT = PACKED.format
TENSORS = tuple(WeightTensor(dtype, shape) for _, shape, dtype in PACKED.tensors)


def moved(field: Field, part: int, **changes: object) -> Field:
    """``field`` with changes in one of the fields that it is joined from."""
    if part:
        assert field.high is not None
        return dataclasses.replace(field, high=moved(field.high, part - 1, **changes))
    return dataclasses.replace(field, **changes)


def test_a_number_is_read_from_the_words_of_its_ends():
    for field, dim in ((FORMAT.code, 0), (FORMAT.dequant_ops[0].operand, 1)):
        run = run_of(FORMAT, field)
        assert (run.width, run.dim) == (3, dim)
        first, last = (end.index[dim] for end in run.ends)
        for number in range(32):
            digits = {f"{axis}{i}": 0 for axis in "kn" for i in range(3)} | {run.digit: number}
            assert first.value(digits) == 3 * number // 32
            assert last.value(digits) == (3 * number + 2) // 32
            assert run.place.value(digits) == 3 * number % 32


def test_four_numbers_of_a_run_are_the_bytes_of_a_word():
    view = words_of_runs(Weight(FORMAT, TENSORS))
    assert view.weight.format.k == (*FORMAT.k[:-1], 8, 4)
    assert [part.index[0].const for part in view.parts] == [0, 1, 2]
    assert view.weight.format.code.offset.value({"k2": 5, "k3": 3}) == 24


@pytest.mark.parametrize("part", [0, 1, 2])
def test_other_places_are_no_run(part):
    code = FORMAT.code
    [(digit, places)] = parts_of(code)[part].offset.tables
    words = parts_of(code)[part].index[0]
    swapped = AffineIndex(tables=((digit, (places[1], places[0], *places[2:])),))
    elsewhere = (dataclasses.replace(words, const=1), parts_of(code)[part].index[1])
    for changes in ({"offset": swapped}, {"index": elsewhere}, {"source": 1}):
        assert run_of(FORMAT, moved(code, part, **changes)) is None
    # all three of another word are a run again
    assert run_of(FORMAT, code) is not None


def test_scales_that_change_within_a_run_are_left_to_others():
    scale = Field(
        2, (AffineIndex(linear=(("k2", 1),)), AffineIndex(linear=(("n0", 32), ("n1", 1))))
    )
    format = dataclasses.replace(FORMAT, dequant_ops=(DequantOp("mul", scale),))
    assert words_of_runs(Weight(format, TENSORS)) is None


def test_words_of_64_bits_are_left_to_others():
    wide = (dataclasses.replace(TENSORS[0], dtype=torch.int64), *TENSORS[1:])
    assert words_of_runs(Weight(FORMAT, wide)) is None
