"""Kernels for groups and many rows: when they apply, which tile they take, what ptxas makes of
it."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.problem import Problem
from inductor_quant.kernels.scaled_mm.group_large_m_sm90 import kernel as group_large_m_sm90
from inductor_quant.ops import fp8 as fp8_op
from inductor_quant.ops import w8a8 as w8a8_op
from inductor_quant.ops.w8a8 import make_spec
from inductor_quant.spec.gemm import ScaleSpec
from tests.support import in_flight
from tests.support.gemms import fp8, w8a8
from tests.support.gemms.generated import device, generate

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

PROBLEM = Problem(1024, 6144, 4096, has_aligned_rows=True, is_stored_narrow=True)
KERNEL = group_large_m_sm90.W8A8_GROUP_LARGE_M_SM90


def spec(group=128, a_block=(1, -1)):
    return make_spec(
        a_scale=ScaleSpec(torch.float32, a_block),
        b_scale=ScaleSpec(torch.bfloat16, (group, 1)),
        out_dtype=torch.bfloat16,
        bias=False,
    )


def chosen(spec, problem, arch=90):
    return next(candidates("w8a8", spec, problem, device(arch)))


@pytest.mark.parametrize(
    ("changes", "spec", "arch"),
    [
        ({}, spec(), 89),
        ({}, spec(group=64), 90),
        ({}, spec(a_block=(1, 128)), 90),
        ({"m": 255}, spec(), 90),
        ({"m": 257, "n": 1024}, spec(), 90),  # few tiles
        ({"n": 6147}, spec(), 90),
        ({"has_aligned_rows": False}, spec(), 90),
        ({"is_stored_narrow": False}, spec(), 90),
    ],
)
def test_other_problems_are_for_w8a8_mm(changes, spec, arch):
    assert chosen(globals()["spec"](), PROBLEM)[0] is KERNEL
    assert chosen(globals()["spec"](256), PROBLEM)[0] is KERNEL
    assert chosen(spec, dataclasses.replace(PROBLEM, **changes), arch)[0].name == "w8a8_mm"


def test_tiles_of_fewer_rows_where_they_fit_the_chip():
    def rows(m, n):
        return chosen(spec(), dataclasses.replace(PROBLEM, m=m, n=n))[1].block_m

    assert rows(4096, 4096) == 256
    assert rows(384, 4096) == 128  # 96 tiles, of 256 rows 64


FP8 = group_large_m_sm90.FP8_GROUP_LARGE_M_SM90


def test_fp8_of_groups_has_no_other_kernel():
    def of(group, dtype=torch.float32):
        return fp8_op.make_spec(
            a_scale=ScaleSpec(torch.float32, (1, -1)),
            b_scale=ScaleSpec(dtype, (group, 1)),
            out_dtype=torch.bfloat16,
            bias=False,
        )

    for m, group, is_taken in ((1024, 128, True), (256, 512, True), (255, 128, False)):
        problem = dataclasses.replace(PROBLEM, m=m)
        found = [kernel for kernel, _ in candidates("fp8", of(group), problem, device(90))]
        assert set(found) == ({FP8} if is_taken else set()), (m, group)
    assert not list(candidates("fp8", of(64), PROBLEM, device(90)))
    assert not list(candidates("fp8", of(128), PROBLEM, device(89)))
    assert all(kernel is not FP8 for kernel, _ in candidates("fp8", of(-1), PROBLEM, device(90)))


def test_fp8_of_groups_without_a_kernel_runs_as_blocks():
    case = fp8.Case(32, 256, 256, group=64)
    generated = generate(fp8.gemm(case), functools.partial(fp8.make_inputs, case))
    assert "fp8_block" in " ".join(generated.kernels.values())


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("family", ["w8a8", "fp8"])
@pytest.mark.parametrize("rows", [256, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("k", [4096, pytest.param(1152, marks=pytest.mark.slow)])
@pytest.mark.parametrize("n", [4104, pytest.param(4096, marks=pytest.mark.slow)])
def test_nothing_spills_and_each_partial_is_converted_once(family, rows, k, n):
    module, kernel = (fp8, FP8) if family == "fp8" else (w8a8, KERNEL)
    case = module.Case(4096, n, k, group=128)
    config = next(each for each in group_large_m_sm90.CONFIGS if each.block_m == rows)
    given = functools.partial(module.make_inputs, case), f"{kernel.name} {config}"
    [(name, source)] = generate(module.gemm(case), *given).kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == 0
    code = in_flight.machine_code(compiled.ptx)
    assert in_flight.overwritten(code) == []
    lines = [str(line) for line in code]
    converted = 0 if family == "fp8" else 2 * rows // 2  # of both warpgroups
    assert sum("I2FP" in line for line in lines) == converted


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(fp8_op.op, torch.float8_e4m3fn), (w8a8_op.op, torch.int8)],
    ids=["fp8", "w8a8"],
)
def test_groups_of_a_symbolic_k_are_left_to_the_reference(op, dtype):
    """Their size is not known; kernels would take the first group's scales for all."""

    def fn(a, b, scale):
        return op(a, b.t(), None, scale, None, out_dtype=torch.bfloat16)

    def make(device):
        a, b = (torch.randint(-8, 9, (n, 256), device=device).to(dtype) for n in (40, 64))
        for operand in (a, b):
            torch._dynamo.mark_dynamic(operand, 1)
        return a, b, torch.rand(4, 64, device=device) + 0.5

    with pytest.raises(BackendCompilerFailed, match="4 groups along K"):
        generate(fn, make, arch=90)
    torch.manual_seed(0)
    inputs = make("cpu")
    got = torch.compile(fn, backend="inductor_quant")(*inputs)
    torch.testing.assert_close(got, fn(*inputs))
