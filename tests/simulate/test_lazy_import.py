"""Importing the package is cheap. (Who may import it: tests/package/test_layers.py.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from inductor_quant import simulate


def test_import_brings_in_neither_triton_nor_inductor():
    program = (
        "import sys, inductor_quant.simulate as simulate\n"
        "print([name for name in ('triton', 'torch._inductor') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    assert all(hasattr(simulate, name) for name in simulate.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        simulate.missing  # noqa: B018
