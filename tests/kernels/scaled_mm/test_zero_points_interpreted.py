"""Zero points in the generated kernels, run by Triton's interpreter: integers exactly."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.problem import Device
from inductor_quant.lowering import select
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.gemms.zero_points import Zeros, meaning

pytestmark = pytest.mark.interp

f32, bf16, i8 = torch.float32, torch.bfloat16, torch.int8


SIZES = [1, 2, 15, 16, 17, 33, 63, 64, 130]
CASES = [
    *(Zeros(m) for m in SIZES),
    *(Zeros(m, a="const") for m in SIZES[::2]),
    *(Zeros(m, a=f32) for m in SIZES[::3]),
    *(Zeros(m, a=i8, b=i8) for m in SIZES[::3]),
    *(Zeros(17, n=n, k=k) for n, k in ((1, 33), (77, 57), (64, 64), (130, 260))),
    Zeros(1, n=1, k=1),
    Zeros(17, a_tensor=True),
    Zeros(17, a=bf16, a_tensor=True),
    Zeros(17, b=i8, a=""),
    Zeros(17, b=f32, a=""),
    Zeros(17, b=i8, a=f32, b_tensor=True),
    Zeros(17, b=f32, a="const"),
    Zeros(17, b=bf16, a=i8, a_tensor=True, b_tensor=True),
    Zeros(17, sums=torch.int32),
    Zeros(17, sums=f32),
    Zeros(17, a=f32, sums=torch.int32),
    Zeros(65, a="const", sums=torch.int32),
    # the only configuration has no spare row: column sums are a separate kernel
    Zeros(16, config="16x64x64_w4_s3_g8"),
    Zeros(15, config="16x64x64_w4_s3_g8"),
]
# On a chip of one SM, where these are many tiles.
PERSISTENT = [
    Zeros(140, n=200, k=144, a=a, b=b, out_dtype=bf16)
    for a, b in ((i8, ""), ("const", ""), (f32, i8), ("", bf16), (i8, i8))
]


@pytest.mark.parametrize("case", [*CASES, *PERSISTENT], ids=str)
def test_integers_are_exact(case: Zeros, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of full range, sums below 2**24: fp32 holds every result exactly."""
    if case in PERSISTENT:
        chip = Device(90, num_sms=1, shared_memory=232448)
        monkeypatch.setattr(select, "describe_device", lambda device: chip)
    torch.manual_seed(0)
    with collect() as report:
        generated = generate(case.call(), case.inputs, *([case.config] if case.config else []))
    [kernel] = report.kernels
    assert kernel.chosen.startswith("w8a8_persistent" if case in PERSISTENT else "w8a8_mm")
    assert sum("triton_tem" in name for name in generated.kernels) == 1, list(generated.kernels)
    # Row sums are a kernel; column sums are one if no tile has a spare row.
    has_spare = case.m < (16 if case.config else 64) and case.m * case.n > 1
    sums = (case.a != "" and case.sums is None and not has_spare) + (case.b != "")
    assert len(generated.kernels) == 1 + sums, list(generated.kernels)
    inputs = case.inputs("cpu")
    got = simulate.interpret(generated, inputs)
    want = meaning(case, inputs)
    assert want.abs().max() < 2**24
    assert torch.equal(got, want.to(case.out_dtype))
