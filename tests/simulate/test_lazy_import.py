"""Importing the package is cheap, and nobody else does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import inductor_quant
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


def test_nothing_else_imports_it():
    root = Path(inductor_quant.__path__[0])
    importing = re.compile(r"^\s*(from|import)\s.*\bsimulate\b", re.MULTILINE)
    importers = [
        path
        for path in root.rglob("*.py")
        if "simulate" not in path.relative_to(root).parts and importing.search(path.read_text())
    ]
    assert importers == []
