"""``weight_only_medium_m_sm90`` and ``weight_only_large_m_sm90``: choice, layouts, machine code."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re

import pytest
import torch
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.kernels.codegen.gluon_layout import layout, positions
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.weight_only.large_m_sm90.kernel import (
    WEIGHT_ONLY_LARGE_M_SM90,
    unrolled,
)
from inductor_quant.kernels.weight_only.medium_m_sm90.kernel import MIN_M, WEIGHT_ONLY_MEDIUM_M_SM90
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, described, gemm, generate_case, make_inputs
from tests.support.in_flight import literals_in_loops, machine_code, products
from tests.support.sampling import sampled

pytestmark = pytest.mark.usefixtures("large_groups")

bf16, f16 = torch.bfloat16, torch.float16
# From 3.9 on Triton synchronizes warpgroups where they wait for wgmma.
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


def test_a_layout_has_a_basis_vector_per_bit():
    tile = layout(
        ((("s", 2),), (("r", 2), ("t", 4)), (("g", 8), ("v0", 2))),
        lanes=(("t", 4), ("g", 8)),
        warps=(("w", 2), ("s", 2)),
    )
    assert tile.registers == ((0, 0, 1), (0, 4, 0))  # neighbours along the last axis first
    assert tile.lanes == ((0, 1, 0), (0, 2, 0), (0, 0, 2), (0, 0, 4), (0, 0, 8))
    assert tile.warps == ((0, 0, 0), (1, 0, 0))  # the tile has no w: both warps have the same
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
        (Case("awq", 64, 4096, 4096, f16), 90),  # packed along N
        (Case("nibble_pairs", 64, 4096, 4096), 90),  # packed in 8 bits
        (Case("gptq", 64, 4096, 4096), 90),  # scales of fp16, x of bf16
        (Case("act_order", 64, 4096, 4096, f16), 90),
        (Case("gptq", 16, 4096, 4096, f16), 90),
        (Case("gptq", 257, 4096, 4096, f16), 90),
    ],
    ids=str,
)
def test_rejected_gemms(case, arch):
    spec, problem = described(case)
    problem = dataclasses.replace(problem, has_aligned_rows=True)
    rejection = WEIGHT_ONLY_MEDIUM_M_SM90.rejection(spec, problem, device(arch))
    assert rejection is not None
    assert rejection.code == RejectionCode.NO_KERNEL


@pytest.mark.parametrize("m", [17, 64, 100, 256])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (6144, 4096), (4096, 14336), (256, 512)])
def test_configurations_are_legal_and_share_the_split(m, n, k):
    spec, problem = described(Case("gptq", m, n, k, f16))
    found = WEIGHT_ONLY_MEDIUM_M_SM90.configs(spec, problem, device(90))
    assert len(set(found)) == len(found) >= 1
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert WEIGHT_ONLY_MEDIUM_M_SM90.config_rejection(spec, problem, config, device(90)) is None


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 64, 2, 4),  # no warpgroup
        GemmConfig(64, 128, 256, 4, 4),  # two groups in a block
        GemmConfig(64, 128, 64, 4, 2),  # no free stage to copy to
        GemmConfig(64, 64, 128, 4, 6),  # more stages than blocks of K
        GemmConfig(256, 128, 64, 4, 4),  # too many accumulators
        GemmConfig(64, 128, 128, 4, 4, split_k=4),  # one block of K per split, not two
        GemmConfig(256, 128, 64, 8, 8),  # more than the shared memory
        GemmConfig(256, 256, 64, 16, 3),  # ptxas: insufficient registers
    ],
    ids=str,
)
def test_rejected_configurations(config):
    spec, problem = described(Case("gptq", 64, 512, 512, f16))
    assert WEIGHT_ONLY_MEDIUM_M_SM90.config_rejection(spec, problem, config, device(90)) is not None


def test_values_have_four_bits():
    """3-bit values in 4-bit slots: the assembly would pick whole nibbles."""
    spec, problem = described(Case("gptq", 64, 4096, 4096, f16))
    assert problem.weight is not None
    format = problem.weight.format
    format = dataclasses.replace(format, element=dataclasses.replace(format.element, width=3))
    weight = dataclasses.replace(problem.weight, format=format)
    problem = dataclasses.replace(problem, weight=weight, has_aligned_rows=True)
    rejection = WEIGHT_ONLY_MEDIUM_M_SM90.rejection(spec, problem, device(90))
    assert rejection is not None
    assert "4 bits" in rejection.detail


def test_rows_of_x_must_be_aligned():
    spec, problem = described(Case("gptq", 64, 4096, 4096, f16))
    assert WEIGHT_ONLY_MEDIUM_M_SM90.rejection(spec, problem, device(90)) is not None
    problem = dataclasses.replace(problem, has_aligned_rows=True)
    assert WEIGHT_ONLY_MEDIUM_M_SM90.rejection(spec, problem, device(90)) is None


def described_for_tma(case):
    """(spec, problem) as the lowering describes whole tensors."""
    spec, problem = described(case)
    return spec, dataclasses.replace(problem, has_aligned_rows=True, has_weight_descriptors=True)


def test_operands_need_tensor_descriptors():
    spec, problem = described_for_tma(Case("gptq", 256, 4096, 4096, f16))
    assert WEIGHT_ONLY_LARGE_M_SM90.rejection(spec, problem, device(90)) is None
    for without in (
        dataclasses.replace(problem, has_weight_descriptors=False),
        dataclasses.replace(problem, m=MIN_M - 1),
    ):
        assert WEIGHT_ONLY_LARGE_M_SM90.rejection(spec, without, device(90)) is not None
    spec, problem = described_for_tma(Case("awq", 256, 4096, 4096, f16))
    assert WEIGHT_ONLY_LARGE_M_SM90.rejection(spec, problem, device(90)) is not None


@pytest.mark.parametrize(
    ("m", "n", "k", "first"),
    [
        (256, 28672, 4096, "256x128x64_w8_s4_g8"),
        (256, 6144, 4096, "256x64x64_w4_s5_g8"),
        (256, 4096, 14336, "256x64x64_w4_s5_g8_k2"),
        (256, 4096, 4096, "128x64x128_w8_s5_g8"),  # half of the warps have half of each block of K
        (512, 24576, 4096, "256x128x64_w8_s4_g8"),
        (256, 128256, 4096, "256x128x64_w8_s4_g8"),  # of up to 256 rows medium_m_sm90 would be next
        (256, 8640, 4096, "128x64x128_w8_s5_g8"),
        (1536, 10240, 2048, "256x128x64_w8_s4_g8"),  # mm_sm90 would share no tiles
        (1024, 6144, 4096, "256x64x64_w4_s5_g8"),
        (4096, 6144, 4096, "256x128x64_w8_s4_g8"),
        (240, 256, 512, "128x64x128_w8_s5_g8"),
        (128, 28672, 4096, "128x128x128_w8_s4_g8"),
        (128, 8192, 28672, "128x128x128_w8_s4_g8_k2"),
        (64, 8192, 28672, "64x128x64_w8_s8_g8_k2"),
        (33, 14336, 4096, "64x128x64_w8_s8_g8"),
        (32, 4096, 14336, "32x128x64_w8_s8_g8_k4"),
    ],
)
def test_configurations_for_tma_are_legal_and_share_the_split(m, n, k, first):
    """The first is the fastest measured."""
    spec, problem = described_for_tma(Case("gptq", m, n, k, f16))
    found = WEIGHT_ONLY_LARGE_M_SM90.configs(spec, problem, device(90))
    assert len(set(found)) == len(found)
    assert str(found[0]) == first
    assert len({config.split_k for config in found}) == 1
    for config in found:
        assert WEIGHT_ONLY_LARGE_M_SM90.config_rejection(spec, problem, config, device(90)) is None


@pytest.mark.parametrize(
    ("m", "n", "k"), [(512, 28672, 4096), (1536, 9216, 3072), (1024, 14336, 3584)]
)
def test_rounds_that_leave_sms_idle_are_for_the_kernel_that_shares_tiles(m, n, k):
    spec, problem = described_for_tma(Case("gptq", m, n, k, f16))
    kernel, config = next(candidates("weight_only", spec, problem, device(90)))
    assert kernel is WEIGHT_ONLY_MM_SM90
    assert kernel.scratch(spec, problem, config, device(90)) > 0
    problem = dataclasses.replace(problem, m_is_bounded=False)  # of other M nothing is known
    assert next(candidates("weight_only", spec, problem, device(90)))[0] is WEIGHT_ONLY_LARGE_M_SM90


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (64, 12288, 4096),  # tiles for 96 of 132 SMs
        (64, 28672, 4096),  # more tiles than SMs
        (64, 4096, 4096),  # short splits
        (128, 6144, 4096),
    ],
)
def test_small_m_is_for_two_ctas_per_sm(m, n, k):
    """Unless nearly every SM has one long tile."""
    spec, problem = described_for_tma(Case("gptq", m, n, k, f16))
    assert WEIGHT_ONLY_LARGE_M_SM90.configs(spec, problem, device(90)) == []
    assert WEIGHT_ONLY_MEDIUM_M_SM90.configs(spec, problem, device(90))


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 64, 2, 4),  # no warpgroup
        GemmConfig(64, 128, 256, 8, 4),  # two groups in a block
        GemmConfig(64, 128, 64, 8, 2),  # one stage is multiplied, one dequantized
        GemmConfig(256, 256, 64, 8, 3),  # too many accumulators
        GemmConfig(128, 256, 64, 16, 3),  # too many for four warpgroups
        GemmConfig(64, 64, 64, 8, 4),  # 32 of K per half of the warps
        GemmConfig(64, 64, 128, 16, 4),  # four K slices
        GemmConfig(64, 128, 128, 8, 4, split_k=4),  # one block of K per split, not two
        GemmConfig(256, 128, 64, 8, 8),  # more than the shared memory
    ],
    ids=str,
)
def test_rejected_configurations_for_tma(config):
    spec, problem = described_for_tma(Case("gptq", 64, 512, 512, f16))
    assert WEIGHT_ONLY_LARGE_M_SM90.config_rejection(spec, problem, config, device(90)) is not None


needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


def test_the_body_of_the_loop_goes_through_all_stages_if_it_can():
    config = GemmConfig(64, 128, 64, 8, 8)
    for k, steps in ((4096, 8), (768, 4), (384, 2)):
        _, problem = described_for_tma(Case("gptq", 64, 4096, k, f16))
        assert unrolled(problem, config) == steps


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize("m", sampled([32, 64, 256, 128]))
def test_the_weight_stays_in_registers(m):
    case = Case("gptq", m, 16384, 1024, f16)
    config, *_ = WEIGHT_ONLY_MEDIUM_M_SM90.configs(*described(case), device(90))
    kernels = generate_case(case, f"weight_only_medium_m_sm90 {config}").kernels
    [(name, source)] = [item for item in kernels.items() if "gl.inline_asm" in item[1]]
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    assert any("wgmma" in name for name in kernel.matrix_instructions())
    assert "st.shared" not in kernel.ptx


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize("addends", [1, 2])
def test_a_symbolic_m_costs_no_instructions_in_the_loop(addends):
    """ptxas computed addresses anew in each K iteration for want of registers, and spilled each
    value that an epilogue loads under a mask; of a static M some that it loads without."""
    case, counts = Case("gptq", 4096, 4096, 4096, f16), []
    options = {"inductor_quant.row_buckets": False, "inductor_quant.on_error": "raise"}
    for is_symbolic in (False, True):

        def make(device, is_symbolic=is_symbolic):
            x, *rest = make_inputs(case, device)
            added = torch.empty(addends, case.m, case.n, dtype=f16, device=device).unbind()
            if is_symbolic:
                for rows in (x, *added):
                    torch._dynamo.mark_dynamic(rows, 0, min=2049, max=4097)
            return added, x, *rest

        generated = simulate.generate(
            lambda added, *inputs: gemm(case)(*inputs) + functools.reduce(operator.add, added),
            make,
            arch=90,
            backend=inductor_quant_backend,
            options=options,
        )
        [(name, source)] = generated.kernels.items()
        assert ("ks0" in source) == is_symbolic
        assert "weight_only_large_m_sm90" in source
        kernel = simulate.compile_kernel(name, source)
        assert kernel.spill_stores == 0
        code = [each for _, each in machine_code(kernel.ptx)]
        products = [i for i, each in enumerate(code) if "GMMA" in each]
        counts.append(products[-1] - products[0])
    assert counts[1] < 1.03 * counts[0]


@pytest.mark.one_in(2)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "n", "k"),
    sampled([(256, 16384, 1024), (256, 4096, 512), (128, 14336, 3072), (32, 4096, 14336)]),
)
def test_no_warp_waits_for_another(m, n, k):
    case = Case("gptq", m, n, k, f16)
    spec, problem = described_for_tma(case)
    config, *_ = WEIGHT_ONLY_LARGE_M_SM90.configs(spec, problem, device(90))
    kernels = generate_case(case).kernels  # it is the default
    [(name, source)] = [item for item in kernels.items() if "gl.inline_asm" in item[1]]
    assert "gl.warp_specialize" in source
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    assert not kernel.is_serialized
    stages, steps = config.num_stages, unrolled(problem, config)
    if steps % stages == 0:  # slots are literals: an iteration frees that of the one before
        freed = re.findall(r"STAGES \+ (\d+), k_iter > 0", source)
        assert freed == [str((step - 1) % stages) for step in range(steps)]
    loop = kernel.ptx[kernel.ptx.index("wgmma.mma_async") : kernel.ptx.rindex("wgmma.mma_async")]
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", loop)
    assert "fence.proxy.async" not in loop
    if TRITON < (3, 9) or config.num_warps == 4:
        assert "bar.sync" not in loop  # no warp waits for another


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_a_constant_zero_point_is_no_second_literal(dtype):
    """A multiply-add takes one; ptxas would copy the other to a register for each."""
    tile = f"{WEIGHT_ONLY_LARGE_M_SM90.name} 128x128x64_w8_s8_g8"
    [named] = generate_case(Case("int4_words", 128, 8192, 4096, dtype), tile).kernels.items()
    code = machine_code(simulate.compile_kernel(*named).ptx)
    assert products(code) >= 32
    assert len(literals_in_loops(code)) < 8
