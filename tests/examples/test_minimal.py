"""The minimal example, run as the README says: what it prints is what the README shows."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.compiles
def test_the_readme_shows_what_the_minimal_example_prints(forks):
    path = str(ROOT / "examples/minimal.py")
    status, printed = forks.python(path, CUDA_VISIBLE_DEVICES="")
    assert status == 0
    assert printed.startswith("2 of 3 matrix products matched")
    assert printed in (ROOT / "README.md").read_text(encoding="utf-8")
