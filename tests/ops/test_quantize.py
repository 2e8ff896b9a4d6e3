"""``quantize`` and the row maximum of absolute values: against exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from inductor_quant.ops.fusion import quantize, row_reduce

VALUES = [
    0.0,
    -0.0,
    0.5,
    1.5,
    2.5,
    -0.5,
    -1.5,
    126.5,
    127.4,
    127.5,
    -127.5,
    -128.5,
    0.49999997,
    3e38,
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("low", "high"), [(-128, 127), (-127, 127), (-8, 7), (0, 0)])
def test_it_rounds_to_even_and_saturates(dtype, low, high):
    x = torch.tensor([*VALUES, math.inf, -math.inf, math.nan]).to(dtype)
    got = quantize.op(x, None, low, high, dtype=torch.int8)
    exact = x.double().round().clamp(low, high)
    assert torch.equal(got[:-1], exact[:-1].to(torch.int8))
    assert got[-1] == 0
    torch.library.opcheck(quantize.op, (x, None, low, high), {"dtype": torch.int8})


def test_it_divides_each_row_by_its_scale():
    x, scale = torch.randn(5, 7, 9).to(torch.bfloat16), torch.rand(5, 7, 1) + 0.01
    exact = (x.double() / scale.double()).round().clamp(-128, 127)
    assert torch.equal(quantize.op(x, scale, dtype=torch.int8), exact.to(torch.int8))
    torch.library.opcheck(quantize.op, (x, scale), {"dtype": torch.int8})


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_floats_saturate_and_keep_nan(scale_dtype):
    x = torch.tensor([[0.0, 17.0, 463.0, 470.0, -500.0, math.inf, -math.inf, math.nan, 1e-9]])
    x, scale = x.to(torch.bfloat16), torch.tensor([[1.03]]).to(scale_dtype)
    got = quantize.op(x, scale, dtype=torch.float8_e4m3fn)
    want = (x / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (x / scale).dtype == scale_dtype
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert got.float().tolist()[0][3:7] == [448, -448, 448, -448]
    torch.library.opcheck(quantize.op, (x[:, :7], scale), {"dtype": torch.float8_e4m3fn})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keepdim", [True, False])
def test_absmax_is_the_largest_absolute_value(dtype, keepdim):
    x = torch.randn(5, 7, 9).to(dtype)
    x[0, 0, 3], x[0, 1, 2], x[1, 0] = math.nan, -math.inf, -0.0
    got = row_reduce.op(x, "absmax", keepdim)
    assert torch.equal(got.nan_to_num(77), x.abs().amax(-1, keepdim).nan_to_num(77))
    torch.library.opcheck(row_reduce.op, (x[2:], "absmax", keepdim))
