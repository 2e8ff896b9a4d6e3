"""The Gluon kernel for words: what it takes, layouts, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import triton

from inductor_quant import _gluon_compat as gluon
from inductor_quant import simulate
from inductor_quant.decisions import RejectionCode
from inductor_quant.kernels import many_rows_gluon, many_rows_tma
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.gluon_layout import layout, positions
from tests.support import formats
from tests.support.generated import device
from tests.support.weight_only import Case, described, generate_case

bf16, f16 = torch.bfloat16, torch.float16
# From 3.9 on warpgroups meet where they wait for their products.
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def test_a_layout_says_where_each_bit_leads():
    tile = layout(
        ((("s", 2),), (("r", 2), ("t", 4)), (("g", 8), ("v0", 2))),
        lanes=(("t", 4), ("g", 8)),
        warps=(("w", 2), ("s", 2)),
    )
    assert tile.registers == ((0, 0, 1), (0, 4, 0))  # neighbours along the last axis first
    assert tile.lanes == ((0, 1, 0), (0, 2, 0), (0, 0, 2), (0, 0, 4), (0, 0, 8))
    assert tile.warps == ((0, 0, 0), (1, 0, 0))  # the tile has no w: both have the same
    assert tile.shape == (2, 8, 16)
    assert tile.coarser(4).lanes[2:] == ((0, 0, 0), (0, 0, 1), (0, 0, 2))
    assert tile.split(4).lanes[2:] == ((0, 0, 0, 2), (0, 0, 1, 0), (0, 0, 2, 0))
    assert positions("L", 3, 1, 8) == (
        "gl.expand_dims(gl.expand_dims("
        "gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)"
    )


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (Case("gptq", 64, 4096, 4096, f16), 100),  # no wgmma
        (Case("awq", 64, 4096, 4096, f16), 90),  # words along N
        (Case("nibble_pairs", 64, 4096, 4096), 90),  # words of 8 bits
        (Case("gptq", 64, 4096, 4096), 90),  # scales of fp16, x of bf16
        (Case("act_order", 64, 4096, 4096, f16), 90),
        (Case("gptq", 16, 4096, 4096, f16), 90),
        (Case("gptq", 257, 4096, 4096, f16), 90),
    ],
    ids=str,
)
def test_what_is_for_the_other_kernels(case, arch):
    spec, problem = described(case)
    problem = dataclasses.replace(problem, has_aligned_rows=True)
    rejection = many_rows_gluon.supports(spec, problem, device(arch))
    assert rejection is not None
    assert rejection.code == RejectionCode.NO_KERNEL


@pytest.mark.parametrize("m", [17, 64, 100, 256])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (6144, 4096), (4096, 14336), (256, 512)])
def test_configurations_are_legal_and_share_the_split(m, n, k):
    spec, problem = described(Case("gptq", m, n, k, f16))
    found = many_rows_gluon.configs(spec, problem, device(90))
    assert len(set(found)) == len(found) >= 1
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert many_rows_gluon.is_legal(spec, problem, config, device(90)) is None


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 64, 2, 4),  # no warpgroup
        GemmConfig(64, 128, 256, 4, 4),  # two groups in a block
        GemmConfig(64, 128, 64, 4, 2),  # no stage to copy to
        GemmConfig(64, 64, 128, 4, 6),  # K has fewer steps
        GemmConfig(256, 128, 64, 4, 4),  # too many sums
        GemmConfig(64, 128, 128, 4, 4, split_k=4),  # one block of K a part, not two
        GemmConfig(256, 128, 64, 8, 8),  # more than the shared memory
        GemmConfig(256, 256, 64, 16, 3),  # ptxas: insufficient registers
    ],
    ids=str,
)
def test_what_is_not_legal(config):
    spec, problem = described(Case("gptq", 64, 512, 512, f16))
    assert many_rows_gluon.is_legal(spec, problem, config, device(90)) is not None


def test_numbers_have_four_bits():
    """Three in the place of four: the assembly picks nibbles."""
    spec, problem = described(Case("gptq", 64, 4096, 4096, f16))
    assert problem.weight is not None
    format = problem.weight.format
    format = dataclasses.replace(format, element=dataclasses.replace(format.element, width=3))
    weight = dataclasses.replace(problem.weight, format=format)
    problem = dataclasses.replace(problem, weight=weight, has_aligned_rows=True)
    rejection = many_rows_gluon.supports(spec, problem, device(90))
    assert rejection is not None
    assert "4 bits" in rejection.detail


def test_rows_of_x_must_be_aligned():
    spec, problem = described(Case("gptq", 64, 4096, 4096, f16))
    assert many_rows_gluon.supports(spec, problem, device(90)) is not None
    problem = dataclasses.replace(problem, has_aligned_rows=True)
    assert many_rows_gluon.supports(spec, problem, device(90)) is None


def described_for_tma(case):
    """(spec, problem) as the lowering says it of whole tensors."""
    spec, problem = described(case)
    return spec, dataclasses.replace(problem, has_aligned_rows=True, has_described_words=True)


def test_what_tensor_descriptors_are_made_of():
    spec, problem = described_for_tma(Case("gptq", 256, 4096, 4096, f16))
    assert many_rows_tma.supports(spec, problem, device(90)) is None
    for without in (
        dataclasses.replace(problem, has_described_words=False),
        dataclasses.replace(problem, m=many_rows_tma.MIN_M - 1),
    ):
        assert many_rows_tma.supports(spec, without, device(90)) is not None
    spec, problem = described_for_tma(Case("awq", 256, 4096, 4096, f16))
    assert many_rows_tma.supports(spec, problem, device(90)) is not None


@pytest.mark.parametrize(
    ("m", "n", "k", "first"),
    [
        (256, 28672, 4096, "256x128x64_w8_s4_g8"),
        (256, 6144, 4096, "256x64x64_w4_s5_g8"),
        (256, 4096, 14336, "256x64x64_w4_s5_g8_k2"),
        (256, 4096, 4096, "128x64x128_w8_s5_g8"),  # half of the warps have half of each step
        (512, 28672, 4096, "256x128x64_w8_s4_g8"),
        (1024, 6144, 4096, "256x64x64_w4_s5_g8"),
        (4096, 6144, 4096, "256x128x64_w8_s4_g8"),
        (130, 256, 512, "128x64x128_w8_s5_g8"),
        (128, 28672, 4096, "128x128x128_w8_s4_g8"),
        (128, 8192, 28672, "128x128x128_w8_s4_g8_k2"),
        (64, 8192, 28672, "64x128x64_w8_s8_g8_k2"),
        (33, 14336, 4096, "64x128x64_w8_s8_g8"),
        (32, 4096, 14336, "32x128x64_w8_s8_g8_k4"),
    ],
)
def test_configurations_for_tma_are_legal_and_share_the_split(m, n, k, first):
    """The first is the fastest that was measured."""
    spec, problem = described_for_tma(Case("gptq", m, n, k, f16))
    found = many_rows_tma.configs(spec, problem, device(90))
    assert len(set(found)) == len(found)
    assert str(found[0]) == first
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert many_rows_tma.is_legal(spec, problem, config, device(90)) is None


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (64, 12288, 4096),  # tiles for 96 of 132 multiprocessors
        (64, 28672, 4096),  # for more than there are
        (64, 4096, 4096),  # short parts of K
        (128, 6144, 4096),
    ],
)
def test_few_rows_are_for_two_blocks_a_multiprocessor(m, n, k):
    """Unless nearly all have one long tile."""
    spec, problem = described_for_tma(Case("gptq", m, n, k, f16))
    assert many_rows_tma.configs(spec, problem, device(90)) == []
    assert many_rows_gluon.configs(spec, problem, device(90))


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 64, 2, 4),  # no warpgroup
        GemmConfig(64, 128, 256, 8, 4),  # two groups in a block
        GemmConfig(64, 128, 64, 8, 2),  # one stage is multiplied, one dequantized
        GemmConfig(256, 256, 64, 8, 3),  # too many sums
        GemmConfig(128, 256, 64, 16, 3),  # too many of four warpgroups
        GemmConfig(64, 64, 64, 8, 4),  # 32 of K for each half of the warps
        GemmConfig(64, 64, 128, 16, 4),  # four parts
        GemmConfig(64, 128, 128, 8, 4, split_k=4),  # one block of K a part, not two
        GemmConfig(256, 128, 64, 8, 8),  # more than the shared memory
    ],
    ids=str,
)
def test_what_is_not_legal_for_tma(config):
    spec, problem = described_for_tma(Case("gptq", 64, 512, 512, f16))
    assert many_rows_tma.is_legal(spec, problem, config, device(90)) is not None


needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


def test_the_body_of_the_loop_goes_through_all_stages_if_it_can():
    config = GemmConfig(64, 128, 64, 8, 8)
    for k, steps in ((4096, 8), (768, 4), (384, 2)):
        _, problem = described_for_tma(Case("gptq", 64, 4096, k, f16))
        assert many_rows_tma.unrolled(problem, config) == steps


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize("m", [32, 64, 128, 256])
def test_more_rows_multiply_from_registers(m):
    case = Case("gptq", m, 16384, 1024, f16)
    config, *_ = many_rows_gluon.configs(*described(case), device(90))
    kernels = generate_case(case, f"weight_only_words_gluon {config}").kernels
    [(name, source)] = [item for item in kernels.items() if "gl.inline_asm" in item[1]]
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    assert any("wgmma" in name for name in kernel.matrix_instructions())
    assert "st.shared" not in kernel.ptx


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *((256, 16384, 1024), (256, 8192, 1024), (256, 4096, 512)),
        *((128, 14336, 3072), (64, 14336, 3072), (32, 4096, 14336)),
    ],
)
def test_warps_load_and_products_follow_each_other(m, n, k):
    case = Case("gptq", m, n, k, f16)
    spec, problem = described_for_tma(case)
    config, *_ = many_rows_tma.configs(spec, problem, device(90))
    kernels = generate_case(case).kernels  # it is the default
    [(name, source)] = [item for item in kernels.items() if "gl.inline_asm" in item[1]]
    assert "gl.warp_specialize" in source
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    assert not kernel.is_serialized
    stages, steps = config.num_stages, many_rows_tma.unrolled(problem, config)
    if steps % stages == 0:  # places are numbers: a step frees that of the one before
        freed = re.findall(r"STAGES \+ (\d+), step > 0", source)
        assert freed == [str((step - 1) % stages) for step in range(steps)]
    loop = kernel.ptx[kernel.ptx.index("wgmma.mma_async") : kernel.ptx.rindex("wgmma.mma_async")]
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", loop)
    assert "fence.proxy.async" not in loop
    if TRITON < (3, 9) or config.num_warps == 4:
        assert "bar.sync" not in loop  # no warp waits for another
