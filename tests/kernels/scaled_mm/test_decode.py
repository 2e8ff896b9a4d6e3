"""The decode kernels of 8-bit operands: when they apply, and what ptxas makes of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.decode import kernel as decode
from inductor_quant.ops import fp8, w8a8
from inductor_quant.report.events import collect
from inductor_quant.spec.gemm import ScaleSpec
from tests.support.gemms import fp8 as eight
from tests.support.gemms import w8a8 as integers
from tests.support.gemms.generated import generate
from tests.support.sampling import sampled

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
PROBLEM = Problem(m=8, n=6144, k=4096, has_aligned_rows=True)
FLOAT, BF16 = torch.float32, torch.bfloat16
TOKEN, CHANNEL = ScaleSpec(FLOAT, (1, -1)), ScaleSpec(FLOAT, (-1, 1))
INT8 = w8a8.make_spec(a_scale=TOKEN, b_scale=CHANNEL, out_dtype=BF16, bias=True)
A_BLOCKS, B_BLOCKS = ScaleSpec(FLOAT, (1, 128)), ScaleSpec(FLOAT, (128, 128))
BLOCKS = fp8.make_spec(a_scale=A_BLOCKS, b_scale=B_BLOCKS, out_dtype=BF16, bias=False)


ROWS = fp8.make_spec(a_scale=TOKEN, b_scale=CHANNEL, out_dtype=BF16, bias=True)


KERNELS = [
    (decode.W8A8_DECODE, INT8),
    (decode.FP8_DECODE, ROWS),
    (decode.FP8_BLOCK_DECODE, BLOCKS),
]
FAMILIES = [kernel.family for kernel, _ in KERNELS]


@pytest.mark.parametrize(("kernel", "spec"), KERNELS, ids=FAMILIES)
def test_decode_on_hopper(kernel, spec):
    assert kernel.rejection(spec, PROBLEM, H200) is None
    for config in kernel.configs(spec, PROBLEM, H200):
        assert kernel.config_rejection(spec, PROBLEM, config, H200) is None


@pytest.mark.parametrize(
    ("n", "k", "config"),
    [
        (6144, 4096, "8x16x2048_w8_s1_g8"),
        (24576, 1536, "8x16x2048_w8_s1_g8"),
        (2112, 7168, "8x16x4096_w16_s1_g8"),  # 132 tiles
        (1024, 2048, "8x16x2048_w8_s1_g8"),
        (4096, 1024, "8x16x1024_w8_s1_g8"),
        (32768, 512, "8x16x512_w4_s1_g8"),
        (16384, 128, "8x16x512_w4_s1_g8"),
    ],
)
def test_a_step_is_shorter_than_twice_k(n, k, config):
    problem = dataclasses.replace(PROBLEM, n=n, k=k)
    assert str(decode.FP8_BLOCK_DECODE.configs(BLOCKS, problem, H200)[0]) == config


@pytest.mark.parametrize(("kernel", "spec"), KERNELS, ids=FAMILIES)
@pytest.mark.parametrize(
    "problem",
    [
        dataclasses.replace(PROBLEM, m=9),
        dataclasses.replace(PROBLEM, m_is_static=False, m_is_bounded=False),
        dataclasses.replace(PROBLEM, k=4096 + 64),
        dataclasses.replace(PROBLEM, k=16384),
        dataclasses.replace(PROBLEM, n=57344),
        dataclasses.replace(PROBLEM, m=1, n=1),
        dataclasses.replace(PROBLEM, has_aligned_rows=False),
    ],
    ids=str,
)
def test_other_problems_are_for_other_kernels(kernel, spec, problem):
    assert kernel.rejection(spec, problem, H200) is not None


def test_no_other_groups_or_devices():
    grouped = w8a8.make_spec(a_scale=A_BLOCKS, b_scale=CHANNEL, out_dtype=BF16, bias=False)
    blocks = {"a_scale": ScaleSpec(FLOAT, (1, 64)), "b_scale": ScaleSpec(FLOAT, (64, 128))}
    short = fp8.make_spec(**blocks, out_dtype=BF16, bias=False)
    ampere = dataclasses.replace(H200, arch=80)
    for (kernel, spec), other in zip((KERNELS[0], KERNELS[2]), (grouped, short), strict=True):
        assert kernel.rejection(other, PROBLEM, H200) is not None
        assert kernel.rejection(spec, PROBLEM, ampere) is not None


CASES = {
    "w8a8": (integers.Case(3, 2100, 8192), integers, "mma.sync.aligned.m16n8k32.row.col.satfinite"),
    "fp8": (
        eight.Case(3, 2100, 8192),
        eight,
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    ),
    "fp8_block": (
        eight.Case(1, 2112, 8192, block=(128, 128), a_scales="m"),
        eight,
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("family", "config"), sampled(itertools.product(CASES, decode.CONFIGS[:3])), ids=str
)
def test_loads_go_to_the_lane_that_multiplies(family, config):
    case, support, instruction = CASES[family]
    with collect() as report:
        generated = generate(
            support.gemm(case),
            lambda device: support.make_inputs(case, device),
            f"{family}_decode {config}",
        )
    [choice] = report.kernels
    assert choice.chosen.startswith(f"{family}_decode")
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == compiled.spill_loads == 0
    assert ".maxnreg 128" in compiled.ptx
    # 32 elements of K an instruction, 128 a slice
    [(found, count)] = compiled.matrix_instructions().items()
    assert found.startswith(instruction)
    assert count == decode.slices(config) * 4
    # loads of the first step and of the next ones: 16 bytes a lane, 8 rows, half of the slice
    loads = decode.slices(config) * 2 * 3
    assert compiled.ptx.count(".v4.b32 {") >= 2 * loads
