"""W8A8 on a GPU: every layout and configuration, fusion, dynamic M, large offsets."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from inductor_quant import explain
from inductor_quant.kernels.scaled_mm.mm.kernel import SWAPPED
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.report.events import collect
from tests.support.gemms.w8a8 import Case, assert_close, gemm, make_inputs, reference

pytestmark = pytest.mark.gpu

OPTIONS = {"inductor_quant.on_error": "raise"}
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    # rows from one to many
    *(Case(m, 512, 256) for m in (1, 2, 7, 16, 17, 33, 128, 2048)),
    # odd sizes, and a K below, at and beside a block
    Case(33, 727, 577),
    Case(127, 577, 859),
    Case(5, 1, 33),
    Case(1, 1, 1),
    Case(64, 1000, 1000),
    Case(16, 4099, 4096),
    # types
    *(Case(50, 130, 96, out_dtype=dtype) for dtype in (f16, f32)),
    *(Case(50, 130, 96, scale_dtype=dtype) for dtype in (f16, bf16)),
    # scales
    Case(50, 130, 96, a_scale="tensor"),
    Case(50, 130, 96, b_scale="tensor"),
    Case(50, 130, 96, a_scale="tensor", b_scale="tensor", bias=False),
    Case(50, 130, 96, a_scale="none"),
    Case(50, 130, 96, b_scale="none", bias=False),
    Case(96, 96, 96),
    # layouts
    *(Case(50, 130, 96, w_layout=x) for x in ("columns", "sliced", "every_second", "unaligned")),
    *(Case(50, 130, 96, a_layout=x) for x in ("columns", "sliced", "every_second", "unaligned")),
]


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="inductor_quant", options=OPTIONS, **kwargs)


def kernels_of(code: str) -> list[str]:
    """Names of the kernels that the wrapper launches, in order."""
    return re.findall(r"^\s+(\w+)\.run\(", code, re.MULTILINE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    with collect() as report:
        got = compiled(gemm(case))(*inputs)
    assert len(report.matches) == 1, report
    assert_close(got, reference(inputs))


@pytest.mark.parametrize(
    "config", [c.config for c in cost_model.load("w8a8_mm", 90).configs], ids=str
)
def test_integers_are_exact_with_every_configuration(config):
    integers_are_exact("w8a8_mm", config)


@pytest.mark.sm90
@pytest.mark.parametrize("config", SWAPPED, ids=str)
def test_integers_are_exact_with_every_transposed_tile(config):
    integers_are_exact("w8a8_swap_ab", config)


def integers_are_exact(kernel, config):
    """Scales that are powers of two and sums below 2**24: fp32 holds every result exactly."""
    m, n, k = 193, 321, 1000
    torch.manual_seed(0)
    a, w, *_ = make_inputs(Case(m, n, k), "cuda")
    a_scale = 2.0 ** torch.randint(-3, 4, (m, 1), device="cuda")
    b_scale = 2.0 ** torch.randint(-3, 4, (n,), device="cuda")
    fn = gemm(Case(m, n, k, out_dtype=f32))
    options = {**OPTIONS, "inductor_quant.configs": (f"{kernel} {config}",)}
    run = torch.compile(fn, backend="inductor_quant", options=options)
    got, (code,) = run_and_get_code(run, a, w, a_scale, b_scale, None)
    assert f"BLOCK_K : tl.constexpr = {config.block_k}" in code
    assert torch.equal(got.double(), reference((a, w, a_scale, b_scale, None)))


def test_epilogue_is_fused_into_one_kernel():
    case = Case(64, 512, 256)
    inputs = make_inputs(case, "cuda")
    residual = torch.randn(64, 512, device="cuda", dtype=bf16)

    def fn(residual, *inputs):
        return F.gelu(gemm(case)(*inputs)) + residual

    got, (code,) = run_and_get_code(compiled(fn), residual, *inputs)
    assert len(kernels_of(code)) == 1, kernels_of(code)
    assert "extern_kernels._int_mm" not in code
    want = F.gelu(reference(inputs)) + residual.double()
    assert_close(got, want, slack=2)  # the value is rounded before the epilogue too


@pytest.mark.parametrize("m", [1, 7, 16])
def test_small_m_runs(m):
    """Stock Inductor's _int_mm needs M > 16."""
    case = Case(m, 1024, 1024)
    inputs = make_inputs(case, "cuda")
    assert_close(compiled(gemm(case))(*inputs), reference(inputs))


def test_dynamic_m_compiles_twice_at_most():
    fn = gemm(Case(0, 256, 128))
    counter = CompileCounterWithBackend("inductor_quant")
    run = torch.compile(fn, backend=counter)
    for m in (1, 2, 3, 16, 17, 100, 1000, 4096):
        inputs = make_inputs(Case(m, 256, 128), "cuda")
        torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
        assert_close(run(*inputs), reference(inputs))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("empty", ["m", "n"])
def test_empty_result(empty):
    case = Case(0 if empty == "m" else 8, 0 if empty == "n" else 64, 32)
    got = compiled(gemm(case))(*make_inputs(case, "cuda"))
    assert got.shape == (case.m, case.n)


def test_max_autotune_and_cuda_graphs():
    case = Case(48, 512, 512)
    inputs = make_inputs(case, "cuda")
    run = torch.compile(gemm(case), backend="inductor_quant", mode="max-autotune")
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert_close(run(*inputs).clone(), reference(inputs))


@pytest.mark.parametrize(("m", "n", "k"), [(66000, 32768, 32), (33, 66000, 32768)])
def test_offsets_beyond_32_bits(m, n, k):
    """M * N or N * K of 2**31 and more."""
    case = Case(m, n, k)
    inputs = make_inputs(case, "cuda")
    got, (code,) = run_and_get_code(compiled(gemm(case)), *inputs)
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in code
    a, w, a_scale, b_scale, bias = inputs
    for rows in (slice(0, 40), slice(m - 40 if m > 40 else 0, m)):
        part = (a[rows], w, a_scale[rows], b_scale, bias)
        assert_close(got[rows], reference(part))


def test_second_device_is_used():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    case = Case(32, 128, 64)
    inputs = tuple(t if t is None else t.to("cuda:1") for t in make_inputs(case, "cuda"))
    got = compiled(gemm(case))(*inputs)
    assert got.device == torch.device("cuda:1")
    assert_close(got, reference(inputs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_explain_times_every_match(dynamic):
    """A symbolic M has its value in the call."""
    case = Case(40, 256, 128)
    a, *others = make_inputs(case, "cuda")
    if dynamic:
        torch._dynamo.mark_dynamic(a, 0)
        torch._dynamo.mark_dynamic(others[1], 0)
    explanation = explain(gemm(case), a, *others, dynamic=None if dynamic else False)
    row, *ranges = explanation.rows
    assert isinstance(row.site.m, str) == dynamic == bool(ranges)
    assert row.timing is not None
    assert row.timing.us > 0
    assert row.timing.stock_us is not None
    assert 0 < row.timing.share < 1
