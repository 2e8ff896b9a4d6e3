"""block_sparse on a GPU: every configuration, fusion, guards on the tables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

from inductor_quant.kernels.block_sparse.direct.kernel import BLOCK_SPARSE_DIRECT
from inductor_quant.kernels.block_sparse.mm import kernel as mm_kernel
from inductor_quant.kernels.block_sparse.mm.kernel import BLOCK_SPARSE_MM, BLOCK_SPARSE_MM_TMA
from inductor_quant.lowering.select import describe_device
from inductor_quant.report.events import collect
from tests.support.gemms.block_sparse import Case, described, gemm, make_inputs, reference
from tests.support.gemms.weight_only import assert_close

pytestmark = pytest.mark.gpu

f16, i8, e4m3 = torch.float16, torch.int8, torch.float8_e4m3fn
OPTIONS = {"inductor_quant.on_error": "raise"}


def compiled(fn, *configs):
    torch._dynamo.reset()
    options = OPTIONS | {"inductor_quant.configs": tuple(map(str, configs))}
    return torch.compile(fn, backend="inductor_quant", options=options)


def check(case, kernel=None, config=None):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    pins = [] if config is None else [f"{kernel.name} {config}"]
    with collect() as report:
        got = compiled(gemm(case), *pins)(*inputs)
    [choice] = report.kernels
    assert kernel is None or choice.chosen.startswith(f"{kernel.name} ")
    rounds = not choice.chosen.startswith(BLOCK_SPARSE_DIRECT.name)
    want = reference(case, inputs, rounds=rounds)
    if case.dtype == i8:
        assert torch.equal(got.cpu().double(), want)
    else:
        assert_close(got, want)


CASES = [
    *(
        Case(m, 768, 1024, (m_block, m_block), 0.8, bias=True, order=True)
        for m, m_block in ((1, 16), (1, 128), (16, 32), (63, 64), (200, 128), (1000, 32))
    ),
    Case(1000, 768, 1024, (16, 16), 0.9, f16),
    Case(300, 768, 1024, (64, 32), 0.8),
    Case(40, 768, 1024, (16, 128), 0.8, f16),
    Case(5, 768, 1024, zeros=0.7, values="placed", index_dtype=torch.int64),
    Case(300, 768, 1024, zeros=0.7, values="placed"),
    Case(5, 768, 1024, (128, 64), 0.7, values="in_place"),
    Case(300, 768, 1024, (128, 64), 0.7, values="in_place"),
    Case(40, 512, 512, layout="columns"),
    Case(300, 512, 512, layout="every_second"),
    *(
        Case(m, 768, 1024, block, 0.8, stored=stored, scale=scale, values=values, bias=True)
        for m, block, stored, scale, values in (
            (1, (32, 32), i8, "blocks", "listed"),
            (16, (32, 32), e4m3, "rows_of_blocks", "placed"),
            (300, (32, 32), i8, "rows_of_blocks", "listed"),
            (300, (64, 64), e4m3, "blocks", "listed"),
            (300, (128, 128), i8, "rows", "in_place"),
            (40, (16, 64), e4m3, "rows", "listed"),
        )
    ),
    *(
        Case(
            m, 1024, 1024, (block, block), 0.8, rows=rows, values=values, stored=stored, scale=scale
        )
        for m, block, rows, values, stored, scale in (
            (300, 32, 4, "placed", i8, "blocks"),
            (1000, 64, 2, "listed", None, ""),
            (300, 32, 2, "in_place", None, ""),
            (40, 16, 4, "listed", e4m3, "rows_of_blocks"),
        )
    ),
    Case(17, 768, 1024, zeros=0.8, dtype=i8),
    Case(300, 768, 1024, (64, 64), 0.8, dtype=i8, values="placed"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_close_to_fp64(case):
    check(case)


@pytest.mark.parametrize("m", [1, 13, 40, 300])
@pytest.mark.parametrize(
    "kernel",
    [BLOCK_SPARSE_DIRECT, BLOCK_SPARSE_MM, BLOCK_SPARSE_MM_TMA],
    ids=lambda kernel: kernel.name,
)
@pytest.mark.parametrize("stored", [None, i8, e4m3])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_every_configuration(size, stored, kernel, m, monkeypatch):
    monkeypatch.setattr(mm_kernel, "MIN_TMA_TILES", {})
    case = Case(m, 1024, 512, (size, size), 0.8, stored=stored, scale="blocks" if stored else "")
    device = describe_device(torch.device("cuda"))
    spec, problem = described(case)
    if kernel.rejection(spec, problem, device):
        pytest.skip(f"{kernel.name} does not take this size")
    for config in kernel.configs(spec, problem, device):
        check(case, kernel, config)


@pytest.mark.parametrize("m", [1, 40, 300])
def test_rows_of_blocks_in_their_order(m, monkeypatch):
    """As where not all CTAs run at once."""
    monkeypatch.setattr(mm_kernel, "MAX_WARPS", 0)
    monkeypatch.setattr(mm_kernel, "MIN_TMA_TILES", {})
    check(Case(m, 1024, 512, zeros=0.8, bias=True, order=True))


class SparseLinear(nn.Module):
    """W [1024, 1024] in blocks of 32, 80 % zero, built in the forward."""

    def __init__(self):
        super().__init__()
        mask = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.2
        row, col = mask.nonzero(as_tuple=True)
        self.register_buffer("values", (torch.randn(len(row), 32, 32) * 0.1).half())
        self.register_buffer("crow", F.pad(mask.sum(1).cumsum(0), (1, 0)).int())
        self.register_buffer("col", col.int())
        self.register_buffer("bias", torch.randn(1024).half())

    def rows(self):
        place = torch.arange(self.values.shape[0], device=self.values.device)
        # (torch 2.11's Inductor searches from the start of the storage of a slice.)
        return torch.searchsorted(self.crow, place, right=True) - 1

    def forward(self, x):
        w = x.new_zeros(32, 32, 32, 32).index_put((self.rows(), self.col), self.values)
        return F.linear(x, w.permute(0, 2, 1, 3).reshape(1024, 1024), self.bias)

    def exact(self, x):
        w = torch.zeros(32, 32, 32, 32, dtype=torch.float64, device=x.device)
        w[self.rows(), self.col.long()] = self.values.double()
        return x.double() @ w.permute(0, 2, 1, 3).reshape(1024, 1024).t() + self.bias.double()


def test_a_long_row_of_blocks_is_shared_by_ctas():
    case = Case(16, 2048, 4096, zeros=0.9, bias=True, order=True)
    inputs = make_inputs(case, "cuda")

    def fn(*tensors):
        return torch.ops.inductor_quant.block_sparse(*tensors, n=case.n, longest=128)

    with collect() as report:
        got = compiled(fn, "block_sparse_mm 16x32x256_w4_s7_g8_k4")(*inputs)
    [choice] = report.kernels
    assert choice.chosen.endswith("_k4")
    assert_close(got, reference(case, inputs))


@pytest.mark.parametrize("m", [1, 256, 4096])
def test_a_sparse_linear_is_one_kernel(m):
    module = SparseLinear().cuda()
    x, residual = (torch.randn(m, 1024, device="cuda").half() for _ in range(2))

    def fn(x, residual):
        return F.gelu(module(x)) + residual

    with torch.no_grad(), collect() as report:
        got, [code] = run_and_get_code(compiled(fn), x, residual)
    [match] = report.matches
    assert match.family == "block_sparse"
    assert code.count(".run(") == 1
    want = F.gelu(module.exact(x)) + residual.double()
    assert_close(got, want.cpu(), 1.5)


def test_a_table_that_is_written_to_is_seen():
    module, x = SparseLinear().cuda(), torch.randn(16, 1024, device="cuda").half()
    run = compiled(module)
    with torch.no_grad():
        assert_close(run(x), module.exact(x).cpu(), 1.5)
        module.col.copy_(31 - module.col)
        assert_close(run(x), module.exact(x).cpu(), 1.5)


def test_replay_in_a_cuda_graph():
    case = Case(16, 1024, 1024, zeros=0.8, bias=True)
    inputs = make_inputs(case, "cuda")
    run = compiled(gemm(case))
    run(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*inputs)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    assert_close(got, reference(case, inputs))
