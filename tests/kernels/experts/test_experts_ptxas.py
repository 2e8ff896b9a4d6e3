"""The code of kernels of experts, and what ptxas makes of it."""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest
import torch
import triton

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.codegen.dialect import HOISTS_MORE
from inductor_quant.kernels.experts.mm.kernel import CONFIGS
from tests.support import in_flight
from tests.support.gemms import formats
from tests.support.gemms.experts import Case, gemm, make_inputs
from tests.support.gemms.generated import generate

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
bf16 = torch.bfloat16
E = 32


@pytest.fixture(autouse=True)
def _groups(large_groups):
    """Of 128."""


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "awq", "nibble_pairs", "int8_channel", "nf4", "fp8_row"])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("mean", [2, 14, 16, 64])
@pytest.mark.parametrize("gather", [{}, {"has_rows": True, "repeats": 8}], ids=str)
def test_nothing_spills(name, is_sorted, mean, gather):
    mean = 12 if gather and is_sorted and mean == 64 else mean  # not by TMA
    case = Case(name, (mean, 0) * (E // 2), 512, 2048, is_sorted=is_sorted, **gather)
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [(kernel, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(kernel, source)
    most = 0
    if name == "nf4":  # a table; with registers enough an SM would have 12 warps instead of 16
        most = 32 if HOISTS_MORE else 24
    elif "few_rows(" in source:  # words that both loops need, beside them
        most = 32 if HOISTS_MORE else 16
    assert compiled.spill_stores <= most
    assert compiled.matrix_instructions()
    # Of 340 instructions and more; from Triton 3.7 on two halves of a register of gathered int8.
    has_halves = name == "int8_channel" and gather and TRITON >= (3, 7)
    in_loops = in_flight.spilled_in_loops(in_flight.machine_code(compiled.ptx))
    assert len(in_loops) <= (4 if name == "nf4" or has_halves else 0)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "mean"), [("nibble_pairs", 32), pytest.param("nf4", 64, marks=pytest.mark.slow)]
)
def test_a_tile_with_half_its_rows_multiplies_these_alone(name, mean):
    case = Case(name, (mean,) * E, 512, 2048)
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [(kernel, source)] = generated.kernels.items()
    compiled = simulate.compile_kernel(kernel, source)
    assert not compiled.is_serialized
    block_m = int(re.search(r"BLOCK_M : tl.constexpr = (\d+)", source)[1])
    counts = compiled.matrix_instructions()
    whole, half = (f"m64n{rows}k16" for rows in (block_m, block_m // 2))
    found = {size: sum(counts[each] for each in counts if size in each) for size in (whole, half)}
    assert found[whole] == found[half] == sum(counts.values()) // 2 > 0


@pytest.mark.compiles
def test_a_tile_of_96_rows_has_two_products_or_the_first_alone():
    """x is in the order of lanes, so that no byte of a word is chosen."""
    case = Case("nibble_pairs", (64,) * E, 512, 2048, has_rows=True)
    make, tile = functools.partial(make_inputs, case), "experts_mm_sm90 96x128x64_w4_s6_g8"
    generated = generate(gemm(case), make, tile)
    [(kernel, source)] = [each for each in generated.kernels.items() if "specialize" in each[1]]
    compiled = simulate.compile_kernel(kernel, source)
    assert not compiled.is_serialized
    assert compiled.spill_stores <= (16 if HOISTS_MORE else 0)
    found = Counter(int(rows) for rows in re.findall(r"wgmma\S*m64n(\d+)k16", compiled.ptx))
    assert found[64] == 2 * found[32] > 0
    code = in_flight.machine_code(compiled.ptx)
    assert in_flight.overwritten(code) == in_flight.spilled_in_loops(code) == []
    # Of 64 pairs of values of two K iterations.
    chosen = len(in_flight._in_loops(code, re.compile(r"\bPRMT\b")))
    assert chosen < 64


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "awq", "nibble_pairs", "int8_channel", "nf4", "fp8_row"])
@pytest.mark.parametrize("mean", [100, 600])
def test_nothing_spills_with_many_rows(name, mean):
    """In the widest tiles too, of 256 rows: the rows of a thread are not kept over the loop."""
    case = Case(name, (mean,) * E, 512, 2048)
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [(kernel, source)] = generated.kernels.items()
    assert "gl.warp_specialize" in source
    compiled = simulate.compile_kernel(kernel, source)
    assert compiled.spill_stores == 0
    code = in_flight.machine_code(compiled.ptx)
    assert in_flight.products(code) >= 8
    assert in_flight.overwritten(code) == []


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("gptq", 64),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("gptq", mean) for mean in (24, 100, 600)),
                *(("awq", mean) for mean in (24, 64, 100)),
                *(("nibble_pairs", mean) for mean in (64, 600)),
            )
        ),
    ],
)
def test_scales_of_small_groups_do_not_spill(name, mean, monkeypatch):
    """Of fp16, for x in bf16, but for those of nibble_pairs. With a mean of 100 two CTAs share an
    SM, with 128 registers a thread."""
    monkeypatch.setattr(formats, "GROUP", 32)
    case = Case(name, (mean,) * E, 512, 2048)
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [(kernel, source)] = generated.kernels.items()
    assert "gl.warp_specialize" in source
    compiled = simulate.compile_kernel(kernel, source)
    # One or two words, of 1211 instructions of a turn one access.
    most = {"gptq": 4 * (TRITON >= (3, 9)), "awq": 4 + 4 * (TRITON >= (3, 9))}.get(name, 0)
    assert compiled.spill_stores <= (most if mean == 100 else 0)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("hqq", 24), ("int8_group", 0)])
def test_scales_of_small_groups_that_spill_have_arrived(name, most, monkeypatch):
    """Zero points in fp16 and values of 8 bits are dequantized in fp32, which takes more than 128
    registers. The next turn's scales are not stored where they are loaded, which waits for them."""
    monkeypatch.setattr(formats, "GROUP", 32)
    case = Case(name, (24,) * E, 2048, 768)
    generated = generate(gemm(case), lambda device: make_inputs(case, device))
    [(kernel, source)] = generated.kernels.items()
    assert "limit_registers(128)" in source
    compiled = simulate.compile_kernel(kernel, source)
    assert compiled.spill_stores <= most
    assert in_flight.stored_as_loaded(in_flight.machine_code(compiled.ptx)) == []


@pytest.mark.compiles
@pytest.mark.slow
def test_no_configuration_spills():
    for name in ("int8_group", "nibble_pairs"):
        case = Case(name, (3, 0, 5), 512, 2048)
        for _, configs in CONFIGS:
            for config in configs:
                make = functools.partial(make_inputs, case)
                generated = generate(gemm(case), make, f"experts_mm {config}")
                [(text, source)] = generated.kernels.items()
                assert simulate.compile_kernel(text, source).spill_stores == 0, config


@pytest.mark.compiles
def test_a_symbolic_number_of_rows_has_one_kernel_and_no_sync():
    case = Case("nibble_pairs", (2,) * E, 512, 1024)

    def make(device):
        x, offsets, *weight = make_inputs(case, device)
        torch._dynamo.mark_dynamic(x, 0)
        return x, offsets, *weight

    generated = generate(gemm(case), make)
    [(_, source)] = generated.kernels.items()
    assert "M = ks0" in source
    assert ".item()" not in generated.wrapper
    assert ".tolist()" not in generated.wrapper
