"""fp8_block_two_block_sm90 and the quantization before it on a GPU, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import inductor_quant
from inductor_quant.ops import fp8_block
from tests.support.gemms.fp8 import Case, e5m2, gemm, make_inputs, reference
from tests.support.gemms.w8a8 import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("hopper")]
BLOCK = (128, 128)
CASES = [
    Case(128, 7168, 2048, block=BLOCK, a_scales="m", bias=False),
    Case(64, 7168, 2048, block=BLOCK),
    Case(128, 6400, 2816, block=BLOCK, out_dtype=torch.float16, w_dtype=e5m2),
    Case(64, 6432, 256, block=(128, 256), scale_dtype=torch.bfloat16),
]


def compiled(fn, *inputs, kernel="fp8_block"):
    with inductor_quant.collect() as report, torch.no_grad():
        run = torch.compile(
            fn,
            backend="inductor_quant",
            options={"inductor_quant.on_error": "raise"},
            dynamic=False,
        )
        run(*inputs)
    [choice] = report.kernels
    assert choice.chosen.startswith(kernel)
    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_close_to_fp64_and_the_same_each_time(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    run = compiled(gemm(case), *inputs, kernel="fp8_block_two_block_sm90")
    got = run(*inputs)
    assert_close(got, reference(case, inputs), case.out_dtype, slack=2)
    assert all(torch.equal(run(*inputs), got) for _ in range(50))


@pytest.mark.parametrize(
    ("m", "n", "k", "along_m"), [(128, 7168, 2048, False), (64, 512, 4096, True)]
)
def test_a_linear_from_bf16(m, n, k, along_m):
    """Row groups, whose quantization is tiled in one dimension or two."""
    torch.manual_seed(0)
    gate, up = (torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in "gu")
    _, w, _, w_scale, _ = make_inputs(Case(m, n, k, block=BLOCK, bias=False), "cuda")

    def quantized(gate, up):
        blocks = (F.silu(gate.float()) * up.float()).unflatten(1, (-1, 128))
        scale = blocks.abs().amax(-1).clamp_min(1e-12) / 448
        a = (blocks / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
        return a, scale.t().contiguous().t() if along_m else scale

    def linear(gate, up, w, w_scale):
        a, scale = quantized(gate, up)
        scales = scale, w_scale.t(), None
        return fp8_block.op(a, w.t(), *scales, block_k=128, block_n=128, out_dtype=torch.bfloat16)

    got = compiled(linear, gate, up, w, w_scale)(gate, up, w, w_scale)
    a, scale = quantized(gate, up)
    dense = w.double() * w_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    wanted = (a.double() * scale.double().repeat_interleave(128, 1)) @ dense.t()
    assert (got.double() - wanted).norm() < 1e-2 * wanted.norm()
