"""Fixtures of the GPU tests of 8-bit operands."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_anew():
    torch.compiler.reset()


@pytest.fixture
def hopper():
    """For kernels that need wgmma or were only measured on sm_90."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper only")
