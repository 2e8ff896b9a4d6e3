"""fp8_large_m_sm90, fp8_block_large_m_sm90: when they apply, what ptxas makes of them, epilogues.

Numerics: test_large_m_sm90_fp8_interpreted.py and tests/gpu.
"""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.scaled_mm.large_m_sm90.kernel import (
    BLOCK_CONFIGS,
    FP8_BLOCK_LARGE_M_SM90,
    FP8_LARGE_M_SM90,
    tile,
)
from inductor_quant.ops import fp8 as op
from inductor_quant.report.events import collect
from inductor_quant.spec.gemm import ScaleSpec
from tests.support.gemms.fp8 import Case, gemm, make_inputs
from tests.support.gemms.generated import generate
from tests.support.sampling import sampled

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
CASE = Case(4096, 2112, 1536, block=(128, 128), a_scales="m")
H200 = Device(arch=90, num_sms=132, shared_memory=232448)
PROBLEM = Problem(m=4096, n=7168, k=16384, is_stored_narrow=True, has_aligned_rows=True)
NAMES = ("fp8_block_large_m_sm90", "fp8_large_m_sm90")
ROWS = Case(4096, 2112, 1536)
TWO_ACCUMULATORS = (
    tile(256, group_m=8),
    tile(192, group_m=8),
)  # two accumulators, of one width and of two
FLOAT = torch.float32
A_SCALE, B_SCALE = ScaleSpec(FLOAT, (1, 128)), ScaleSpec(FLOAT, (128, 128))


def spec(a_scale=A_SCALE, b_scale=B_SCALE, **dtypes):
    return op.make_spec(
        a_scale=a_scale, b_scale=b_scale, out_dtype=torch.bfloat16, bias=True, **dtypes
    )


def test_large_gemms_on_hopper():
    assert FP8_BLOCK_LARGE_M_SM90.rejection(spec(), PROBLEM, H200) is None
    wide = spec(b_scale=ScaleSpec(torch.bfloat16, (128, 256)), a_dtype=torch.float8_e5m2)
    assert FP8_BLOCK_LARGE_M_SM90.rejection(wide, PROBLEM, H200) is None
    for fast_accum in (False, True):
        rows = spec(ScaleSpec(FLOAT, (1, -1)), ScaleSpec(FLOAT, (-1, 1)), fast_accum=fast_accum)
        assert FP8_LARGE_M_SM90.rejection(rows, PROBLEM, H200) is None


@pytest.mark.parametrize(
    ("given", "problem", "device"),
    [
        (spec(), PROBLEM, dataclasses.replace(H200, arch=100)),
        (spec(), PROBLEM, dataclasses.replace(H200, arch=0)),
        (spec(), dataclasses.replace(PROBLEM, m=1024, n=1024), H200),
        (spec(), dataclasses.replace(PROBLEM, m=128, n=24576), H200),
        (spec(), dataclasses.replace(PROBLEM, has_aligned_rows=False), H200),
        (spec(), dataclasses.replace(PROBLEM, k_is_static=False), H200),
        (spec(), dataclasses.replace(PROBLEM, is_stored_narrow=False), H200),
        (spec(b_scale=ScaleSpec(FLOAT, (128, 1))), PROBLEM, H200),
        (spec(ScaleSpec(FLOAT, (1, 64)), ScaleSpec(FLOAT, (64, 128))), PROBLEM, H200),
        (spec(ScaleSpec(torch.float8_e8m0fnu, (1, 128))), PROBLEM, H200),
    ],
)
def test_other_problems_are_for_other_kernels(given, problem, device):
    assert FP8_BLOCK_LARGE_M_SM90.rejection(given, problem, device) is not None


ROW_SPEC = spec(ScaleSpec(FLOAT, (1, -1)), ScaleSpec(FLOAT, (-1, 1)), fast_accum=True)


@pytest.mark.parametrize(
    ("sizes", "is_taken"),
    [
        ((256, 18944, 3584), True),  # three rounds of 96 columns; of 128, 2.2
        ((224, 11008, 4096), True),
        ((256, 12288, 3072), True),
        ((256, 6144, 4096), False),  # few products
        ((256, 4096, 14336), False),  # so few tiles that K is split
        ((256, 28672, 4096), False),  # 256 columns fit as well
        ((192, 18944, 3584), False),  # three tiles of 64 rows
        ((1166, 5120, 1280), False),  # K is short
        ((1166, 5120, 1536), True),
    ],
)
def test_rows_up_to_256_and_short_k_are_for_others(sizes, is_taken):
    m, n, k = sizes
    problem = dataclasses.replace(PROBLEM, m=m, n=n, k=k)
    assert (FP8_LARGE_M_SM90.rejection(ROW_SPEC, problem, H200) is None) == is_taken
    if m <= 256:
        unbounded = dataclasses.replace(problem, m_is_static=False, m_is_bounded=False)
        found = FP8_LARGE_M_SM90.rejection(ROW_SPEC, unbounded, H200)
        assert (found is None) == (m == 256)  # fp8_split_k needs a bound
        precise = dataclasses.replace(ROW_SPEC, fast_accum=False)
        assert FP8_LARGE_M_SM90.rejection(precise, problem, H200) is not None


def generate_gluon(fn, make, config=None, **simulated):
    pinned = [] if config is None else [f"{name} {config}" for name in NAMES]
    with collect() as report:
        generated = generate(fn, make, *pinned, **simulated)
    [choice] = report.kernels
    assert choice.chosen.startswith(NAMES)
    return generated


needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")


@pytest.mark.one_in(6)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("case", "config"),
    [
        *sampled((CASE, config) for config in BLOCK_CONFIGS if config.group_m == 8),
        *sampled(
            (dataclasses.replace(CASE, k=1408, bias=False), config) for config in TWO_ACCUMULATORS
        ),
        *sampled((ROWS, tile(columns, group_m=8)) for columns in (256, 96)),
        (dataclasses.replace(ROWS, fast_accum=True, bias=False), TWO_ACCUMULATORS[1]),
    ],
    ids=str,
)
def test_warpgroups_multiply_and_nothing_spills(case, config):
    generated = generate_gluon(gemm(case), lambda device: make_inputs(case, device), config)
    [(name, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(name, source)
    blocks = math.ceil(case.k / 128)
    is_new = TRITON >= (3, 9) and case.block
    assert compiled.spill_stores == compiled.spill_loads == 0
    assert compiled.shared_bytes <= H200.shared_memory
    # 32 elements of K an instruction, two warpgroups; steps in the loop, and the remainder
    is_long = config.block_n == 192 and blocks % 4 == 0 and not is_new
    unrolled = 1 if case.fast_accum else 4 if is_long else 2 if case.block else 1
    count = 4 * 2 * (unrolled + blocks % unrolled)
    widths = {96: [64, 32], 128: [128], 192: [128, 64], 256: [128, 128]}[config.block_n]
    assert compiled.matrix_instructions() == {
        f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3": count * widths.count(n)
        for n in widths
    }
    assert re.search(r"setmaxnreg.inc.sync.aligned.u32\s+240", compiled.ptx)
    assert "cp.async.bulk.tensor.2d" in compiled.ptx


@needs_gluon
@pytest.mark.compiles
@pytest.mark.slow
def test_bias_and_silu_take_few_instructions():
    """Roundings of two values, and neither ``exp`` nor division of full range: no spill either."""
    [(name, source)] = generate_gluon(
        lambda *inputs: F.silu(gemm(CASE)(*inputs)), lambda device: make_inputs(CASE, device)
    ).kernels.items()
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == 0
    assert "cvt.rn.bf16x2.f32" in compiled.ptx
    assert "cvt.rn.bf16.f32" not in compiled.ptx
    assert "div.full.f32" not in compiled.ptx
    values = compiled.ptx.count("rcp.approx.ftz.f32")
    assert values >= 64 * 128 // 128  # of an accumulator, a thread
    assert compiled.ptx.count("ex2.approx.ftz.f32") == values


def test_only_divisions_by_more_than_one_are_approximated():
    text = """tmp1 = libdevice.exp(tmp0)
    tmp2 = tl.full([1], 1.0, tl.float32)
    tmp3 = tl.full([1], 0.5, tl.float32)
    tmp4 = tmp1 + tmp2
    tmp5 = tmp1 + tmp3
    tmp6 = (tmp0 / tmp4)
    tmp7 = (tmp0 / tmp5)
    tmp8 = tmp7.to(tl.float16)
    """
    got = gluon.fast_math(text)
    assert "tmp6 = tile_over(tmp0, tmp4)" in got
    assert "tmp7 = (tmp0 / tmp5)" in got
    assert "tmp8 = tile_round(tmp7, tl.float16)" in got
    assert "tmp1 = tile_exp(tmp0)" in got


@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(("n", "is_masked"), [(1024, False), (1040, True)])
def test_loads_of_an_epilogue_have_a_mask_where_columns_end_in_a_tile(n, is_masked):
    case = dataclasses.replace(CASE, m=4000, n=n)

    def make(device):
        residual = torch.empty(case.m, case.n, dtype=torch.bfloat16, device=device)
        return residual, *make_inputs(case, device)

    [(_, source)] = generate_gluon(
        lambda residual, *inputs: gemm(case)(*inputs) + residual, make
    ).kernels.items()
    [load] = [line for line in source.splitlines() if "tile_load(" in line]
    assert ("mask" in load) == is_masked
    [store] = [line for line in source.splitlines() if "tile_store(" in line]
    assert "mask)" in store


def test_tiles_that_leave_the_chip_idle_come_later():
    def tile(m, n):
        problem = dataclasses.replace(PROBLEM, m=m, n=n)
        first = FP8_BLOCK_LARGE_M_SM90.configs(spec(), problem, H200)[0]
        return first.block_m, first.block_n

    assert tile(4096, 7168) == (128, 256)
    assert tile(4096, 2112) == (128, 192)  # 2.7 rounds of 3, not 2.2 of 3 larger ones
    assert tile(1024, 2112) == (128, 192)
    assert tile(132 * 128, 128) == (128, 128)


@needs_gluon
@pytest.mark.compiles
def test_the_epilogue_is_in_the_kernel():
    """Constants, a scalar in memory, libdevice functions, positions, a bias and a residual.

    It may spill, once a tile; bias and SiLU alone do not."""

    def fn(residual, factor, *inputs):
        out = F.silu(gemm(CASE)(*inputs)).tanh().clamp(min=-0.1) * factor + residual
        return torch.where(torch.arange(CASE.n, device=out.device) < 100, out, 0.5)

    def make(device):
        residual = torch.empty(CASE.m, CASE.n, dtype=torch.bfloat16, device=device)
        return residual, torch.empty((), device=device), *make_inputs(CASE, device)

    small = BLOCK_CONFIGS[-1]  # half the code to compile
    [(name, source)] = generate_gluon(fn, make, small).kernels.items()
    assert "libdevice.tanh" in source
    assert simulate.compile_kernel(name, source).spill_stores <= 128


@pytest.mark.one_in(2)
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_values_of_64_bits_change_their_layout_without_shared_memory(dtype):
    """The pipeline stages leave none."""

    def fn(order, *inputs):
        return torch.where(order < 100, gemm(CASE)(*inputs), 0.5)

    def make(device):
        return torch.empty(CASE.n, dtype=dtype, device=device), *make_inputs(CASE, device)

    small = BLOCK_CONFIGS[-1]
    [(name, source)] = generate_gluon(fn, make, small).kernels.items()
    assert simulate.compile_kernel(name, source).shared_bytes <= H200.shared_memory


@needs_gluon
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_functions_are_approximated_if_16_bits_are_stored(stored):
    def fn(*inputs):
        return F.silu(gemm(CASE)(*inputs).float()).to(stored)

    [(_, source)] = generate_gluon(fn, lambda device: make_inputs(CASE, device)).kernels.items()
    assert ("tile_exp(" in source) == (stored == torch.bfloat16)
    assert ("libdevice.exp(" in source) == (stored == torch.float32)


@needs_gluon
@pytest.mark.compiles
def test_rows_may_be_dynamic():
    def make(device):
        inputs = make_inputs(CASE, device)
        for tensor in (inputs[0], inputs[2]):
            torch._dynamo.mark_dynamic(tensor, 0)
        return inputs

    [(name, source)] = generate_gluon(gemm(CASE), make).kernels.items()
    assert "4096" not in source.split("def ")[1].split("produce")[0]
    assert simulate.compile_kernel(name, source).spill_stores == 0


@needs_gluon
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_operands_may_begin_in_the_middle_of_a_tensor(is_dynamic):
    """Every partition of the kernel applies the storage offset, like the kernel itself."""

    def fn(a, w, a_scales, b_scales, biases):
        start = biases.shape[0] - CASE.n
        return gemm(CASE)(a, w, a_scales[:, 3:15], b_scales[2:19], biases[start:])

    def make(device):
        a, w, a_scale, b_scale, bias = make_inputs(CASE, device)
        a_scales = a_scale.new_empty(CASE.m, a_scale.shape[1] + 5)
        biases = bias.new_empty(CASE.n + 7)
        if is_dynamic:
            torch._dynamo.mark_dynamic(biases, 0)
        return a, w, a_scales, b_scale.new_empty(25, b_scale.shape[1]), biases

    [(_, source)] = generate_gluon(fn, make).kernels.items()
    for operand in ("A_SCALE", "B_SCALE", "BIAS"):
        lines = [line.strip() for line in source.splitlines()]
        begins = [line for line in lines if line.startswith(f"{operand} = ")]
        assert len(begins) == 4, begins  # the kernel, the parts that load, multiply and finish
        assert set(begins) == {begins[0]}
        assert " + " in begins[0]


@needs_gluon
def test_an_operand_computed_from_a_transpose_is_row_major():
    """Inductor would store it in the order that it reads; a TMA descriptor needs rows."""

    def fn(columns, *inputs):
        return gemm(CASE)(columns.t().to(CASE.a_dtype), *inputs)

    def make(device):
        _, *inputs = make_inputs(CASE, device)
        return torch.empty(CASE.k, CASE.m, dtype=torch.bfloat16, device=device), *inputs

    source = "\n".join(generate_gluon(fn, make).kernels.values())
    assert f"make_tensor_descriptor(A, [M, K], [{CASE.k}, 1]" in source


@needs_gluon
@pytest.mark.compiles
def test_ordinary_kernels_compile_as_before():
    """Only Gluon functions get Gluon's source class."""
    gluon.runtime()
    case = Case(64, 512, 512, block=(128, 128))
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    assert all("@gluon" not in source for source in generated.kernels.values())
    for name, source in generated.kernels.items():
        assert simulate.compile_kernel(name, source).spill_stores == 0
