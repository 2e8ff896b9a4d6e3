"""Numerics of horizontal launches of int8 GEMMs with many rows, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.problem import Device
from inductor_quant.kernels.scaled_mm.large_m_sm90 import kernel as large_m_sm90
from inductor_quant.lowering import select
from tests.support.gemms.generated import generate
from tests.support.gemms.horizontal import Integers
from tests.support.gemms.large_m import at_any_size
from tests.support.gemms.w8a8 import Case, assert_close
from tests.support.sampling import sampled

pytestmark = pytest.mark.interp

PERSISTENT = "w8a8_persistent 128x128x128_w4_s3_g4"


@pytest.fixture(autouse=True)
def any_size_and_a_small_chip(monkeypatch):
    """A CTA has several tiles, of several GEMMs."""
    at_any_size(monkeypatch, sms=2)
    small = Device(90, num_sms=1, shared_memory=232448)
    monkeypatch.setattr(select, "describe_device", lambda device: small)


def run(group, fn, config):
    torch.manual_seed(0)
    inputs = group.make_inputs("cpu")
    generated = generate(fn, group.make_inputs, config)
    [name] = [name for name in generated.kernels if name.startswith("triton_tem")]
    assert config.split()[0] in generated.kernels[name]
    return inputs, simulate.interpret(generated, inputs)


def exactly(group, config):
    """Sums are exact, scales powers of two: the result is rounded once."""
    inputs, got = run(group, group.grouped, config)
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert torch.equal(result, want.to(result.dtype))


def integers(m, k, **options):
    return Case(m, 0, k, **{"bias": False, **options})


@pytest.mark.parametrize(
    "group",
    [
        Integers(integers(300, 144), (256, 128, 128)),
        Integers(integers(257, 128, b_scale="tensor"), (128, 384)),
        Integers(integers(300, 32, a_scale="tensor"), (128, 128)),
    ],
    ids=str,
)
def test_persistent_ctas_are_exact(group):
    exactly(group, PERSISTENT)


@pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")
@pytest.mark.parametrize("columns", sampled(sorted(large_m_sm90.ELEMENT_COST)))
def test_every_warp_specialized_tile_is_exact(columns):
    """The first GEMM has three tiles: of 192 columns, a pair and a half. M and K end within a
    tile."""
    group = Integers(integers(140, 272), (3 * columns, columns, 2 * columns))
    exactly(group, f"w8a8_large_m_sm90 {large_m_sm90.tile(columns, group_m=8)}")


@pytest.mark.parametrize(
    "config",
    [
        PERSISTENT,
        pytest.param(
            f"w8a8_large_m_sm90 {large_m_sm90.tile(128, group_m=8)}",
            marks=pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
        ),
    ],
)
def test_each_gemm_has_its_scales_and_bias(config):
    group = Integers(Case(300, 0, 144), (256, 128, 128))
    inputs, got = run(group, group.grouped, config)
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert_close(result, want)
