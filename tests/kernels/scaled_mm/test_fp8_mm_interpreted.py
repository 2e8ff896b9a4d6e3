"""Numerics of the FP8 kernels, run by Triton's interpreter, against fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.kernels import dispatch
from inductor_quant.kernels.problem import Device
from inductor_quant.lowering import select
from inductor_quant.report.events import collect
from tests.support.gemms.fp8 import Case, e5m2, e8m0, gemm, make_inputs, reference
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import assert_close
from tests.support.sampling import sampled

pytestmark = pytest.mark.interp

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("columns", "sliced", "every_second", "unaligned")

ROWS = [
    *(Case(m, 64, 64) for m in (1, 7, 16, 33, 130)),
    Case(20, 77, 57),
    Case(1, 1, 1),
    Case(17, 50, 260, fast_accum=True),
    *(Case(30, 50, 64, out_dtype=dtype) for dtype in (f16, f32)),
    *(Case(30, 50, 64, scale_dtype=dtype) for dtype in (f16, bf16)),
    Case(30, 50, 64, a_scale="tensor", b_scale="tensor", bias=False),
    Case(30, 50, 64, a_scale="none"),
    Case(30, 50, 64, b_scale="none", a_dtype=e5m2),
    *(Case(30, 50, 64, w_layout=x) for x in LAYOUTS),
    *(Case(30, 50, 64, a_layout=x) for x in LAYOUTS),
]
BLOCKS = [
    *(Case(m, 256, 256, block=(128, 128)) for m in (1, 17, 130)),
    *(Case(m, 201, 301, block=(b, b)) for m, b in ((7, 128), (64, 64), (130, 32))),
    Case(33, 200, 300, block=(128, 128), a_scales="m"),
    Case(33, 200, 300, block=(128, 1), a_scales="m", scale_dtype=bf16),
    Case(1, 77, 99, block=(64, 64), a_scales="m", scale_dtype=bf16),
    Case(33, 77, 100, block=(64, 48), bias=False),
    Case(130, 71, 97, block=(32, 32), scale_dtype=e8m0, a_scales="m"),
    Case(7, 71, 97, block=(32, 1), scale_dtype=e8m0, a_dtype=e5m2),
    *(Case(30, 50, 200, block=(128, 128), w_layout=x) for x in LAYOUTS),
    *(Case(30, 50, 200, block=(128, 128), a_layout=x) for x in LAYOUTS),
]


def run(case, inputs, fn=None, make=None, pin=None, **options):
    with collect() as report:
        generated = generate(
            fn or gemm(case),
            make or (lambda device: make_inputs(case, device)),
            *filter(None, [pin]),
            **options,
        )
    [choice] = report.kernels
    return simulate.interpret(generated, inputs), choice.chosen


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [*sampled(ROWS), *sampled(BLOCKS)], ids=str)
def test_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got, kernel = run(case, inputs)
    names = [f"{case.family}_{name}" for name in ("mm", "split_k", "decode")]
    assert kernel.split()[0] in names
    assert_close(got, reference(case, inputs))


@pytest.mark.parametrize(
    ("case", "config"),
    sampled(
        [
            (Case(130, 77, 57), "fp8_mm 64x32x64_w4_s4_g8"),
            (Case(7, 50, 260, w_layout="every_second"), "fp8_mm 16x16x256_w2_s6_g8"),
            (Case(20, 77, 600), "fp8_split_k 16x64x128_w4_s6_g8_k2"),
            (Case(1, 200, 1036, fast_accum=True), "fp8_split_k 16x128x128_w4_s6_g8_k4"),
            (Case(100, 140, 512, bias=False), "fp8_split_k 64x128x128_w4_s6_g8_k3"),
            (Case(130, 70, 260, out_dtype=f16), "fp8_split_k 128x64x256_w4_s4_g8"),
        ]
    ),
    ids=str,
)
def test_pinned_tiles_are_close_to_fp64(case, config):
    """As they are and transposed, and with K in parts, of which the last may be empty."""
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got, kernel = run(case, inputs, pin=config)
    assert kernel == config
    assert_close(got, reference(case, inputs))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", sampled([*ROWS[3:6], *BLOCKS[2:5], *BLOCKS[10:12]]), ids=str)
def test_a_device_without_fp8_decodes_it(case):
    """sm_80: each of the 256 bytes has an equal in bf16."""
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got, _ = run(case, inputs, arch=80)
    assert_close(got, reference(case, inputs))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, e5m2], ids=str)
def test_every_byte_is_decoded_exactly(dtype):
    """NaN and infinity included."""
    case = Case(16, 16, 16, a_dtype=dtype, bias=False, out_dtype=f32)
    case = dataclasses.replace(case, a_scale="none", b_scale="none")
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    generated = generate(gemm(case), lambda device: make_inputs(case, device), arch=80)
    for row in torch.arange(256).to(torch.uint8).reshape(16, 16):
        a = torch.diag(row).view(dtype)  # each byte alone in its row: there is no 0 * NaN
        got = simulate.interpret(generated, (a, ones, None, None, None))
        want = row.view(dtype).float()[:, None].expand(16, 16)
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize(
    "case",
    [
        Case(300, 200, 144),
        Case(257, 140, 128, fast_accum=True, out_dtype=f16),
        Case(300, 200, 272, block=(128, 128)),
        Case(300, 200, 272, block=(64, 64), a_scales="m", scale_dtype=e8m0),
    ],
    ids=str,
)
def test_the_persistent_kernel_is_close_to_fp64(case, monkeypatch):
    """On a chip of one SM: two CTAs take three tiles and more each."""
    chip = Device(90, num_sms=1, shared_memory=232448)
    monkeypatch.setattr(select, "describe_device", lambda device: chip)
    # without the kernel that is preferred on Hopper
    others = [k for k in dispatch.KERNELS if k.name != f"{case.family}_large_m_sm90"]
    monkeypatch.setattr(dispatch, "KERNELS", others)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got, kernel = run(case, inputs)
    assert kernel.startswith(f"{case.family}_persistent "), kernel
    assert_close(got, reference(case, inputs))


@pytest.mark.parametrize("case", [Case(30, 50, 64), Case(30, 50, 256, block=(128, 128))], ids=str)
def test_a_fused_epilogue_computes_what_it_says(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    residual = torch.randn(30, 50, dtype=bf16)

    def make(device):
        return torch.empty(30, 50, dtype=bf16, device=device), *make_inputs(case, device)

    got, _ = run(
        case,
        (residual, *inputs),
        lambda residual, *inputs: F.gelu(gemm(case)(*inputs)) + residual,
        make,
    )
    assert_close(got, F.gelu(reference(case, inputs)) + residual.double(), slack=2)


@pytest.mark.parametrize("case", [Case(8, 50, 64), Case(8, 50, 256, block=(128, 128))], ids=str)
def test_one_kernel_serves_every_dynamic_m(case):
    def make(device):
        inputs = make_inputs(case, device)
        for tensor in (inputs[0], inputs[2]):
            torch._dynamo.mark_dynamic(tensor, 0)
        return inputs

    generated = generate(gemm(case), make)
    for m in (2, 5, 16, 40):
        other = dataclasses.replace(case, m=m)
        inputs = make_inputs(other, "cpu")
        assert_close(simulate.interpret(generated, inputs), reference(other, inputs))


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_a_zero_block_gives_no_nan_and_nan_propagates(block):
    case = Case(20, 40, 256, block=block, bias=False)
    a, w, a_scale, b_scale, _ = make_inputs(case, "cpu")
    a.view(torch.uint8)[3, :128] = 0
    a_scale[3] = 0
    w.view(torch.uint8)[7, 200] = 0x7F  # NaN
    got, _ = run(case, (a, w, a_scale, b_scale, None))
    assert got[:, 7].isnan().all()
    assert got[:, [*range(7), *range(8, 40)]].isfinite().all()
    assert not got[3, :7].any()


SPLIT = [
    Case(9, 200, 1024, block=(128, 128)),
    Case(16, 200, 3000, block=(128, 128), a_scales="m"),
    Case(33, 300, 3000, block=(128, 1)),
    Case(20, 130, 2048, block=(64, 64), scale_dtype=e8m0, bias=False),
]


@pytest.mark.parametrize("case", sampled(SPLIT), ids=str)
def test_small_m_and_a_long_k_are_split(case):
    """A last part of K that is shorter, and one that is empty; the bias is added once."""
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    with collect() as report:
        generated = generate(
            lambda *given: F.silu(gemm(case)(*given)), lambda device: make_inputs(case, device)
        )
    kernel = report.kernels[0].chosen
    assert kernel.startswith("fp8_block_split_k ")
    # the sum, the bias and SiLU are one kernel after the GEMM
    assert len(generated.kernels) == (2 if "_k" in kernel.split()[1] else 1)
    assert_close(simulate.interpret(generated, inputs), F.silu(reference(case, inputs)), slack=2)


def test_k_is_not_split_if_m_is_symbolic():
    """The partials would be fp32 [split_k, M, N], whatever M becomes."""
    case = dataclasses.replace(SPLIT[1], m=8, k=1500)

    def make(device):
        inputs = make_inputs(case, device)
        for tensor, dim in ((inputs[0], 0), (inputs[2], 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        return inputs

    with collect() as report:
        generated = generate(gemm(case), make)
    kernel = report.kernels[0].chosen
    assert kernel.startswith("fp8_block_split_k ")
    assert "_k" not in kernel.split()[1]
    for m in (3, 33):
        other = dataclasses.replace(case, m=m)
        inputs = make_inputs(other, "cpu")
        assert_close(simulate.interpret(generated, inputs), reference(other, inputs))


@pytest.mark.parametrize("split", ["", "_k4"], ids=["unsplit", "other split"])
def test_a_split_that_cannot_be_generated_leaves_the_next_its_own_shape(split, monkeypatch):
    append = select._append_choice

    def refuse_halves(kernel, config, *rest):
        return config.split_k != 2 and append(kernel, config, *rest)

    monkeypatch.setattr(select, "_append_choice", refuse_halves)
    case = SPLIT[0]
    inputs = make_inputs(case, "cpu")
    tile = "fp8_block_split_k 16x64x128_w4_s4_g8"
    with collect() as report:
        generated = generate(
            gemm(case), lambda device: make_inputs(case, device), f"{tile}_k2", tile + split
        )
    assert report.kernels[0].offered == (tile + split,)
    assert_close(simulate.interpret(generated, inputs), reference(case, inputs))
