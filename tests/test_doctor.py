"""``python -m inductor_quant doctor``: short, complete, and with an exit code that can be used."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from inductor_quant import _torch_compat as compat
from inductor_quant import doctor, simulate


def test_the_command_prints_versions_devices_and_caches():
    result = subprocess.run(
        [sys.executable, "-m", "inductor_quant", "doctor"], capture_output=True, text=True
    )
    assert result.returncode == (0 if torch.cuda.is_available() else 1)
    for word in ("inductor_quant", "torch", "triton", "private torch symbols", "cache"):
        assert word in result.stdout
    assert len(result.stdout.splitlines()) <= 20
    if not torch.cuda.is_available():
        assert "no CUDA device" in result.stdout.splitlines()[-1]


def test_an_unknown_command_is_refused():
    result = subprocess.run(
        [sys.executable, "-m", "inductor_quant", "nurse"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "doctor" in result.stderr


@pytest.mark.compiles
@pytest.mark.parametrize(("arch", "has_wgmma"), [(80, False), (90, True), (100, False)])
def test_a_card_is_described_with_what_it_can_do(arch, has_wgmma):
    with simulate.virtual_gpu(arch):
        facts, obstacles = doctor.examine()
    described = dict(facts)
    assert f"sm_{arch}" in described["cuda:0"]
    assert "w8a8 yes" in described["cuda:0"]
    assert ("the card has wgmma" in described["cuda:0"]) == has_wgmma
    assert "cuda:1" in described
    assert not obstacles


@pytest.mark.compiles
def test_missing_symbols_and_the_off_switch_are_obstacles(monkeypatch):
    monkeypatch.setattr(compat, "problems", lambda: ("torch._inductor.ir.Soap is missing",))
    monkeypatch.setenv("INDUCTOR_QUANT_DISABLE", "1")
    with simulate.virtual_gpu(90):
        facts, obstacles = doctor.examine()
    assert dict(facts)["private torch symbols"] == "1 lost"
    assert len(obstacles) == 2
    assert "INDUCTOR_QUANT_DISABLE" in obstacles[0]
    assert "Soap" in obstacles[1]
