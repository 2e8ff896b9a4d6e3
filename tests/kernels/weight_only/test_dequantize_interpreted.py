"""Numerics of ``weight_only_dequantize`` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.weight_only import library
from inductor_quant.ops import weight_only
from tests.support.gemms.weight_only import Case, generate_case, make_inputs

pytestmark = pytest.mark.interp

bf16, f16 = torch.bfloat16, torch.float16
M = 640


@pytest.mark.parametrize(
    ("case", "is_exact"),
    [
        (Case("groups_of_n", M, 192, M), True),  # columns in another order; tiles end within N
        (Case("groups_of_n", M, 96, M, f16), True),
        (Case("hqq", M, 60, M), True),
        (Case("nvfp4", M, 72, M), False),  # both scales become one, which is rounded
        (Case("mxfp4", M, 40, M), True),
        (Case("crossing", M, 96, M, f16), True),
    ],
    ids=str,
)
def test_the_identity_times_the_weight_is_the_weight(case, is_exact, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(library, "cycles", lambda *_: 0.0)  # W is written once
    generated = generate_case(case)
    assert any("weight_only_dequantize" in source for source in generated.kernels.values())
    _, *inputs = make_inputs(case, "cpu")
    got = simulate.interpret(generated, (torch.eye(M).to(case.dtype), *inputs))
    want = weight_only.dequantize(case.packed.format, inputs[2:]).to(case.dtype)
    if is_exact:
        assert torch.equal(got, want)
    else:
        assert ((got.double() - want.double()).abs() <= 2**-7 * want.double().abs()).all()
        assert (got != want).double().mean() < 1e-2
