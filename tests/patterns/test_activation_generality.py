"""How an int8 activation and its epilogue are spelled does not matter, and a near miss is none.

A small number of seeds; the full measurement is

    python -m tests.support.activation_programs --programs 1000 --near-misses 500
"""

from __future__ import annotations

import pytest

from tests.support.activation_programs import CRASH, REJECTED, WRONG, draw, verdict
from tests.support.correction_programs import outcome


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(2))
def test_programs_are_matched_and_right(block: int) -> None:
    for seed in range(6 * block, 6 * block + 6):
        spelling = draw(("programs", seed))
        found = verdict(spelling, seed)
        assert found.outcome not in (WRONG, CRASH, REJECTED), f"{spelling}\n{found.detail}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(2))
def test_near_misses_keep_their_value(block: int) -> None:
    for seed in range(6 * block, 6 * block + 6):
        spelling = draw(("near misses", seed), mutated=True)
        found = verdict(spelling, seed)
        assert found.outcome not in (WRONG, CRASH), f"{spelling}\n{found.detail}"


@pytest.mark.parametrize("block", range(2))
def test_random_terms_keep_their_value(block: int) -> None:
    """``python -m tests.support.correction_programs --programs 500``"""
    for seed in range(7 * block, 7 * block + 7):
        assert not outcome(seed).startswith(WRONG), seed
