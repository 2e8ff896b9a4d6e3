"""w8a8_persistent and w8a8_large_m_sm90 on a GPU: numerics, fusion, CUDA graphs, dynamic M."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.report.events import collect
from tests.support.gemms.w8a8 import Case, assert_close, gemm, make_inputs, reference
from tests.support.gemms.zero_points import Zeros, meaning

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

OPTIONS = {"inductor_quant.on_error": "raise"}
# More than four tiles an SM on every card; M and N end within a tile.
M, N, K = 5000, 3000, 272

CASES = [
    Case(M, N, K),
    Case(M, N, 64),
    Case(M, N, K, out_dtype=torch.float16, bias=False),
    Case(M, N, K, scale_dtype=torch.bfloat16),
    Case(M, N, K, a_scale="tensor"),
    Case(M, N, K, b_scale="tensor"),
    Case(M, N, K, a_scale="none"),
]


def run(fn, *inputs, options=OPTIONS, **kwargs):
    """The result, and the kernel that computed it. Dynamo is reset: it would reuse code, or make
    a size that changes symbolic."""
    torch.compiler.reset()
    with collect() as report, torch.no_grad():
        got = torch.compile(fn, backend="inductor_quant", options=options, **kwargs)(*inputs)
    [choice] = report.kernels
    return got, choice.chosen


PERSISTENT = [f"w8a8_persistent {c.config}" for c in cost_model.load("w8a8_persistent", 90).configs]
LARGE_M = [f"w8a8_large_m_sm90 {config}" for config in large_m_sm90.CONFIGS]


@pytest.fixture
def any_size(monkeypatch):
    """w8a8_large_m_sm90 for sizes that it is not chosen for."""
    for bound in ("MIN_FILL", "MIN_PRODUCTS", "MIN_K_STEPS"):
        monkeypatch.setattr(large_m_sm90, bound, 0)


def pinned(kernel):
    return {**OPTIONS, "inductor_quant.configs": (kernel,)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    got, kernel = run(gemm(case), *inputs)
    assert kernel.startswith("w8a8_persistent ")
    assert_close(got, reference(inputs))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_of_large_m_is_close_to_fp64(case, any_size):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    [narrow] = [kernel for kernel in LARGE_M if " 128x96x" in kernel]
    got, kernel = run(gemm(case), *inputs, options=pinned(narrow))
    assert kernel == narrow
    assert_close(got, reference(inputs))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1024, 6144, 4096), (300, 28672, 4112), (4096, 500, 4096)]
)
def test_large_m_is_chosen_on_hopper(m, n, k):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for sm_90")
    case = Case(m, n, k)
    inputs = make_inputs(case, "cuda")
    got, kernel = run(gemm(case), *inputs)
    assert kernel.startswith("w8a8_large_m_sm90 ")
    assert_close(got, reference(inputs))


@pytest.mark.parametrize("a", [torch.int8, torch.float32, "const", ""], ids=str)
@pytest.mark.parametrize("b", [torch.int8, torch.bfloat16, ""], ids=str)
def test_zero_points_are_exact(a, b, any_size):
    torch.manual_seed(0)
    case = Zeros(300, n=200, k=144, a=a, b=b, out_dtype=torch.bfloat16)
    inputs = case.inputs("cpu")
    inputs = [None if tensor is None else tensor.cuda() for tensor in inputs]
    for kernel in LARGE_M[2:4]:
        got, chosen = run(case.call(), *inputs, options=pinned(kernel))
        assert chosen == kernel
        assert torch.equal(got, meaning(case, inputs).to(torch.bfloat16))


@pytest.mark.parametrize("config", [*PERSISTENT, *LARGE_M])
def test_integers_are_exact_with_every_configuration(config, any_size):
    """Scales that are powers of two and sums of few bits: bf16 holds every result exactly."""
    torch.manual_seed(0)
    a = torch.randint(-1, 2, (M, 64), dtype=torch.int8, device="cuda")
    w = torch.randint(-1, 2, (N, 64), dtype=torch.int8, device="cuda")
    a_scale = 2.0 ** torch.randint(-3, 4, (M, 1), device="cuda")
    b_scale = 2.0 ** torch.randint(-3, 4, (N,), device="cuda")
    inputs = (a, w, a_scale, b_scale, None)
    options = pinned(config)
    fn = gemm(Case(M, N, 64, bias=False))
    got, kernel = run(fn, *inputs, options=options)
    assert kernel == config
    assert torch.equal(got.double(), reference(inputs))
    again, _ = run(fn, *inputs, options=options)
    assert torch.equal(again, got)


@pytest.mark.parametrize("options", [OPTIONS, pinned(LARGE_M[1])], ids=["persistent", "large_m"])
def test_epilogue_is_fused(options, any_size):
    case = Case(M, N, K)
    inputs = make_inputs(case, "cuda")
    residual = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)

    def fn(residual, *inputs):
        return F.gelu(gemm(case)(*inputs)) + residual

    got, kernel = run(fn, residual, *inputs, options=options)
    assert kernel in PERSISTENT + LARGE_M[1:2]
    assert_close(got, F.gelu(reference(inputs)) + residual.double(), slack=2)


@pytest.mark.parametrize("options", [OPTIONS, pinned(LARGE_M[0])], ids=["persistent", "large_m"])
def test_cuda_graphs_replay_it(options, any_size):
    """Every launch makes its descriptors, in memory that the graph keeps."""
    case = Case(M, N, K)
    inputs = make_inputs(case, "cuda")
    fn = torch.compile(gemm(case), backend="inductor_quant", options=options)
    with torch.no_grad():
        fn(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = [fn(*inputs) for _ in range(3)]
        for _ in range(2):
            for tensor in out:
                tensor.fill_(float("nan"))
            inputs[0].copy_(make_inputs(case, "cuda")[0])
            graph.replay()
            for tensor in out:
                assert_close(tensor, reference(inputs))


def test_max_autotune_offers_both_kernels():
    case = Case(M, N, K)
    inputs = make_inputs(case, "cuda")
    with collect() as report, torch.no_grad():
        run = torch.compile(gemm(case), backend="inductor_quant", mode="max-autotune")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert_close(run(*inputs).clone(), reference(inputs))
    [choice] = report.kernels
    assert {name.split()[0] for name in choice.offered} == {"w8a8_persistent", "w8a8_mm"}
    assert all(us is not None for us in choice.times_us)


def test_one_kernel_serves_every_dynamic_m():
    case = Case(M, N, K)
    fn = torch.compile(gemm(case), backend="inductor_quant", options=OPTIONS)
    with torch.no_grad(), collect() as report:
        for m in (M, 1, 17, 9000):
            inputs = make_inputs(Case(m, N, K), "cuda")
            if m == M:
                torch._dynamo.mark_dynamic(inputs[0], 0)
                torch._dynamo.mark_dynamic(inputs[2], 0)
            assert_close(fn(*inputs), reference(inputs))
    assert report.kernels[0].chosen.startswith("w8a8_persistent ")


@pytest.mark.parametrize(
    ("operand", "layout"),
    [
        ("a_layout", "columns"),  # such a weight is copied along K
        *itertools.product(("a_layout", "w_layout"), ("sliced", "every_second", "unaligned")),
    ],
)
def test_operands_without_a_descriptor_go_to_the_general_kernel(operand, layout):
    case = Case(M, N, K, **{operand: layout})
    inputs = make_inputs(case, "cuda")
    got, kernel = run(gemm(case), *inputs)
    assert kernel.startswith("w8a8_mm ")
    assert_close(got, reference(inputs))


def test_an_unaligned_input_after_an_aligned_one():
    """Inductor copies it for the kernel that was compiled for aligned rows."""
    case = Case(M, N, K)
    fn = torch.compile(gemm(case), backend="inductor_quant", options=OPTIONS, dynamic=False)
    with torch.no_grad():
        for layout in ("rows", "unaligned"):
            inputs = make_inputs(Case(M, N, K, a_layout=layout, w_layout=layout), "cuda")
            assert_close(fn(*inputs), reference(inputs))
