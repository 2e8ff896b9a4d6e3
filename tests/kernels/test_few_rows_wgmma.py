"""The wgmma kernel for few rows: what it takes, what is legal, what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import _gluon_compat as gluon
from inductor_quant import simulate
from inductor_quant.decisions import RejectionCode
from inductor_quant.kernels import KERNELS, few_rows_wgmma
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.group import together
from tests.support import formats
from tests.support.generated import device
from tests.support.weight_only import Case, described, generate_case

bf16, f16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def problem_of(case):
    """(spec, problem) as the lowering says it of rows that are aligned."""
    spec, problem = described(case)
    return spec, dataclasses.replace(problem, has_aligned_rows=True)


def without_zero_points(problem, operand=None):
    """The same weight with a number taken off instead, or nothing."""
    weight = problem.weight
    zero, *others = weight.format.steps
    first = () if operand is None else (dataclasses.replace(zero, operand=operand),)
    format = dataclasses.replace(weight.format, steps=(*first, *others))
    return dataclasses.replace(problem, weight=dataclasses.replace(weight, format=format))


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (Case("gptq", 16, 28672, 4096), 80),
        (Case("gptq", 16, 28672, 4096), 100),
        (Case("gptq", 8, 28672, 4096), 90),
        (Case("gptq", 33, 28672, 4096), 90),
        (Case("awq", 16, 28672, 4096), 90),  # words along N
        (Case("int4_words", 16, 28672, 4096), 90),  # scales of whole columns
    ],
    ids=str,
)
def test_what_is_for_the_other_kernels(case, arch):
    rejection = few_rows_wgmma.supports(*problem_of(case), device(arch))
    assert rejection is not None
    assert rejection.code == RejectionCode.NO_KERNEL


def test_what_it_asks_of_operands():
    spec, problem = problem_of(Case("gptq", 16, 28672, 4096))
    assert few_rows_wgmma.supports(spec, problem, device(90)) is None
    symmetric = without_zero_points(problem)
    assert few_rows_wgmma.supports(spec, symmetric, device(90)) is None
    refused = [
        ("zero point", without_zero_points(problem, 1.5)),
        ("multiples of 16", dataclasses.replace(problem, has_aligned_rows=False)),
        *(("multiples of 16", with_scales(problem, **how)) for how in MISPLACED),
    ]
    for reason, other in refused:
        rejection = few_rows_wgmma.supports(spec, other, device(90))
        assert rejection is not None
        assert reason in rejection.detail


def test_views_of_a_wider_tensor():
    spec, problem = problem_of(Case("gptq", 16, 28672, 4096))
    wider = with_scales(problem, stride=(28672 + 8, 1))
    assert few_rows_wgmma.supports(spec, wider, device(90)) is None


# along K; rows that begin at odd places; all of them do
MISPLACED = ({"stride": (1, 32)}, {"stride": (28672 + 1, 1)}, {"is_aligned": False})


def with_scales(problem, **how):
    """The same weight, its scales placed otherwise in memory."""
    *others, scales = problem.weight.tensors
    tensors = (*others, dataclasses.replace(scales, **how))
    return dataclasses.replace(problem, weight=dataclasses.replace(problem.weight, tensors=tensors))


def test_fields_of_two_sizes_have_layouts_of_their_own():
    """Zero points of a byte beside scales of two: as many, but not in 16 bytes."""
    spec, problem = problem_of(Case("gptq", 16, 28672, 4096, f16))
    scale = problem.weight.format.steps[-1].operand
    zeros = dataclasses.replace(scale, source=len(problem.weight.tensors), width=8)
    problem = without_zero_points(problem, zeros)
    bytes_of = dataclasses.replace(problem.weight.tensors[-1], dtype=torch.uint8)
    tensors = (*problem.weight.tensors, bytes_of)
    weight = dataclasses.replace(problem.weight, tensors=tensors)
    problem = dataclasses.replace(problem, weight=weight)
    config = GemmConfig(16, 128, 256, 8, 2)
    text = few_rows_wgmma.code_of(spec, problem, config).constants()
    names = [line.split(":")[0] for line in text.splitlines()]
    assert [name for name in names if names.count(name) > 1] == []
    assert sum(name.startswith("COPIED_") for name in names) == 2


@pytest.mark.parametrize(
    ("m", "n", "k", "is_for_it"),
    [
        (16, 28672, 4096, True),
        (16, 22016, 2560, True),
        (16, 14336, 4096, False),  # too few
        (17, 22016, 4096, True),
        (32, 14336, 4096, False),
        (16, 25600, 4096, False),  # a few multiprocessors would have a tile more than the others
        (32, 34048, 4096, False),
        (16, 28672, 1152, False),
    ],
)
def test_configurations_are_legal_and_for_many_columns(m, n, k, is_for_it):
    spec, problem = problem_of(Case("gptq", m, n, k))
    found = few_rows_wgmma.configs(spec, problem, device(90))
    assert bool(found) == is_for_it
    for config in found:
        assert few_rows_wgmma.is_legal(spec, problem, config, device(90)) is None


def test_which_tile_is_first():
    """The multiprocessor that has most of 22016 columns has two tiles of 128, or three of 64."""
    for m, n, columns in (
        *((16, 28672, 128), (16, 22016, 64), (16, 57344, 128)),
        *((32, 28672, 256), (32, 22016, 256)),
    ):
        spec, problem = problem_of(Case("gptq", m, n, 4096))
        first, *_ = few_rows_wgmma.configs(spec, problem, device(90))
        assert first.block_n == columns


def test_gemms_in_one_launch():
    """Not where what is fused behind each would be a kernel of its own: that wants parts of K."""
    spec, _ = problem_of(Case("gptq", 16, 1024, 4096))
    members = [problem_of(Case("gptq", 16, 14336, 4096))[1] for _ in range(2)]
    for lost, is_for_it in ((0, True), (2, False)):
        problem = together(members, lost_fusions=lost)
        assert few_rows_wgmma.supports(spec, problem, device(90)) is None
        assert bool(few_rows_wgmma.configs(spec, problem, device(90))) == is_for_it


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 128, 256, 8, 2),  # more rows than the kernel has
        GemmConfig(8, 128, 256, 8, 2),  # fewer than there are
        GemmConfig(16, 64, 256, 8, 2),  # half a tile of wgmma for each warpgroup
        GemmConfig(16, 128, 64, 8, 2),  # less than a slice
        GemmConfig(16, 128, 128, 8, 3),  # the buffers of x do not alternate
        GemmConfig(16, 128, 256, 8, 8),  # more stages than there are steps
        GemmConfig(16, 128, 256, 8, 2, split_k=2),
    ],
    ids=str,
)
def test_what_is_not_legal(config):
    spec, problem = problem_of(Case("gptq", 9, 1024, 1024))
    assert few_rows_wgmma.is_legal(spec, problem, config, device(90)) is not None


def test_a_tile_has_all_rows():
    spec, problem = problem_of(Case("gptq", 17, 1024, 1024))
    for rows, is_enough in ((16, False), (32, True)):
        config = GemmConfig(rows, 128, 256, 8, 2)
        assert (few_rows_wgmma.is_legal(spec, problem, config, device(90)) is None) == is_enough


def test_it_is_preferred_to_the_kernels_for_more_rows():
    spec, problem = problem_of(Case("gptq", 32, 28672, 4096, f16))
    able = [
        kernel.name
        for kernel in KERNELS
        if kernel.family == "weight_only"
        and kernel.supports(spec, problem, device(90)) is None
        and kernel.configs(spec, problem, device(90))
    ]
    assert able[0] == "weight_only_few_rows_wgmma"
    assert "weight_only_words_gluon" in able


needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "n", "dtype"), [(16, 28672, bf16), (9, 22016, f16), (32, 28672, bf16)]
)
def test_everything_is_copied_ahead(m, n, dtype):
    case = Case("gptq", m, n, 4096, dtype)
    config, *_ = few_rows_wgmma.configs(*problem_of(case), device(90))
    generated = generate_case(case, f"weight_only_few_rows_wgmma {config}")
    [(name, source)] = [item for item in generated.kernels.items() if "copy_async" in item[1]]
    kernel = simulate.compile_kernel(name, source)
    assert kernel.spill_stores == 0, f"{config}: {kernel.registers} registers"
    assert not kernel.is_serialized
    assert f"m64n{config.block_m}k16" in "".join(kernel.matrix_instructions())
    assert "ld.global" not in kernel.ptx
