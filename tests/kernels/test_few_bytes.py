"""Few rows and weights of bytes in Gluon: when its kernels apply, and what ptxas makes of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import _gluon_compat as gluon
from inductor_quant import simulate
from inductor_quant.kernels import few_bytes
from inductor_quant.kernels.config import Device, Problem
from inductor_quant.ops import fp8, w8a8
from inductor_quant.report import collect
from inductor_quant.spec import ScaleSpec
from tests.support import fp8 as eight
from tests.support import numerics as integers
from tests.support.generated import generate

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
PROBLEM = Problem(m=8, n=6144, k=4096, has_aligned_rows=True)
FLOAT, BF16 = torch.float32, torch.bfloat16
TOKEN, CHANNEL = ScaleSpec(FLOAT, (1, -1)), ScaleSpec(FLOAT, (-1, 1))
INT8 = w8a8.make_spec(a_scale=TOKEN, b_scale=CHANNEL, out_dtype=BF16, bias=True)
A_BLOCKS, B_BLOCKS = ScaleSpec(FLOAT, (1, 128)), ScaleSpec(FLOAT, (128, 128))
BLOCKS = fp8.make_spec(a_scale=A_BLOCKS, b_scale=B_BLOCKS, out_dtype=BF16, bias=False)


@pytest.mark.parametrize("spec", [INT8, BLOCKS], ids=str)
def test_it_takes_few_rows_on_hopper(spec):
    assert few_bytes.supports(spec, PROBLEM, H200) is None
    for config in few_bytes.configs(spec, PROBLEM, H200):
        assert few_bytes.is_legal(spec, PROBLEM, config, H200) is None


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
def test_a_step_is_not_twice_as_long_as_k(n, k, config):
    problem = dataclasses.replace(PROBLEM, n=n, k=k)
    assert str(few_bytes.configs(BLOCKS, problem, H200)[0]) == config


@pytest.mark.parametrize("spec", [INT8, BLOCKS], ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        dataclasses.replace(PROBLEM, m=9),
        dataclasses.replace(PROBLEM, m_is_static=False),
        dataclasses.replace(PROBLEM, k=4096 + 64),
        dataclasses.replace(PROBLEM, k=16384),
        dataclasses.replace(PROBLEM, n=57344),
        dataclasses.replace(PROBLEM, m=1, n=1),
        dataclasses.replace(PROBLEM, has_aligned_rows=False),
    ],
    ids=str,
)
def test_what_it_cannot_read_is_for_the_other_kernels(spec, problem):
    assert few_bytes.supports(spec, problem, H200) is not None


@pytest.mark.parametrize(
    "spec",
    [
        w8a8.make_spec(a_scale=A_BLOCKS, b_scale=CHANNEL, out_dtype=BF16, bias=False),
        fp8.make_spec(
            a_scale=ScaleSpec(FLOAT, (1, 64)),
            b_scale=ScaleSpec(FLOAT, (64, 128)),
            out_dtype=BF16,
            bias=False,
        ),
    ],
    ids=str,
)
def test_no_other_groups(spec):
    assert few_bytes.supports(spec, PROBLEM, H200) is not None
    assert few_bytes.supports(spec, PROBLEM, dataclasses.replace(H200, arch=80)) is not None


CASES = {
    "w8a8": (integers.Case(3, 2100, 8192), integers, "mma.sync.aligned.m16n8k32.row.col.satfinite"),
    "fp8_block": (
        eight.Case(1, 2112, 8192, block=(128, 128), a_scales="m"),
        eight,
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    ),
}


@pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")
@pytest.mark.compiles
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("config", few_bytes.CONFIGS[:3], ids=str)
def test_what_a_lane_reads_it_multiplies(family, config):
    case, support, instruction = CASES[family]
    with collect() as report:
        generated = generate(
            support.gemm(case),
            lambda device: support.make_inputs(case, device),
            f"{family}_few_gluon {config}",
        )
    [choice] = report.kernels
    assert choice.chosen.startswith(f"{family}_few_gluon")
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == compiled.spill_loads == 0
    assert ".maxnreg 128" in compiled.ptx
    # 32 of K in an instruction, 128 a slice
    [(found, count)] = compiled.matrix_instructions().items()
    assert found.startswith(instruction)
    assert count == few_bytes.slices(config) * 4
    # the first step's loads and the next ones: 16 bytes a lane, 8 rows and half of the slice
    loads = few_bytes.slices(config) * 2 * 3
    assert compiled.ptx.count(".v4.b32 {") >= 2 * loads
