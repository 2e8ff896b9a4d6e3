"""Runs every test marked ``interp`` in a process of its own, because Triton reads TRITON_INTERPRET
when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARK = "pytest.mark." + "interp"


@pytest.mark.compiles  # not in the interpreter's own process
def test_the_tests_that_run_in_the_interpreter_pass():
    """All in one process, which starts first (conftest.py): a second one would spend 15 s on
    imports and collection."""
    # Files without the mark are not imported.
    paths = sorted(Path(ROOT, "tests").rglob("test_*.py"))
    files = [str(path) for path in paths if MARK in path.read_text()]
    options = ["-m", "interp and not slow", "-q", "-x", "--show-capture=no"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    tail = result.stdout[-6000:] + result.stderr[-2000:]
    assert result.returncode == 0, tail
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, tail
    assert int(passed[1]) >= 250, f"only {passed[1]} tests ran in the interpreter"
