"""Experts of 8-bit rows on a GPU: every kernel, any routing, layers, CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.report.events import collect
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs, reference
from tests.support.producers import experts as dense
from tests.support.producers.experts import route
from tests.support.producers.scaled_experts import ScaledExperts

pytestmark = [pytest.mark.gpu, pytest.mark.sm89]

OPTIONS = {"inductor_quant.on_error": "raise"}
e4m3, i8 = torch.float8_e4m3fn, torch.int8
BLOCK = (128, 128)
FEW, MANY = (3, 0, 20, 1), (130, 0, 257, 64)


def compiled(fn):
    return torch.compile(fn, backend="inductor_quant", options=OPTIONS)


def check(case: Case) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()  # another number of rows is a graph of its own, not one with any number
    inputs = tuple(t.cuda() for t in make_inputs(case, "cpu"))
    with collect() as report:
        got = compiled(gemm(case))(*inputs).cpu()
    [kernel] = report.kernels
    assert kernel.chosen.startswith("scaled_experts_")
    want = reference(case, inputs)
    assert (got - want).abs().max() <= 8e-3 * want.abs().max()
    assert not got[sum(case.counts) :].any()


@pytest.mark.parametrize("counts", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    ("dtype", "block"), [(e4m3, BLOCK), (e4m3, (64, 32)), (e4m3, None), (i8, None)], ids=str
)
def test_sorted_rows(counts, dtype, block):
    check(Case(counts, 384, 640, dtype, block, left_over=5))


@pytest.mark.parametrize(("dtype", "block"), [(e4m3, BLOCK), (e4m3, None), (i8, None)], ids=str)
def test_rows_in_any_order(dtype, block):
    check(Case(FEW, 384, 640, dtype, block, is_sorted=False))


@pytest.mark.parametrize("counts", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(("dtype", "block"), [(e4m3, BLOCK), (e4m3, None), (i8, None)], ids=str)
def test_rows_are_read_where_they_are(counts, dtype, block):
    for gather in ({"has_rows": True}, {"has_rows": True, "repeats": 8, "left_over": 5}):
        check(Case(counts, 384, 640, dtype, block, **gather))


@pytest.mark.parametrize(("dtype", "block"), [(e4m3, BLOCK), (e4m3, None), (i8, None)], ids=str)
def test_neighbours_in_any_order_share_a_row(dtype, block):
    check(Case(FEW, 384, 640, dtype, block, is_sorted=False, repeats=2))


@pytest.mark.parametrize(
    "case",
    [
        Case((0, 0, 700, 0), 320, 1152, block=BLOCK),  # one with all rows
        Case((129,) * 5, 264, 528, block=BLOCK),  # N and K end within a tile
        Case((200, 90, 120), 320, 512, fast_accum=True),
        Case((200, 90, 120), 320, 512, has_scales=False, dtype=i8, out_dtype=torch.float32),
        Case((200, 90, 120), 320, 512, k_major=False, block=BLOCK),
    ],
    ids=str,
)
def test_sizes_and_layouts(case):
    check(case)


@pytest.mark.sm90  # what the op of torch takes
@pytest.mark.parametrize("fast_accum", [False, True])
def test_a_product_that_says_so_itself_for_any_number_of_rows(fast_accum):
    """One graph, from none to a thousand rows an expert."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts, n, k = 6, 384, 640
    stack = torch.randn(experts, n, k).to(e4m3).cuda().transpose(1, 2)
    of_stack = torch.rand(experts, n, device="cuda") + 0.5

    @compiled
    def product(x, of_x, offsets):
        own = {"out_dtype": torch.bfloat16, "use_fast_accum": fast_accum}
        return torch._scaled_grouped_mm(x, stack, of_x, of_stack, offs=offsets, **own)

    with collect() as report:
        for each in (64, 3, 17, 300, 1000, 1):
            counts = torch.randint(0, 2 * each + 1, (experts,))
            counts[2] = 0
            offsets = counts.cumsum(0).to(torch.int32).cuda()
            rows = max(2, int(offsets[-1]))
            x = torch.randn(rows, k).to(e4m3).cuda()
            of_x = torch.rand(rows, device="cuda") + 0.5
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(of_x, 0)
            got = product(x, of_x, offsets)
            chosen = torch.arange(experts).repeat_interleave(counts).cuda()
            dense = (x.double() * of_x.double()[:, None])[: len(chosen)]
            weights = stack.double() * of_stack.double()[:, None]
            for expert in range(experts):
                want = dense[chosen == expert] @ weights[expert]
                difference = (got[: len(chosen)][chosen == expert] - want).abs()
                assert not len(want) or difference.max() <= 8e-3 * want.abs().max()
    [match] = report.matches
    assert match.family == "scaled_experts"


@pytest.mark.parametrize(
    ("format", "form"),
    [
        *(("fp8_block", "rows_first"), ("fp8_block", "gathered_first"), ("int8", "gathered_first")),
        *(("fp8", "scaled_behind"), ("int8", "of_ids")),
        *(("fp8_tensor", "static"), ("fp8_block", "static")),
    ],
    ids=str,
)
def test_a_layer_in_a_cuda_graph_follows_the_routing(format, form, monkeypatch):
    monkeypatch.setattr(dense, "GROUP", 128)
    torch.manual_seed(0)
    model = ScaledExperts(format, form, e=16, h=512, i=256).cuda()
    args = tuple(t.cuda() for t in route(37, 16, 4, 512))
    run = compiled(model)
    with torch.no_grad(), collect() as report:
        run(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # fails if anything waits for the device
            got = run(*args)
        for seed in range(3):
            torch.manual_seed(seed)
            for old, new in zip(args, route(37, 16, 4, 512), strict=True):
                old.copy_(new)
            if seed == 2:
                args[1][:] = torch.arange(4)  # all tokens choose the same
            graph.replay()
            want = model(*args)
            assert (got - want).norm() <= 0.03 * want.norm()
    assert [match.family for match in report.matches] == ["scaled_experts"] * 2
