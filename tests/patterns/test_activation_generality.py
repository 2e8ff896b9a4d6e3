"""The spelling of an int8 activation and its epilogue does not matter; near misses are declined.

A small number of seeds; the full measurement is

    python -m tests.support.programs.activation --programs 1000 --near-misses 500
"""

from __future__ import annotations

import pytest

from tests.support.programs.activation import CRASH, REJECTED, WRONG, draw, verdict
from tests.support.programs.zero_point import outcome
from tests.support.sampling import sampled


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", sampled(range(2)))
def test_programs_are_matched_and_right(block: int) -> None:
    for seed in range(6 * block, 6 * block + 6):
        spelling = draw(("programs", seed))
        found = verdict(spelling, seed)
        assert found.outcome not in (WRONG, CRASH, REJECTED), f"{spelling}\n{found.detail}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", sampled(range(2)))
def test_near_misses_keep_their_value(block: int) -> None:
    for seed in range(6 * block, 6 * block + 6):
        spelling = draw(("near misses", seed), mutated=True)
        found = verdict(spelling, seed)
        assert found.outcome not in (WRONG, CRASH), f"{spelling}\n{found.detail}"


@pytest.mark.parametrize("block", sampled(range(2)))
def test_random_terms_keep_their_value(block: int) -> None:
    """``python -m tests.support.programs.zero_point --programs 500``"""
    for seed in range(7 * block, 7 * block + 7):
        assert not outcome(seed).startswith(WRONG), seed
