"""Numerics of the generated kernels, run by Triton's interpreter, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.kernels.problem import Device
from inductor_quant.kernels.tuning import cost_model
from inductor_quant.lowering import select
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import Case, assert_close, gemm, make_inputs, reference
from tests.support.gemms.zero_points import Zeros, meaning
from tests.support.sampling import sampled

pytestmark = pytest.mark.interp

bf16, f16, f32, i8 = torch.bfloat16, torch.float16, torch.float32, torch.int8

CASES = [
    *(Case(m, 64, 64) for m in (1, 2, 7, 16, 33, 130)),
    Case(33, 72, 40),
    Case(20, 77, 57),
    Case(5, 1, 33),
    Case(1, 1, 1),
    Case(17, 50, 260),
    *(Case(30, 50, 64, out_dtype=dtype) for dtype in (f16, f32)),
    *(Case(30, 50, 64, scale_dtype=dtype) for dtype in (f16, bf16)),
    Case(30, 50, 64, a_scale="tensor"),
    Case(30, 50, 64, b_scale="tensor"),
    Case(30, 50, 64, a_scale="tensor", b_scale="tensor", bias=False),
    Case(30, 50, 64, a_scale="none"),
    Case(30, 50, 64, b_scale="none", bias=False),
    Case(40, 40, 40),
    *(Case(30, 50, 64, w_layout=x) for x in ("columns", "sliced", "every_second", "unaligned")),
    *(Case(30, 50, 64, a_layout=x) for x in ("columns", "sliced", "every_second", "unaligned")),
]


def run(fn, make, inputs, config=None):
    generated = generate(fn, make, *([] if config is None else [config]))
    assert sum("w8a8" in name for name in generated.kernels) == 1
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got = run(gemm(case), lambda device: make_inputs(case, device), inputs)
    assert_close(got, reference(inputs))


# One per tile: the interpreter has neither stages nor warps.
TILES = {
    (config.block_m, config.block_n, config.block_k): config
    for config in (entry.config for entry in cost_model.load("w8a8_mm", 90).configs)
}


@pytest.mark.parametrize("config", sampled(TILES.values(), every=3), ids=str)
def test_integers_are_exact_with_every_configuration(config):
    """Scales that are powers of two and sums below 2**24: fp32 holds every result exactly."""
    case = Case(35, 70, 150, out_dtype=f32, bias=False)
    torch.manual_seed(0)
    a, w, *_ = make_inputs(case, "cpu")
    inputs = (
        a,
        w,
        2.0 ** torch.randint(-3, 4, (case.m, 1)),
        2.0 ** torch.randint(-3, 4, (case.n,)),
        None,
    )
    got = run(gemm(case), lambda device: make_inputs(case, device), inputs, config)
    assert torch.equal(got.double(), reference(inputs))


def test_a_fused_epilogue_computes_what_it_says():
    case = Case(30, 50, 64)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    residual = torch.randn(30, 50, dtype=bf16)

    def fn(residual, *inputs):
        return F.gelu(gemm(case)(*inputs)) + residual

    def make(device):
        return torch.empty(30, 50, dtype=bf16, device=device), *make_inputs(case, device)

    got = run(fn, make, (residual, *inputs))
    assert_close(got, F.gelu(reference(inputs)) + residual.double(), slack=2)


def test_one_kernel_serves_every_dynamic_m():
    case = Case(8, 50, 64)

    def make(device):
        inputs = make_inputs(case, device)
        for tensor in (inputs[0], inputs[2]):
            torch._dynamo.mark_dynamic(tensor, 0)
        return inputs

    generated = generate(gemm(case), make)
    for m in (2, 5, 16, 40):
        inputs = make_inputs(Case(m, 50, 64), "cpu")
        assert_close(simulate.interpret(generated, inputs), reference(inputs))


def test_alpha_is_applied_before_the_bias():
    case = Case(30, 50, 64)
    torch.manual_seed(0)
    a, w, a_scale, b_scale, bias = make_inputs(case, "cpu")

    def fn(a, w, a_scale, b_scale, bias):
        return (torch._int_mm(a, w.t()).float() * 0.37 * a_scale * b_scale + bias).to(bf16)

    got = run(fn, lambda device: make_inputs(case, device), (a, w, a_scale, b_scale, bias))
    assert_close(got, reference((a, w, a_scale * 0.37, b_scale, bias)))


def test_one_tensor_may_be_both_scales():
    """A square GEMM with [1] scales that are the same tensor: the template's inputs coincide."""
    a, w, *_ = make_inputs(Case(32, 32, 32), "cpu")
    scale = torch.tensor([0.03])

    def fn(a, w, scale):
        return (torch._int_mm(a, w.t()).float() * scale * scale).to(bf16)

    def make(device):
        return (
            torch.empty(32, 32, dtype=torch.int8, device=device),
            torch.empty(32, 32, dtype=torch.int8, device=device),
            torch.empty(1, device=device),
        )

    assert_close(run(fn, make, (a, w, scale)), reference((a, w, scale, scale, None)))


def test_a_matrix_may_be_multiplied_by_itself():
    a, _, a_scale, b_scale, _ = make_inputs(Case(40, 40, 40), "cpu")

    def fn(a, a_scale, b_scale):
        return (torch._int_mm(a, a.t()).float() * a_scale * b_scale).to(bf16)

    def make(device):
        a, _, a_scale, b_scale, _ = make_inputs(Case(40, 40, 40), device)
        return a, a_scale, b_scale

    got = run(fn, make, (a, a_scale, b_scale))
    assert_close(got, reference((a, a, a_scale, b_scale, None)))


@pytest.mark.parametrize("which", ["bias", "scale"])
def test_an_expand_after_a_cast_is_not_taken_for_the_whole_operand(which):
    """A stored bias of one element is no bias of N elements."""
    torch.manual_seed(0)
    a, w, a_scale, _, _ = make_inputs(Case(32, 48, 64), "cpu")
    short = torch.randn(1 if which == "bias" else (4, 1, 1)).to(bf16)

    def fn(a, w, a_scale, short):
        out = torch._int_mm(a, w.t())
        if which == "bias":
            return out * a_scale + short.expand(48).float()
        return (out.view(4, 8, 48) * short.expand(4, 8, 1).float()).view(32, 48)

    def make(device):
        a, w, a_scale, _, _ = make_inputs(Case(32, 48, 64), device)
        return a, w, a_scale, torch.empty(short.shape, dtype=bf16, device=device)

    generated = generate(fn, make)
    try:
        got = simulate.interpret(generated, (a, w, a_scale, short))
    except (RuntimeError, NotImplementedError):  # not matched: stock's extern int8 kernel
        assert which == "scale"
        assert not any("w8a8" in name for name in generated.kernels)
        return
    assert_close(got, fn(a, w, a_scale, short).double())


# ------------------------------------------------------------------------------------------
# zero points

SIZES = [1, 2, 15, 16, 17, 33, 63, 64, 130]
ZERO_POINTS = [
    *(Zeros(m) for m in SIZES),
    *(Zeros(m, a="const") for m in SIZES[::2]),
    *(Zeros(m, a=f32) for m in SIZES[::3]),
    *(Zeros(m, a=i8, b=i8) for m in SIZES[::3]),
    *(Zeros(17, n=n, k=k) for n, k in ((1, 33), (77, 57), (64, 64), (130, 260))),
    Zeros(1, n=1, k=1),
    Zeros(17, a_tensor=True),
    Zeros(17, a=bf16, a_tensor=True),
    Zeros(17, b=i8, a=""),
    Zeros(17, b=f32, a=""),
    Zeros(17, b=i8, a=f32, b_tensor=True),
    Zeros(17, b=f32, a="const"),
    Zeros(17, b=bf16, a=i8, a_tensor=True, b_tensor=True),
    Zeros(17, sums=torch.int32),
    Zeros(17, sums=f32),
    Zeros(17, a=f32, sums=torch.int32),
    Zeros(65, a="const", sums=torch.int32),
    # the only configuration has no spare row: column sums are a separate kernel
    Zeros(16, config="16x64x64_w4_s3_g8"),
    Zeros(15, config="16x64x64_w4_s3_g8"),
]
# On a chip of one SM, where these are many tiles.
PERSISTENT = [
    Zeros(140, n=200, k=144, a=a, b=b, out_dtype=bf16)
    for a, b in ((i8, ""), ("const", ""), (f32, i8), ("", bf16), (i8, i8))
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", sampled([*PERSISTENT, *ZERO_POINTS]), ids=str)
def test_zero_points_are_exact(case: Zeros, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of full range, sums below 2**24: fp32 holds every result exactly."""
    if case in PERSISTENT:
        chip = Device(90, num_sms=1, shared_memory=232448)
        monkeypatch.setattr(select, "describe_device", lambda device: chip)
    torch.manual_seed(0)
    with collect() as report:
        generated = generate(case.call(), case.inputs, *([case.config] if case.config else []))
    [kernel] = report.kernels
    assert kernel.chosen.startswith("w8a8_persistent" if case in PERSISTENT else "w8a8_mm")
    assert sum("triton_tem" in name for name in generated.kernels) == 1, list(generated.kernels)
    # Row sums are a kernel; column sums are one if no tile has a spare row.
    has_spare = case.m < (16 if case.config else 64) and case.m * case.n > 1
    sums = (case.a != "" and case.sums is None and not has_spare) + (case.b != "")
    assert len(generated.kernels) == 1 + sums, list(generated.kernels)
    inputs = case.inputs("cpu")
    got = simulate.interpret(generated, inputs)
    want = meaning(case, inputs)
    assert want.abs().max() < 2**24
    assert torch.equal(got, want.to(case.out_dtype))
