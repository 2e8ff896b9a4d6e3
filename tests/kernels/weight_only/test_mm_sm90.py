"""What ``weight_only_mm_sm90`` takes, which thread holds what, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.codegen.words import as_words
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.problem import Weight, WeightTensor
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90, plan_of
from inductor_quant.ops import weight_only
from inductor_quant.spec.weight_format import Field, WeightFormat
from tests.support.gemms import formats
from tests.support.gemms.generated import device, hardest
from tests.support.gemms.weight_only import Case, described, generate_case

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

bf16, f16 = torch.bfloat16, torch.float16


@pytest.fixture
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def aligned(case):
    spec, problem = described(case)
    return spec, dataclasses.replace(problem, has_aligned_rows=True)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("awq", (17, 192)),
        ("nibble_pairs", (17, 192)),
        ("hqq", (1, 192)),
        ("int8_group", (1, 128)),
        ("int8_channel", (33, 128)),
        ("nf4", (1, 128)),
        ("uint2", None),  # a kernel for narrow fields is faster
        ("act_order", None),  # the group of each k is data
        ("e5m2_group", None),
        ("int8_divisor", None),
        ("int4_in_int64", None),
        ("shift_table", None),
    ],
)
def test_it_takes_the_rows_at_which_it_is_fastest(name, rows, large_groups):
    taken = []
    for m in (1, 8, 16, 17, 32, 33, 128, 129, 192, 193, 512):
        spec, problem = aligned(Case(name, m, 1024, 4096, bf16))
        if WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90)) is None:
            taken.append(m)
            assert name != "nibble_pairs" or not 32 < m <= 128
            assert WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90))
    assert ((taken[0], taken[-1]) if taken else None) == rows


def test_a_word_whose_values_are_tiles_apart_along_k_is_left_to_others():
    """The two halves of K in one byte: which half it is, is not known within a tile."""
    element = Field(
        0, (formats.form(("n0", 1)), formats.form(("k1", 1))), formats.form(("k0", 4)), 4
    )
    format = WeightFormat((2, 512), (64,), element)
    weight = Weight(format, (WeightTensor(torch.uint8, (64, 512)),))
    assert plan_of(weight, GemmConfig(64, 64, 64, 4, 4)) is None


def test_rows_of_x_must_be_aligned_and_the_card_sm90():
    spec, problem = aligned(Case("hqq", 8, 1024, 4096))
    unaligned = dataclasses.replace(problem, has_aligned_rows=False)
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90)) is None
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, unaligned, device(90)) is not None
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(80)) is not None


@pytest.mark.parametrize("n", [1984, 2048, 11008])
def test_few_tiles_split_k_until_most_sms_have_one(n, large_groups):
    spec, problem = aligned(Case("awq", 64, n, 8960, f16))
    config, *_ = WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90))
    ctas = -(-n // config.block_n) * config.split_k
    assert ctas >= 0.7 * device(90).num_sms


@pytest.mark.parametrize("name", ["gptq", "awq", "hqq", "nibble_pairs", "int8_channel", "nf4"])
@pytest.mark.parametrize("block", [(64, 128, 4), (64, 64, 4), (128, 64, 8), (128, 128, 8)])
def test_lanes_store_to_different_banks(name, block, large_groups):
    """Eight lanes store 16 bytes each, in a row of 128 bytes swizzled by the row."""
    _, problem = described(Case(name, 64, 1024, 1024, bf16))
    plan = plan_of(problem.weight, GemmConfig(64, block[0], block[1], block[2], 4))
    for group in range(4):
        chunks = set()
        for lane in range(8 * group, 8 * group + 8):
            held = [basis for bit, basis in enumerate(plan.layout.lanes) if lane >> bit & 1]
            position = {"n": 0, "k": 0}
            for axis, digit in enumerate(plan.digits):
                kind = "n" if digit.name[0] == "n" else "k"
                position[kind] = position[kind] * digit.inner + sum(basis[axis] for basis in held)
            row = sum((position["n"] >> bit & 1) << to for to, bit in enumerate(plan.rows))
            chunks.add((position["k"] % 64 // 8) ^ (row % 8))
        assert len(chunks) == 8


@pytest.mark.parametrize("name", ["int8_channel", "nibble_pairs", "hqq", "int8_zero_channel"])
def test_bytes_read_as_words_are_the_same_weight(name):
    packed = Case(name, 1, 64, 128).packed
    _, problem = described(Case(name, 1, 64, 128))
    view = as_words(problem.weight)
    tensors = packed.make()
    source = view.weight.format.code.source
    words = tensors[source].view(torch.int32)
    assert view.dim is not None
    want = weight_only.dequantize(packed.format, tensors)
    got = weight_only.dequantize(
        view.weight.format, [words if i == source else t for i, t in enumerate(tensors)]
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "m", "dtype"),
    [("awq", 17, f16), ("awq", 192, f16), ("hqq", 64, bf16), ("int8_group", 128, bf16)],
)
def test_no_configuration_spills_and_the_writers_fence(name, m, dtype, large_groups):
    case = Case(name, m, 1024, 4096, dtype)
    spec, problem = aligned(case)
    assert choose_name(spec, problem) == WEIGHT_ONLY_MM_SM90.name
    for config in hardest(WEIGHT_ONLY_MM_SM90.configs(spec, problem, device(90)), 1):
        generated = generate_case(case, f"{WEIGHT_ONLY_MM_SM90.name} {config}")
        named = next(item for item in generated.kernels.items() if "w_tiles" in item[1])
        kernel = simulate.compile_kernel(*named)
        assert kernel.spill_stores == 0
        assert not kernel.is_serialized
        # Between a fence and the products that read what it is for, there is a barrier.
        loop = kernel.ptx[: kernel.ptx.index("wgmma.mma_async")]
        fenced = loop[: loop.rindex("bar.sync")]
        assert "fence.proxy.async" in fenced[fenced.rindex("cp.async.wait_group") :]


def choose_name(spec, problem):
    return next(candidates("weight_only", spec, problem, device(90)))[0].name


def test_a_k_of_one_tile_compiles():
    """The loop is gone then, and so must be the code in it that never runs."""
    generated = generate_case(Case("gptq", 1, 64, 128))
    [(name, source)] = generated.kernels.items()
    assert "w_tiles" in source
    simulate.compile_kernel(name, source)
