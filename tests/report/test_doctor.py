"""``python -m inductor_quant doctor``: short, complete, and with an exit code that can be used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import inductor_quant
from inductor_quant import __main__, simulate
from inductor_quant.report import doctor


# In this process; tests/package/test_packaging.py runs ``python -m inductor_quant doctor``.
def run(monkeypatch, command):
    monkeypatch.setattr(sys, "argv", ["inductor_quant", command])
    return __main__.main()


def test_the_command_prints_versions_devices_and_caches(monkeypatch, capsys):
    assert run(monkeypatch, "doctor") == (0 if torch.cuda.is_available() else 1)
    output = capsys.readouterr().out
    for word in ("inductor_quant", "torch", "triton", "private symbols", "cache"):
        assert word in output
    assert output.splitlines()[0].endswith(f"at {Path(inductor_quant.__file__).parent}")
    assert len(output.splitlines()) <= 20
    if not torch.cuda.is_available():
        assert "no CUDA device" in output.splitlines()[-1]


def test_an_unknown_command_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "nurse")
    assert "doctor" in capsys.readouterr().err


@pytest.mark.compiles
@pytest.mark.parametrize(("arch", "has_wgmma"), [(80, False), (90, True), (100, False)])
def test_a_card_is_described_with_what_it_can_do(arch, has_wgmma):
    with simulate.virtual_gpu(arch):
        facts, obstacles = doctor.examine()
    described = dict(facts)
    assert f"sm_{arch}" in described["cuda:0"]
    assert "w8a8 yes" in described["cuda:0"]
    assert ("has wgmma" in described["cuda:0"]) == has_wgmma
    assert (doctor.UNTUNED in described["cuda:0"]) == (arch != 90)
    assert "cuda:1" in described
    assert not obstacles


@pytest.mark.compiles
def test_missing_symbols_and_the_off_switch_are_obstacles(monkeypatch):
    missing = {"inductor": ("torch._inductor.ir.Soap is missing",)}
    monkeypatch.setattr(doctor, "problems", lambda part: missing.get(part, ()))
    monkeypatch.setenv("INDUCTOR_QUANT_DISABLE", "1")
    with simulate.virtual_gpu(90):
        facts, obstacles = doctor.examine()
    assert "inductor is off: torch._inductor.ir.Soap" in dict(facts)["private symbols"]
    assert len(obstacles) == 2
    assert "INDUCTOR_QUANT_DISABLE" in obstacles[0]
    assert "Soap" in obstacles[1]
