"""Numerics of the decode kernels of 8-bit operands, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.scaled_mm.decode import kernel as decode
from tests.support.gemms import fp8, w8a8
from tests.support.gemms.generated import generate
from tests.support.gemms.horizontal import Floats, Integers
from tests.support.gemms.quantizing import (
    E4M3,
    FLOAT_NARROW,
    FLOAT_PLAIN,
    FLOAT_ROUNDED,
    GUARDED,
    PLAIN,
    ROUNDED,
    Case,
)
from tests.support.gemms.w8a8 import assert_close
from tests.support.gemms.zero_points import Zeros, meaning
from tests.support.sampling import sampled

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

CONFIGS = tuple(map(str, decode.CONFIGS))


def run(fn, make, inputs, kernel):
    generated = generate(fn, make, kernel)
    assert any("@gluon.jit" in source for source in generated.kernels.values())
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (w8a8.Case(1, 72, 640), CONFIGS[3]),  # in the second step K is left for one warp of four
        (w8a8.Case(8, 64, 128, a_scale="tensor", bias=False), CONFIGS[2]),
        (w8a8.Case(5, 77, 2304, out_dtype=torch.float32, b_scale="none"), CONFIGS[1]),
        (w8a8.Case(4, 40, 1536, a_layout="padded"), CONFIGS[3]),  # even steps
    ],
    ids=str,
)
def test_integers_are_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = w8a8.make_inputs(case, "cpu")
    got = run(
        w8a8.gemm(case),
        lambda device: w8a8.make_inputs(case, device),
        inputs,
        f"w8a8_decode {config}",
    )
    assert_close(got, w8a8.reference(inputs))


@pytest.mark.parametrize(
    ("case", "config"),
    sampled(
        [
            (fp8.Case(3, 72, 640), CONFIGS[3]),
            (fp8.Case(8, 64, 256, bias=False, a_dtype=fp8.e5m2, a_scale="tensor"), CONFIGS[2]),
            (fp8.Case(1, 77, 2304, scale_dtype=torch.bfloat16, b_scale="tensor"), CONFIGS[1]),
            (fp8.Case(5, 40, 512, a_scale="none", b_scale="none"), CONFIGS[3]),
        ]
    ),
    ids=str,
)
def test_rows_are_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = fp8.make_inputs(case, "cpu")
    make = lambda device: fp8.make_inputs(case, device)  # noqa: E731
    got = run(fp8.gemm(case), make, inputs, f"fp8_decode {config}")
    assert_close(got, fp8.reference(case, inputs))


def test_zero_points_are_exact():
    torch.manual_seed(0)
    case = Zeros(3, n=40, k=256, a=torch.float32, b=torch.int8, out_dtype=torch.bfloat16)
    inputs = case.inputs("cpu")
    got = run(case.call(), case.inputs, inputs, f"w8a8_decode {CONFIGS[3]}")
    assert torch.equal(got, meaning(case, inputs).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("family", "group"),
    [
        ("w8a8", Integers(w8a8.Case(5, 0, 1024), (64, 16, 48))),
        ("fp8", Floats(fp8.Case(5, 0, 1024, fast_accum=True), (64, 16, 48))),
        ("fp8", Floats(fp8.Case(1, 0, 640, a_scale="tensor", bias=False), (16, 32))),
    ],
    ids=str,
)
def test_gemms_of_one_launch(family, group):
    torch.manual_seed(0)
    inputs = group.make_inputs("cpu")
    got = run(group.grouped, group.make_inputs, inputs, f"{family}_decode {CONFIGS[2]}")
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert_close(result, want)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (fp8.Case(3, 200, 640, block=(128, 128), a_scales="m"), CONFIGS[3]),
        (fp8.Case(8, 144, 2048, block=(128, 128), bias=False, a_dtype=fp8.e5m2), CONFIGS[2]),
        (fp8.Case(1, 77, 2304, block=(128, 256), scale_dtype=torch.bfloat16), CONFIGS[1]),
    ],
    ids=str,
)
def test_blocks_are_close_to_fp64(case, config):
    torch.manual_seed(0)
    inputs = fp8.make_inputs(case, "cpu")

    def fn(residual, *inputs):
        return torch.relu(fp8.gemm(case)(*inputs)) + residual

    def make(device):
        return torch.ones(case.n, device=device), *fp8.make_inputs(case, device)

    residual = torch.randn(case.n)
    got = run(fn, make, (residual, *inputs), f"fp8_block_decode {config}")
    want = torch.relu(fp8.reference(case, inputs)) + residual.double()
    assert_close(got, want, torch.bfloat16)  # the GEMM rounds its result


# ------------------------------------------------------------------------------------------
# with the quantization of x


def quantized(case, config, inputs):
    generated = generate(case.call(), case.inputs, f"{case.kernel} {config}")
    assert len(generated.kernels) == 1
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (
            Case(1, 72, 640),
            CONFIGS[3],
        ),  # in the second step K is left for one warp of four
        (
            Case(2, 40, 2304, scale_ops=ROUNDED),
            CONFIGS[1],
        ),  # in the last slice for two warps of eight
        (
            Case(3, 33, 1536, scale_ops=PLAIN, dtype=torch.float16, distance=8),
            CONFIGS[2],
        ),
        (
            Case(4, 48, 128, scale_ops=("add 0.5", "mul 0.0078125"), dtype=torch.float32),
            CONFIGS[3],
        ),
        (Case(4, 48, 512, low=-127, scale_ops=("to f32", "div 119.0")), CONFIGS[3]),
        (Case(2, 64, 1024, scale_ops=None), CONFIGS[2]),
        (
            Case(3, 64, 640, scale_ops=None, per_token=True, low=-127, has_bias=False),
            CONFIGS[3],
        ),
        (Case(3, 40, 1152, FLOAT_ROUNDED, element=E4M3), CONFIGS[2]),
        (Case(4, 33, 640, FLOAT_NARROW, element=E4M3, distance=8), CONFIGS[3]),
        (Case(2, 32, 512, FLOAT_PLAIN, element=E4M3, dtype=torch.float16), CONFIGS[3]),
        (Case(2, 32, 512, None, per_token=True, element=E4M3), CONFIGS[3]),
    ],
    ids=str,
)
def test_x_is_quantized_in_the_kernel(case, config):
    torch.manual_seed(0)
    inputs = case.inputs("cpu")
    assert_close(quantized(case, config, inputs), case.meaning(inputs), case.dtype)


@pytest.mark.parametrize(
    ("scale_ops", "scale_dtype"),
    sampled(
        [
            *((ops, torch.float32) for ops in (FLOAT_PLAIN, FLOAT_ROUNDED, FLOAT_NARROW)),
            *((None, dtype) for dtype in (torch.bfloat16, torch.float32)),
        ]
    ),
)
def test_e4m3_has_the_bits_of_eager_mode(scale_ops, scale_dtype):
    """The weight is the identity, so the result shows every quantized value."""
    torch.manual_seed(0)
    case = Case(3, 256, 256, scale_ops, has_bias=False, element=E4M3, scale_dtype=scale_dtype)
    x, _, a_scale, _, _ = case.inputs("cpu")
    # Some quotients are halfway between two numbers, where a product with the reciprocal is not.
    x[0], x[1, :3] = torch.arange(256) / 512, torch.tensor([0.0, -0.0, 1e-30])
    if scale_ops is None:
        a_scale.fill_(196 / 448)
    else:
        x[0, 0], x[2] = 196, 0
    inputs = (x, torch.eye(256).to(E4M3), a_scale, torch.ones(1, 256), None)
    got = quantized(case, CONFIGS[3], inputs)
    want = case.meaning(inputs).to(x.dtype)
    assert torch.equal(got.nan_to_num(77.0), want.nan_to_num(77.0))
    assert want[2].isnan().all() == (scale_ops == FLOAT_ROUNDED)  # 0 / 0


@pytest.mark.one_in(1)
@pytest.mark.parametrize("largest", [3.0, 1e30, 2e-37, float("inf"), float("nan")])
def test_e4m3_by_a_product_has_the_bits_of_a_division(largest):
    """Row 0 within the bounds of the product; row 1 moves the CTA out of them, except the first."""
    torch.manual_seed(0)
    case = Case(2, 256, 256, FLOAT_ROUNDED, has_bias=False, element=E4M3)
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    x[0] = torch.arange(256) / 512
    x[0, 0], x[0, 1], x[1, 0], x[1, 1:] = 196, 1e-36, largest, x[1, 1:] * min(largest, 1.0)
    inputs = (x, torch.eye(256).to(E4M3), None, torch.ones(1, 256), None)
    got = quantized(case, CONFIGS[3], inputs)
    want = case.meaning(inputs).to(x.dtype)
    assert torch.equal(got.nan_to_num(77.0), want.nan_to_num(77.0))


def test_x_may_be_read_twice(monkeypatch):
    monkeypatch.setattr(decode.W8A8DecodeQuantize, "max_registers", lambda *_: decode.FEW_REGISTERS)
    torch.manual_seed(0)
    case = Case(4, 40, 640, scale_ops=GUARDED)
    inputs = case.inputs("cpu")
    got = quantized(case, CONFIGS[3], inputs)
    assert_close(got, case.meaning(inputs), case.dtype)
