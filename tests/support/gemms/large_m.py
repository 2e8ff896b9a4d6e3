"""``*_large_m_sm90`` for sizes that it is not chosen for."""

from __future__ import annotations

import dataclasses

import pytest

from inductor_quant import simulate
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel

_BOUNDS = ("MIN_FILL", "MIN_PRODUCTS", "MIN_K_STEPS", "MIN_K_STEPS_FLOAT", "SPLIT_ROWS")


def at_any_size(monkeypatch: pytest.MonkeyPatch, *, sms: int) -> None:
    """On a virtual Hopper of so many SMs, on which a CTA has several tiles."""
    for bound in _BOUNDS:
        monkeypatch.setattr(kernel, bound, 0)
    for each in (kernel.LargeM, kernel.Fp8LargeM):
        monkeypatch.setattr(each, "min_m", 0)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=sms)
    monkeypatch.setitem(simulate.GPUS, 90, small)
