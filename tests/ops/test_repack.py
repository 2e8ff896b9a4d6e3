"""Which layouts are repacked, and that the weight is the same."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.kernels.codegen.byte_layout import byte_layout_of
from inductor_quant.kernels.codegen.packed_layout import packed_layout_of
from inductor_quant.kernels.problem import Weight, WeightTensor
from inductor_quant.ops import repack
from inductor_quant.ops.dequantize import dequantize
from tests.support.gemms.weight_only import Case, make_inputs

REPACKED = ("awq", "hqq", "int8_shuffled", "int4_in_int64", "shift_table")
OTHERS = (
    "gptq",
    "nibble_pairs",
    "int4_words",
    "uint2",
    "uint3",
    "ten_parts",
    "nf4",
    "joined_table",
)
BYTES = ("int8_group", "int8_divisor", "int8_folded", "int8_channel", "fp8_row", "fp8_block")


@pytest.mark.parametrize("name", [*REPACKED, *OTHERS, *BYTES, "fp8_words", "int8_zero_channel"])
def test_what_kernels_read_fast_stays_and_the_rest_is_the_same_weight(name):
    case = Case(name, 1, 64, 256)
    _, _, _, *tensors = make_inputs(case, "cpu")
    format = case.packed.format
    described = (WeightTensor(t.dtype, tuple(t.shape), t.stride()) for t in tensors)
    weight = Weight(format, tuple(described))
    packed, found = packed_layout_of(weight), byte_layout_of(weight)
    is_fast = found is not None and found[1].count == 1
    is_fast |= packed is not None and packed.axis == "k"
    made = repack.repacked(format, tensors)
    assert (made is not None) == (name in REPACKED)
    if made is not None:
        assert not is_fast
        want = dequantize(format, tensors, torch.float64)
        assert torch.equal(dequantize(made.format, made.buffers, torch.float64), want)
