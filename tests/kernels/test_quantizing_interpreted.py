"""Numerics of the kernel that quantizes its activation, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import _gluon_compat as gluon
from inductor_quant import simulate
from inductor_quant.kernels import few_bytes
from tests.support.generated import generate
from tests.support.numerics import assert_close
from tests.support.quantizing import GUARDED, PLAIN, ROUNDED, Case

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

STEPS = tuple(map(str, few_bytes.CONFIGS))


def interpreted(case, config, inputs):
    generated = generate(case.call(), case.inputs, f"w8a8_few_quantizing {config}")
    assert len(generated.kernels) == 1
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case(1, 72, 640), STEPS[3]),  # of the second step's slices one warp of four has K
        (Case(2, 40, 2304, recipe=ROUNDED), STEPS[1]),  # of the last slice two warps of eight
        (Case(3, 33, 1536, recipe=PLAIN, dtype=torch.float16, distance=8), STEPS[2]),
        (Case(4, 48, 128, recipe=("add 0.5", "mul 0.0078125"), dtype=torch.float32), STEPS[3]),
        (Case(4, 48, 512, low=-127, recipe=("to f32", "div 119.0")), STEPS[3]),
        (Case(2, 64, 1024, recipe=None), STEPS[2]),
        (Case(3, 64, 640, recipe=None, per_token=True, low=-127, has_bias=False), STEPS[3]),
    ],
    ids=str,
)
def test_result_is_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = case.inputs("cpu")
    assert_close(interpreted(case, config, inputs), case.meaning(inputs), case.dtype)


def test_x_may_be_read_twice(monkeypatch):
    monkeypatch.setattr(few_bytes, "registers", lambda *given: few_bytes.FEW_REGISTERS)
    torch.manual_seed(0)
    case = Case(4, 40, 640, recipe=GUARDED)
    inputs = case.inputs("cpu")
    got = interpreted(case, STEPS[3], inputs)
    assert_close(got, case.meaning(inputs), case.dtype)
