"""Runs every test marked ``interp``: the interpreter is chosen by an environment variable that
Triton reads when it is imported, so those tests need a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MARK = "pytest.mark." + "interp"


@pytest.mark.compiles  # that is: not from within the interpreter's own process
def test_the_tests_that_run_in_the_interpreter_pass():
    """All in one process: it begins first (conftest.py), and a second one would import and collect
    for a quarter of a minute."""
    # Files without the mark are not even imported.
    paths = sorted(Path(ROOT, "tests").rglob("test_*.py"))
    files = [str(path) for path in paths if MARK in path.read_text()]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "interp", "-q", "-x", "--show-capture=no", *files],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    tail = result.stdout[-6000:] + result.stderr[-2000:]
    assert result.returncode == 0, tail
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None, tail
    assert int(passed[1]) >= 500, f"only {passed[1]} tests ran in the interpreter"
