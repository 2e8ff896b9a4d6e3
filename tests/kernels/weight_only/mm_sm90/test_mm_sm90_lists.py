"""``weight_only_mm_sm90`` where tensors list the group of each k: what it takes and compiles to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.config import GemmConfig, parse_config
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from inductor_quant.kernels.weight_only.mm_sm90.loop import rows_of
from tests.support import in_flight
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, generate_case, loadable

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

bf16, f16 = torch.bfloat16, torch.float16
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
BESIDE_LOOP = 8  # bytes that may be spilled there


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("m", "dtype", "tile"),
    [
        (64, bf16, "64x128x64_w4_s4_g8"),  # shared
        (100, f16, "128x128x64_w4_s4_g8"),
        pytest.param(24, f16, "32x128x64_w4_s8_g8", marks=pytest.mark.slow),
        pytest.param(64, f16, "64x256x64_w8_s4_g8", marks=pytest.mark.slow),
        pytest.param(128, bf16, "128x128x64_w8_s8_g8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_copied", [True, False])
def test_listed_groups_of_neighbouring_columns_are_loaded_at_once(
    is_copied, m, dtype, tile, monkeypatch
):
    """For each k one load of scales and one of zero points, from shared memory, or each from an
    address that is one instruction if tiles end beyond N; and nothing spills there. Triton 3.9
    merges fewer of the loads (README.md)."""
    if TRITON >= (3, 9):
        pytest.skip("loads are not merged, and some tiles spill")
    monkeypatch.setattr(formats, "GROUP", 128)
    monkeypatch.setattr(formats, "f16", dtype)  # of scales
    n = 4096 if is_copied else 4096 + 8
    case = Case("act_order", m, n, 4096, dtype)
    generated = generate_case(case, f"{WEIGHT_ONLY_MM_SM90.name} {tile}")
    named = next(item for item in generated.kernels.items() if "x_stages" in item[1])
    kernel = simulate.compile_kernel(*named)
    assert kernel.spill_stores <= BESIDE_LOOP
    assert not kernel.is_serialized
    code = in_flight.machine_code(kernel.ptx)
    assert in_flight.overwritten(code) == []
    config = parse_config(tile)
    loop = in_flight.loop(code)
    assert in_flight.spills(code) == []
    ks, columns = 2 * config.block_k // 4, config.block_n // (8 * config.num_warps)
    assert sum("LDG" in each for each in loop) == (0 if is_copied else 2 * ks)
    if is_copied:
        assert len(loop) < (6.5 if columns == 4 else 8) * ks * columns
        return
    assert sum("LDG.E.64" in each for each in loop) == (ks if columns == 4 else 0)
    assert 2 * ks <= sum("IMAD" in each for each in loop) < 3.3 * ks
    assert len(loop) < (7.5 if columns == 4 else 10) * ks * columns


def test_listed_rows_that_threads_cannot_read_so_are_not_copied(large_groups):
    config = GemmConfig(64, 128, 64, 4, 4)
    _, problem = loadable(Case("act_order", 64, 4096, 4096, f16))
    weight, format = problem.weight, problem.weight.format
    sub, mul = format.dequant_ops
    assert rows_of(weight, config) is not None

    def changed(scale, dtype=None):
        tensors = list(weight.tensors)
        if dtype is not None:
            at = sub.operand.source
            tensors[at] = dataclasses.replace(tensors[at], dtype=dtype)
        ops = (sub, dataclasses.replace(mul, operand=scale))
        new = dataclasses.replace(format, dequant_ops=ops)
        return dataclasses.replace(weight, format=new, tensors=tuple(tensors))

    rows, columns = mul.operand.index
    shifted = dataclasses.replace(mul.operand, index=(rows, dataclasses.replace(columns, const=1)))
    assert rows_of(changed(mul.operand), config) is not None
    assert rows_of(changed(shifted), config) is None  # no multiple of 16 bytes
    assert rows_of(changed(mul.operand, torch.int64), config) is None


def test_a_position_that_depends_on_n_too_is_left_to_others(large_groups):
    """The groups of a column after those of the one before."""
    spec, problem = loadable(Case("act_order", 64, 1024, 1024, f16))
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90)) is None
    sub, mul = problem.weight.format.dequant_ops
    group, column = mul.operand.index
    group = dataclasses.replace(group, linear=(("n0", 8),))
    mul = dataclasses.replace(mul, operand=dataclasses.replace(mul.operand, index=(group, column)))
    format = dataclasses.replace(problem.weight.format, dequant_ops=(sub, mul))
    weight = dataclasses.replace(problem.weight, format=format)
    problem = dataclasses.replace(problem, weight=weight)
    assert WEIGHT_ONLY_MM_SM90.rejection(spec, problem, device(90)) is not None


@pytest.mark.parametrize(
    ("tile", "is_shared"),
    [("64x128x64_w4_s4_g8", True), ("128x128x64_w4_s4_g8", False), ("128x128x64_w8_s8_g8", True)],
)
def test_tiles_of_listed_groups_that_lack_registers_are_not_shared(tile, is_shared, large_groups):
    spec, problem = loadable(Case("act_order", 128, 11008, 4096, f16))
    config = parse_config(tile)
    assert (WEIGHT_ONLY_MM_SM90.scratch(spec, problem, config, device(90)) > 0) == is_shared
