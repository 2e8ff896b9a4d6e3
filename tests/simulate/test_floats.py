"""Conversions between float formats in interpreted kernels are bit for bit those of torch."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.interp

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
BLOCK = 1024


@triton.jit
def convert_kernel(x, out, length, rounding: tl.constexpr, n: tl.constexpr):
    i = tl.program_id(0) * n + tl.arange(0, n)
    value = tl.load(x + i, mask=i < length)
    converted = value.to(out.dtype.element_ty, fp_downcast_rounding=rounding)
    tl.store(out + i, converted, mask=i < length)


def convert(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    out = torch.empty(x.numel(), dtype=dtype)
    convert_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), rounding, BLOCK)
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def finite_values(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of an 8 or 16 bit format in order, as float64."""
    codes = torch.arange(1 << (8 * dtype.itemsize))
    codes = codes.to(torch.uint8) if dtype.itemsize == 1 else codes.to(torch.int32).to(torch.int16)
    values = codes.view(dtype).to(torch.float64)
    return values[values.isfinite()].unique()


def around_the_halves(dtype: torch.dtype) -> torch.Tensor:
    """Float32 values at, just below and just above the middle of two neighbours in ``dtype``."""
    values = finite_values(dtype)
    if dtype.itemsize == 2:
        values = values[:: len(values) // 2000]
        next_values = torch.nextafter(values.to(dtype), torch.tensor(math.inf, dtype=dtype))
        neighbours = next_values.double()
        values, neighbours = values[neighbours.isfinite()], neighbours[neighbours.isfinite()]
    else:
        values, neighbours = values[:-1], values[1:]
    middle = ((values + neighbours) / 2).float()
    infinity = torch.tensor(math.inf)
    return torch.cat(
        [middle, torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity)]
    )


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
def test_float32_is_rounded_to_nearest_even(target):
    generator = torch.Generator().manual_seed(0)
    largest = min(torch.finfo(target).max, 3e38)
    random = (torch.randn(2000, generator=generator) * 8).clamp(-largest, largest)
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, largest, -largest])
    x = torch.cat([around_the_halves(target), random, special])
    assert torch.equal(bits(convert(x, target)), bits(x.to(target)))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
def test_16_bit_floats_are_rounded_to_nearest_even(source, target):
    if source == target:
        pytest.skip("no conversion")
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2000, generator=generator) * 20).to(source)
    assert torch.equal(bits(convert(x, target)), bits(x.to(target)))


@pytest.mark.parametrize(("target", "largest"), [(E4M3, 448.0), (E5M2, 57344.0)], ids=str)
def test_8_bit_floats_saturate(target, largest):
    x = torch.tensor([largest * 1.04, -largest * 2, 3e38, math.inf, -math.inf, largest])
    expected = torch.tensor([largest, -largest, largest, largest, -largest, largest])
    assert torch.equal(convert(x, target).float(), expected)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, E4M3, E5M2], ids=str)
def test_nan_stays_nan(target):
    # A NaN with a payload in the low bits only, which truncation turns into an infinity.
    x = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert convert(x, target).float().isnan().all()


@pytest.mark.parametrize("source", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_8_bit_float_is_decoded_as_by_torch(source, target):
    x = torch.arange(256, dtype=torch.uint8).view(source)
    expected = x.to(target)
    torch.testing.assert_close(convert(x, target), expected, rtol=0, atol=0, equal_nan=True)


def test_every_bf16_is_decoded_as_by_torch():
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    torch.testing.assert_close(convert(x, torch.float32), x.float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_towards_zero_truncates_if_asked_for():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    truncated = (bits(x) & -0x10000).view(torch.float32)
    assert torch.equal(convert(x, torch.bfloat16, "rtz").float(), truncated)
