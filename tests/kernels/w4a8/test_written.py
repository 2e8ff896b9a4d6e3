"""The int8 weight that is written once where no kernel of ``w4a8`` applies: every bit of it, and
its machine code."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from tests.support import in_flight
from tests.support.gemms import w4a8

PIN = "w8a8_mm 64x64x64_w4_s3_g8"


def generated(case):
    """And the kernel that writes the weight."""
    found = w4a8.generate_case(case, PIN)
    [written] = [
        (name, source)
        for name, source in found.kernels.items()
        if "weight_only_dequantize" in source
    ]
    return found, written


def case_of(name, k=288, n=72, **options):
    given = {"scales": ("none", "none"), "bias": False, "groups": False, **options}
    return w4a8.Case(name, 200, n, k, torch.float32, **given)


@pytest.mark.interp
@pytest.mark.parametrize("times", [1, -4])
@pytest.mark.parametrize("name", w4a8.NAMES)
def test_its_sums_are_exact(name, times):
    torch.manual_seed(0)
    case = case_of(name, times=times)
    found, _ = generated(case)
    inputs = w4a8.make_inputs(case, "cpu")
    got = simulate.interpret(found, inputs)
    assert torch.equal(got.double(), w4a8.reference(case, inputs))


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize("name", w4a8.NAMES)
def test_it_is_computed_without_floats(name):
    _, written = generated(case_of(name, 4096, 4096))
    compiled = simulate.compile_kernel(*written)
    assert compiled.spill_stores == 0
    code = " ".join(str(line) for line in in_flight.machine_code(compiled.ptx))
    assert not [name for name in ("F2I", "I2F", "FADD", "FFMA", "FMUL") if name in code]
