"""The FP8 kernels on a GPU: every element against fp64, and how sums are accumulated."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import inductor_quant
from inductor_quant.kernels.tuning import cost_model
from tests.kernels.scaled_mm.test_fp8_mm_interpreted import BLOCKS, ROWS
from tests.support.gemms.fp8 import Case, gemm, make_inputs, reference
from tests.support.gemms.w8a8 import assert_close
from tests.support.spellings.fp8 import HAS_V2, LAID_OUT, VERSION_2_BLOCKS

pytestmark = [pytest.mark.gpu, pytest.mark.sm89]

OPTIONS = {"inductor_quant.on_error": "raise"}
LARGE = [
    Case(4096, 4096, 1024),
    Case(4100, 4000, 528, fast_accum=True),
    Case(4096, 4096, 1024, block=(128, 128)),
    Case(4100, 4000, 528, block=(128, 128), a_scales="m"),
    Case(4096, 2112, 7168, block=(128, 128), a_scales="m"),
    Case(64, 7168, 2048, block=(128, 128)),
    Case(16, 2112, 7168, block=(128, 128), a_scales="m"),
    Case(1, 4096, 7168, block=(128, 128)),
    Case(16, 24576, 1536, block=(128, 128), a_scales="m"),
]
# fp8_split_k; the first four split K
SPLIT = [
    Case(1, 4096, 14336, fast_accum=True),
    Case(48, 3584, 18944, fast_accum=True),
    Case(16, 4096, 14336),
    Case(200, 1536, 8960, fast_accum=True),
    Case(16, 6144, 4096, fast_accum=True),
    Case(33, 4304, 1152),
    Case(100, 5120, 5120, fast_accum=True),
    Case(256, 13824, 5120, fast_accum=True),
    Case(40, 1000, 1000, out_dtype=torch.float32, fast_accum=True),
]
SMALL = [Case(64, 512, 512), Case(64, 512, 512, block=(128, 128))]
# The bound for fp32 results too: the matrix unit of Hopper adds with 14 bits.
HALF = torch.bfloat16


def run(fn, *inputs, options=OPTIONS):
    with inductor_quant.collect() as report, torch.no_grad():
        got = torch.compile(fn, backend="inductor_quant", options=options, dynamic=False)(*inputs)
    [choice] = report.kernels
    return got, choice.chosen


@pytest.mark.parametrize("case", [*ROWS, *BLOCKS, *LARGE, *SPLIT], ids=str)
def test_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    got, kernel = run(gemm(case), *inputs)
    assert kernel.startswith(case.family)
    dtype = HALF if case.out_dtype == torch.float32 else case.out_dtype
    # With fast accumulation the matrix unit keeps 14 bits of its sums: it shows for a long K.
    is_coarse = case.fast_accum and case.k > 8192
    assert_close(got, reference(case, inputs), dtype, slack=4 if is_coarse else 2)


@pytest.mark.sm90
@pytest.mark.parametrize(
    ("fast_accum", "config"),
    [
        (name == "fp8_split_k", entry.config)
        for name in ("fp8_split_k", "fp8_split_k_precise")
        for entry in cost_model.load(name, 90).configs
    ],
    ids=str,
)
def test_every_tile_of_the_tables(fast_accum, config):
    torch.manual_seed(0)
    rows = min(config.block_m, 128) - 3
    case = Case(rows, 1000, 4 * config.split_k * config.block_k, fast_accum=fast_accum)
    inputs = make_inputs(case, "cuda")
    options = OPTIONS | {"inductor_quant.configs": (f"fp8_split_k {config}",)}
    got, kernel = run(gemm(case), *inputs, options=options)
    assert kernel == f"fp8_split_k {config}"
    assert_close(got, reference(case, inputs), slack=2)


@pytest.mark.sm90
@pytest.mark.parametrize(
    "case",
    [
        Case(256, 1024, 7168, out_dtype=torch.float32, bias=False),
        Case(16, 4096, 7168, block=(128, 128), out_dtype=torch.float32, bias=False),
        Case(256, 1024, 7168, block=(128, 128), out_dtype=torch.float32, bias=False),
        Case(4096, 4096, 7168, block=(128, 128), bias=False),
    ],
    ids=str,
)
def test_sums_are_as_exact_as_two_level_accumulation(case):
    """128 elements of K in the matrix unit, then fp32; against cuBLASLt per 128, added in fp32."""
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    a, w, a_scale, b_scale, _ = inputs
    a.copy_(torch.randn(a.shape, device="cuda").to(a.dtype))
    w.copy_(torch.randn(w.shape, device="cuda").to(w.dtype))
    want = reference(case, inputs)
    two_level = torch.zeros(case.m, case.n, device="cuda")
    one = torch.ones((), device="cuda")
    for k in range(0, case.k, 128):
        part = torch._scaled_mm(
            a[:, k : k + 128].contiguous(),
            w[:, k : k + 128].contiguous().t(),
            *(one, one),
            out_dtype=torch.float32,
            use_fast_accum=True,
        )
        if case.block is not None:
            columns = b_scale[torch.arange(case.n, device="cuda") // 128, k // 128]
            part = part * a_scale[:, k // 128, None] * columns
        two_level += part
    if case.block is None:
        two_level = two_level * a_scale * b_scale
    got, _ = run(gemm(case), *inputs)
    rms = [(x.double() - want).square().mean().sqrt() for x in (got, two_level.to(got.dtype))]
    assert rms[0] <= 1.02 * rms[1], rms


@pytest.mark.parametrize(
    "case", [Case(64, 512, 512), Case(64, 512, 512, block=(128, 128))], ids=str
)
def test_an_epilogue_is_fused(case):
    inputs = make_inputs(case, "cuda")
    residual = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    got, _ = run(lambda r, *given: F.silu(gemm(case)(*given)) * r, residual, *inputs)
    want = F.silu(reference(case, inputs)) * residual.double()
    assert_close(got, want, slack=3)


@pytest.mark.parametrize(
    "case", [LARGE[0], LARGE[2], Case(64, 512, 512, block=(128, 128))], ids=str
)
def test_max_autotune_times_all_choices_and_cuda_graphs_replay(case):
    inputs = make_inputs(case, "cuda")
    with inductor_quant.collect() as report, torch.no_grad():
        fn = torch.compile(gemm(case), backend="inductor_quant", mode="max-autotune")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert_close(fn(*inputs).clone(), reference(case, inputs), slack=2)
    assert all(us is not None for us in report.kernels[0].times_us)


@pytest.mark.sm90
@pytest.mark.parametrize("spelling", [*LAID_OUT, *(VERSION_2_BLOCKS if HAS_V2 else ())], ids=str)
def test_scales_of_blocks_are_read_as_the_library_reads_them(spelling):
    torch.manual_seed(0)
    inputs = spelling.inputs("cuda")
    got, _ = run(spelling.fn, *inputs)
    want = spelling.exact(inputs)
    assert_close(got, want, slack=2)
    assert_close(spelling.fn(*inputs), want, slack=4)  # cuBLASLt


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_one_kernel_serves_every_dynamic_m(block):
    case = Case(64, 384, 512, block=block)
    fn = torch.compile(gemm(case), backend="inductor_quant", options=OPTIONS)
    with torch.no_grad():
        for m in (64, 2, 17, 300):
            other = dataclasses.replace(case, m=m)
            inputs = make_inputs(other, "cuda")
            if m == 64:
                torch._dynamo.mark_dynamic(inputs[0], 0)
                torch._dynamo.mark_dynamic(inputs[2], 0)
            assert_close(fn(*inputs), reference(other, inputs), slack=2)
