"""The Gluon kernel of ``w8a8``: when it applies, which tile it takes, what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import _gluon_compat as gluon
from inductor_quant import simulate
from inductor_quant.kernels import mm_gluon, w8a8_gluon
from inductor_quant.kernels.config import Device, Problem
from inductor_quant.ops.w8a8 import make_spec
from inductor_quant.report import collect
from inductor_quant.spec import ScaleSpec
from tests.support.generated import generate
from tests.support.numerics import Case, gemm, make_inputs

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
PROBLEM = Problem(1024, 6144, 4096, has_aligned_rows=True, is_stored_narrow=True)
SPEC = make_spec(a_scale=None, b_scale=None, out_dtype=torch.bfloat16, bias=False)
GROUPS = make_spec(
    a_scale=None,
    b_scale=ScaleSpec(torch.float32, (128, 1)),
    out_dtype=torch.bfloat16,
    bias=False,
)
needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


def sized(m, n, k, **other):
    return dataclasses.replace(PROBLEM, m=m, n=n, k=k, **other)


@pytest.mark.parametrize(
    ("spec", "problem", "arch"),
    [
        (SPEC, PROBLEM, 100),
        (GROUPS, PROBLEM, 90),
        (SPEC, sized(255, 28672, 4096), 90),
        (SPEC, sized(256, 4096, 4096), 90),  # too few products
        (SPEC, sized(65536, 5120, 1280), 90),  # K is short
        (SPEC, sized(4096, 140, 16384), 90),  # no tile that fills the chip
        (SPEC, dataclasses.replace(PROBLEM, has_aligned_rows=False), 90),
        (SPEC, dataclasses.replace(PROBLEM, is_stored_narrow=False), 90),
        (SPEC, dataclasses.replace(PROBLEM, needs_spare_row=True), 90),
    ],
)
def test_what_is_for_the_other_kernels(spec, problem, arch):
    device = dataclasses.replace(H200, arch=arch)
    assert w8a8_gluon.supports(SPEC, PROBLEM, H200) is None
    assert w8a8_gluon.supports(spec, problem, device) is not None


@pytest.mark.parametrize(
    ("m", "n", "k", "columns"),
    [
        (256, 6144, 4096, 96),
        (256, 4096, 14336, 64),
        (512, 28672, 4096, 128),
        (512, 6144, 4096, 192),
        (512, 4096, 14336, 128),
        (1024, 4096, 14336, 256),
        (4096, 28672, 4096, 128),
    ],
)
def test_the_tile_is_the_one_that_was_fastest(m, n, k, columns):
    """H200; a round of tiles should leave no SM without one, and few need a second."""
    problem = sized(m, n, k)
    assert w8a8_gluon.supports(SPEC, problem, H200) is None
    best, *_ = w8a8_gluon.configs(SPEC, problem, H200)
    assert best.block_n == columns


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize("columns", [96, 256])
def test_groups_of_warps_multiply_and_no_register_is_spilled(columns):
    config = mm_gluon.tile(columns, group_m=8)
    case = Case(4096, 4000, 4112)
    with collect() as report:
        generated = generate(
            gemm(case), lambda device: make_inputs(case, device), f"w8a8_gluon {config}"
        )
    assert report.kernels[0].chosen == f"w8a8_gluon {config}"
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == 0
    assert compiled.shared_bytes <= H200.shared_memory
    widths = {96: [64, 32], 256: [128, 128]}[columns]
    assert compiled.matrix_instructions() == {
        f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8": 8 * widths.count(n) for n in widths
    }
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
