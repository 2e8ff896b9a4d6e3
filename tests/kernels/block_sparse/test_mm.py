"""Block-sparse products on virtual GPUs: which kernel, what it fuses, machine code."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.kernels.block_sparse.mm.kernel import BLOCK_SPARSE_MM, BLOCK_SPARSE_MM_TMA
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.report.events import collect
from tests.support.gemms.block_sparse import Case, described, gemm, make_inputs
from tests.support.gemms.generated import device, generate, hardest

f16, i8 = torch.float16, torch.int8
ARCHS = (80, 89, 90, 100)
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (128, 16), (16, 64)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_block_has_legal_configurations_for_every_m(arch, block):
    for m in (1, 17, 64, 65, 1000, 8192):
        spec, problem = described(Case(m, 4096, 4096, block, 0.8))
        found = list(candidates("block_sparse", spec, problem, device(arch)))
        assert len(found) >= 2
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("m", "n", "block", "kernel"),
    [
        (256, 4096, 32, BLOCK_SPARSE_MM),
        (1024, 4096, 32, BLOCK_SPARSE_MM_TMA),
        (1024, 1024, 32, BLOCK_SPARSE_MM),
        (1024, 4096, 64, BLOCK_SPARSE_MM),
        (4096, 4096, 64, BLOCK_SPARSE_MM_TMA),
        (256, 14336, 128, BLOCK_SPARSE_MM),
        (257, 4096, 128, BLOCK_SPARSE_MM_TMA),
        (4096, 4096, 16, BLOCK_SPARSE_MM),
    ],
)
def test_tma_where_it_is_faster(m, n, block, kernel):
    spec, problem = described(Case(m, n, 4096, (block, block), 0.8))
    chosen, _ = next(candidates("block_sparse", spec, problem, device(90)))
    assert chosen is kernel


@pytest.mark.parametrize(
    ("m", "n", "longest", "config"),
    [
        (16, 1024, 0, "16x32x64_w2_s9_g8"),
        (16, 4096, 0, "16x32x128_w4_s7_g8"),
        (1, 14336, 0, "16x32x32_w1_s9_g8"),
        (1, 4096, 128, "16x32x256_w4_s7_g8_k4"),
        (1, 4096, 40, "16x32x128_w4_s7_g8"),
        (256, 4096, 128, "64x32x32_w2_s8_g8"),
        (256, 1024, 0, "64x32x128_w4_s5_g8"),
    ],
)
def test_the_tile_by_rows_ctas_and_the_longest_row_of_blocks(m, n, longest, config):
    spec, problem = described(Case(m, n, 4096, (32, 32), 0.8))
    blocks = dataclasses.replace(spec.b.blocks, longest=longest)
    spec = dataclasses.replace(spec, b=dataclasses.replace(spec.b, blocks=blocks))
    assert str(BLOCK_SPARSE_MM.configs(spec, problem, device(90))[0]) == config


@pytest.mark.parametrize(
    ("m", "n", "k", "block", "dtype", "group"),
    [
        (4096, 4096, 4096, 32, f16, 4),
        (4096, 2048, 1024, 32, f16, 16),
        (4096, 4096, 14336, 32, f16, 1),
        (4096, 4096, 65536, 32, f16, 1),
        (4096, 4096, 4096, 32, i8, 8),
        (4096, 4096, 4096, 128, f16, 8),
    ],
)
def test_tiles_of_8_mib_of_x_are_walked_together(m, n, k, block, dtype, group):
    spec, problem = described(Case(m, n, k, (block, block), 0.8, dtype))
    assert BLOCK_SPARSE_MM_TMA.configs(spec, problem, device(90))[0].group_m == group


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("m", "n", "pin", "is_read"),
    [
        (64, 4096, "block_sparse_mm 64x32x128_w4_s5_g8", False),
        (4096, 1024, "block_sparse_mm_tma 256x32x32_w4_s5_g16", False),
        (4096, 2048, "block_sparse_mm_tma 256x32x32_w4_s5_g16", True),  # registers
        (4096, 1024, "block_sparse_mm_tma 256x32x32_w4_s7_g16", True),  # shared memory
    ],
)
def test_the_order_of_rows_is_read_if_not_all_ctas_run_at_once(m, n, pin, is_read):
    case = Case(m, n, 1024, zeros=0.8, order=True)
    [source] = generate(gemm(case), lambda d: make_inputs(case, d), pin).kernels.values()
    assert ("tl.load(ORDER" in source) == is_read


def test_rows_without_a_bound_may_take_turns():
    case = Case(64, 4096, 4096, zeros=0.8)
    spec, problem = described(case)
    problem = dataclasses.replace(problem, m_is_static=False, m_is_bounded=False)
    config = BLOCK_SPARSE_MM.configs(spec, problem, device(90))[0]
    assert BLOCK_SPARSE_MM.constants(spec, problem, config, device(90))["TAKES_TURNS"]


CASES = [
    Case(1, 1024, 1024, zeros=0.8),
    Case(1024, 4096, 1024, zeros=0.8, rows=2),
    pytest.param(
        Case(300, 1024, 1024, zeros=0.8, stored=i8, scale="blocks"), marks=pytest.mark.slow
    ),
    pytest.param(Case(4096, 4096, 1024, (64, 64), zeros=0.8), marks=pytest.mark.slow),
    pytest.param(Case(40, 1024, 1024, (64, 64), 0.8, f16), marks=pytest.mark.slow),
    pytest.param(Case(300, 1024, 1024, (128, 128), 0.8), marks=pytest.mark.slow),
    pytest.param(Case(300, 1024, 1024, zeros=0.8), marks=pytest.mark.slow),
    pytest.param(Case(4096, 1024, 1024, (16, 16), 0.9), marks=pytest.mark.slow),
]


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_configuration_spills(case, arch):
    spec, problem = described(case)
    of_tma = BLOCK_SPARSE_MM_TMA.rejection(spec, problem, device(arch)) is None
    kernel = BLOCK_SPARSE_MM_TMA if of_tma else BLOCK_SPARSE_MM
    for config in hardest(kernel.configs(spec, problem, device(arch)), 2):
        pin = f"{kernel.name} {config}"
        [item] = generate(
            gemm(case), lambda d: make_inputs(case, d), pin, arch=arch
        ).kernels.items()
        compiled = simulate.compile_kernel(*item)
        assert compiled.spill_stores == 0
        # Loads are asynchronous and wide: a gathered column of x is known to be contiguous.
        assert "cp.async.cg.shared.global" in compiled.ptx
        has_wgmma = any("wgmma" in name for name in compiled.matrix_instructions())
        is_wide = config.block_m >= 64 and config.num_warps >= 4
        assert has_wgmma == (arch == 90 and is_wide)


def places(device):
    """Three blocks in each of 16 rows: (crow, col)."""
    place = torch.arange(48, device=device)
    return torch.arange(17, device=device) * 3, place % 3 * 2 + place // 3 % 2


def sparse_linear(x, values, bias, residual):
    """From plain PyTorch: W [512, 256] in blocks of 32, whose rows are found from ``crow``."""
    crow, col = places(x.device)
    place = torch.arange(values.shape[0], device=x.device)
    row = torch.searchsorted(crow[1:], place, right=True)
    w = x.new_zeros(16, 8, 32, 32).index_put((row, col), values)
    out = F.linear(x, w.permute(0, 2, 1, 3).reshape(512, 256), bias)
    return F.gelu(out) + residual


def linear_inputs(device):
    shapes = (5, 256), (48, 32, 32), (512,), (5, 512)
    return tuple(torch.randn(shape, device=device).to(f16) for shape in shapes)


@pytest.mark.compiles
def test_a_sparse_linear_and_what_follows_are_one_kernel():
    with collect() as report:
        generated = generate(sparse_linear, linear_inputs)
    [match] = report.matches
    assert (match.family, match.format) == ("block_sparse", "bsr 32x32, 62% zero")
    [(name, source)] = generated.kernels.items()
    assert "block_sparse" in name
    assert "extern_kernels." not in generated.wrapper
    assert "erf" in source


@pytest.mark.interp
def test_a_sparse_linear_has_the_values_of_its_graph():
    torch.manual_seed(0)
    x, values, bias, residual = linear_inputs("cpu")
    got = simulate.interpret(generate(sparse_linear, linear_inputs), (x, values, bias, residual))
    w = torch.zeros(16, 8, 32, 32, dtype=torch.float64)
    _, col = places("cpu")
    w[torch.arange(48) // 3, col] = values.double()
    want = x.double() @ w.permute(0, 2, 1, 3).reshape(512, 256).t() + bias.double()
    torch.testing.assert_close(got.double(), F.gelu(want) + residual.double(), rtol=2e-3, atol=2e-2)
