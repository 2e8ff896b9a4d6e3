"""The spelling of a dequantization does not matter; near misses are declined.

A few seeds of the measurement in ``tests/support/programs/generality.py``; the full one is

    python -m tests.support.programs.generality --programs 2000 --near-misses 1000
    python -m tests.support.programs.generality --fields --programs 3000 --near-misses 1500
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.support.programs.axes import draw, histogram
from tests.support.programs.dequantization import Program, draw_program
from tests.support.programs.edits import same_bits
from tests.support.programs.fields import draw_field_program
from tests.support.programs.generality import CRASH, WRONG, Measurement
from tests.support.programs.mutations import KINDS, OUTSIDE, near_miss
from tests.support.programs.reference import decode

PROGRAMS = range(40)
STRADDLING = range(10)
NEAR_MISSES = range(20)  # of either kind
FIELDS = range(10)
FIELD_MISSES = range(10)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured() -> Measurement:
    found = Measurement()
    found.add_programs(PROGRAMS)
    found.add_straddling(STRADDLING)
    found.add_near_misses(NEAR_MISSES)
    found.add_fields(FIELDS)
    found.add_field_misses(FIELD_MISSES)
    return found


def test_nothing_is_matched_wrongly(measured: Measurement) -> None:
    measured.print_failures()
    assert measured.wrong_matches == 0
    assert not [cause for _, cause in measured.failures if cause.startswith((CRASH, WRONG))]


def test_every_program_is_recognized(measured: Measurement) -> None:
    measured.print_failures()
    groups = ("programs", "programs of fields")
    assert not [cause for group, cause in measured.failures if group in groups]


def test_what_leaves_the_family_is_rejected(measured: Measurement) -> None:
    measured.print_failures()
    groups = ("programs", "programs of fields")
    assert not [cause for group, cause in measured.failures if group not in groups]


# ------------------------------------------------------------------------------------------
# the measure itself


def test_the_graphs_compute_what_their_axes_say() -> None:
    """The graph against a numpy evaluation that never sees it."""
    straddling = [draw_program(seed, is_mixed_radix=False) for seed in STRADDLING]
    for program in [*map(draw_program, PROGRAMS), *straddling]:
        want = decode(program.axes, program.data, program.arrangements)
        assert same_bits(want, program.weight), str(program)


def test_graphs_of_fields_compute_what_their_formulas_say() -> None:
    for seed in FIELDS:
        program, formula = draw_field_program(seed)
        got = program.values[program.output]
        assert same_bits(formula(program.data.values).to(got.dtype), got), str(program)


def test_a_run_of_the_graph_is_what_it_was_built_with() -> None:
    for seed in range(20):
        program = draw_program(seed)
        again = program.run(program.data)[program.output]
        assert same_bits(again, program.values[program.output])
        assert same_bits(program.module(*program.inputs), again)
        program.module.graph.lint()
        for node in program.module.graph.nodes:
            if node.op != "output":
                fake, real = node.meta["val"], program.values[node]
                assert (fake.shape, fake.dtype, fake.stride()) == (
                    (real.shape, real.dtype, real.stride())
                )


def test_every_value_of_every_axis_is_drawn_often() -> None:
    drawn = histogram(draw(random.Random(str(seed))) for seed in range(2000))
    rare = {
        (axis, value): count
        for axis, counter in drawn.items()
        for value, count in counter.items()
        if count < 50
    }
    assert not rare


def test_near_misses_differ_by_execution() -> None:
    """According to the axes that the program was made from."""
    for group in KINDS:
        mutants: list[Program] = [near_miss(seed, group) for seed in NEAR_MISSES]
        assert len({mutant.mutation.split(" at ")[0] for mutant in mutants}) > 6
        for mutant in mutants:
            assert mutant.must_reject is (group == OUTSIDE)
            want = decode(mutant.axes, mutant.data, mutant.arrangements)
            assert not same_bits(want, mutant.weight), str(mutant)
