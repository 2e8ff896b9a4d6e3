"""Simplified activation quantization: which graphs are rewritten, and that the values stay."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch._inductor import config

from inductor_quant import simulate
from inductor_quant.ops.fusion import quantize
from inductor_quant.options import Options
from tests.support.gemms.generated import generate
from tests.support.graphs.post_grad import W8A8, capture, count
from tests.support.sampling import sampled

aten = torch.ops.aten
K, N = 64, 48


def linear(quantized, scale, w):
    return torch._int_mm(quantized, w.t()).float() * scale


def scale_of(x):
    return x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127


def divided(x, w):
    scale = scale_of(x)
    return linear((x / scale).round().clamp(-128, 127).to(torch.int8), scale, w)


def multiplied(x, w):
    scale = scale_of(x)
    return linear((x * (1 / scale)).round().clamp(-127, 127).to(torch.int8), scale, w)


def unclamped(x, w):
    scale = scale_of(x)
    return linear((x / scale).round().to(torch.int8), scale, w)


def unclamped_by_a_reciprocal(x, w):
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-5).float() * (1 / 127) + 1e-9
    return linear((x.float() * (1 / scale)).round().to(torch.int8), scale, w)


def unclamped_by_the_tensor(x, w):
    scale = x.abs().amax().float() / 127
    return linear((x.float() / scale).round().to(torch.int8), scale, w)


def of_one_side(x, w):
    scale = scale_of(x)
    return linear((x / scale).round().clamp_min(-100).clamp_max(90).to(torch.int8), scale, w)


def clamped_on_one_side(x, w):
    scale = scale_of(x)
    return linear((x / scale).round().clamp_min(-100).to(torch.int8), scale, w)


def in_three_dimensions(x, w):
    scale = scale_of(x[None])
    a = (x[None] / scale).round().clamp(-128, 127).to(torch.int8).reshape(-1, K)
    return linear(a, scale.reshape(-1, 1), w)


TAKEN = {
    divided: (-128, 127),
    multiplied: (-127, 127),
    unclamped: (-128, 127),
    unclamped_by_a_reciprocal: (-128, 127),
    unclamped_by_the_tensor: (-128, 127),
    of_one_side: (-100, 90),
    clamped_on_one_side: (-100, 127),
    in_three_dimensions: (-128, 127),
}


def make(device, m=17):
    x = torch.empty(m, K, dtype=torch.bfloat16, device=device)
    w = torch.empty(N, K, dtype=torch.int8, device=device)
    if device == "cpu":
        x, w = x.normal_(), w.random_(-128, 128)
    return x, w


def rewritten(fn, make=make):
    """The graph after our pass, which computes what ``fn`` does."""
    torch.manual_seed(0)
    _, [rewrite] = capture(fn, make("cpu"))
    return rewrite.after


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fn", TAKEN, ids=lambda fn: fn.__name__)
def test_rounding_clamp_and_cast_are_one_op(fn):
    after = rewritten(fn)
    [node] = after.graph.find_nodes(op="call_function", target=quantize.op)
    assert node.args[2:] == TAKEN[fn]
    assert (node.args[1] is None) == (fn in (multiplied, unclamped_by_a_reciprocal))
    for op in (aten.round.default, aten.clamp.default, aten.clamp_min.default):
        is_the_scales = op is aten.clamp_min.default and fn is not unclamped_by_the_tensor
        assert count(after, op) == is_the_scales
    # that of the scale
    assert count(after, aten.div.Tensor) == (fn is not unclamped_by_a_reciprocal)


def truncated(x, w):
    scale = scale_of(x)
    return linear((x / scale).to(torch.int8), scale, w)


def wrapping(x, w):
    scale = scale_of(x) / 2
    return linear((x / scale).round().clamp(-300, 300).to(torch.int8), scale, w)


def between_fractions(x, w):
    scale = scale_of(x)
    return linear((x / scale).round().clamp(-3.5, 3.5).to(torch.int8), scale, w)


def rounded_for_others(x, w):
    scale = scale_of(x)
    rounded = (x / scale).round()
    return linear(rounded.clamp(-128, 127).to(torch.int8), scale, w), rounded


def disjoint(x, w):
    scale = scale_of(x)
    return linear((x / scale).round().clamp(-128, -5).clamp(5, 127).to(torch.int8), scale, w)


def static(x, w):
    return linear((x * 32.0).round().to(torch.int8), 0.03125, w)


def one_side_alone(x, w):
    return linear((x * 32.0).round().clamp_min(-128).to(torch.int8), 0.03125, w)


def by_another_tensor(x, w):
    scale = scale_of(x * 0.5)
    return linear((x / scale).round().to(torch.int8), scale, w)


def up_to_128(x, w):
    """127.5 is a tie, which rounds to 128."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127.5
    return linear((x / scale).round().to(torch.int8), scale, w)


def by_the_largest(x, w):
    """An amax without abs does not bound negative values."""
    scale = x.float().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return linear((x / scale).round().to(torch.int8), scale, w)


def by_a_rounded_scale(x, w):
    """A bf16 scale may be less than absmax / 127."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).float()
    return linear((x / scale).round().to(torch.int8), scale, w)


def by_less_than_the_scale(x, w):
    scale = scale_of(x) - 1e-3
    return linear((x / scale).round().to(torch.int8), scale, w)


UNCERTAIN = [
    static,
    one_side_alone,
    by_another_tensor,
    up_to_128,
    by_the_largest,
    by_a_rounded_scale,
    by_less_than_the_scale,
]
LEFT = [truncated, wrapping, between_fractions, rounded_for_others, disjoint, *UNCERTAIN]


@pytest.mark.parametrize("fn", LEFT, ids=lambda fn: fn.__name__)
def test_what_reads_otherwise_stays(fn):
    after = rewritten(fn)
    assert count(after, W8A8) == 1
    assert count(after, quantize.op) == 0


def test_strict_numerics_keep_the_division():
    torch.manual_seed(0)
    with config.patch(emulate_precision_casts=True):
        _, [rewrite] = capture(divided, make("cpu"), options=Options(numerics="strict"))
    assert count(rewrite.after, W8A8) == 1
    assert count(rewrite.after, quantize.op) == 0


def test_a_quotient_that_others_read_stays_a_quotient():
    def fn(x, w):
        scale = scale_of(x)
        quotient = x / scale
        return linear(quotient.round().clamp(-128, 127).to(torch.int8), scale, w), quotient

    after = rewritten(fn)
    assert count(after, quantize.op) == 1
    assert count(after, aten.div.Tensor) == 2


def test_a_division_that_is_not_by_rows_stays():
    def fn(x, w, columns):
        a = (x.float() / columns).round().clamp(-128, 127).to(torch.int8)
        return linear(a, 0.5, w)

    def make_three(device):
        return (*make(device), torch.ones(K, device=device))

    after = rewritten(fn, make_three)
    assert count(after, quantize.op) == 1
    assert count(after, aten.div.Tensor) == 1


def scales_of_groups(x):
    """As compressed-tensors."""
    low, high = torch.aminmax(x.unflatten(-1, (-1, 32)), dim=-1, keepdim=True)
    low, high = (
        torch.minimum(low, torch.zeros_like(low)),
        torch.maximum(high, torch.zeros_like(high)),
    )
    return torch.maximum(low.abs(), high.abs()) / x.new_full((), 448.0)


def test_the_scale_of_a_group_takes_one_reduction():
    def fn(x, w):
        return divided(x, w), scales_of_groups(x)

    torch.manual_seed(0)
    x, w = make("cpu")
    x[0, 0], x[1, 0], x[2] = math.nan, -math.inf, 0
    (_, scales), [rewrite] = capture(fn, (x, w))
    assert torch.equal(scales.nan_to_num(77), scales_of_groups(x).nan_to_num(77))
    assert count(rewrite.after, aten.amin.default) == 0
    assert count(rewrite.after, aten.amax.default) == 1


def test_the_ends_of_different_groups_stay_two_reductions():
    def fn(x, w):
        low, high = x.view(17, 8, 8).amin(1), x.view(17, 8, 8).amax(2)
        zero = torch.zeros_like(low)
        return divided(x, w), torch.maximum(-torch.minimum(low, zero), torch.maximum(high, zero))

    assert count(rewritten(fn), aten.amin.default) == 1


def test_a_maximum_of_inputs_stays():
    def fn(x, w):
        zero = torch.zeros_like(x)
        both = torch.maximum(-torch.minimum(x, zero), torch.maximum(x, zero))
        return divided(x, w), both

    assert count(rewritten(fn), aten.maximum.default) == 2


def compiled(fn, m):
    return generate(fn, lambda device: make(device, m))


@pytest.mark.compiles
def test_an_element_takes_a_maximum_a_product_and_a_conversion():
    source = next(iter(compiled(divided, 256).kernels.items()))
    ptx = simulate.compile_kernel(*source).ptx
    elements = len(re.findall(r"cvt\.rni\.sat\.s8", ptx))
    assert elements > 0
    assert len(re.findall(r"div\.full", ptx)) <= 2  # of a row
    assert not re.search(r"cvt\.rni\.f32|cvt\.rzi", ptx)
    assert len(re.findall(r"setp", ptx)) < elements + 8


@pytest.mark.interp
@pytest.mark.parametrize("fn", sampled(TAKEN), ids=lambda fn: fn.__name__)
def test_it_computes_what_eager_does(fn):
    torch.manual_seed(0)
    x, w = make("cpu")
    x[3] = 0
    x[5, 7] = 1000.0
    got = simulate.interpret(compiled(fn, 17), (x, w))
    want = fn(x, w)
    step = scale_of(x) * 128
    # a tie may round the other way: one step of one product in its row
    assert ((got - want).abs() <= step).all()
    assert (got != want).any(-1).sum() <= 4


@pytest.mark.interp
def test_nan_and_infinity_are_what_eager_makes_of_them():
    torch.manual_seed(0)
    x, w = make("cpu")
    x[0, 3], x[1, 3], x[2, 3] = math.nan, math.inf, -math.inf
    got = simulate.interpret(compiled(divided, 17), (x, w))
    assert got[:3].isnan().all()
    assert divided(x, w)[:3].isnan().all()
    assert got[3:].isfinite().all()
