"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest

from tests.support.gemms import formats


@pytest.fixture
def large_groups(monkeypatch):
    """Quantization groups of 128, as producers have them: a block of K is inside one."""
    monkeypatch.setattr(formats, "GROUP", 128)
