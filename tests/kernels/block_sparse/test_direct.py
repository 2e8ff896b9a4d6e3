"""``block_sparse_direct`` on virtual GPUs: what it takes, and machine code."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import inductor as compat
from inductor_quant.kernels.block_sparse.direct.kernel import BLOCK_SPARSE_DIRECT
from inductor_quant.kernels.dispatch import candidates
from inductor_quant.report.events import collect
from inductor_quant.spec import row_ranges
from tests.support.gemms.block_sparse import Case, described, gemm, make_inputs
from tests.support.gemms.generated import device, generate, hardest
from tests.support.in_flight import machine_code

f16, i8, e4m3 = torch.float16, torch.int8, torch.float8_e4m3fn


def first(case, arch=90):
    spec, problem = described(case)
    return next(candidates("block_sparse", spec, problem, device(arch)))[0].name


@pytest.mark.parametrize(
    ("case", "arch", "name"),
    [
        (Case(1, 4096, 4096, zeros=0.8), 90, "block_sparse_direct"),
        (Case(16, 4096, 4096, (16, 128), 0.8, f16), 80, "block_sparse_direct"),
        (Case(16, 4096, 4096, zeros=0.8, stored=e4m3), 89, "block_sparse_direct"),
        (Case(16, 4096, 4096, zeros=0.8, stored=e4m3), 80, "block_sparse_mm"),
        (Case(17, 4096, 4096, zeros=0.8), 90, "block_sparse_mm"),
        (Case(17, 2048, 4096, zeros=0.8), 90, "block_sparse_direct"),
        (Case(17, 2048, 4096, (16, 64), zeros=0.8), 90, "block_sparse_mm"),
        (Case(64, 1024, 1024, (64, 64), zeros=0.8), 90, "block_sparse_direct"),
        (Case(64, 1024, 1024, zeros=0.8), 80, "block_sparse_mm"),
        (Case(65, 512, 1024, zeros=0.8), 90, "block_sparse_mm"),
        (Case(16, 4096, 4096, (32, 16), 0.8), 90, "block_sparse_mm"),
        (Case(16, 4096, 4096, zeros=0.8, rows=2), 90, "block_sparse_mm"),
        (Case(16, 4096, 4096, zeros=0.8, dtype=i8), 90, "block_sparse_mm"),
        (Case(16, 4096, 4096, zeros=0.8), 100, "block_sparse_mm"),
    ],
    ids=str,
)
def test_few_rows_or_tiles_and_blocks_of_at_least_32_columns(case, arch, name):
    assert first(case, arch) == name


@pytest.mark.parametrize("n", [1024, 1408, 2048])
def test_a_range_of_rows_has_the_kernel_of_each(n):
    for m in range(17, 65):
        _, most = row_ranges.range_of(m, row_ranges.tops(["block_sparse"]))
        assert first(Case(m, n, 256)) == first(Case(most, n, 256))


def test_unaligned_rows_are_left_to_the_general_kernel():
    spec, problem = described(Case(1, 4096, 4096, zeros=0.8))
    problem = dataclasses.replace(problem, has_weight_descriptors=False)
    assert "aligned" in BLOCK_SPARSE_DIRECT.rejection(spec, problem, device(90)).detail


def offset_by_one(case, device):
    """The values begin at an odd address."""
    x, values, *others = make_inputs(case, device)
    longer = torch.cat([values.flatten()[:1], values.flatten()])
    return x, longer, *others


@pytest.mark.compiles
def test_values_at_an_odd_address_too():
    case = Case(3, 256, 256, stored=i8, scale="blocks")
    count = len(case.blocks)

    def fn(x, longer, *others):
        return gemm(case)(x, longer[1:].view(count, 32, 32), *others)

    generated = generate(fn, lambda device: offset_by_one(case, device))
    assert any("block_sparse" in name for name in generated.kernels)
    assert not any("@gluon.jit" in source for source in generated.kernels.values())


@pytest.mark.compiles
@pytest.mark.parametrize("is_package", [False, True])
def test_a_package_has_the_general_kernel(monkeypatch, is_package):
    """Gluon is not for the C++ wrapper."""
    monkeypatch.setattr(compat, "uses_cpp_wrapper", lambda: is_package)
    case = Case(3, 256, 256)
    with collect() as report:
        generate(gemm(case), lambda device: make_inputs(case, device))
    [choice] = report.kernels
    name = "block_sparse_mm" if is_package else "block_sparse_direct"
    assert choice.chosen.startswith(f"{name} ")


@pytest.mark.parametrize(
    ("m", "n", "k", "longest", "config"),
    [
        (1, 4096, 4096, 0, "8x32x2048_w16_s1_g8"),
        (1, 14336, 4096, 0, "8x32x512_w4_s1_g8"),
        (16, 14336, 4096, 0, "16x32x256_w4_s1_g8"),
        (16, 8192, 4096, 0, "16x32x512_w8_s1_g8"),
        # a row in several steps, in one
        (16, 4096, 4096, 0, "16x32x512_w8_s1_g8"),
        (16, 4096, 4096, 20, "16x32x1024_w16_s1_g8"),
        (16, 1024, 1024, 10, "16x32x512_w8_s1_g8"),
        (64, 1024, 1024, 10, "16x32x512_w8_s1_g8"),
        (64, 1024, 1024, 5, "16x32x256_w4_s1_g8"),
        (16, 1024, 1024, 2, "16x32x128_w4_s1_g8"),
    ],
)
def test_the_warps_by_ctas_and_the_step_by_the_longest_row(m, n, k, longest, config):
    spec, problem = described(Case(m, n, k, zeros=0.8))
    blocks = dataclasses.replace(spec.b.blocks, longest=longest)
    spec = dataclasses.replace(spec, b=dataclasses.replace(spec.b, blocks=blocks))
    assert str(BLOCK_SPARSE_DIRECT.configs(spec, problem, device(90))[0]) == config


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("n", "config", "is_read"),
    [(14336, "16x32x256_w4_s1_g8", False), (14336, "16x32x512_w8_s1_g8", True)],
)
def test_the_order_of_rows_is_read_if_not_all_ctas_run_at_once(n, config, is_read):
    case = Case(16, n, 512, zeros=0.8, order=True)
    pin = f"block_sparse_direct {config}"
    [source] = generate(gemm(case), lambda d: make_inputs(case, d), pin).kernels.values()
    assert ("gl.load(ORDER" in source) == is_read


CASES = [
    Case(16, 4096, 4096, zeros=0.8),
    Case(64, 1024, 1024, zeros=0.8, dtype=f16),
    Case(1, 4096, 4096, zeros=0.8, stored=i8, scale="blocks"),
    pytest.param(
        Case(16, 4096, 4096, zeros=0.8, stored=i8, scale="rows_of_blocks"), marks=pytest.mark.slow
    ),
    pytest.param(
        Case(16, 4096, 4096, zeros=0.8, stored=e4m3, scale="blocks"), marks=pytest.mark.slow
    ),
    pytest.param(Case(16, 14336, 4096, (64, 64), 0.8, f16), marks=pytest.mark.slow),
]


@pytest.mark.one_in(4)
@pytest.mark.compiles
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_configuration_spills_and_the_loads_of_a_step_are_together(case):
    spec, problem = described(case)
    found = BLOCK_SPARSE_DIRECT.configs(spec, problem, device(90))
    for config in hardest(found, 2):
        pin = f"block_sparse_direct {config}"
        [item] = generate(gemm(case), lambda d: make_inputs(case, d), pin).kernels.items()
        compiled = simulate.compile_kernel(*item)
        assert compiled.spill_stores == 0
        names = [instruction for _, instruction in machine_code(compiled.ptx)]
        loads = [i for i, name in enumerate(names) if re.search(r"\bLDG", name)]
        products = [i for i, name in enumerate(names) if "HMMA" in name]
        assert max(loads) < min(products)
        width, size = (64, 1) if case.stored else (128, 2)
        wide = sum(f"LDG.E.{width}" in name for name in names)
        assert wide * width // 8 * 32 * config.num_warps == config.block_n * config.block_k * size
