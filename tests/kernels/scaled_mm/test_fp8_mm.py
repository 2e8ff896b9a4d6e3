"""The code of FP8 kernels for virtual GPUs: matrix instructions, spills, what is fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant._compat.group_reduce import TILE
from inductor_quant.kernels import KERNELS
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.mm.kernel import (
    FP8_BLOCK_MM,
    FP8_BLOCK_SPLIT_K,
    FP8_MM,
    FP8_SPLIT_K,
    is_covered,
)
from inductor_quant.ops import fp8_block
from inductor_quant.ops.fp8 import make_spec
from inductor_quant.report.events import collect
from inductor_quant.spec.decisions import RejectionCode
from inductor_quant.spec.gemm import ScaleSpec
from tests.support.gemms.fp8 import Case, e5m2, e8m0, gemm, make_inputs
from tests.support.gemms.generated import generate
from tests.support.sampling import sampled

pytestmark = pytest.mark.compiles

H200 = Device(arch=90, num_sms=132, shared_memory=232448)
F32 = torch.float32
ROWS = make_spec(a_scale=None, b_scale=None, out_dtype=torch.bfloat16, bias=False)
FAST = make_spec(a_scale=None, b_scale=None, out_dtype=torch.bfloat16, bias=False, fast_accum=True)
BLOCKS = make_spec(
    a_scale=ScaleSpec(F32, (1, 128)),
    b_scale=ScaleSpec(F32, (128, 128)),
    out_dtype=torch.bfloat16,
    bias=False,
)
CASES = [
    Case(64, 512, 512),
    Case(16, 6144, 4096, fast_accum=True),
    Case(300, 512, 512),
    Case(64, 512, 512, fast_accum=True),
    Case(4096, 4096, 1024),
    Case(4096, 4096, 1024, fast_accum=True),
    Case(64, 512, 512, a_dtype=e5m2),
    Case(256, 512, 512, block=(128, 128)),
    Case(4096, 4096, 1024, block=(128, 128)),
    Case(256, 512, 512, block=(64, 64), a_dtype=e5m2),
    Case(256, 512, 512, block=(32, 32), scale_dtype=e8m0),
    Case(16, 2112, 7168, block=(128, 128), a_scales="m"),
]
INSTRUCTION = {80: "bf16.bf16", 89: "mma.sync", 90: "wgmma", 100: "tcgen05"}


def chosen(fn, make, arch=90):
    with collect() as report:
        generated = generate(fn, make, arch=arch)
    return generated, report.kernels[0].chosen


# every case for sm_90, which the tiles are tuned for, each fifth for other architectures
COMPILED = [
    (case, arch)
    for position, arch in enumerate(INSTRUCTION)
    for case in (CASES if arch == 90 else CASES[position::5])
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "arch"), sampled(COMPILED), ids=str)
def test_the_matrix_unit_multiplies_and_nothing_spills(case, arch):
    """sm_80 has no FP8: operands are decoded to bf16."""
    generated, kernel = chosen(gemm(case), lambda device: make_inputs(case, device), arch)
    name, source = next(iter(generated.kernels.items()))
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == 0, kernel
    is_small = case.m < 64 and arch in (90, 100) and "split_k" not in kernel
    wanted = "mma" if is_small else INSTRUCTION[arch]
    found = compiled.matrix_instructions()
    assert any(wanted in opcode for opcode in found), found
    if arch in (89, 90):
        assert all("e4m3" in opcode or "e5m2" in opcode for opcode in found), found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5], CASES[6]], ids=str)
def test_silu_times_up_is_in_the_one_kernel(case):
    def make(device):
        up = torch.empty(case.m, case.n, dtype=torch.bfloat16, device=device)
        return up, *make_inputs(case, device)

    generated, _ = chosen(lambda up, *given: F.silu(gemm(case)(*given)) * up, make)
    assert len(generated.kernels) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("along_m", [False, True])
def test_silu_times_up_and_its_quantization_in_blocks_are_one_kernel(along_m):
    """It writes the scales in the layout of the graph."""
    m, n, k = 64, 512, 4096

    def fn(gate, up, w, w_scale):
        blocks = (F.silu(gate) * up).float().unflatten(1, (-1, 128))
        scale = blocks.abs().amax(-1).clamp_min(1e-12) / 448
        a = (blocks / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
        scale = scale.t().contiguous().t() if along_m else scale
        return fp8_block.op(
            *(a, w.t(), scale, w_scale.t(), None), block_k=128, block_n=128, out_dtype=F32
        )

    def make(device):
        case = Case(m, n, k, block=(128, 128), bias=False)
        _, w, _, w_scale, _ = make_inputs(case, device)
        return *(torch.empty(m, k, dtype=torch.bfloat16, device=device) for _ in "gu"), w, w_scale

    kernels = generate(fn, make).kernels
    quantizing, adding = (name for name in kernels if "tem" not in name)
    tile = TILE if along_m else {name: TILE[name] for name in ("XBLOCK", "num_warps")}
    assert f"fixed_config(\n    config={tile}" in kernels[quantizing]
    assert simulate.compile_kernel(quantizing, kernels[quantizing]).spill_stores == 0
    assert adding.startswith("triton_poi")  # the partials


def test_sums_are_promoted_to_fp32_without_fast_accum():
    """After 128 elements of K, or a shorter step; other architectures add in fp32 anyway."""
    config = GemmConfig(64, 64, 64, 4, 4)
    problem = Problem(64, 64, 512)

    def promote(spec, arch=90, config=config):
        device = Device(arch, 132, 232448)
        return FP8_MM.constants(spec, problem, config, device)["PROMOTE"]

    assert promote(ROWS) == 64
    assert promote(ROWS, config=GemmConfig(64, 64, 256, 4, 4)) == 128
    assert promote(FAST) == promote(BLOCKS) == promote(ROWS, 89) == 0


@pytest.mark.parametrize(
    ("spec", "config", "code"),
    [
        (BLOCKS, GemmConfig(64, 64, 256, 4, 3), RejectionCode.BLOCK_SHAPE),
        (BLOCKS, GemmConfig(128, 128, 128, 4, 3), RejectionCode.REGISTERS),
        (ROWS, GemmConfig(128, 128, 128, 4, 3), RejectionCode.REGISTERS),
        (FAST, GemmConfig(128, 128, 128, 4, 3), None),
        (BLOCKS, GemmConfig(64, 128, 128, 4, 4), None),
        (FAST, GemmConfig(64, 64, 128, 4, 3, split_k=2), RejectionCode.BLOCK_SHAPE),
    ],
    ids=str,
)
def test_legal_configs(spec, config, code):
    found = FP8_BLOCK_MM.config_rejection(spec, Problem(4096, 4096, 4096), config, H200)
    assert (found and found.code) == code


def test_where_operands_are_in_registers_block_scales_have_more_warps():
    problem = Problem(4095, 4008, 1152)

    def warps(spec, arch):
        card = Device(arch, 132, 101376)
        found = FP8_BLOCK_MM.configs(spec, problem, card)
        tiles = [each for each in found if (each.block_m, each.block_n) == (64, 64)]
        legal = [c for c in tiles if FP8_BLOCK_MM.config_rejection(spec, problem, c, card) is None]
        return {each.num_warps for each in legal}

    assert warps(BLOCKS, 89) == warps(BLOCKS, 120) == {8}
    assert 4 in warps(BLOCKS, 90) & warps(BLOCKS, 100) & warps(FAST, 89)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (1, 2112, 7168, "16x64x128_w4_s6_g8_k4"),
        (16, 7168, 2048, "16x64x128_w4_s6_g8"),  # partials would be too short
        (16, 24576, 1536, "16x64x128_w4_s4_g8"),
        (64, 7168, 16384, "64x64x128_w4_s4_g8_k3"),
        (128, 4096, 7168, "128x64x128_w4_s4_g8_k4"),
        (256, 2112, 7168, "128x64x128_w4_s4_g8_k4"),
        (64, 64, 512, "64x64x128_w4_s6_g8"),
    ],
)
def test_k_is_split_until_there_are_two_ctas_an_sm(m, n, k, tile):
    [first, *others] = FP8_BLOCK_SPLIT_K.configs(BLOCKS, Problem(m, n, k), H200)
    assert str(first) == tile
    assert {config.split_k for config in others} == {first.split_k}
    assert FP8_BLOCK_SPLIT_K.config_rejection(BLOCKS, Problem(m, n, k), first, H200) is None


@pytest.mark.parametrize(
    ("spec", "m", "n", "k", "tile"),
    [
        (FAST, 1, 6144, 4096, "16x64x128_w4_s8_g8"),  # a tile an SM: the deepest pipeline
        (FAST, 16, 13824, 5120, "16x128x128_w4_s6_g8"),
        (FAST, 16, 4096, 14336, "16x64x128_w4_s8_g8_k2"),  # half of the SMs would be idle
        (FAST, 64, 6144, 4096, "64x64x256_w4_s4_g8"),
        (FAST, 256, 28672, 4096, "128x256x128_w8_s4_g8"),
        (ROWS, 64, 6144, 4096, "64x64x128_w4_s6_g8"),
    ],
)
def test_tiles_of_rows(spec, m, n, k, tile):
    problem = Problem(m, n, k)
    [first, *others] = FP8_SPLIT_K.configs(spec, problem, H200)
    assert str(first) == tile
    assert {config.split_k for config in others} <= {first.split_k}
    assert FP8_SPLIT_K.config_rejection(spec, problem, first, H200) is None
    swaps = FP8_SPLIT_K.constants(spec, problem, first, H200)["SWAP_AB"]
    assert swaps == (first.block_m < 64 or first.block_n == 64)


@pytest.mark.parametrize(
    ("config", "problem", "is_taken"),
    [
        ("16x64x128_w4_s6_g8", Problem(32, 4096, 4096), True),
        ("16x64x128_w4_s6_g8", Problem(33, 4096, 4096), False),  # 192 tiles
        ("64x64x128_w4_s6_g8", Problem(33, 4096, 4096), True),
        ("16x64x128_w4_s6_g8", Problem(96, 1280, 1280), True),  # 120 tiles of 132 SMs
        ("16x64x128_w4_s6_g8", Problem(96, 1536, 1280), False),
        ("32x64x128_w4_s6_g8_k4", Problem(96, 768, 8192), False),
        ("128x64x128_w4_s6_g8", Problem(33, 4096, 4096), False),
        ("64x64x128_w4_s6_g8_k2", Problem(64, 4096, 1024), True),
        ("64x64x128_w4_s6_g8_k2", Problem(64, 4096, 896), False),  # parts of four steps
        ("64x64x128_w4_s6_g8_k2", Problem(64, 6400, 4096), False),  # 100 tiles of 132 SMs
    ],
)
def test_what_was_measured(config, problem, is_taken):
    assert is_covered(parse_config(config), problem, H200) == is_taken


@pytest.mark.parametrize(
    "problem",
    [
        Problem(257, 4096, 4096),
        Problem(64, 4096, 4096, m_is_static=False, m_is_bounded=False),
    ],
)
def test_other_rows_are_for_other_kernels(problem):
    assert FP8_SPLIT_K.rejection(FAST, problem, H200) is not None
    assert FP8_SPLIT_K.rejection(FAST, Problem(16, 4096, 4096), Device(89, 142, 101376))


@pytest.mark.parametrize(
    ("problem", "device", "says"),
    [
        (Problem(65, 8576, 4096), H200, "not small"),
        (Problem(65, 4096, 4096, m_is_static=False, m_is_bounded=False), H200, "not small"),
        (Problem(16, 4096, 4096), Device(80, 108, 166912), "sm_90"),
    ],
    ids=str,
)
def test_split_k_rejects_other_problems(problem, device, says):
    rejection = FP8_BLOCK_SPLIT_K.rejection(BLOCKS, problem, device)
    assert rejection is not None
    assert says in rejection.detail


@pytest.mark.parametrize(
    "kernel",
    [
        k
        for k in KERNELS
        if k.family in ("w8a8", "fp8", "fp8_block") and k not in (FP8_SPLIT_K, FP8_BLOCK_SPLIT_K)
    ],
    ids=lambda k: k.name,
)
def test_kernels_that_do_not_split_k_reject_such_a_pin(kernel):
    config = GemmConfig(64, 64, 128, 4, 3, split_k=2)
    spec = BLOCKS if kernel.family == "fp8_block" else FAST
    found = kernel.config_rejection(spec, Problem(4096, 4096, 4096), config, H200)
    assert found is not None
    assert "does not split K" in found.detail
