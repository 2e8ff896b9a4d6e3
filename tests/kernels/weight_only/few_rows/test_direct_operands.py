"""What ``weight_only_direct`` does not do for each value of W: scales x, looks up pairs."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.weight_only.direct.kernel import WEIGHT_ONLY_DIRECT
from inductor_quant.kernels.weight_only.direct.operands import looks_up_pairs, scales_x
from tests.support import in_flight
from tests.support.gemms import apart, formats
from tests.support.gemms.generated import device, generate
from tests.support.gemms.weight_only import Case, aligned, compiled_in_direct

pytestmark = [
    pytest.mark.usefixtures("large_groups"),
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]

bf16, f16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("name", "m", "dtype", "tile", "is_scaled"),
    [
        ("groups_of_n", 1, bf16, "8x64x512_w8", True),
        ("groups_of_n", 16, bf16, "16x32x512_w8", True),
        ("groups_of_n", 1, f16, "8x64x512_w8", False),  # a small scale would leave x few bits
        ("groups_of_n", 1, bf16, "8x256x128_w8", False),  # columns of two groups
        ("groups_of_n", 32, bf16, "32x32x512_w8", False),
        ("hqq", 1, bf16, "8x64x512_w8", False),
        ("act_order", 1, bf16, "8x64x512_w8", False),
    ],
)
def test_x_is_scaled_where_columns_share_what_each_k_has(
    name, m, dtype, tile, is_scaled, monkeypatch
):
    monkeypatch.setattr(formats, "GROUP", 64)
    spec, problem = aligned(Case(name, m, 4096, 4096, dtype))
    config = parse_config(f"{tile}_s1_g8")
    assert scales_x(spec, problem.weight, config) == is_scaled
    assert bool(WEIGHT_ONLY_DIRECT.codegen(spec, problem, config).x_ops) == is_scaled


def test_scales_of_another_type_than_x_are_those_of_w(monkeypatch):
    monkeypatch.setattr(apart, "bf16", f16)
    spec, problem = aligned(Case("groups_of_n", 1, 4096, 4096, bf16))
    assert not scales_x(spec, problem.weight, parse_config("8x32x512_w8_s1_g8"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("m", [1, 8, 16])
def test_scales_of_each_k_take_few_instructions(m, monkeypatch):
    """Two and a half for each value of W; 6 where W was scaled."""
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case("groups_of_n", m, 4096, 16384, bf16)
    config, *_ = WEIGHT_ONLY_DIRECT.configs(*aligned(case), device(90))
    kernel = compiled_in_direct(case, config)
    assert kernel.spill_stores <= 8
    loop = in_flight.loop(in_flight.machine_code(kernel.ptx), "HMMA")
    values = 2 * config.block_n * config.block_k // config.num_warps // 32
    assert len(loop) < (3.2 if m == 16 else 2.5) * values


@pytest.mark.parametrize(
    ("m", "config", "is_in_pairs"),
    [
        (8, "8x32x1024_w8_s1_g8", True),
        (1, "8x32x2048_w16_s1_g8", True),
        (1, "8x32x512_w4_s1_g8", False),  # to write the table would take longer
        (1, "8x64x1024_w16_s1_g8", False),  # too much shared memory
        (16, "16x32x1024_w8_s1_g8", False),
    ],
)
def test_tables_are_looked_up_in_pairs(m, config, is_in_pairs):
    spec, problem = aligned(Case("nf4", m, 4096, 4096, bf16))
    config = parse_config(config)
    assert looks_up_pairs(problem, config) == is_in_pairs
    codegen = WEIGHT_ONLY_DIRECT.codegen(spec, problem, config)
    assert bool(codegen.pair_places) == is_in_pairs == (not codegen.places)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_a_table_that_is_known_is_not_looked_up(name):
    _, problem = aligned(Case(name, 1, 4096, 4096, bf16))
    assert problem.weight.format.element.entries
    assert not looks_up_pairs(problem, parse_config("8x32x1024_w8_s1_g8"))


def test_a_pair_is_one_load_from_shared_memory():
    config = "8x32x1024_w8_s1_g8"
    kernel = compiled_in_direct(Case("nf4", 4, 4096, 16384, bf16), config)
    assert kernel.spill_stores == 0
    loop = in_flight.loop(in_flight.machine_code(kernel.ptx), "HMMA")
    assert sum("LDS" in text for text in loop) == 2 * 64
    assert len(loop) < 3.5 * 2 * 128


@pytest.mark.one_in(2)
@pytest.mark.parametrize("m", [1, 8])
def test_products_with_bytes_of_float_are_scaled_once_a_block(m):
    case, config = Case("fp8_block", m, 4096, 4096, bf16), "8x32x512_w4_s1_g8"
    spec, problem = aligned(case)
    codegen = WEIGHT_ONLY_DIRECT.codegen(spec, problem, parse_config(config))
    assert [op.kind for op in codegen.sum_ops] == ["mul"]
    assert codegen.divisor == 1
    code = in_flight.machine_code(compiled_in_direct(case, config).ptx)
    assert sum("FMUL" in text for _, text in code) < 64


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "m"), [("int4_words", 1), ("int4_words", 16), ("int8_channel", 1), ("hqq", 8)]
)
def test_words_are_loaded_an_iteration_before_they_are_needed(name, m, monkeypatch):
    """Of a turn of two iterations the second one's loads, too, are in front of its products."""
    monkeypatch.setattr(formats, "GROUP", 64)
    case = Case(name, m, 4096, 16384, bf16)
    config, *_ = WEIGHT_ONLY_DIRECT.configs(*aligned(case), device(90))
    loop = in_flight.loop(in_flight.machine_code(compiled_in_direct(case, config).ptx), "HMMA")
    loads = [i for i, text in enumerate(loop) if "LDG" in text and ".EF" in text]
    assert len(loads) % 2 == 0
    assert max(loads) < 0.85 * len(loop)
    moves = sum(text.startswith(("MOV", "IMAD.MOV")) for text in loop)
    assert moves < 0.05 * len(loop)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [1028, 1030])
def test_bytes_along_n_need_not_be_words(n):
    """1030 is no multiple of the four bytes of a word."""

    def make(device):
        sizes, dtypes = ((4, 8192), (4096, n), (1, n)), (bf16, torch.uint8, bf16)
        made = zip(sizes, dtypes, strict=True)
        return tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in made)

    def linear(x, nibbles, scales):
        q = torch.stack([nibbles & 15, nibbles >> 4], 1).flatten(0, 1).to(torch.int8) - 8
        return x @ (q.to(bf16) * scales)

    generated = generate(linear, make, f"{WEIGHT_ONLY_DIRECT.name} 8x32x1024_w8_s1_g8")
    [named] = [item for item in generated.kernels.items() if "partials" in item[1]]
    simulate.compile_kernel(*named)
