"""fp8_block_two_block_sm90: when it applies, what ptxas makes of it, and its numerics."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.two_block_sm90.kernel import CONFIGS, FP8_BLOCK_TWO_BLOCK_SM90
from inductor_quant.ops import fp8
from inductor_quant.report.events import collect
from inductor_quant.spec.decisions import RejectionCode
from inductor_quant.spec.gemm import ScaleSpec
from tests.support.gemms.fp8 import Case, gemm, make_inputs, reference
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import assert_close

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
SPEC = fp8.make_spec(
    a_scale=ScaleSpec(torch.float32, (1, 128)),
    b_scale=ScaleSpec(torch.float32, (128, 128)),
    out_dtype=torch.bfloat16,
    bias=False,
)
PROBLEM = Problem(128, 7168, 2048, has_aligned_rows=True)
BLOCK = (128, 128)
needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [
        (128, 7168, "64x64x256_w4_s3_g8"),
        (64, 7168, "64x32x256_w4_s3_g8"),
        (128, 8448, "64x64x256_w4_s3_g8"),
        (64, 6432, "64x32x256_w4_s3_g8"),
    ],
)
def test_tiles_fill_the_chip_once(m, n, tile):
    problem = dataclasses.replace(PROBLEM, m=m, n=n)
    assert FP8_BLOCK_TWO_BLOCK_SM90.rejection(SPEC, problem, H200) is None
    first = FP8_BLOCK_TWO_BLOCK_SM90.configs(SPEC, problem, H200)[0]
    assert str(first) == tile
    assert FP8_BLOCK_TWO_BLOCK_SM90.config_rejection(SPEC, problem, first, H200) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"m": 32},
        {"m": 100},  # no whole tile
        {"m": 192, "n": 4096},
        {"n": 7168 + 32},
        {"m_is_static": False},
        {"n": 8512},  # 266 tiles, two rounds
        {"n": 2112},
        {"k": 2048 + 128},
        {"k": 3072},  # split_k is faster
        {"has_aligned_rows": False},
    ],
    ids=str,
)
def test_other_problems_are_for_other_kernels(changed):
    problem = dataclasses.replace(PROBLEM, **changed)
    found = FP8_BLOCK_TWO_BLOCK_SM90.rejection(SPEC, problem, H200)
    assert found is not None
    assert found.code == RejectionCode.NO_KERNEL


def test_other_blocks_and_devices_are_refused():
    narrow = fp8.make_spec(
        a_scale=ScaleSpec(torch.float32, (1, 64)),
        b_scale=ScaleSpec(torch.float32, (64, 128)),
        out_dtype=torch.bfloat16,
        bias=False,
    )
    assert (
        FP8_BLOCK_TWO_BLOCK_SM90.rejection(narrow, PROBLEM, H200).code == RejectionCode.BLOCK_SHAPE
    )
    assert (
        FP8_BLOCK_TWO_BLOCK_SM90.rejection(SPEC, PROBLEM, dataclasses.replace(H200, arch=100))
        is not None
    )
    for problem, config in (
        (PROBLEM, GemmConfig(64, 128, 256, 4, 3)),
        (dataclasses.replace(PROBLEM, n=6432), CONFIGS[0]),
    ):
        found = FP8_BLOCK_TWO_BLOCK_SM90.config_rejection(SPEC, problem, config, H200)
        assert found.code == RejectionCode.BLOCK_SHAPE


@pytest.mark.one_in(2)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    "case",
    [
        Case(128, 7168, 2048, block=BLOCK, a_scales="m", bias=False),
        Case(64, 7168, 2816, block=BLOCK),
    ],
    ids=str,
)
def test_a_step_has_one_barrier_and_two_ctas_fit_an_sm(case):
    with collect() as report:
        generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [choice] = report.kernels
    assert choice.chosen.startswith("fp8_block_two_block_sm90")
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == compiled.spill_loads == 0
    steps = case.k // 256
    assert compiled.ptx.count("bar.sync") == steps
    assert compiled.ptx.count("wgmma.mma_async") == steps * 8
    assert not compiled.is_serialized
    # two on an SM
    assert 2 * (compiled.shared_bytes + 1024) <= 228 * 1024


@needs_gluon
@pytest.mark.interp
@pytest.mark.parametrize(
    ("case", "tile"),
    [
        # fewer steps than stages, and more
        (Case(128, 128, 256, block=BLOCK, a_scales="m"), "64x64"),
        (Case(64, 128, 1280, block=BLOCK, out_dtype=torch.float32), "64x32"),
    ],
    ids=str,
)
def test_results_are_close_to_fp64(case, tile, monkeypatch):
    small = dataclasses.replace(simulate.GPUS[90], num_sms=3)
    monkeypatch.setitem(simulate.GPUS, 90, small)
    torch.manual_seed(0)
    with collect() as report:
        generated = generate(gemm(case), lambda device: make_inputs(case, device))
    assert report.kernels[0].chosen.startswith(f"fp8_block_two_block_sm90 {tile}")
    inputs = make_inputs(case, "cpu")
    assert_close(
        simulate.interpret(generated, inputs), reference(case, inputs), case.out_dtype, slack=2
    )
