"""w8a8_large_m_sm90: when it applies, which tile it takes, what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.ops.w8a8 import make_spec
from inductor_quant.report.events import collect
from inductor_quant.spec.gemm import ScaleSpec
from tests.support import in_flight
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import Case, gemm, make_inputs

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
PROBLEM = Problem(1024, 6144, 4096, has_aligned_rows=True, is_stored_narrow=True)
SPEC = make_spec(a_scale=None, b_scale=None, out_dtype=torch.bfloat16, bias=False)
GROUPS = make_spec(
    a_scale=None,
    b_scale=ScaleSpec(torch.float32, (128, 1)),
    out_dtype=torch.bfloat16,
    bias=False,
)
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
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
        (SPEC, sized(65536, 5120, 1280), 90),  # K is short, for many rounds of tiles
        (SPEC, sized(5127, 1280, 1280), 90),  # and for few products
        (SPEC, sized(6333, 4300, 1152), 90),  # and columns are not stored in eights
        (SPEC, sized(8192, 4096, 768), 90),
        (SPEC, sized(4096, 140, 16384), 90),  # no tile that fills the chip
        (SPEC, dataclasses.replace(PROBLEM, has_aligned_rows=False), 90),
        (SPEC, dataclasses.replace(PROBLEM, is_stored_narrow=False), 90),
        (SPEC, dataclasses.replace(PROBLEM, needs_spare_row=True), 90),
    ],
)
def test_other_problems_are_for_other_kernels(spec, problem, arch):
    device = dataclasses.replace(H200, arch=arch)
    assert large_m_sm90.W8A8_LARGE_M_SM90.rejection(SPEC, PROBLEM, H200) is None
    assert large_m_sm90.W8A8_LARGE_M_SM90.rejection(spec, problem, device) is not None


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
        (5956, 768, 3072, 96),  # K is short, for a few rounds of tiles
        (4303, 3072, 1024, 128),
    ],
)
def test_the_tile_is_the_one_that_was_fastest(m, n, k, columns):
    """On an H200: tiles that leave few SMs idle in the last round."""
    problem = sized(m, n, k)
    assert large_m_sm90.W8A8_LARGE_M_SM90.rejection(SPEC, problem, H200) is None
    best, *_ = large_m_sm90.W8A8_LARGE_M_SM90.configs(SPEC, problem, H200)
    assert best.block_n == columns


@pytest.mark.one_in(2)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize("columns", [96, 256])
def test_warpgroups_multiply_and_nothing_spills(columns):
    config = large_m_sm90.tile(columns, group_m=8)
    case = Case(4096, 4000, 4112)
    with collect() as report:
        generated = generate(
            gemm(case), lambda device: make_inputs(case, device), f"w8a8_large_m_sm90 {config}"
        )
    assert report.kernels[0].chosen == f"w8a8_large_m_sm90 {config}"
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores <= (0 if TRITON < (3, 9) else 4)  # a word, read once a tile
    assert in_flight.spilled_in_loops(in_flight.machine_code(compiled.ptx)) == []
    assert compiled.shared_bytes <= H200.shared_memory
    widths = {96: [64, 32], 256: [128, 128]}[columns]
    assert compiled.matrix_instructions() == {
        f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8": 8 * widths.count(n) for n in widths
    }
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
