"""Numerics of ``weight_only_medium_m`` in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    gemm,
    make_inputs,
    one_hot_rows,
    reference,
)
from tests.support.sampling import sampled

pytestmark = [pytest.mark.interp, pytest.mark.usefixtures("large_groups")]

bf16, f16 = torch.bfloat16, torch.float16
# scales have x's dtype
FORMATS = (
    ("gptq", f16),
    ("awq", f16),
    ("nibble_pairs", bf16),
    ("int4_words", bf16),
    ("uint2", bf16),
)
CONFIGS = ("64x128x128_w8_s3_g8", "64x64x64_w4_s3_g8_k4")


def run(fn, make, inputs, config):
    generated = generate(fn, make, f"weight_only_medium_m {config}")
    assert any("fma.rn" in source for source in generated.kernels.values())
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize(
    ("name", "dtype", "config", "layout"),
    sampled(
        (
            (*of, *how)
            for of in FORMATS
            for how in ((CONFIGS[0], "rows"), (CONFIGS[1], "columns"), (CONFIGS[0], "every_second"))
        ),
        every=4,  # each layout, with another format
    ),
)
def test_result_is_close_to_fp64(name, dtype, config, layout):
    torch.manual_seed(0)
    case = Case(name, 40, 256, 512, dtype, bias=True, column_scale="channel", layout=layout)
    inputs = make_inputs(case, "cpu")
    got = run(gemm(case), lambda device: make_inputs(case, device), inputs, config)
    assert_close(got, reference(case, inputs))


@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_one_hot_rows_give_the_weight_bit_for_bit(name, dtype):
    """In fp32: W is rounded exactly as in the reference."""

    def generated_by(fn, make):
        generated = generate(fn, make, f"weight_only_medium_m {CONFIGS[0]}")
        assert any("fma.rn" in source for source in generated.kernels.values())
        return generated

    case = Case(name, 64, 128, 256, dtype, out_dtype=torch.float32)
    for got, want in one_hot_rows(case, generated_by, 3):
        assert torch.equal(got, want)
