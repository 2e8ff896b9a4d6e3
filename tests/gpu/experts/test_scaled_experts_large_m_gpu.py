"""Experts of 8-bit rows with many rows an expert, on a GPU: every element, at any routing."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.kernels.scaled_experts.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.kernels.scaled_mm.large_m_sm90.kernel import (
    BLOCK_ELEMENT_COST,
    ELEMENT_COST,
    tile,
)
from inductor_quant.report.events import collect
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs, reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

e4m3, i8 = torch.float8_e4m3fn, torch.int8
BLOCK = (128, 128)
NAMES = ("scaled_experts_large_m_sm90", "scaled_experts_int8_large_m_sm90")
OPTIONS = {"inductor_quant.on_error": "raise"}
TALL = 1  # tiles of 192 rows


@pytest.fixture(autouse=True)
def hopper_and_any_size(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    monkeypatch.setattr(large_m_sm90, "MIN_FILL", 0)
    monkeypatch.setattr(large_m_sm90, "MIN_MEAN_ROWS", 0)


def run(fn, inputs, columns=None):
    config = large_m_sm90.TALL if columns == TALL else columns and tile(columns, group_m=8)
    pinned = tuple(f"{name} {config}" for name in NAMES if columns)
    chosen = {"inductor_quant.configs": pinned} if pinned else {}
    with collect() as report, torch.no_grad():
        compiled = torch.compile(fn, backend="inductor_quant", options=OPTIONS | chosen)
        got = compiled(*inputs)
    [kernel] = report.kernels
    assert kernel.chosen.startswith(NAMES)
    return compiled, got


def assert_right(got, case, inputs):
    want, got = reference(case, inputs), got.cpu()
    assert got.shape == want.shape
    # a rounding to bf16, and sums of fp32
    bound = 2**-8 * want.abs() + 2**-10 * want.abs().max()
    assert ((got.double() - want).abs() <= bound).all()
    assert not got[sum(case.counts) :].any()


def inputs_of(case, seed=0):
    torch.manual_seed(seed)
    return tuple(t.cuda() for t in make_inputs(case, "cpu"))


# tiles that N and K fill and do not fill, odd numbers of rows, empty experts, rows without one
ROUTINGS = {
    "any": (130, 0, 257, 1, 64, 63, 0, 321),
    "one": (0, 0, 777, 0),
    "tiles": (128, 256, 384),
    "few": (1,) * 9,
    "many": tuple((37 * i) % 301 for i in range(60)),
}
CASES = [
    Case(ROUTINGS["any"], 384, 1280, block=BLOCK, left_over=5),
    Case(ROUTINGS["one"], 704, 640, block=BLOCK, left_over=259),
    Case(ROUTINGS["tiles"], 1000, 528, block=BLOCK),
    Case(ROUTINGS["few"], 264, 144, block=BLOCK, left_over=1),
    Case(ROUTINGS["many"], 576, 2048, block=BLOCK),
    Case(ROUTINGS["many"], 130, 4096, block=BLOCK, scale_dtype=torch.bfloat16),
    Case(ROUTINGS["any"], 384, 1280, left_over=5),
    Case(ROUTINGS["many"], 1030, 528, fast_accum=True),
    Case(ROUTINGS["any"], 384, 1280, i8, left_over=130),
    Case(ROUTINGS["many"], 1027, 528, i8, out_dtype=torch.float16, has_scales=False),
]


@pytest.mark.parametrize("columns", [TALL, *sorted(ELEMENT_COST)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.n}x{case.k}-{case.dtype}")
def test_every_element_is_close_to_fp64(case, columns):
    if columns not in (TALL, *(BLOCK_ELEMENT_COST if case.block else ELEMENT_COST)):
        pytest.skip("not a tile for these scales")
    inputs = list(inputs_of(case))
    if not case.has_scales:  # within the range of fp16
        inputs[0], inputs[1] = inputs[0] // 32, inputs[1] // 32
    _, got = run(gemm(case), inputs, columns)
    assert_right(got, case, inputs)


@pytest.mark.parametrize("dtype", [e4m3, i8], ids=str)
def test_one_compilation_serves_any_routing_in_a_cuda_graph(dtype):
    case = Case(ROUTINGS["many"], 512, 1024, dtype, BLOCK if dtype == e4m3 else None)
    inputs = inputs_of(case)
    compiled, _ = run(gemm(case), inputs)
    compiled(*inputs)  # compiled for this grad mode: torch 2.15 refuses to within the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # fails if anything waits for the device
        got = compiled(*inputs)
    rows, count = case.rows, len(case.counts)
    for seed in range(4):
        torch.manual_seed(seed)
        counts = torch.bincount(torch.randint(count, (rows,)), minlength=count)
        if seed == 1:  # all in one
            counts = torch.zeros(count, dtype=torch.int64).index_fill(0, torch.tensor(7), rows)
        if seed == 2:  # none in any
            counts = torch.zeros(count, dtype=torch.int64)
        left = rows - int(counts.sum())
        now = Case(tuple(counts.tolist()), 512, 1024, dtype, case.block, left_over=left)
        for old, new in zip(inputs, inputs_of(now, seed), strict=True):
            old.copy_(new)
        got.fill_(float("nan"))
        graph.replay()
        if left < rows:
            assert_right(got, now, inputs)
        assert not got[rows - left :].any()


def test_the_number_of_rows_may_be_dynamic():
    first = Case((200, 0, 300), 512, 1024, block=BLOCK)
    inputs = inputs_of(first)
    for rows in (inputs[0], inputs[3]):
        torch._dynamo.mark_dynamic(rows, 0)
    fn, got = run(gemm(first), inputs)
    assert_right(got, first, inputs)
    for counts, left_over in (((200, 0, 300), 0), ((1, 700, 64), 3), ((0, 129, 0), 0)):
        case = Case(counts, 512, 1024, block=BLOCK, left_over=left_over)
        inputs = inputs_of(case)
        assert_right(fn(*inputs), case, inputs)
    assert fn(*inputs_of(Case((0, 0, 0), 512, 1024, block=BLOCK))).shape == (0, 512)


def test_the_same_bits_twice():
    case = CASES[4]
    inputs = inputs_of(case)
    compiled, first = run(gemm(case), inputs)
    assert torch.equal(first, compiled(*inputs))


def test_what_another_expert_has_does_not_matter():
    """A tile is multiplied with the rows and columns after its own."""
    case = Case((100, 100), 136, 1024, block=BLOCK)
    inputs = inputs_of(case)
    compiled, clean = run(gemm(case), inputs)
    inputs[0][100:], inputs[1][1] = float("nan"), float("nan")
    got = compiled(*inputs)
    assert torch.equal(got[:100], clean[:100])
    assert got[100:].isnan().all()


def test_an_epilogue_is_fused_and_right():
    case = Case((130, 0, 257, 64), 512, 1024, i8)
    inputs = inputs_of(case)
    weight = torch.rand(case.rows, 1, device="cuda", dtype=torch.bfloat16)

    def fn(weight, *inputs):
        return gemm(case)(*inputs) * weight

    _, got = run(fn, (weight, *inputs))
    want = reference(case, inputs) * weight.double().cpu()
    bound = 2**-6 * want.abs() + 2**-10 * want.abs().max()
    assert ((got.double().cpu() - want).abs() <= bound).all()
