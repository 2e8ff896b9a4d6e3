from __future__ import annotations

from typing import Any

import pytest

from inductor_quant._compat import inductor as compat
from tests.support.graphs.post_grad import EagerBackend


@pytest.fixture
def rewrites(monkeypatch):
    """The graphs that ``compile_fx`` was given; they run eagerly, rewritten."""
    found: list[Any] = []

    def compile_fx(gm, inputs, config_patches=None):
        backend = EagerBackend()
        compiled = backend(gm, inputs)
        found.extend(backend.rewrites)
        return compiled

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    return found
