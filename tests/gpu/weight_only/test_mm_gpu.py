"""weight_only on a GPU: every format, fusion, dynamic M, CUDA graphs, large offsets."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from inductor_quant.kernels.weight_only.mm.kernel import CONFIGS
from inductor_quant.ops import weight_only
from inductor_quant.report.events import collect
from tests.support.gemms.formats import FORMATS
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    assert_right,
    gemm,
    make_inputs,
    reference,
)

pytestmark = pytest.mark.gpu

OPTIONS = {"inductor_quant.on_error": "raise"}
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# left unfused by GPUs that do not convert e4m3
E4M3 = ("fp8_row", "fp8_block", "fp8_words")


def compiled(fn, **kwargs):
    return torch.compile(fn, backend="inductor_quant", options=OPTIONS, **kwargs)


def kernels_of(code: str) -> list[str]:
    """Names of the kernels that the wrapper launches, in order."""
    return re.findall(r"^\s+(\w+)\.run\(", code, re.MULTILINE)


def skip_if_unsupported(name: str) -> None:
    if name in E4M3 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no conversion of e4m3")


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("m", [1, 16, 33, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_result_is_close_to_fp64_in_our_kernels(name, m, dtype):
    skip_if_unsupported(name)
    torch.manual_seed(0)
    case = Case(name, m, 512, 1024, dtype, column_scale="channel", bias=True)
    inputs = make_inputs(case, "cuda")
    got, (code,) = run_and_get_code(compiled(gemm(case)), *inputs)
    is_library = name == "ten_parts"  # W is written once; the product is rounded before its scale
    assert_right(got, case, inputs, slack=2 if is_library else 1)
    kernels = kernels_of(code)  # the second adds partials
    if not is_library:
        assert len(kernels) <= 2
        assert all("weight_only" in kernel for kernel in kernels)


ODD = [
    Case("int8_channel", 33, 727, 577),
    Case("int8_channel", 5, 1, 33),
    Case("int8_channel", 1, 1, 1),
    Case("int8_group", 127, 577, 864, f16),
    Case("gptq", 64, 1000, 992, bias=True),
    Case("uint3", 20, 100, 330),
    Case("hqq", 7, 130, 96),
    *(Case("gptq", 20, 136, 160, dtype, out_dtype=f32) for dtype in (bf16, f16)),
    Case("int8_group", 20, 136, 160, f32),
    *(
        Case(name, 33, 136, 160, f16, layout=layout)
        for name in ("gptq", "awq", "hqq", "act_order", "int8_group", "shift_table")
        for layout in ("columns", "every_second")
    ),
]


@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_sizes_types_and_layouts(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cuda")
    got, (code,) = run_and_get_code(compiled(gemm(case)), *inputs)
    # A tensor core sums fp32 in its own order, and truncates.
    assert_right(got, case, inputs, slack=4 if got.dtype == f32 else 1)
    assert len(kernels_of(code)) <= 2


# A product and a difference may become one instruction, rounded once: nearly equal.
CONTRACTED = ("int8_folded",)
# With split K Inductor divides by a constant, and uses its reciprocal.
DIVIDED = ("int8_divisor",)


@pytest.mark.parametrize("rows", [16, 600])
def test_sums_beyond_fp16_are_finite_where_their_scale_makes_them_small(rows):
    """gpt-fast's layer: in eager mode the sums overflow before they are scaled."""
    torch.manual_seed(0)
    x = 300 * torch.randn(rows, 2048, device="cuda").half()
    w = torch.randint(-127, 128, (512, 2048), device="cuda").to(torch.int8)
    scale = (torch.rand(512, device="cuda") * 2e-4 + 1e-4).half()

    def fn(x, w, scale):
        return F.linear(x, w.to(x.dtype)) * scale

    assert not fn(x, w, scale).isfinite().all()
    with collect() as report:
        got = compiled(fn)(x, w, scale)
    assert [match.family for match in report.matches] == ["weight_only"]
    assert_close(got, ((x.double() @ w.double().t()) * scale.double()).cpu())


@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_rows_give_the_weight_bit_for_bit(name):
    skip_if_unsupported(name)
    torch.manual_seed(0)
    case = Case(name, 0, 512, 1024, bf16, out_dtype=f32)
    _, _, _, *weight = make_inputs(case, "cuda")
    x = torch.eye(case.packed.format.shape[0], device="cuda").to(bf16)
    run = compiled(gemm(case))
    got = torch.cat([run(rows, None, None, *weight) for rows in x.split(64)])
    # On the CPU: on a GPU torch divides by way of the reciprocal.
    on_cpu = [t.cpu() for t in weight]
    want = gemm(case)(x.cpu(), None, None, *on_cpu).cuda()
    # if ops are applied to sums, W is not rounded to the dtype of x
    whole = weight_only.dequantize(case.packed.format, on_cpu).cuda()
    if name in CONTRACTED:
        is_rounded = (got != want).float().mean() < 0.01
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-6)
        assert is_rounded or torch.allclose(got, whole, rtol=1e-6, atol=1e-6)
    elif not torch.equal(got, want) and not torch.equal(got, whole):
        assert name in DIVIDED
        torch.testing.assert_close(got, whole, rtol=2**-22, atol=0)


def test_the_reference_is_the_same_on_both_devices():
    for name in FORMATS:
        packed = Case(name, 1, 64, 64).packed
        weight = packed.make("cuda")
        on_gpu = weight_only.dequantize(packed.format, weight, torch.float64)
        torch.testing.assert_close(on_gpu.cpu(), packed.dequantized(weight), rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", ["gptq", "awq", "hqq", "int8_channel", "fp8_block"])
def test_epilogue_is_fused_into_one_kernel(name):
    skip_if_unsupported(name)
    torch.manual_seed(0)
    case = Case(name, 64, 512, 256, bias=True)
    inputs = make_inputs(case, "cuda")
    residual = torch.randn(64, 512, device="cuda").to(bf16)

    def fn(residual, *inputs):
        return F.gelu(gemm(case)(*inputs)) + residual

    got, (code,) = run_and_get_code(compiled(fn), residual, *inputs)
    assert len(kernels_of(code)) == 1, kernels_of(code)
    want = F.gelu(reference(case, inputs)) + residual.cpu().double()
    assert_close(got, want, slack=2)  # the value is rounded before the epilogue too


def test_dynamic_m_compiles_twice_at_most():
    case = Case("gptq", 0, 256, 128)
    counter = CompileCounterWithBackend("inductor_quant")
    run = torch.compile(gemm(case), backend=counter)
    weight = make_inputs(case, "cuda")[1:]
    for m in (1, 2, 3, 16, 17, 100, 1000, 4096):
        x = torch.randn(m, 128, device="cuda").to(bf16)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        now = dataclasses.replace(case, m=m)
        assert_right(run(x, *weight), now, (x, *weight))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["gptq", "awq", "act_order", "nf4", "shift_table"])
def test_max_autotune_and_cuda_graphs(name):
    """act_order is timed with random data as indices."""
    torch.manual_seed(0)
    case = Case(name, 48, 512, 512)
    inputs = make_inputs(case, "cuda")
    run = torch.compile(gemm(case), backend="inductor_quant", mode="max-autotune")
    with torch.no_grad(), collect() as report:
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert_right(run(*inputs).clone(), case, inputs)
    [choice] = report.kernels
    assert len(choice.offered) > 1


@pytest.mark.parametrize("name", ["gptq", "int8_channel", "awq"])
@pytest.mark.parametrize("m", [1, 64, 512])
def test_every_configuration_computes_the_same(name, m):
    """Integers and scales that are powers of two: fp32 holds every sum exactly."""
    case = Case(name, m, 320, 512, bf16, out_dtype=f32)
    packed = case.packed
    _, _, _, *weight = make_inputs(case, "cuda")
    weight[-1] = 2.0 ** torch.randint(-3, 4, weight[-1].shape, device="cuda").to(weight[-1].dtype)
    x = torch.randint(-8, 9, (m, packed.format.shape[0]), device="cuda").to(bf16)
    inputs = (x, None, None, *weight)
    want = reference(case, inputs)
    listed = {config for _, entries in CONFIGS for config in entries}
    for config in sorted(listed):
        options = {**OPTIONS, "inductor_quant.configs": (str(config),)}
        run = torch.compile(gemm(case), backend="inductor_quant", options=options)
        assert torch.equal(run(*inputs).double().cpu(), want), config


@pytest.mark.parametrize(("m", "n", "k"), [(66000, 32768, 32), (33, 66048, 32768)])
def test_offsets_beyond_32_bits(m, n, k):
    """M * N or N * K of 2**31 and more."""
    case = Case("int8_channel", m, n, k)
    inputs = make_inputs(case, "cuda")
    # pinned: at this M no kernel would be offered
    options = {**OPTIONS, "inductor_quant.configs": ("64x64x32_w4_s3_g8",)}
    run = torch.compile(gemm(case), backend="inductor_quant", options=options)
    got, (code,) = run_and_get_code(run, *inputs)
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in code
    x, _, _, q, scale = inputs
    columns = slice(n - 64, n)
    small = Case("int8_channel", 40, 64, k)
    for rows in (slice(0, min(m, 40)), slice(max(0, m - 40), m)):
        part = (x[rows], None, None, q[columns], scale[columns])
        assert_close(got[rows, columns], reference(small, part))
