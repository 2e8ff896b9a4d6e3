"""Numerics of the ``scaled_experts`` kernels for many rows an expert on Hopper, run by Triton's
interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.scaled_experts.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.kernels.scaled_mm.large_m_sm90.kernel import tile
from inductor_quant.simulate.interpreter import gluon as interpreter
from tests.support.gemms.generated import generate
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs, reference
from tests.support.sampling import sampled

pytestmark = [
    pytest.mark.interp,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]
e4m3, i8 = torch.float8_e4m3fn, torch.int8
BLOCK = (128, 128)


@pytest.fixture(autouse=True)
def any_size_and_a_small_chip(monkeypatch):
    monkeypatch.setattr(large_m_sm90, "MIN_FILL", 0)
    monkeypatch.setattr(large_m_sm90, "MIN_MEAN_ROWS", 0)
    small = dataclasses.replace(simulate.GPUS[90], num_sms=3)
    monkeypatch.setitem(simulate.GPUS, 90, small)  # a CTA has several tiles


TALL = "tall"  # tiles of 192 rows, by three warpgroups


def config_of(columns):
    return large_m_sm90.TALL if columns == TALL else tile(columns, group_m=8)


def check(case, columns):
    torch.manual_seed(0)
    name = "scaled_experts_int8_large_m_sm90" if case.dtype == i8 else "scaled_experts_large_m_sm90"
    generated = generate(
        gemm(case), lambda device: make_inputs(case, device), f"{name} {config_of(columns)}"
    )
    assert any("gl.warp_specialize" in source for source in generated.kernels.values())
    inputs = make_inputs(case, "cpu")
    got = simulate.interpret(generated, inputs)
    want = reference(case, inputs)
    bound = 4e-3 * want.abs() + 4e-3 * want.abs().max() * 1e-2
    assert ((got - want).abs() <= bound).all()
    assert not got[sum(case.counts) :].any()


# N and K end within a tile; empty experts at both ends and between; rows of no expert, more than a
# tile; one expert with all rows; no expert with rows; more tiles of rows than are grouped
CASES = [
    (Case((0, 3, 0, 140, 1, 0), 264, 272, e4m3, BLOCK, left_over=5), 256),
    (Case((0, 3, 0, 140, 1, 0), 264, 272, i8, left_over=133), 256),
    (Case((70, 0, 129), 400, 528, e4m3, BLOCK), 192),
    (Case((0, 0, 300), 200, 144, e4m3, BLOCK), 128),
    (Case((128, 1, 64, 65), 136, 272, e4m3), 96),
    (Case((128, 0, 65), 136, 144, i8), 64),
    (Case((0, 0), 136, 144, i8, left_over=130), 64),
    (Case((5, 290), 136, 400, e4m3, fast_accum=True), 256),
    (Case((5, 130), 136, 128, i8, has_scales=False), 192),
    (Case((0, 3, 0, 140, 1, 200), 264, 272, e4m3, BLOCK, left_over=5), TALL),
    (Case((64, 193, 130), 136, 400, e4m3, BLOCK, left_over=133), TALL),
    (Case((0, 3, 0, 140, 1, 200), 264, 272, e4m3, left_over=5), TALL),
    (Case((64, 193, 130), 136, 400, e4m3, fast_accum=True, left_over=133), TALL),
    (Case((1, 193, 0, 130), 136, 272, i8, left_over=5), TALL),
]


@pytest.mark.parametrize(
    ("case", "columns"), [*sampled(CASES[:-5], 4), *CASES[-5:-3], *sampled(CASES[-3:], 1)], ids=str
)
def test_rows_of_an_expert_are_close_to_fp64(case, columns):
    check(case, columns)


@pytest.mark.parametrize("count", [129, 33])
def test_tiles_of_many_experts_are_found(count):
    counts = [150 if expert % 37 == 3 else 0 for expert in range(count)]
    counts[-1] = 3
    check(Case(tuple(counts), 136, 144, i8, left_over=5), 64)


OF_MANY = Case((2, 3, 5, *[0] * 130), 72, 256, e4m3, BLOCK)  # looked at in two parts


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", [Case((2, 3, 5), 72, 256, i8), OF_MANY], ids=["3", "133"])
@pytest.mark.parametrize("offsets", [(-5, 2, 900), (7, 3, 1), (2**31 - 1, -(2**31), 5)])
def test_arbitrary_offsets_leave_the_rows_they_miss(case, offsets):
    """Autotuning runs on them: nothing beyond the tensors is read or written."""
    a, b, _, a_scale, b_scale = make_inputs(case, "cpu")
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    scales = torch.full((30, a_scale.shape[1]), float("nan"))
    scales[10:20] = a_scale
    route = torch.tensor((offsets * 50)[: len(case.counts)], dtype=torch.int32)
    got = simulate.interpret(generated, (a, b, route, scales[10:20], b_scale))
    assert got.shape == (10, 72)


@pytest.mark.parametrize(
    ("case", "columns"),
    [
        (Case((64, 65, 3), 64, 256, i8), 64),
        (Case((64, 65, 3), 64, 256, e4m3, BLOCK), TALL),
    ],
    ids=str,
)
def test_a_warpgroup_without_rows_multiplies_nothing(case, columns, monkeypatch):
    products = []

    def counted(*args, **kwargs):
        products.append(args)
        return multiply(*args, **kwargs)

    multiply = interpreter._multiply
    monkeypatch.setattr(interpreter, "_multiply", counted)
    gluon.runtime.cache_clear()
    try:
        check(case, columns)
    finally:
        gluon.runtime.cache_clear()
    assert len(products) == (1 + 2 + 1) * 2  # warpgroups with rows, steps along K


def test_one_compilation_serves_any_number_of_rows():
    first = Case((0, 70, 5), 72, 256, i8)

    def make(device):
        a, b, offsets, *scales = make_inputs(first, device)
        torch._dynamo.mark_dynamic(a, 0)
        torch._dynamo.mark_dynamic(scales[0], 0)
        return a, b, offsets, *scales

    torch.manual_seed(0)
    generated = generate(
        gemm(first), make, f"scaled_experts_int8_large_m_sm90 {tile(64, group_m=8)}"
    )
    for counts, left_over in (((0, 0, 1), 0), ((130, 0, 30), 4), ((0, 0, 0), 2), ((0, 0, 0), 0)):
        case = Case(counts, 72, 256, i8, left_over=left_over)
        inputs = make_inputs(case, "cpu")
        got = simulate.interpret(generated, inputs)
        want = reference(case, inputs)
        assert got.shape == want.shape
        assert ((got - want).abs() <= 4e-3 * want.abs()).all()
