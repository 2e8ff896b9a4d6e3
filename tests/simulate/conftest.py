"""Fixtures of the simulator's tests."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate


@pytest.fixture(autouse=True, scope="session")
def _corrected_interpreter():
    if simulate.is_interpreting():
        simulate.install()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
