"""Which kernel multiplies 8-bit rows by their experts, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.problem import Groups, Problem
from inductor_quant.ops.scaled_experts import make_spec
from tests.support.gemms.generated import device, generate
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs

e4m3, i8, bf16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
E = 32


def first(rows: int, dtype=e4m3, block=(128, 128), *, arch=90, is_sorted=True, **of_problem):
    spec = make_spec(
        a_dtype=dtype,
        b_dtype=dtype,
        scales=(torch.float32, torch.float32),
        block=block,
        out_dtype=bf16,
    )
    problem = Problem(rows, 1536, 2048, has_aligned_rows=True, groups=Groups(E, is_sorted))
    problem = dataclasses.replace(problem, **of_problem)
    kernel, config = next(candidates("scaled_experts", spec, problem, device(arch)))
    return kernel.name, config


def test_rows_in_any_order_are_a_tile_each():
    name, config = first(512 * E, is_sorted=False)
    assert (name, config.block_m) == ("scaled_experts_mm", 16)


@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (128, 128)), (e4m3, (0, 1)), (i8, (0, 1))])
def test_every_gpu_and_every_layout_has_a_kernel(dtype, block):
    name = "scaled_experts_int8_mm" if dtype == i8 else "scaled_experts_mm"
    for rows in (1, 4 * E, 64 * E, 1024 * E):
        for arch in (80, 89):
            assert first(rows, dtype, block, arch=arch)[0] == name
        assert first(rows, dtype, block, has_aligned_rows=False)[0] == name
        assert first(rows, dtype, block, is_sorted=False)[0] == name


def test_a_tile_lies_within_a_block_of_k():
    _, config = first(8, block=(32, 32))
    assert config.block_k == 32


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (128, 128)), (e4m3, None), (i8, None)])
@pytest.mark.parametrize("mean", [2, 64, 256])
def test_next_to_nothing_spills(dtype, block, mean):
    case = Case((mean, 0) * (E // 2), 512, 2048, dtype, block)
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [(kernel, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(kernel, source)
    assert compiled.spill_stores <= 16  # once a tile, not in its loop
    assert compiled.matrix_instructions()
