"""Which kernel multiplies 8-bit rows by their experts, and what ptxas makes of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant._compat.group_reduce import TILE
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.kernels.problem import Groups, Problem
from inductor_quant.kernels.scaled_experts.large_m_sm90.kernel import TALL, random_tiles
from inductor_quant.kernels.scaled_mm.large_m_sm90.kernel import tile
from inductor_quant.ops.scaled_experts import make_spec, op
from inductor_quant.report.events import collect
from inductor_quant.spec import row_ranges
from tests.support import in_flight
from tests.support.gemms.generated import device, generate
from tests.support.gemms.scaled_experts import Case, gemm, make_inputs

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
needs_gluon = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")
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


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
def test_tiles_are_taller_for_more_rows(arch):
    def rows_of(mean, dtype=i8, block=(0, 1)):
        return first(mean * E, dtype, block, arch=arch, has_aligned_rows=False)[1].block_m

    means = (12, 13, 20, 21, 128, 129)
    assert [rows_of(mean) for mean in means] == [16, 32, 32, 64, 64, 128]
    # a second accumulator
    assert rows_of(129, e4m3, (128, 128)) == 64


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (128, 128)), (e4m3, None), (i8, None)])
@pytest.mark.parametrize(
    ("mean", "arch"), [(1, 90), (32, 90), (128, 90), (300, 80), (300, 89), (300, 90), (300, 120)]
)
@pytest.mark.parametrize("gather", [{}, {"has_rows": True, "repeats": 8}], ids=str)
def test_next_to_nothing_spills(dtype, block, mean, arch, gather):
    case = Case((2 * mean, 0) * (E // 2), 512, 2048, dtype, block, **gather)
    name = "scaled_experts_int8_mm" if dtype == i8 else "scaled_experts_mm"

    def make(device):  # a stack that TMA does not read
        a, _, *others = make_inputs(case, device)
        wide = torch.empty(E, 520, 2048, dtype=dtype, device=device)
        return a, wide[:, :512].transpose(1, 2), *others

    with collect() as report:
        generated = generate(gemm(case), make, arch=arch)
    assert report.kernels[0].chosen.startswith(f"{name} ")
    [(kernel, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(kernel, source)
    assert compiled.spill_stores <= 16  # once a tile, not in its loop
    assert compiled.matrix_instructions()


LARGE = ("scaled_experts_large_m_sm90", "scaled_experts_int8_large_m_sm90")


@pytest.mark.parametrize(("experts", "config"), [(256, TALL), (257, tile(128, group_m=8))])
def test_the_tallest_tiles_leave_room_for_no_more_experts(experts, config):
    """Which are compiled below; with 257 CTAs need 100 bytes more than there are."""
    groups, n, k = Groups(experts, is_sorted=True), 4096, 7168
    assert first(128 * experts, groups=groups, n=n, k=k) == (LARGE[0], config)
    assert first(128 * 1025, groups=Groups(1025, is_sorted=True))[0] not in LARGE


@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (128, 128)), (e4m3, (0, 1)), (i8, (0, 1))])
def test_many_rows_an_expert_are_for_the_kernel_of_large_m(dtype, block):
    name = LARGE[dtype == i8]
    for rows in (49 * E, 256 * E, 8192 * E):
        assert first(rows, dtype, block)[0] == name
    assert first(48 * E, dtype, block)[0] not in LARGE
    for change in (
        {"arch": 100},
        {"is_sorted": False},
        {"has_aligned_rows": False},
        {"is_stored_narrow": False},
        {"k_is_static": False},
        {"n": 64},  # too few tiles
    ):
        assert first(100 * E, dtype, block, **change)[0] not in LARGE
    assert first(256 * E, e4m3, (64, 64))[0] not in LARGE


@pytest.mark.parametrize("arch", [89, 90])
@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (128, 128)), (e4m3, (0, 1)), (i8, (0, 1))])
def test_a_range_of_rows_has_one_kernel(dtype, block, arch):
    many = 4 * E  # whose tiles fill the SMs: else their number counts, too
    tops = row_ranges.tops([row_ranges.kind_of("scaled_experts", many)])
    of = {"arch": arch, "groups": Groups(many, is_sorted=True)}
    found = []
    for mean in range(1, 200):
        _, high = row_ranges.range_of(mean * many, tops)
        found.append(first(mean * many, dtype, block, **of))
        assert found[-1] == first(high or 4096 * many, dtype, block, **of), mean
    assert len({str(config) for _, config in found}) > 2


def test_silu_times_up_and_its_quantization_in_blocks_read_rows_once():
    """Inductor's own choice for so many groups is a loop, which reads them twice."""
    case = Case((4096,) * 8, 2048, 768, block=(128, 128))

    def fn(y, b, offsets, b_scale):
        gate, up = y.chunk(2, -1)
        groups = (F.silu(gate) * up).float().unflatten(1, (-1, 128))
        scale = groups.abs().amax(-1).clamp_min(1e-12) / 448
        a = (groups / scale[..., None]).to(e4m3).flatten(1)
        return op(a, b.transpose(1, 2), scale, b_scale, offsets, None, **case.kwargs)

    def make(device):
        _, b, offsets, _, b_scale = make_inputs(case, device)
        y = torch.empty(case.rows, 2 * case.k, dtype=bf16, device=device)
        return y, b.mT, offsets, b_scale

    kernels = generate(fn, make).kernels
    [quantizing] = (name for name in kernels if "tem" not in name)
    tile = {name: TILE[name] for name in ("XBLOCK", "num_warps")}
    assert f"fixed_config(\n    config={tile}" in kernels[quantizing]
    assert simulate.compile_kernel(quantizing, kernels[quantizing]).spill_stores == 0


@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (128, 128)), (e4m3, (0, 1)), (i8, (0, 1))])
def test_columns_of_a_tile(dtype, block):
    """Wide tiles read less for each element, but an SM has fewer of them."""
    for mean, n, wide in ((8192, 4096, 256), (512, 4096, 256), (256, 1536, 128), (100, 640, 128)):
        columns = wide if block == (128, 128) else 128
        name, config = first(mean * E, dtype, block, n=n)
        assert (name, config.block_m, config.block_n) == (LARGE[dtype == i8], 128, columns)
    # 96 tiles would leave SMs idle
    assert first(100 * E, dtype, block, n=384)[1].block_n == (128 if block[0] else 96)


@pytest.mark.parametrize("change", ["gap", "columns", "k", "offset"])
def test_a_stack_that_is_no_matrix_is_for_others(change):
    """TMA reads it as E * N columns, one after another, whose begin is aligned."""
    case = Case((256,) * 8, 512, 1032 if change == "k" else 1024)

    def make(device):
        a, b, *others = make_inputs(case, device)
        if change == "gap":
            b = torch.empty(8, 520, 1024, dtype=e4m3, device=device)[:, :512].transpose(1, 2)
        elif change == "columns":
            b = torch.empty(8, 1024, 512, dtype=e4m3, device=device)
        elif change == "offset":
            b = torch.empty(8 * 512 * 1024 + 8, dtype=e4m3, device=device)[8:]
            b = b.view(8, 512, 1024).transpose(1, 2)
        return a, b, *others

    with collect() as report:
        generate(gemm(case), make)
    assert report.kernels[0].chosen.startswith("scaled_experts_mm")


@pytest.mark.parametrize(("dtype", "block"), [(e4m3, (128, 128)), (e4m3, (0, 1)), (i8, (0, 1))])
def test_tiles_of_192_rows_are_for_experts_that_exceed_128_at_times(dtype, block):
    for mean, is_tall in ((96, False), (118, True), (160, True), (192, True), (193, False)):
        _, config = first(mean * E, dtype, block, n=4096, k=7168)
        assert (config == TALL) == is_tall, mean


def test_random_tiles_are_those_of_drawn_routings():
    torch.manual_seed(0)
    experts, config = 64, tile(256, group_m=8)
    for mean in (100, 128, 200, 256, 700):
        problem = Problem(mean * experts, 512, 128, groups=Groups(experts, is_sorted=True))
        ids = torch.randint(experts, (50, mean * experts))
        counts = torch.stack([row.bincount(minlength=experts) for row in ids])
        drawn = (-(-counts // 128)).sum(1).float().mean().item() * 2
        assert random_tiles(problem, config) == pytest.approx(drawn, rel=0.02)


@pytest.mark.one_in(16)  # int8: in test_large_m_sm90_int8.py
@needs_gluon
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("case", "columns", "is_dynamic"),
    [
        (Case((256,) * 128, 1536, 2048, block=(128, 128)), 128, True),
        (Case((256,) * 128, 2048, 1408, block=(128, 128)), 128, False),
        (Case((256,) * 128, 1536, 2048, block=(128, 128)), 256, True),
        (Case((256,) * 128, 1536, 2048, block=(128, 128)), 192, False),
        (Case((256,) * 128, 2048, 1408, block=(128, 128)), 192, False),
        (Case((256,) * 256, 4096, 7168, block=(128, 128)), 256, True),  # offsets of 64 bits
        (Case((256,) * 8, 1100, 784, i8), 256, False),
        (Case((256,) * 8, 1101, 784, i8), 192, True),
        (Case((256,) * 8, 1536, 2048), 128, True),
        (Case((256,) * 8, 1536, 2048), 192, False),
        (Case((256,) * 8, 1536, 2048, fast_accum=True), 256, False),
        # tiles of 192 rows
        (Case((256,) * 256, 4096, 7168, block=(128, 128)), 0, True),
        (Case((160,) * 64, 4096, 7168), 0, True),
        (Case((160,) * 8, 1101, 784, fast_accum=True), 0, False),
        (Case((160,) * 8, 1101, 784, i8), 0, True),
    ],
    ids=lambda value: (
        f"{value.n}x{value.k}-{value.dtype}" if isinstance(value, Case) else str(value)
    ),
)
def test_nothing_spills_in_the_loop_over_k(case, columns, is_dynamic):
    def make(device):
        a, b, offsets, *scales = make_inputs(case, device)
        if is_dynamic:
            torch._dynamo.mark_dynamic(a, 0)
            torch._dynamo.mark_dynamic(scales[0], 0)
        return a, b, offsets, *scales

    config = tile(columns, group_m=8) if columns else TALL
    generated = generate(gemm(case), make, f"{LARGE[case.dtype == i8]} {config}")
    [(kernel, source)] = generated.kernels.items()
    assert "gl.warp_specialize" in source
    compiled = simulate.compile_kernel(kernel, source)
    once_a_tile = 48 if TRITON < (3, 9) else 116 if case.block else 0
    assert compiled.spill_stores <= once_a_tile
    assert compiled.shared_bytes <= device(90).shared_memory
    code = in_flight.machine_code(compiled.ptx)
    assert any("GMMA" in instruction for _, instruction in code)
    # Triton 3.9: of tiles of 192 rows one word
    assert len(in_flight.spills(code)) <= (1 if TRITON >= (3, 9) and not columns else 0)
    # Triton 3.9: loads, one of 400 instructions or more; with an odd number of steps the last one
    # is in the loop over tiles.
    most = 2 if TRITON < (3, 9) else 12 if case.k // 128 % 2 else 4
    assert len(in_flight.spilled_in_loops(code)) <= most
