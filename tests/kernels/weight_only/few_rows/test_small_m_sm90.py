"""``weight_only_small_m_sm90``: which GEMMs it takes, its configurations, machine code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels import KERNELS
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.shared.horizontal import together
from inductor_quant.kernels.weight_only.small_m_sm90.kernel import WEIGHT_ONLY_SMALL_M_SM90
from inductor_quant.spec.decisions import RejectionCode
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, described, generate_case

pytestmark = pytest.mark.usefixtures("large_groups")

bf16, f16 = torch.bfloat16, torch.float16


def problem_of(case):
    """(spec, problem) as the lowering describes aligned rows."""
    spec, problem = described(case)
    return spec, dataclasses.replace(problem, has_aligned_rows=True)


def without_zero_points(problem, operand=None):
    """The same weight with a constant as zero point, or none."""
    weight = problem.weight
    zero, *others = weight.format.dequant_ops
    first = () if operand is None else (dataclasses.replace(zero, operand=operand),)
    format = dataclasses.replace(weight.format, dequant_ops=(*first, *others))
    return dataclasses.replace(problem, weight=dataclasses.replace(weight, format=format))


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (Case("gptq", 16, 28672, 4096), 80),
        (Case("gptq", 16, 28672, 4096), 100),
        (Case("gptq", 8, 28672, 4096), 90),
        (Case("gptq", 33, 28672, 4096), 90),
        (Case("awq", 16, 28672, 4096), 90),  # packed along N
        (Case("int4_words", 16, 28672, 4096), 90),  # scales of whole columns
    ],
    ids=str,
)
def test_rejected_gemms(case, arch):
    rejection = WEIGHT_ONLY_SMALL_M_SM90.rejection(*problem_of(case), device(arch))
    assert rejection is not None
    assert rejection.code == RejectionCode.NO_KERNEL


def test_requirements_of_operands():
    spec, problem = problem_of(Case("gptq", 16, 28672, 4096))
    assert WEIGHT_ONLY_SMALL_M_SM90.rejection(spec, problem, device(90)) is None
    symmetric = without_zero_points(problem)
    assert WEIGHT_ONLY_SMALL_M_SM90.rejection(spec, symmetric, device(90)) is None
    refused = [
        ("zero point", without_zero_points(problem, 1.5)),
        ("multiples of 16", dataclasses.replace(problem, has_aligned_rows=False)),
        *(("multiples of 16", with_scales(problem, **how)) for how in MISPLACED),
    ]
    for reason, other in refused:
        rejection = WEIGHT_ONLY_SMALL_M_SM90.rejection(spec, other, device(90))
        assert rejection is not None
        assert reason in rejection.detail


def test_views_of_a_wider_tensor():
    spec, problem = problem_of(Case("gptq", 16, 28672, 4096))
    wider = with_scales(problem, stride=(28672 + 8, 1))
    assert WEIGHT_ONLY_SMALL_M_SM90.rejection(spec, wider, device(90)) is None


# contiguous along K; rows at odd addresses; a misaligned tensor
MISPLACED = ({"stride": (1, 32)}, {"stride": (28672 + 1, 1)}, {"is_aligned": False})


def with_scales(problem, **how):
    """The same weight with other strides or alignment of its scales."""
    *others, scales = problem.weight.tensors
    tensors = (*others, dataclasses.replace(scales, **how))
    return dataclasses.replace(problem, weight=dataclasses.replace(problem.weight, tensors=tensors))


def test_fields_of_two_sizes_have_layouts_of_their_own():
    """uint8 zero points beside 2-byte scales: 16 bytes hold twice as many."""
    spec, problem = problem_of(Case("gptq", 16, 28672, 4096, f16))
    scale = problem.weight.format.dequant_ops[-1].operand
    zeros = dataclasses.replace(scale, source=len(problem.weight.tensors), width=8)
    problem = without_zero_points(problem, zeros)
    byte_layout_of = dataclasses.replace(problem.weight.tensors[-1], dtype=torch.uint8)
    tensors = (*problem.weight.tensors, byte_layout_of)
    weight = dataclasses.replace(problem.weight, tensors=tensors)
    problem = dataclasses.replace(problem, weight=weight)
    config = GemmConfig(16, 128, 256, 8, 2)
    text = WEIGHT_ONLY_SMALL_M_SM90.codegen(spec, problem, config).constants()
    names = [line.split(":")[0] for line in text.splitlines()]
    assert [name for name in names if names.count(name) > 1] == []
    assert sum(name.startswith("COPIED_") for name in names) == 2


@pytest.mark.parametrize(
    ("m", "n", "k", "is_for_it"),
    [
        (16, 28672, 4096, True),
        (16, 22016, 2560, True),
        (16, 14336, 4096, False),  # N is too small
        (17, 22016, 4096, True),
        (32, 14336, 4096, False),
        (16, 25600, 4096, False),  # a few SMs would have one tile more than the others
        (32, 34048, 4096, False),
        (16, 28672, 1152, False),
    ],
)
def test_configurations_are_legal_and_for_large_n(m, n, k, is_for_it):
    spec, problem = problem_of(Case("gptq", m, n, k))
    found = WEIGHT_ONLY_SMALL_M_SM90.configs(spec, problem, device(90))
    assert bool(found) == is_for_it
    for config in found:
        assert WEIGHT_ONLY_SMALL_M_SM90.config_rejection(spec, problem, config, device(90)) is None


def test_which_tile_is_first():
    """The busiest SM has two tiles of 128, or three of 64, of N = 22016."""
    for m, n, columns in (
        *((16, 28672, 128), (16, 22016, 64), (16, 57344, 128)),
        *((32, 28672, 256), (32, 22016, 256)),
    ):
        spec, problem = problem_of(Case("gptq", m, n, 4096))
        first, *_ = WEIGHT_ONLY_SMALL_M_SM90.configs(spec, problem, device(90))
        assert first.block_n == columns


def test_gemms_in_one_launch():
    """Not if it costs fusions: then K must be split."""
    spec, _ = problem_of(Case("gptq", 16, 1024, 4096))
    members = [problem_of(Case("gptq", 16, 14336, 4096))[1] for _ in range(2)]
    for lost, is_for_it in ((0, True), (2, False)):
        problem = together(members, lost_fusions=lost)
        assert WEIGHT_ONLY_SMALL_M_SM90.rejection(spec, problem, device(90)) is None
        assert bool(WEIGHT_ONLY_SMALL_M_SM90.configs(spec, problem, device(90))) == is_for_it


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 256, 8, 2),  # more rows than the kernel supports
        GemmConfig(8, 128, 256, 8, 2),  # fewer rows than M
        GemmConfig(16, 64, 256, 8, 2),  # 64 columns per warpgroup, not 32
        GemmConfig(16, 128, 64, 8, 2),  # less than a slice
        GemmConfig(16, 128, 128, 8, 3),  # an odd number of stages
        GemmConfig(16, 128, 256, 8, 8),  # more stages than K iterations
        GemmConfig(16, 128, 256, 8, 2, split_k=2),
    ],
    ids=str,
)
def test_rejected_configurations(config):
    spec, problem = problem_of(Case("gptq", 9, 1024, 1024))
    assert WEIGHT_ONLY_SMALL_M_SM90.config_rejection(spec, problem, config, device(90)) is not None


def test_a_tile_has_all_rows():
    spec, problem = problem_of(Case("gptq", 17, 1024, 1024))
    for rows, is_enough in ((16, False), (32, True)):
        config = GemmConfig(rows, 128, 256, 8, 2)
        assert (
            WEIGHT_ONLY_SMALL_M_SM90.config_rejection(spec, problem, config, device(90)) is None
        ) == is_enough


def test_it_is_preferred_to_the_kernels_of_larger_m():
    spec, problem = problem_of(Case("gptq", 32, 28672, 4096, f16))
    problem = dataclasses.replace(problem, has_weight_descriptors=True)
    able = [
        kernel.name
        for kernel in KERNELS
        if kernel.family == "weight_only"
        and kernel.rejection(spec, problem, device(90)) is None
        and kernel.configs(spec, problem, device(90))
    ]
    assert able[0] == "weight_only_small_m_sm90"
    assert "weight_only_mm_sm90" in able


needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.mark.one_in(3)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "n", "dtype"), [(16, 28672, bf16), (9, 22016, f16), (32, 28672, bf16)]
)
def test_everything_is_copied_ahead(m, n, dtype):
    case = Case("gptq", m, n, 4096, dtype)
    config, *_ = WEIGHT_ONLY_SMALL_M_SM90.configs(*problem_of(case), device(90))
    generated = generate_case(case, f"weight_only_small_m_sm90 {config}")
    [(name, source)] = [item for item in generated.kernels.items() if "copy_async" in item[1]]
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    assert not kernel.is_serialized
    assert f"m64n{config.block_m}k16" in "".join(kernel.matrix_instructions())
    assert "ld.global" not in kernel.ptx
