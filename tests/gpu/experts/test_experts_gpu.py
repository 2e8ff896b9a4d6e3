"""Experts on a GPU: every format, any routing, a layer with its routing, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.experts.mm_sm90.kernel import BLOCKS, DEEP_BLOCKS, TALL_BLOCKS
from inductor_quant.kernels.weight_only.mm_sm90 import cost
from inductor_quant.report.events import collect
from tests.support.gemms import formats
from tests.support.gemms.experts import Case, gemm, make_inputs, reference
from tests.support.gemms.formats import FORMATS
from tests.support.gemms.weight_only import assert_close
from tests.support.producers import experts
from tests.support.producers.experts import Experts, route

pytestmark = pytest.mark.gpu

OPTIONS = {"inductor_quant.on_error": "raise"}
bf16, f16 = torch.bfloat16, torch.float16
# left unfused by GPUs that do not convert e4m3
E4M3 = ("fp8_row", "fp8_block", "fp8_words")
# how the rows of the product are rows of x
GATHERED = ({"repeats": 2}, {"has_rows": True}, {"has_rows": True, "repeats": 8})
# balanced; empty ones at both ends; one with all rows
COUNTS = ((5, 4, 6, 5), (0, 33, 1, 0), (0, 0, 70, 0))


@pytest.fixture(autouse=True)
def _large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)
    monkeypatch.setattr(experts, "GROUP", 128)


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="inductor_quant", options=OPTIONS, **kwargs)


def check(case: Case) -> None:
    torch.manual_seed(0)
    inputs = tuple(t.cuda() for t in make_inputs(case, "cpu"))
    with collect() as report:
        got = compiled(gemm(case))(*inputs)
    [kernel] = report.kernels
    assert kernel.chosen.startswith("experts_")
    # W is rounded to 16 bits; the tensor core sums in its own order
    assert_close(got, reference(case, inputs), slack=4)
    assert not got[sum(case.counts) :].any()


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("name", [*FORMATS, "looked_up"])
def test_every_format(name, is_sorted):
    if name in E4M3 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no conversion of e4m3")
    dtype = bf16 if is_sorted else f16
    check(Case(name, (3, 0, 20, 1), 512, 1024, 2 * is_sorted, is_sorted, dtype))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", ["nibble_pairs", "mxfp4"])
def test_any_routing(name, counts):
    check(Case(name, counts, 384, 640))
    check(Case(name, tuple(16 * count for count in counts), 384, 640, left_over=5))


@pytest.mark.parametrize("gather", GATHERED, ids=str)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("name", ["nibble_pairs", "int8_channel", "mxfp4", "int8_shuffled"])
def test_rows_of_x_are_read_where_they_are(name, is_sorted, gather):
    for times in (1, 40):  # beyond 16 rows an expert they are gathered before on sm_90
        counts = tuple(count * times for count in (3, 0, 20, 1))
        check(Case(name, counts, 512, 1024, 2 * is_sorted, is_sorted, **gather))


@pytest.mark.sm90
@pytest.mark.parametrize(
    "block", [block for block, *_ in (*cost.BLOCKS, *BLOCKS, *DEEP_BLOCKS, *TALL_BLOCKS)], ids=str
)
@pytest.mark.parametrize("name", ["gptq", "awq", "nibble_pairs", "int8_channel", "nf4", "mxfp4"])
def test_many_rows_in_every_tile(name, block):
    """N ends within a tile; odd numbers of rows, empty experts, rows without an expert."""
    case = Case(name, (129, 0, 257, 1, 64, 0, 321), 416, 1024, left_over=150)
    inputs = tuple(t.cuda() for t in make_inputs(case, "cpu"))
    pinned = {"inductor_quant.configs": (f"experts_mm_sm90 {GemmConfig(*block)}",)}
    with collect() as report:
        run = torch.compile(gemm(case), backend="inductor_quant", options=OPTIONS | pinned)
        got = run(*inputs)
    if not report.kernels:  # the stack was dequantized: the format has no such tile
        pytest.skip("not a tile of this format")
    assert_close(got, reference(case, inputs), slack=4)
    assert not got[sum(case.counts) :].any()


def layer(format: str, form: str, tokens: int, dtype: torch.dtype = bf16):
    torch.manual_seed(0)
    model = Experts(format, form, e=16, h=512, i=256).cuda()
    return model, tuple(t.cuda() for t in route(tokens, 16, 4, 512))


@pytest.mark.parametrize("form", ["grouped", "gather_first", "einsum"])
@pytest.mark.parametrize("format", ["int8", "fp8", "fp8_block", "int4_words", "nibbles", "mxfp4"])
def test_a_layer(format, form):
    model, args = layer(format, form, 1 if form == "einsum" else 37)
    with torch.no_grad(), collect() as report:
        got = compiled(model)(*args)
        want = model(*args)
    families = [match.family for match in report.matches]
    if form == "einsum":  # of one token may be one product with the rows of all chosen experts
        assert families[-1] == "experts"
        assert {*families} <= {"experts", "weight_only"}
    else:
        assert families == ["experts"] * 2
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.sm90
@pytest.mark.parametrize("block", [(64, 128, 64, 4, 4), (96, 128, 64, 4, 6), (128, 128, 64, 8, 8)])
@pytest.mark.parametrize("form", ["grouped", "transformers_grouped"])
@pytest.mark.parametrize("format", ["int4_words", "nibbles", "mxfp4"])
def test_a_layer_whose_rows_are_in_the_order_of_lanes(format, form, block):
    """Those that are gathered, and those that the first product or an activation writes."""
    if block[0] == TALL_BLOCKS[0][0][0] and format != "int4_words":
        pytest.skip("not a tile of this format")
    pinned = OPTIONS | {"inductor_quant.configs": (f"experts_mm_sm90 {GemmConfig(*block)}",)}
    model, args = layer(format, form, 280)
    with torch.no_grad(), collect() as report:
        got = torch.compile(model, backend="inductor_quant", options=pinned)(*args)
        want = model(*args)
    orders = [choice.weight[0].k for choice in report.kernels if choice.weight]
    assert len(orders) == 2
    assert all(len(digits) > 3 for digits in orders)
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("form", ["grouped", "gather_first"])
def test_one_compilation_serves_any_number_of_tokens(form):
    counter = CompileCounterWithBackend("inductor_quant")
    model, _ = layer("int4_words", form, 8)
    run = torch.compile(model, backend=counter, dynamic=True)
    for tokens in (8, 3, 40, 129):
        _, args = layer("int4_words", form, tokens)
        with torch.no_grad():
            got, want = run(*args), model(*args)
        assert (got - want).norm() <= 0.02 * want.norm()
    assert counter.frame_count == 1


@pytest.mark.parametrize("form", ["grouped", "gather_first"])
def test_a_cuda_graph_follows_the_routing(form):
    model, args = layer("nibbles", form, 16)
    run = compiled(model)
    with torch.no_grad():
        run(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # fails if anything waits for the device
            got = run(*args)
        for seed in range(3):
            torch.manual_seed(seed)
            for old, new in zip(args, route(16, 16, 4, 512), strict=True):
                old.copy_(new)
            if seed == 2:
                args[1][:] = torch.arange(4)  # all tokens choose the same
            graph.replay()
            want = model(*args)
            assert (got - want).norm() <= 0.02 * want.norm()


def test_the_stacks_are_never_dense():
    model, args = layer("nibbles", "grouped", 16)
    dense = 2 * min(model.gate_up_proj.numel(), model.down_proj.numel())

    def peak(run):
        with torch.no_grad():
            run(*args)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(*args)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(compiled(model)) < dense / 2
    torch.compiler.reset()
    assert peak(torch.compile(model)) > dense


def test_autotuning_times_the_configurations():
    case = Case("nibble_pairs", (5, 0, 6, 5), 512, 1024)
    inputs = tuple(t.cuda() for t in make_inputs(case, "cpu"))
    got = torch.compile(
        gemm(case), backend="inductor_quant", options=OPTIONS | {"max_autotune": True}
    )(*inputs)
    assert_close(got, reference(case, inputs), slack=4)
