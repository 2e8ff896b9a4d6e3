"""int8 in few tiles that are computed as their transpose: where it is chosen, what is compiled."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.mm.kernel import SWAPPED, W8A8_SWAP_AB
from inductor_quant.ops import w8a8
from inductor_quant.report.events import collect
from inductor_quant.spec.gemm import ScaleSpec
from tests.support.gemms import w8a8 as gemms
from tests.support.gemms.generated import generate

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
ROW, COLUMN = ScaleSpec(torch.float32, (1, -1)), ScaleSpec(torch.float32, (-1, 1))
SPEC = w8a8.make_spec(a_scale=ROW, b_scale=COLUMN, out_dtype=torch.bfloat16, bias=True)


def chosen(problem, device=H200):
    if W8A8_SWAP_AB.rejection(SPEC, problem, device) is not None:
        return None
    return next(map(str, W8A8_SWAP_AB.configs(SPEC, problem, device)), None)


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (Problem(16, 4864, 896), "16x64x128_w4_s6_g8"),
        (Problem(24, 9216, 3072), "32x128x128_w4_s6_g8"),
        (Problem(48, 1152, 1152), "16x64x128_w4_s6_g8"),
        (Problem(95, 2304, 768), "32x64x128_w4_s6_g8"),
        (Problem(96, 5120, 5120), "32x128x128_w4_s6_g8"),
        (Problem(64, 4096, 4096), None),  # in the table of w8a8_mm
        (Problem(16, 4608, 3584), None),  # which has tiles of 16 rows
        (Problem(160, 1152, 1152), None),
        (Problem(48, 1000, 1001), None),  # rows begin at any byte
        (Problem(48, 1152, 1152, m_is_static=False, m_is_bounded=False), None),
    ],
)
def test_few_tiles_of_few_rows_are_taken(problem, tile):
    assert chosen(problem) == tile


def test_it_is_for_wgmma_alone():
    problem = Problem(48, 1152, 1152)
    assert chosen(problem, Device(arch=80, num_sms=108, shared_memory=166912)) is None
    assert chosen(problem, Device(arch=100, num_sms=148, shared_memory=232448)) is None


def test_groups_and_spare_rows_are_for_w8a8_mm():
    grouped = w8a8.make_spec(
        a_scale=ScaleSpec(torch.float32, (1, 128)),
        b_scale=COLUMN,
        out_dtype=torch.bfloat16,
        bias=False,
    )
    problem = Problem(48, 1152, 1152)
    assert W8A8_SWAP_AB.rejection(grouped, problem, H200) is not None
    spare = dataclasses.replace(problem, needs_spare_row=True)
    assert W8A8_SWAP_AB.rejection(SPEC, spare, H200) is not None


def test_only_its_own_tiles_can_be_pinned():
    problem = Problem(48, 1152, 1152)
    for text, is_legal in (("32x64x128_w4_s6_g8", True), ("128x128x128_w4_s3_g8", False)):
        found = W8A8_SWAP_AB.config_rejection(SPEC, problem, parse_config(text), H200)
        assert (found is None) == is_legal


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize("config", [str(config) for config in SWAPPED])
def test_wgmma_has_the_columns_of_b_as_rows(config):
    """64 of them; nothing spills."""
    case = gemms.Case(96, 2304, 768)
    with collect() as report:
        generated = generate(
            gemms.gemm(case),
            lambda device: gemms.make_inputs(case, device),
            f"w8a8_swap_ab {config}",
        )
    assert report.kernels[0].chosen == f"w8a8_swap_ab {config}"
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == compiled.spill_loads == 0
    block_m = int(config.partition("x")[0])
    [instruction] = compiled.matrix_instructions()
    assert f"m64n{block_m}k32.s32.s8.s8" in instruction
