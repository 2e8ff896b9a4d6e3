"""Numerics of ``weight_only_mm`` for every format, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from inductor_quant import simulate
from inductor_quant.ops import weight_only
from inductor_quant.spec.weight_format import AffineIndex, Field, WeightFormat
from tests.support.gemms.formats import FORMATS, form
from tests.support.gemms.generated import generate
from tests.support.gemms.weight_only import Case, assert_close, gemm, make_inputs, reference
from tests.support.sampling import sampled

pytestmark = pytest.mark.interp

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    *sampled(Case(name, 5, 40, 96) for name in FORMATS),
    # M from one to more than a tile
    *(Case("gptq", m, 64, 64, bias=True, column_scale="channel") for m in (1, 33, 120)),
    # sizes that no block divides
    Case("int8_channel", 7, 77, 57, bias=True),
    Case("int8_channel", 1, 1, 1),
    Case("int8_group", 17, 50, 288),
    Case("uint2", 3, 20, 70),
    Case("gptq", 20, 136, 160, f16),
    # dtypes
    *(Case("int8_group", 5, 40, 96, dtype, out_dtype=f32) for dtype in (bf16, f16, f32)),
    *(Case(name, 5, 40, 96, f16, column_scale="tensor") for name in ("fp8_row", "hqq", "nf4")),
    # strides
    *sampled(
        (
            Case(name, 5, 40, 96, f16, layout=layout, column_scale="channel", bias=True)
            for name in ("gptq", "awq", "hqq", "act_order", "fp8_block", "shift_table")
            for layout in ("columns", "every_second")
        ),
        every=3,
    ),
]


def run(fn, make, inputs, config=None):
    generated = generate(fn, make, *([] if config is None else [config]))
    [name] = generated.kernels
    assert "weight_only" in name
    return simulate.interpret(generated, inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_close_to_fp64(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    got = run(gemm(case), lambda device: make_inputs(case, device), inputs)
    assert_close(got, reference(case, inputs))


@pytest.mark.parametrize(
    ("name", "dtype"), sampled(zip(reversed(FORMATS), itertools.cycle((bf16, f16))))
)
def test_at_large_m_cublas_multiplies_the_dequantized_weight(name, dtype):
    """W bit for bit: identity rows times W, every second row. Several scales of columns are
    multiplied with each other first, so the last bit may differ."""
    torch.manual_seed(0)
    case = Case(name, 0, 40, 96, dtype)
    _, _, _, *weight = make_inputs(case, "cpu")
    k, _ = case.packed.format.shape
    x = torch.zeros(600, k, dtype=dtype)
    rows = torch.arange(k)
    x[2 * rows, rows] = 1

    def make(device):
        _, _, _, *weight = make_inputs(case, device)
        return torch.empty(x.shape, dtype=dtype, device=device), None, None, *weight

    generated = generate(gemm(case), make)
    [source] = generated.kernels.values()
    assert "tl.dot" not in source
    got = simulate.interpret(generated, (x, None, None, *weight))
    want = weight_only.dequantize(case.packed.format, weight).to(dtype)
    is_exact = len(case.packed.format.column_ops) < 2
    rtol = 0 if is_exact else torch.finfo(dtype).eps
    torch.testing.assert_close(got[2 * rows], want, rtol=rtol, atol=0)


def one_hot(case, config=None):
    """(the kernel's result for x = identity, the reference's)"""
    _, _, _, *weight = make_inputs(case, "cpu")
    inputs = (torch.eye(case.packed.format.shape[0]).to(case.dtype), None, None, *weight)

    def make(device):
        x, _, _, *weight = make_inputs(case, device)
        return (
            torch.empty(x.shape[1], x.shape[1], dtype=x.dtype, device=device),
            None,
            None,
            *weight,
        )

    return run(gemm(case), make, inputs, config), gemm(case)(*inputs)


# Formats whose result does not depend on the order of rounding; tiles that divide K and N, that do
# not, and that exceed both.
TILES = ("64x32x32_w4_s2_g8", "64x16x64_w4_s2_g8", "64x64x128_w8_s2_g8")


@pytest.mark.parametrize(("name", "config"), list(zip(FORMATS, itertools.cycle(TILES))))
def test_one_hot_rows_give_the_weight_bit_for_bit(name, config):
    torch.manual_seed(0)
    if name == "crossing":  # a tile loads each bit: the largest exceeds shared memory
        config = TILES[0]
    got, want = one_hot(Case(name, 0, 40, 96, bf16, out_dtype=f32), config)
    assert torch.equal(got, want)


def custom(format, weight, dtype=f16):
    """As ``one_hot``, for a given format."""
    x = torch.eye(format.shape[0]).to(dtype)
    text = format.encode()

    def fn(x, *weight):
        return weight_only.op(x, list(weight), None, None, format=text, out_dtype=f32)

    def make(device):
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in (x, *weight))

    return run(fn, make, (x, *weight)), weight_only.dequantize(format, weight)


@pytest.mark.parametrize(
    ("dtype", "amounts"),
    sampled(
        itertools.product(
            (torch.int32, torch.int8, torch.uint8, torch.uint32, torch.int64),
            (torch.int32, torch.int64),
        ),
        every=3,
    ),
)
def test_a_shift_that_is_data_follows_torch(dtype, amounts):
    info = torch.iinfo(dtype)
    words = torch.randint(info.min, info.max, (16,), dtype=torch.int64).to(dtype)
    shifts = torch.tensor([-1, 0, 3, 7, 8, 31, 32, 63, 64, 1000], dtype=amounts)
    shift = Field(1, (form(("n0", 1)),))
    format = WeightFormat((16,), (10,), Field(0, (form(("k0", 1)),), form(data=shift), 4))
    got, want = custom(format, [words, shifts])
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("stored", "bits", "dtype"),
    sampled(
        itertools.product(
            (torch.int8, torch.uint8, torch.int32),
            (16, 32, 64),
            (torch.int16, torch.int32, torch.int64),
        ),
        every=4,  # each value of each, with others
    ),
)
def test_an_integer_difference_wraps(stored, bits, dtype):
    """Of bytes and of fields of four bits, with a zero point for each group of 16."""
    words = torch.iinfo(stored)
    q = torch.randint(words.min, words.max, (4, 32), dtype=torch.int64).to(stored)
    ends = torch.tensor([words.min, words.max, -1, 0, 1, 2**24 + 1, -(2**31), 2**31 - 1])
    info = torch.iinfo(dtype)
    z = torch.cat([ends.clamp(info.min, info.max), torch.randint(-9, 9, (24,))]).to(dtype)
    minus = Field(1, (form(("n0", 1)),))
    if stored == torch.int32:
        shift = form(("k1", 4))
        element = Field(0, (form(("k0", 1)), form(("n0", 1))), shift, 4, minus=minus, bits=bits)
        format = WeightFormat((4, 8), (32,), element)
    else:
        index = (form(("k0", 1)), form(("n0", 1)))
        format = WeightFormat((4,), (32,), Field(0, index, minus=minus, bits=bits))
    got, want = custom(format, [q, z], f32)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "table",
    [(7, 0, 3, 1, 6, 2, 5, 4), (-8, -1, -5, -3, -2, -6, -7, -4), (1000, 3, 700, 1, 9, 9, 1270, 55)],
    ids=["small", "from the end", "wide"],
)
def test_positions_in_a_table_of_any_order(table):
    """Counted from either end; small tables become one integer, others a chain of comparisons."""
    size = max(table) + 1 if min(table) >= 0 else 8
    values = torch.arange(size, dtype=torch.int16)
    format = WeightFormat((4, 8), (3,), Field(0, (AffineIndex(tables=(("k1", table),)),)))
    got, want = custom(format, [values])
    assert torch.equal(got, want)


def test_positions_that_change_sign_within_a_row():
    values = torch.arange(5, 21, dtype=torch.int16)
    format = WeightFormat((16,), (4,), Field(0, (form(("k0", 1), const=-7),)))
    got, want = custom(format, [values])
    assert torch.equal(got, want)


def test_a_digit_of_one_value_and_a_value_that_wraps():
    words = torch.randint(-(2**31), 2**31, (8, 3), dtype=torch.int32)
    element = Field(
        0, (form(("k1", 1)), form(("k0", 5), ("n0", 1))), form(("k2", 4)), 4, True, 9, True
    )
    format = WeightFormat((1, 8, 8), (3, 1), element)
    got, want = custom(format, [words])
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_a_listed_position_that_counts_back_from_another_length(dtype):
    """``size`` of a field: g < 0 means row g + 4; plus 2 for either sign."""
    values = torch.arange(10, 26, dtype=torch.int16)
    listed = Field(1, (form(("k0", 1)),), size=4)
    format = WeightFormat((8,), (2,), Field(0, (form(data=listed, const=2),)))
    rows = torch.tensor([-4, -1, 0, 3, 2, -2, -3, 1], dtype=dtype)
    got, want = custom(format, [values, rows])
    assert torch.equal(got, want)
    assert torch.equal(want[:, 0], values[torch.where(rows < 0, rows + 4, rows).long() + 2].float())


def test_a_fused_epilogue_is_right():
    case = Case("gptq", 30, 48, 64, bias=True)
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    residual = torch.randn(30, 48).to(bf16)

    def fn(residual, *inputs):
        return F.gelu(gemm(case)(*inputs)) + residual

    def make(device):
        return torch.empty(30, 48, dtype=bf16, device=device), *make_inputs(case, device)

    got = run(fn, make, (residual, *inputs))
    want = F.gelu(reference(case, inputs)) + residual.double()
    assert_close(got, want, slack=2)  # the value is rounded before the epilogue too


def test_one_kernel_serves_every_dynamic_m():
    case = Case("awq", 8, 48, 64)

    def make(device):
        inputs = make_inputs(case, device)
        torch._dynamo.mark_dynamic(inputs[0], 0)
        return inputs

    generated = generate(gemm(case), make)
    for m in (2, 5, 16, 40):
        now = Case("awq", m, 48, 64)
        inputs = make_inputs(now, "cpu")
        assert_close(simulate.interpret(generated, inputs), reference(now, inputs))
