"""The minimal example, run as the README says: what it prints is what the README shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.compiles
def test_the_readme_shows_what_the_minimal_example_prints():
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "examples/minimal.py"]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("2 of 3 matrix products matched")
    assert done.stdout in (ROOT / "README.md").read_text(encoding="utf-8")
