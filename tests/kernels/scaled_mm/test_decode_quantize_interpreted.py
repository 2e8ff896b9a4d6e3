"""Numerics of the kernel that quantizes its activation, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.scaled_mm.decode import kernel as decode
from tests.support.gemms.generated import generate
from tests.support.gemms.quantizing import GUARDED, PLAIN, ROUNDED, Case
from tests.support.gemms.w8a8 import assert_close

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

CONFIGS = tuple(map(str, decode.CONFIGS))


def interpreted(case, config, inputs):
    generated = generate(case.call(), case.inputs, f"w8a8_decode_quantize {config}")
    assert len(generated.kernels) == 1
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case(1, 72, 640), CONFIGS[3]),  # in the second step K is left for one warp of four
        (
            Case(2, 40, 2304, scale_ops=ROUNDED),
            CONFIGS[1],
        ),  # in the last slice for two warps of eight
        (Case(3, 33, 1536, scale_ops=PLAIN, dtype=torch.float16, distance=8), CONFIGS[2]),
        (Case(4, 48, 128, scale_ops=("add 0.5", "mul 0.0078125"), dtype=torch.float32), CONFIGS[3]),
        (Case(4, 48, 512, low=-127, scale_ops=("to f32", "div 119.0")), CONFIGS[3]),
        (Case(2, 64, 1024, scale_ops=None), CONFIGS[2]),
        (Case(3, 64, 640, scale_ops=None, per_token=True, low=-127, has_bias=False), CONFIGS[3]),
    ],
    ids=str,
)
def test_result_is_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = case.inputs("cpu")
    assert_close(interpreted(case, config, inputs), case.meaning(inputs), case.dtype)


def test_x_may_be_read_twice(monkeypatch):
    monkeypatch.setattr(decode.W8A8DecodeQuantize, "max_registers", lambda *_: decode.FEW_REGISTERS)
    torch.manual_seed(0)
    case = Case(4, 40, 640, scale_ops=GUARDED)
    inputs = case.inputs("cpu")
    got = interpreted(case, CONFIGS[3], inputs)
    assert_close(got, case.meaning(inputs), case.dtype)
