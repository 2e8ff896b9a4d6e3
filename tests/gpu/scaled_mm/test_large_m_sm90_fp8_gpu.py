"""fp8_large_m_sm90, fp8_block_large_m_sm90 on a GPU: every element against fp64, at any size."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import inductor_quant
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from tests.support.gemms.fp8 import Case, e5m2, gemm, make_inputs, reference
from tests.support.gemms.w8a8 import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("hopper")]

NAMES = ("fp8_block_large_m_sm90", "fp8_large_m_sm90")
CASES = [
    # tiles that fill the chip, else another kernel is chosen
    Case(4096, 4096, 1024, block=(128, 128)),
    Case(4100, 4000, 528, block=(128, 128), a_scales="m"),
    Case(2560, 4099, 640, block=(128, 128), bias=False),
    Case(4096, 2112, 7168, block=(128, 256), a_scales="m", scale_dtype=torch.bfloat16),
    Case(33000, 130, 16, block=(128, 128), a_scales="m", out_dtype=torch.float16),
    Case(4097, 1100, 144, block=(128, 128), scale_dtype=torch.float16, a_dtype=e5m2),
    Case(4100, 4000, 528),
    Case(4096, 2112, 7168, a_scale="tensor", w_dtype=e5m2),
    Case(4097, 1100, 144, b_scale="tensor", bias=False, scale_dtype=torch.bfloat16),
    Case(33000, 130, 16, b_scale="none", out_dtype=torch.float16),
    Case(4100, 4000, 1168, fast_accum=True),
    Case(1024, 2112, 1792, block=(128, 128), a_scales="m"),
    Case(210, 11008, 4096, fast_accum=True),  # rows of fp8_split_k too
]


def run(fn, *inputs, config=None, **options):
    pinned = tuple(f"{name} {config}" for name in NAMES)
    chosen = {} if config is None else {"inductor_quant.configs": pinned}
    with inductor_quant.collect() as report, torch.no_grad():
        compiled = torch.compile(
            fn,
            backend="inductor_quant",
            options={"inductor_quant.on_error": "raise", **chosen, **options},
            dynamic=False,
        )
        got = compiled(*inputs)
    [choice] = report.kernels
    assert choice.chosen.startswith(NAMES)
    return got


@pytest.mark.parametrize("columns", sorted(large_m_sm90.ELEMENT_COST))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_close_to_fp64(case, columns, monkeypatch):
    if case.block and columns not in large_m_sm90.BLOCK_ELEMENT_COST:
        pytest.skip("not a tile for block scales")
    if case.block and case.n % 2 and columns == 192:
        pytest.skip("refused: it spills")
    for bound in ("MIN_FILL", "MIN_PRODUCTS", "MIN_K_STEPS_FLOAT"):
        monkeypatch.setattr(large_m_sm90, bound, 0)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    got = run(gemm(case), *inputs, config=large_m_sm90.tile(columns, group_m=8))
    assert_close(got, reference(case, inputs), case.out_dtype, slack=2)


@pytest.mark.parametrize("case", [CASES[1], Case(4100, 4000, 528)], ids=str)
def test_the_epilogue_is_fused_and_right(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    residual = torch.randn(case.m, case.n, device="cuda", dtype=torch.bfloat16)
    factor = torch.tensor(0.75, device="cuda")
    column = torch.arange(case.n, device="cuda")

    def fn(residual, factor, *inputs):
        out = F.silu(gemm(case)(*inputs)).clamp(min=-0.1) * factor + residual
        return torch.where(column < 1000, out, 0.5)

    got = run(fn, residual, factor, *inputs)
    want = F.silu(reference(case, inputs)).clamp(min=-0.1) * 0.75 + residual.double()
    assert_close(got, torch.where(column < 1000, want, 0.5), case.out_dtype, slack=2)


def test_silu_of_large_numbers_infinity_and_nan():
    torch.manual_seed(0)
    case = CASES[0]
    inputs = list(make_inputs(case, "cuda"))
    large = torch.tensor([math.inf, -math.inf, math.nan, 1e3, -1e3, 60, -60, -88, -90])
    inputs[4] = torch.cat([large.to(inputs[4]), inputs[4][len(large) :]])
    got = run(lambda *inputs: F.silu(gemm(case)(*inputs)), *inputs)
    want = F.silu(reference(case, inputs))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    for columns in (slice(len(large)), slice(len(large), None)):
        finite = want[:, columns].isfinite()
        assert_close(got[:, columns][finite], want[:, columns][finite], case.out_dtype, slack=2)


def test_nan_infinity_and_zero_scales_propagate():
    torch.manual_seed(0)
    case = Case(4096, 4096, 512, block=(128, 128), bias=False)
    inputs = make_inputs(case, "cuda")
    a, w, a_scale, b_scale, _ = inputs
    a.view(torch.uint8)[7, 130] = 0x7F  # NaN
    a_scale[9, 1], a_scale[11, 2], b_scale[3, 0] = math.inf, math.nan, 0.0
    a_scale[13] = 0.0
    got = run(gemm(case), *inputs)
    # scales multiply the sum of a block: an infinite scale does not meet its terms one by one
    want = torch.zeros(case.m, case.n, dtype=torch.float64, device="cuda")
    for block in range(case.k // 128):
        k = slice(128 * block, 128 * block + 128)
        scales = a_scale[:, block, None].double() * b_scale[:, block].double().repeat_interleave(
            128
        )
        want += (a[:, k].double() @ w[:, k].double().t()) * scales
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    assert_close(got[finite], want[finite], torch.bfloat16, slack=2)
    assert (got[13][finite[13]] == 0).all()


def test_scales_and_bias_may_be_slices():
    torch.manual_seed(0)
    case = CASES[1]
    a, w, a_scale, b_scale, bias = make_inputs(case, "cuda")
    inputs = a, w, *(sliced(tensor) for tensor in (a_scale, b_scale, bias))
    assert_close(run(gemm(case), *inputs), reference(case, inputs), case.out_dtype, slack=2)


def sliced(tensor):
    """The same values, in the middle of a larger tensor."""
    larger = torch.full([size + 5 for size in tensor.shape], math.nan, device="cuda")
    larger = larger.to(tensor.dtype)
    inner = larger[tuple(slice(3, 3 + size) for size in tensor.shape)]
    return inner.copy_(tensor)


def test_the_same_bits_twice_and_in_a_cuda_graph():
    torch.manual_seed(0)
    case = CASES[1]
    inputs = make_inputs(case, "cuda")
    compiled = torch.compile(gemm(case), backend="inductor_quant", dynamic=False)
    first = compiled(*inputs).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*inputs)
    graph.replay()
    assert torch.equal(first, captured)
    assert torch.equal(first, compiled(*inputs))


def test_rows_may_be_dynamic():
    torch.manual_seed(0)
    fn = torch.compile(gemm(CASES[0]), backend="inductor_quant", dynamic=True)
    for m in (4096, 4100, 5000):
        case = Case(m, 4096, 1024, block=(128, 128))
        inputs = make_inputs(case, "cuda")
        assert_close(fn(*inputs), reference(case, inputs), torch.bfloat16, slack=2)
