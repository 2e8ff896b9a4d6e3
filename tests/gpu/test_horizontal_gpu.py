"""Several GEMMs of one activation in one launch, on a real GPU."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.report.events import collect
from tests.support.gemms import formats, fp8, w4a8, w8a8, weight_only
from tests.support.gemms.horizontal import (
    DecoderLayer,
    Floats,
    Group,
    Int4,
    Integers,
    PackedLayout,
    words,
)
from tests.support.spellings.quantizers import TorchaoLinear

pytestmark = pytest.mark.gpu

bf16, f32 = torch.bfloat16, torch.float32
COLUMNS = (1024, 256, 512)


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def run(fn, inputs, **options):
    torch._dynamo.reset()
    given = {f"inductor_quant.{name}": value for name, value in options.items()}
    given["inductor_quant.on_error"] = "raise"
    with torch.no_grad(), collect() as report:
        compiled = torch.compile(fn, backend="inductor_quant", dynamic=False, options=given)
        return compiled(*inputs), report


@pytest.mark.parametrize(("m", "block_m"), [(1, 8), (16, 16)])
@pytest.mark.parametrize(
    ("name", "tile"),
    [("gptq", "128x128_w2"), ("awq", "128x128_w1"), ("nibble_pairs", "128x128_w2")],
)
def test_words_compute_what_each_gemm_alone_does(name, tile, m, block_m):
    """In the same configuration, but for which multiply-adds the compiler contracts (awq in one
    warp: 3 of 28,672 elements, by one rounding); and in its own each is close to fp64."""
    torch.manual_seed(0)
    group: Group = PackedLayout(weight_only.Case(name, m, 0, 2048, bias=True), COLUMNS)
    inputs = group.make_inputs("cuda")
    pinned = (f"weight_only_small_m {block_m}x{tile}_s3_g8_k4",)
    got, report = run(group.grouped, inputs, configs=pinned)
    assert all(choice.is_horizontal for choice in report.kernels)
    each, report = run(group.alone, inputs, configs=pinned)
    assert not any(choice.is_horizontal for choice in report.kernels)
    for result, want in zip(got, each, strict=True):
        assert (result != want).float().mean() <= 1e-3
        assert ((result - want).abs() <= 2**-7 * want.abs()).all()
    got, report = run(group.grouped, inputs)
    assert all(choice.is_horizontal for choice in report.kernels)
    for result, case, part in zip(got, group.cases, group.parts(inputs), strict=True):
        weight_only.assert_right(result, case, part)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(("name", "groups"), [("nibble_pairs", True), ("awq", False)])
def test_int4_weights_are_close_to_fp64(name, groups, m):
    torch.manual_seed(0)
    group = Int4(w4a8.Case(name, m, 0, 2048, groups=groups), COLUMNS)
    inputs = group.make_inputs("cuda")
    got, report = run(group.grouped, inputs)
    assert all(choice.is_horizontal for choice in report.kernels)
    for result, want in zip(got, group.exact(inputs), strict=True):
        w4a8.assert_close(result.cpu(), want)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_integers_are_exact(m):
    torch.manual_seed(0)
    case = w8a8.Case(m, 0, 512, out_dtype=f32, bias=False)
    group = Integers(case, COLUMNS)
    inputs = group.make_inputs("cuda")
    got, report = run(group.grouped, inputs)
    assert all(choice.is_horizontal for choice in report.kernels)
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert torch.equal(result.double(), want)


@pytest.mark.parametrize("m", [1, 3, 8])
def test_floats_are_close_to_fp64(m):
    torch.manual_seed(0)
    group = Floats(fp8.Case(m, 0, 1536), COLUMNS)
    inputs = group.make_inputs("cuda")
    got, report = run(group.grouped, inputs)
    assert all(choice.is_horizontal for choice in report.kernels)
    for result, want in zip(got, group.exact(inputs), strict=True):
        w8a8.assert_close(result, want)


@pytest.mark.parametrize(
    ("m", "k", "columns"),
    [
        (8200, 1024, (1024, 1024, 1024)),
        (2050, 4096, (4096, 1024, 1024)),
        (300, 2048, (2048, 512, 512)),
    ],
)
def test_integers_of_many_rows_are_exact(m, k, columns):
    torch.manual_seed(0)
    group = Integers(w8a8.Case(m, 0, k, bias=False), columns)
    inputs = group.make_inputs("cuda")
    got, report = run(group.grouped, inputs)
    assert all(choice.is_horizontal for choice in report.kernels)
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert torch.equal(result, want.to(result.dtype))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("linear", [words, TorchaoLinear])
def test_a_decoder_layer_computes_the_same(linear, rows):
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer, x = DecoderLayer(linear, 512), torch.randn(rows, 1, 512, dtype=bf16)
    one, report = run(layer, (x,))
    assert sum(choice.is_horizontal for choice in report.kernels) == 5
    apart, report = run(layer, (x,), horizontal_fusion=False)
    assert not any(choice.is_horizontal for choice in report.kernels)
    assert one.stride() == apart.stride()
    assert (one - apart).abs().max() <= 0.05 * apart.abs().max()
