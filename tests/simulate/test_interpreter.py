"""What the corrected interpreter computes, against torch. Most of it is wrong upstream."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from inductor_quant import simulate
from inductor_quant.simulate import interpreter

pytestmark = pytest.mark.interp

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_second_install_changes_nothing():
    builder = type(triton.runtime.interpreter.interpreter_builder)
    rint = libdevice.rint
    simulate.install()
    assert type(triton.runtime.interpreter.interpreter_builder) is builder
    assert libdevice.rint is rint


# arithmetic


@triton.jit
def binary_kernel(x, y, out, op: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if op == "add":
        c = a + b
    elif op == "sub":
        c = a - b
    elif op == "mul":
        c = a * b
    elif op == "div":
        c = (a / b).to(a.dtype)
    elif op == "neg":
        c = -a
    elif op == "scale":
        c = a * 3.14159
    elif op == "less":
        c = tl.where(a < b, a, b)
    elif op == "fma":
        c = tl.fma(a, b, a)
    tl.store(out + i, c)


BINARY_OPS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a, b: -a,
    "scale": lambda a, b: a * torch.tensor(3.14159, dtype=a.dtype),
    "less": torch.minimum,
    "fma": lambda a, b: (a.double() * b.double() + a.double()).to(a.dtype),
}


@pytest.mark.parametrize("op", BINARY_OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_arithmetic_is_that_of_torch(op, dtype):
    x, y = torch.randn(2, 256).to(dtype)
    out = torch.empty_like(x)
    binary_kernel[(1,)](x, y, out, op, 256)
    assert_same(out, BINARY_OPS[op](x, y))


@triton.jit
def cast_kernel(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_become_bf16_by_value(dtype):
    x = torch.randint(0, 127, (64,), dtype=dtype)
    out = torch.empty(64, dtype=torch.bfloat16)
    cast_kernel[(1,)](x, out, 64)
    assert_same(out, x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float64], ids=str)
def test_bf16_becomes_other_types_by_value(dtype):
    x = (torch.randn(64) * 40).to(torch.bfloat16)
    out = torch.empty(64, dtype=dtype)
    cast_kernel[(1,)](x, out, 64)
    assert_same(out, x.to(dtype))


@triton.jit
def constants_kernel(out):
    i = tl.arange(0, 16)
    tl.store(out + i, tl.full((16,), 2.5, tl.bfloat16))


def test_bf16_constants_have_their_value():
    out = torch.empty(16, dtype=torch.bfloat16)
    constants_kernel[(1,)](out)
    assert_same(out, torch.full((16,), 2.5, dtype=torch.bfloat16))


# tl.dot


@triton.jit
def dot_kernel(a, b, out, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr):
    rows = tl.arange(0, m)
    columns = tl.arange(0, n)
    inner = tl.arange(0, k)
    x = tl.load(a + rows[:, None] * k + inner[None, :])
    y = tl.load(b + inner[:, None] * n + columns[None, :])
    product = tl.dot(x, y, out_dtype=out.dtype.element_ty)
    tl.store(out + rows[:, None] * n + columns[None, :], product)


def dot(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    dot_kernel[(1,)](a, b, out, a.shape[0], b.shape[1], a.shape[1])
    return out


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2], ids=str
)
def test_float_dot_accumulates_in_float32(dtype):
    a, b = torch.randn(32, 64).to(dtype), torch.randn(64, 16).to(dtype)
    expected = a.double() @ b.double()
    torch.testing.assert_close(dot(a, b, torch.float32), expected.float(), rtol=1e-5, atol=1e-5)


def test_dot_of_bf16_code_nan_is_nan():
    a = torch.ones(16, 16, dtype=torch.bfloat16)
    a[3, 4] = math.nan
    result = dot(a, torch.ones(16, 16, dtype=torch.bfloat16), torch.float32)
    assert result[3].isnan().all()
    assert not result[2].isnan().any()


@pytest.mark.parametrize("k", [64, 2048])
def test_int8_dot_is_exact(k):
    # At k = 2048 sums of -127 * -127 need 25 bits: too many for float32.
    a = torch.full((16, k), -127, dtype=torch.int8)
    b = torch.full((k, 16), -127, dtype=torch.int8)
    a[:, 1::7] = torch.randint(-128, 128, a[:, 1::7].shape, dtype=torch.int8)
    assert_same(dot(a, b, torch.int32), a.int() @ b.int())


# reductions


@triton.jit
def larger_magnitude(a, b):
    return tl.where(tl.abs(a) > tl.abs(b), a, b)


@triton.jit
def reduce_kernel(x, out, m: tl.constexpr, n: tl.constexpr, axis: tl.constexpr):
    rows = tl.arange(0, m)
    columns = tl.arange(0, n)
    block = tl.load(x + rows[:, None] * n + columns[None, :])
    if axis is None:
        tl.store(out, tl.reduce(block, None, larger_magnitude))
    elif axis == 0:
        tl.store(out + columns, tl.reduce(block, 0, larger_magnitude))
    else:
        kept = tl.reduce(block, 1, larger_magnitude, keep_dims=True)
        tl.store(out + rows[:, None], kept)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_custom_reduction_calls_its_function_once_per_halving(axis, monkeypatch):
    calls = []

    def counted(a, b, function=larger_magnitude.fn):
        calls.append(a.shape)
        return function(a, b)

    monkeypatch.setattr(larger_magnitude, "fn", counted)
    x = torch.randn(8, 32)
    out = torch.empty({None: 1, 0: 32, 1: 8}[axis])
    reduce_kernel[(1,)](x, out, 8, 32, axis)
    flat = x.flatten()
    expected = {
        None: flat[flat.abs().argmax()][None],
        0: x.gather(0, x.abs().argmax(0, keepdim=True))[0],
        1: x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0],
    }[axis]
    assert_same(out, expected)
    assert len(calls) == {None: 8, 0: 3, 1: 5}[axis]


@triton.jit
def first_maximum(value_a, index_a, value_b, index_b):
    take_a = (value_a > value_b) | ((value_a == value_b) & (index_a < index_b))
    return tl.where(take_a, value_a, value_b), tl.where(take_a, index_a, index_b)


@triton.jit
def argmax_kernel(x, values, indices, n: tl.constexpr):
    i = tl.arange(0, n)
    value, index = tl.reduce((tl.load(x + i), i), 0, first_maximum)
    tl.store(values, value)
    tl.store(indices, index)


def test_custom_reduction_of_a_pair():
    x = torch.tensor([1.0, 9.0, -3.0, 9.0, 2.0, 0.0, 8.0, -9.0])
    values, indices = torch.empty(1), torch.empty(1, dtype=torch.int32)
    argmax_kernel[(1,)](x, values, indices, 8)
    assert (values.item(), indices.item()) == (9.0, 1)


@triton.jit
def sum_kernel(x, sums, maxima, n: tl.constexpr):
    block = tl.load(x + tl.arange(0, n))
    tl.store(sums, tl.sum(block).to(tl.float32))
    tl.store(maxima, tl.max(block).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_sum_and_maximum_are_of_values(dtype):
    x = torch.arange(-3, 5).to(dtype)
    sums, maxima = torch.empty(1), torch.empty(1)
    sum_kernel[(1,)](x, sums, maxima, 8)
    assert (sums.item(), maxima.item()) == (4.0, 4.0)


# masks, descriptors, control flow, assembly


@triton.jit
def masked_kernel(x, out, length, n: tl.constexpr):
    i = tl.arange(0, n)
    value = tl.load(x + i, mask=i < length, other=-7.0)
    tl.store(out + i, value + 1.0, mask=i <= length)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masked_elements_are_neither_read_nor_written(dtype):
    x = torch.tensor([0.0, 1.0, 2.0, *[math.nan] * 5], dtype=dtype)
    out = torch.full((8,), 100.0, dtype=dtype)
    masked_kernel[(1,)](x, out, 3, 8)
    assert_same(out, torch.tensor([1.0, 2.0, 3.0, -6.0, *[100.0] * 4], dtype=dtype))


@triton.jit
def scalar_mask_kernel(x, out, length, n: tl.constexpr):
    i = tl.arange(0, n)
    row_exists = tl.program_id(0) < length
    row = tl.load(x + i, mask=row_exists & (i < 4))
    tl.store(out + tl.program_id(0) * n + i, row, mask=row_exists)


def test_scalar_comparison_is_a_mask():
    x, out = torch.ones(8), torch.full((3, 8), -1.0)
    scalar_mask_kernel[(3,)](x, out, 2, 8)
    row = torch.tensor([1.0] * 4 + [0.0] * 4)
    assert_same(out, torch.stack([row, row, torch.full((8,), -1.0)]))


@triton.jit
def splat_mask_kernel(x, out, length, n: tl.constexpr):
    i = tl.arange(0, n)
    everything = tl.full((n,), 0, tl.int32) + tl.program_id(0) < length
    scalar = tl.program_id(0) < length
    mask = tl.broadcast_to(scalar, (n,)) & everything
    tl.store(out + i, tl.load(x + i, mask=mask, other=0.0), mask=mask)


def test_splat_of_a_scalar_comparison_is_a_mask():
    x, out = torch.ones(8), torch.zeros(8)
    splat_mask_kernel[(2,)](x, out, 1, 8)
    assert_same(out, x)


@triton.jit
def descriptor_kernel(x, out, m, n, block_m: tl.constexpr, block_n: tl.constexpr):
    shape = [block_m, block_n]
    source = tl.make_tensor_descriptor(x, shape=[m, n], strides=[n, 1], block_shape=shape)
    target = tl.make_tensor_descriptor(out, shape=[m, n], strides=[n, 1], block_shape=shape)
    row = tl.program_id(0) * block_m
    column = tl.program_id(1) * block_n
    target.store([row, column], source.load([row, column]) + source.load([row, column]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_device_descriptors_stop_at_the_edge(dtype):
    x = torch.randint(-60, 60, (24, 48)).to(dtype)
    buffer = torch.full((26, 48), 99).to(dtype)
    out = buffer[:24]
    descriptor_kernel[(2, 2)](x, out, 24, 48, 16, 32)
    assert_same(out, x + x)
    assert_same(buffer[24:], torch.full((2, 48), 99).to(dtype))


@triton.jit
def persistent_kernel(x, out, tiles, n: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=3):
        i = tile * n + tl.arange(0, n)
        tl.store(out + i, tl.load(x + i) * 2.0)


def test_persistent_loop_visits_every_tile():
    x = torch.randn(10 * 8)
    out = torch.zeros(80)
    persistent_kernel[(3,)](x, out, 10, 8)
    assert_same(out, 2 * x)


LOP3 = "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;"
SWAP = "mov.b32 $0, $3; mov.b32 $1, $2;"


@triton.jit
def asm_kernel(x, out, asm: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    value = tl.load(x + i)
    result = tl.inline_asm_elementwise(asm, "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + i, result)


@triton.jit
def swap_kernel(x, y, asm: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    first, second = tl.inline_asm_elementwise(
        asm,
        "=r,=r,r,r",
        [tl.load(x + i), tl.load(y + i)],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    tl.store(x + i, first)
    tl.store(y + i, second)


def test_inline_assembly_computes_its_registered_emulation():
    simulate.register_asm_emulation(f"  {LOP3}\n", lambda x: (x & 0x000F000F) | 0x43004300)
    x = torch.arange(100, 116, dtype=torch.int32)
    out = torch.empty_like(x)
    asm_kernel[(1,)](x, out, LOP3, 16)
    assert_same(out, (x & 0x000F000F) | 0x43004300)


def test_inline_assembly_may_have_several_results():
    simulate.register_asm_emulation(SWAP, lambda x, y: (y, x))
    x, y = torch.arange(16, dtype=torch.int32), torch.arange(16, 32, dtype=torch.int32)
    swap_kernel[(1,)](x, y, SWAP, 16)
    assert_same(x, torch.arange(16, 32, dtype=torch.int32))
    assert_same(y, torch.arange(16, dtype=torch.int32))


def test_inline_assembly_without_emulation_says_what_to_do():
    x = torch.arange(16, dtype=torch.int32)
    with pytest.raises(Exception, match="register_asm_emulation"):
        asm_kernel[(1,)](x, x.clone(), "no.such.instruction;", 16)


def test_scalar_of_any_rank_is_an_index():
    # Triton 3.6 hands a one-element array to int(), which numpy 2.4 refuses.
    handle = triton.runtime.interpreter.TensorHandle(np.array([[5]], np.int32), tl.int32)
    assert range(tl.tensor(handle, tl.int32))[-1] == 4
    assert interpreter._as_index(tl.tensor(handle, tl.int32)) == 5
