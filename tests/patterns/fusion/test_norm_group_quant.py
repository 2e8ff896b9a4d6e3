"""Group quantization after a norm: which graphs are rewritten, and that the values stay."""

from __future__ import annotations

import random

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inductor_quant._compat import inductor as compat
from inductor_quant.ops import fp8_block
from inductor_quant.ops.fusion import group_reduce as op
from inductor_quant.patterns.fusion.norm_group_quant import fuse_norm_and_group_quant
from tests.support.graphs.post_grad import count
from tests.support.sampling import sampled
from tests.support.spellings import group_reduce as groups
from tests.support.spellings.group_reduce import GROUP, QUANTIZATIONS, Case

aten = torch.ops.aten
bf16 = torch.bfloat16
F = torch.nn.functional


def traced(fn, inputs, unknown=()):
    """The decomposed graph, with symbolic dimensions of the first input."""
    kinds = [DimDynamic.DYNAMIC if i in unknown else DimDynamic.STATIC for i in range(9)]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first = StatelessSymbolicContext(dynamic_sizes=kinds[: inputs[0].dim()])
    fakes = [mode.from_tensor(inputs[0], symbolic_context=first)]
    fakes += [mode.from_tensor(x, static_shapes=True) for x in inputs[1:]]
    with mode:
        gm = make_fx(fn, decomposition_table=select_decomp_table())(*fakes)
    gm.graph.eliminate_dead_code()
    return gm


@pytest.fixture(autouse=True)
def _as_behind_our_recognizer_on_a_card(monkeypatch):
    monkeypatch.setattr(compat, "runs_triton", lambda device: True)
    monkeypatch.setattr(groups, "product", product)


def product(a, scale, w, w_scale):
    blocks = {"block_k": GROUP, "block_n": GROUP}
    a, w = (x if x.dtype == groups.e4m3 else x.to(groups.e4m3) for x in (a, w))
    return fp8_block.op(a, w.t(), scale, w_scale.t(), None, **blocks, out_dtype=bf16)


def rewritten(fn, inputs, unknown=()):
    """The graph after the pass, how many tensors it rewrote, results before and after."""
    before, after = traced(fn, inputs, unknown), traced(fn, inputs, unknown)
    joined = fuse_norm_and_group_quant(after.graph)
    after.graph.lint()
    after.recompile()
    return after, joined, before(*inputs), after(*inputs)


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.float().nan_to_num(77), b.float().nan_to_num(77))


CASES = [
    *(
        Case("rms", name, 5, 512, 128, along_m=name == "repeated")
        for name in QUANTIZATIONS
        if name != "around_zero"  # two reductions with zero are one before this pass
    ),
    *(Case(norm, "in_blocks", 3, 256, 128, residual=True, gate=True) for norm in groups.NORMS),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_is_written_in_the_shape_of_the_rows(case):
    torch.manual_seed(0)
    after, joined, wanted, got = rewritten(case.fn, groups.random_inputs(case))
    assert joined == 1
    assert_same(got, wanted)
    assert count(after, op.reduce_op) == 1 + (case.quantization == "of_both_ends")
    assert count(after, op.value_op) == 1
    # the one of the weight's scales stays
    assert count(after, aten.amax.default) + count(after, aten.amin.default) == 0
    for node in after.graph.find_nodes(op="call_function", target=op.reduce_op):
        assert node.meta["val"].shape == (case.m, case.k)


@pytest.mark.parametrize("unknown", [(), (0,), (1,)])
def test_rows_in_two_dimensions_stay_in_two(unknown):
    """The norm reduces three dimensions, the GEMM has two. M may be symbolic."""
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 256).to(bf16), torch.randn(256).to(bf16), torch.randn(256))
    after, joined, wanted, got = rewritten(batched, inputs, unknown)
    assert joined == 1
    [node] = after.graph.find_nodes(op="call_function", target=op.reduce_op)
    assert node.meta["val"].dim() == 3
    assert_same(got, wanted)


def batched(x, weight, other):
    y = groups.rms(x, weight).reshape(-1, x.shape[-1])
    a, scale = groups.in_blocks(y)
    return a, scale, (a.float() * other).reshape(x.shape)


def test_two_sizes_that_are_unknown_are_too_many():
    inputs = (torch.randn(2, 3, 256).to(bf16), torch.randn(256).to(bf16), torch.randn(256))
    assert rewritten(batched, inputs, (0, 1))[1] == 0


def test_scales_that_the_graph_transposes_are_stored_along_the_rows():
    case = Case("rms", "in_blocks", 5, 512, 128, along_m=True)
    torch.manual_seed(0)
    after, *_ = rewritten(case.fn, groups.random_inputs(case))
    [value] = after.graph.find_nodes(op="call_function", target=op.value_op)
    assert value.args[-1]
    assert value.meta["val"].stride() == (1, 5)


def test_others_read_what_they_read_before():
    """The scale, the quotient, the maximum, a copy that is returned, a product with a vector."""

    def fn(x, weight):
        y = groups.rms(x, weight)
        blocks = y.float().unflatten(1, (-1, GROUP))
        most = blocks.abs().amax(-1, keepdim=True)
        scale = (most / 448).clamp_min(1e-12)
        quotient = blocks / scale
        a = quotient.to(torch.float8_e4m3fn)
        bent = quotient * weight[:GROUP]
        copy = scale.expand(blocks.shape).clone()
        return a.flatten(1), scale[:, 1:], quotient[0], most.sum(), bent, copy, scale.squeeze(-1)

    torch.manual_seed(0)
    _, joined, wanted, got = rewritten(fn, (torch.randn(4, 512).to(bf16), torch.rand(512)))
    assert joined == 1
    assert_same(got, wanted)


def test_a_scale_is_returned_and_transposed():
    def fn(x, weight):
        a, scale = groups.in_blocks(groups.rms(x, weight))
        return a, scale, scale.t().contiguous() * 2, scale.t()

    torch.manual_seed(0)
    _, joined, wanted, got = rewritten(fn, (torch.randn(4, 512).to(bf16), torch.rand(512)))
    assert joined == 1
    assert_same(got, wanted)


def drawn(seed):
    """A quantization behind a norm: random steps of values per group and per element, with operands
    of no dimension, ``where``, integers, and operands that are broadcast along rows or groups."""
    rng = random.Random(seed)
    size, tail = rng.choice((4, 16, 32)), rng.choice((True, False))
    choices = [rng.randrange(1 << 20) for _ in range(12)]

    def per_group(v, zero, pick):
        steps = [
            lambda: torch.where(v > zero, v, zero + 1),
            lambda: torch.where(zero > 0, v, v + 1),
            lambda: torch.where(v.isnan(), zero, v),
            lambda: v.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32),
            lambda: torch.where(
                v > 0, (v.view(torch.int32) >> 23).to(torch.uint8), zero.to(torch.uint8)
            ).to(torch.float32),
            lambda: torch.exp2(torch.floor(torch.log2(v)).clamp(-126, 127)),
            lambda: v * zero.add(2),
            lambda: v + v.sum(-2, keepdim=True),
            lambda: v + v[:1],
            lambda: torch.where(v[..., :1] > 0, v, zero),
            lambda: v.clamp_min(1e-4),
        ]
        return steps[pick % len(steps)]()

    def per_element(blocks, scale, weight, zero, pick):
        steps = [
            lambda: torch.where(scale > zero, blocks, zero),
            lambda: torch.where(zero > 1, blocks, scale),
            lambda: torch.where(blocks > 0, scale, blocks),
            lambda: blocks + weight[:size],
            lambda: blocks * zero.add(2),
            lambda: (blocks.view(torch.int32) + 1).view(torch.float32),
            lambda: blocks + scale.expand(blocks.shape),
            lambda: blocks,
        ]
        return steps[pick % len(steps)]()

    def fn(x, weight, zero):
        blocks = groups.rms(x, weight).float().unflatten(-1, (-1, size))
        scale = blocks.abs().amax(-1, keepdim=True)
        kept = []
        for pick in choices[: rng_steps[0]]:
            scale = per_group(scale, zero, pick)
            kept.append(scale)
        for pick in choices[4 : 4 + rng_steps[1]]:
            blocks = per_element(blocks, scale, weight, zero, pick)
        quotient = blocks / scale
        a = quotient.clamp(-448, 448).to(torch.float8_e4m3fn)
        others = (kept[choices[10] % len(kept)].squeeze(-1), quotient) if kept and tail else ()
        return (a.flatten(-2), scale.squeeze(-1), *others)

    rng_steps = (rng.randint(0, 4), rng.randint(0, 3))
    torch.manual_seed(seed)
    return fn, (torch.randn(4, 128).to(bf16), torch.rand(128).to(bf16), torch.tensor(0.0))


@pytest.mark.parametrize("part", sampled(range(8), every=8))
def test_random_quantizations_behind_a_norm_keep_their_values(part):
    joined = 0
    for seed in range(part * 20, part * 20 + 20):
        _, found, wanted, got = rewritten(*drawn(seed))
        joined += found
        assert_same(got, wanted)
    assert joined > 4


def mxfp8(x, weight):
    """torchao's emulated MXFP8: the exponent of a group as an integer, with NaN apart."""
    blocks = groups.rms(x, weight).float().unflatten(1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    exponent = ((most.view(torch.int32) >> 23) & 255) - 8
    nan = torch.tensor(255, dtype=torch.uint8)
    exponent = torch.where(most.isnan(), nan, exponent.to(torch.uint8))
    scale = (exponent.clamp(1, 255).to(torch.int32) << 23).view(torch.float32)
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1), exponent


def test_integers_of_a_group_are_no_values_of_its_elements():
    torch.manual_seed(0)
    inputs = (torch.randn(4, 256).to(bf16), torch.rand(256).to(bf16))
    _, joined, wanted, got = rewritten(mxfp8, inputs)
    assert joined == 0
    assert_same(got, wanted)


def without_a_norm(x, weight):
    return groups.in_blocks(F.silu(x) * weight)


def longer(x, weight):
    return groups.in_blocks(groups.rms(x.repeat(1, 17), weight.repeat(17)))


def norm_of_heads(x, weight):
    return groups.in_blocks(groups.rms(x.unflatten(1, (-1, 256)), weight[:256]).flatten(1))


def norm_of_columns(x, weight):
    return groups.in_blocks(x / x.float().square().mean(0, keepdim=True))


def norm_before_a_product(x, weight):
    return groups.in_blocks(groups.rms(x, weight) @ x.t() @ x)


def not_quantized(x, weight):
    blocks = groups.rms(x, weight).unflatten(1, (-1, GROUP))
    return blocks / blocks.abs().amax(-1, keepdim=True)


def of_three(x, weight):
    """The group size is no power of two."""
    blocks = groups.rms(x, weight)[:, :510].unflatten(1, (-1, 3))
    return (blocks / blocks.abs().amax(-1, keepdim=True)).to(torch.float8_e4m3fn)


def of_every_fourth(x, weight):
    """The elements of a group are not adjacent: the maximum is over another dimension."""
    blocks = groups.rms(x, weight).float().unflatten(1, (GROUP, -1))
    return (blocks / blocks.abs().amax(1, keepdim=True)).to(torch.float8_e4m3fn)


def written_to(x, weight):
    blocks = groups.rms(x, weight).float().unflatten(1, (-1, GROUP))
    most = blocks.abs().amax(-1, keepdim=True)
    blocks.mul_(2)
    return (blocks / most).to(torch.float8_e4m3fn)


NEAR_MISSES = [
    *(without_a_norm, longer, norm_of_heads, norm_of_columns, norm_before_a_product),
    *(not_quantized, of_three, of_every_fourth, written_to),
]


@pytest.mark.parametrize("fn", NEAR_MISSES, ids=lambda fn: fn.__name__)
def test_what_is_no_quantization_of_the_rows_of_a_norm_stays(fn):
    inputs = (torch.randn(4, 512).to(bf16), torch.rand(512).to(bf16))
    before, after = traced(fn, inputs), traced(fn, inputs)
    assert fuse_norm_and_group_quant(after.graph) == 0
    assert str(after.graph) == str(before.graph)
