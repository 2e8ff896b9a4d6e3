"""How ``weight_only_mm_sm90`` reads and dequantizes words, in machine code."""

from __future__ import annotations

import re

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.kernels.config import parse_config
from inductor_quant.kernels.weight_only.mm_sm90.kernel import WEIGHT_ONLY_MM_SM90
from tests.support import in_flight
from tests.support.gemms.weight_only import Case, generate_case, loadable

pytestmark = pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon")

bf16, f16 = torch.bfloat16, torch.float16
CONFIG = "64x128x64_w4_s4_g8"
PAIRS = 32  # of values that a thread has in a K iteration


def loop_of(case, config=CONFIG):
    """The names of the instructions of the loop, and how many K iterations it has."""
    generated = generate_case(case, f"weight_only_mm_sm90 {config}")
    [(name, source)] = generated.kernels.items()
    loop = in_flight.loop(in_flight.machine_code(simulate.compile_kernel(name, source).ptx))
    names = [re.sub(r"^@!?U?P\w+ ", "", each).split()[0] for each in loop]
    return names, sum("GMMA" in each for each in names) // 8  # eight in an iteration


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "dtype", "each"),
    [
        ("nibble_pairs", bf16, 1),  # less 8
        ("uint2", bf16, 1),  # as they are, with a scale of each column after the loop
        ("int8_channel", bf16, 1),
        ("gptq", f16, 2),  # stored zero points
    ],
)
def test_a_pair_with_a_power_of_two_as_zero_point_takes_one_multiply_add(
    name, dtype, each, large_groups
):
    names, iterations = loop_of(Case(name, 64, 1024, 4096, dtype))
    products = sum(text.startswith(("HFMA2", "HMUL2", "HADD2")) for text in names)
    # beside them those of a few scales
    assert each * PAIRS <= products / iterations < (each + 0.7) * PAIRS


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["int8_channel", "fp8_row", "int8_group"])
def test_bytes_of_a_row_are_read_sixteen_at_a_time(name, large_groups):
    """Lanes that share two words read both: each its own word would be four times as many loads."""
    names, iterations = loop_of(Case(name, 64, 1024, 4096, bf16))
    reads = [text for text in names if text.startswith("LDS")]
    wide = reads.count("LDS.128")
    assert wide == 16 * iterations
    assert len(reads) - wide <= iterations  # Triton 3.7.1 reads one number of its own in each


@pytest.mark.parametrize(
    ("name", "k", "config", "count"),
    [
        ("nibble_pairs", 4096, "64x128x64_w8_s8_g8", 2),
        ("int8_channel", 4096, "64x128x64_w8_s8_g8", 2),
        ("nf4", 4096, "64x128x64_w8_s8_g8", 2),
        ("int8_channel", 4096 + 64, "64x128x64_w8_s8_g8", 1),  # a box would end beyond K
        ("awq", 4096, "64x128x64_w8_s8_g8", 1),  # rows along N
        ("nibble_pairs", 4096, "64x128x64_w8_s4_g8", 1),  # loaded one by one
    ],
)
def test_words_of_iterations_that_are_loaded_together_are_one_box(
    name, k, config, count, large_groups
):
    spec, problem = loadable(Case(name, 64, 1024, k, bf16))
    codegen = WEIGHT_ONLY_MM_SM90.codegen(spec, problem, parse_config(config))
    assert codegen.box_iterations == count
