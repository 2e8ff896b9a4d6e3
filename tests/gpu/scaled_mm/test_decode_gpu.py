"""The decode kernels of 8-bit operands on a GPU: every element against fp64."""

from __future__ import annotations

import pytest
import torch

import inductor_quant
from tests.support.gemms import fp8, w8a8
from tests.support.gemms.w8a8 import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("hopper")]

Int8, Fp8 = w8a8.Case, fp8.Case
BLOCK = (128, 128)


def run(fn, *inputs, kernel):
    with inductor_quant.collect() as report, torch.no_grad():
        compiled = torch.compile(
            fn,
            backend="inductor_quant",
            options={"inductor_quant.on_error": "raise"},
            dynamic=False,
        )
        got = compiled(*inputs)
    [choice] = report.kernels
    assert choice.chosen == f"{kernel}_s1_g8"
    return got


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Int8(1, 6144, 4096), "8x16x2048_w8"),
        (Int8(8, 4099, 1152, out_dtype=torch.float16), "8x16x2048_w8"),
        (Int8(3, 33, 128, a_scale="tensor", bias=False), "8x16x512_w4"),
        (Int8(2, 1, 1024), "8x16x1024_w8"),
        (Int8(5, 14336, 4096, a_layout="padded", b_scale="none"), "8x16x2048_w8"),
        (Int8(2, 1024, 4096), "8x16x4096_w16"),
        (Fp8(1, 6144, 4096), "8x16x2048_w8"),
        (Fp8(8, 4099, 1152, scale_dtype=torch.bfloat16, b_scale="tensor"), "8x16x2048_w8"),
        (Fp8(2, 33, 128, w_dtype=fp8.e5m2, a_scale="tensor", bias=False), "8x16x512_w4"),
        (Fp8(5, 2048, 7168, a_scale="none", fast_accum=True), "8x16x4096_w16"),
        (Fp8(1, 2112, 7168, block=BLOCK, a_scales="m"), "8x16x4096_w16"),
        (Fp8(8, 4099, 1152, block=BLOCK, scale_dtype=torch.bfloat16), "8x16x2048_w8"),
        (Fp8(2, 33, 128, block=(128, 256), w_dtype=fp8.e5m2, bias=False), "8x16x512_w4"),
        (Fp8(7, 4096, 7168, block=BLOCK, a_dtype=fp8.e5m2), "8x16x2048_w8"),
    ],
    ids=str,
)
def test_result_is_close_to_fp64(case, config):
    torch.manual_seed(0)
    if isinstance(case, Fp8):
        inputs = fp8.make_inputs(case, "cuda")
        got = run(fp8.gemm(case), *inputs, kernel=f"{case.family}_decode {config}")
        assert_close(got, fp8.reference(case, inputs), case.out_dtype, slack=2)
    else:
        inputs = w8a8.make_inputs(case, "cuda")
        got = run(w8a8.gemm(case), *inputs, kernel=f"w8a8_decode {config}")
        assert_close(got, w8a8.reference(inputs))


def test_the_epilogue_is_in_the_kernel():
    torch.manual_seed(0)
    case = Int8(4, 4099, 640)
    inputs = w8a8.make_inputs(case, "cuda")
    residual = torch.randn(case.m, case.n, device="cuda", dtype=torch.bfloat16)
    column = torch.arange(case.n, device="cuda")

    def fn(residual, *inputs):
        out = torch.relu(w8a8.gemm(case)(*inputs)) + residual
        return torch.where(column < 100, out, 0.5)

    want = torch.relu(w8a8.reference(inputs).to(torch.bfloat16).double()) + residual.double()
    want[:, 100:] = 0.5
    assert_close(run(fn, residual, *inputs, kernel="w8a8_decode 8x16x1024_w8"), want, slack=2)
