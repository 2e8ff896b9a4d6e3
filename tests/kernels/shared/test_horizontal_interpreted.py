"""Numerics of horizontal launches in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from tests.support.gemms import w4a8, w8a8, weight_only
from tests.support.gemms.generated import generate
from tests.support.gemms.horizontal import Group, Int4, Integers, PackedLayout
from tests.support.sampling import sampled

pytestmark = [pytest.mark.interp, pytest.mark.usefixtures("large_groups")]

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = ("gptq", "awq", "nibble_pairs", "int4_words", "uint2")


def run(group: Group, fn, inputs, config):
    generated = generate(fn, group.make_inputs, config)
    launched = [name for name in generated.kernels if name.startswith("triton_tem")]
    return simulate.interpret(generated, inputs), launched


@pytest.mark.parametrize("name", sampled(FORMATS))
def test_packed_weights_are_close_to_fp64(name):
    """Every element, with bias and per_channel scale. Without split K the kernel does all."""
    torch.manual_seed(0)
    case = weight_only.Case(name, 5, 0, 256, column_scale="channel", bias=True)
    group = PackedLayout(case, (128, 256, 128))
    inputs = group.make_inputs("cpu")
    got, launched = run(group, group.grouped, inputs, "weight_only_small_m 8x128x128_w2_s3_g8")
    assert len(launched) == 1
    for result, want in zip(got, group.exact(inputs), strict=True):
        weight_only.assert_close(result, want)


@pytest.mark.parametrize("name", sampled(["gptq", "awq"]))
def test_with_split_k_results_are_bitwise_those_of_single_gemms(name):
    torch.manual_seed(0)
    group = PackedLayout(
        weight_only.Case(name, 9, 0, 256, column_scale="channel", bias=True), (256, 128)
    )
    inputs = group.make_inputs("cpu")
    pinned = "weight_only_small_m 16x128x128_w2_s3_g8_k2"
    got, launched = run(group, group.grouped, inputs, pinned)
    assert len(launched) == 1
    each, launched = run(group, group.alone, inputs, pinned)
    assert len(launched) == 2
    for result, alone in zip(got, each, strict=True):
        assert torch.equal(result, alone)


@pytest.mark.parametrize(
    ("group", "config"),
    [
        (Int4(w4a8.Case("nibble_pairs", 5, 0, 512), (64, 192, 64)), "8x32x512_w4_s1_g8"),
        pytest.param(
            *(Int4(w4a8.Case("gptq", 3, 0, 512, groups=False), (128, 64)), "8x32x256_w2_s1_g8_k2"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(Int4(w4a8.Case("awq", 9, 0, 512, groups=False), (64, 64)), "16x64x256_w4_s1_g8"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_int4_weights_are_close_to_fp64(group, config):
    torch.manual_seed(0)
    inputs = group.make_inputs("cpu")
    got, launched = run(group, group.grouped, inputs, f"w4a8_direct {config}")
    assert len(launched) == 1
    for result, want in zip(got, group.exact(inputs), strict=True):
        w4a8.assert_close(result, want)


@pytest.mark.slow
def test_e4m3_activations_run_as_weight_only_together():
    torch.manual_seed(0)
    group = Int4(w4a8.Case("gptq", 5, 0, 256, a_dtype=torch.float8_e4m3fn), (128, 256))
    inputs = group.make_inputs("cpu")
    got, launched = run(group, group.grouped, inputs, "weight_only_small_m 8x128x128_w2_s3_g8")
    assert len(launched) == 1
    for result, want in zip(got, group.exact(inputs), strict=True):
        w4a8.assert_close(result, want, slack=2.0)


def case(m, k, **options):
    return w8a8.Case(m, 0, k, out_dtype=f32, **{"bias": False, **options})


@pytest.mark.parametrize(
    "group",
    [
        Integers(case(5, 96), (128, 64, 192)),
        Integers(case(33, 57), (64, 64)),  # no block divides K; two tiles along M
        Integers(case(1, 64, a_scale="tensor", b_scale="tensor"), (64, 128)),
        Integers(case(16, 64, a_scale="none", w_layout="columns"), (64, 128)),
    ],
    ids=str,
)
def test_integers_are_exact(group):
    torch.manual_seed(0)
    inputs = group.make_inputs("cpu")
    got, launched = run(group, group.grouped, inputs, "w8a8_mm 16x64x32_w4_s3_g8")
    assert len(launched) == 1
    for result, want in zip(got, group.exact(inputs), strict=True):
        assert torch.equal(result.double(), want)


@pytest.mark.parametrize("groups", [1, 2])
def test_scales_and_bias_are_per_channel(groups):
    torch.manual_seed(0)
    group = Integers(w8a8.Case(5, 0, 64), (64, 128, 64), groups)
    inputs = group.make_inputs("cpu")
    got, _ = run(group, group.grouped, inputs, "w8a8_mm 16x64x32_w4_s3_g8")
    for result, want in zip(got, group.alone(*inputs), strict=True):
        w8a8.assert_close(result, want.double())


def readers_of_any_strides(a, scale, cache, *own):
    """Uses of results that are slices of one matrix: views that merge and split dimensions, a
    library call, in-place writes, a copy into the caller's memory, and returned views."""
    q, k, v = (
        ((torch._int_mm(a, own[i]) * scale) * own[i + 1]).to(bf16) for i in range(0, len(own), 2)
    )
    heads = q.view(4, 5, 2, 32).transpose(1, 2).softmax(-1)
    flat = k.flatten() * 2
    product = v.t() @ k
    rows = v.view(-1, 16)[3].sum()
    cache[:, 1:].copy_(k.view(4, 5, 64))
    v.mul_(3)
    k[:, 1::2] = 0.5
    joined = torch.cat([q[:, :32], v, k], 1)
    padded = torch.nn.functional.pad(v, (1, 2))
    return heads, flat, product, rows, joined, padded, k.unflatten(1, (8, 8)).permute(2, 0, 1) + 0


def test_readers_of_a_slice_see_no_difference():
    def make(device):
        def integers(*size):
            return torch.randint(-9, 9, size, device=device).to(torch.int8)

        def floats(*size):
            return torch.rand(size, device=device)

        weights = (integers(64, 64), floats(64)), (integers(64, 64), floats(64))
        cache = torch.zeros(4, 6, 64, dtype=bf16, device=device)
        last = integers(64, 64), floats(64)
        return integers(20, 64), floats(20, 1), cache, *weights[0], *weights[1], *last

    torch.manual_seed(0)
    inputs = make("cpu")
    results = []
    for is_horizontal in (True, False):
        config = "w8a8_mm 32x64x32_w4_s3_g8"
        generated = generate(readers_of_any_strides, make, config, horizontal_fusion=is_horizontal)
        launched = [name for name in generated.kernels if name.startswith("triton_tem")]
        assert ("w8a8_horizontal" in launched[0]) == is_horizontal
        given = [t.clone() for t in inputs]
        results.append([*simulate.interpret(generated, tuple(given)), *given])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
