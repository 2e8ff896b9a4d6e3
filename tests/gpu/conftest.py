"""Layers of tests are small; up to 128 rows the library's product of a dense weight takes less time
than our kernels there, and would be chosen. These tests are about the kernels."""

from __future__ import annotations

import math

import pytest
import torch

from inductor_quant.kernels.weight_only import library

LARGE_M = 128


@pytest.fixture(autouse=True)
def _no_caches():
    """A cache hit runs no pass and lowers nothing, and a pinned configuration is no part of a
    cache's key."""
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.fixture(autouse=True)
def _kernels_for_small_layers(monkeypatch):
    cost = library.cycles

    def without_library(problem, device):
        return math.inf if problem.m <= LARGE_M else cost(problem, device)

    monkeypatch.setattr(library, "cycles", without_library)
