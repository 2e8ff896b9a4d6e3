"""Random contents of the tensors that dequantization programs read.

Every value is such that no floating-point operation of a program rounds, in any of its dtypes:
scales are small powers of two (or 1.5 of them, where the codes are narrow), zeros are integers or,
for narrow codes, halves. So two right evaluations agree in every bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

# base: what a quantizer would have written. The others: any bits at all, at their extremes.
STYLES = ("base", "random", "ones", "sign", "alternating", "zeros")
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

Fill = Callable[[np.random.Generator, str, "Data"], torch.Tensor]


@dataclasses.dataclass
class Data:
    """Tensors by name, in the order of the program's inputs."""

    fills: dict[str, Fill] = dataclasses.field(default_factory=dict)
    values: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def add(self, rng: np.random.Generator, name: str, fill: Fill) -> torch.Tensor:
        self.fills[name] = fill
        self.values[name] = fill(rng, "base", self)
        return self.values[name]

    def redrawn(self, rng: np.random.Generator, style: str) -> Data:
        """Other contents for the same program."""
        other = Data(self.fills)
        for name, fill in self.fills.items():
            other.values[name] = fill(rng, style, other)
        return other


def words(shape: tuple[int, ...], dtype: torch.dtype) -> Fill:
    """Packed words of arbitrary bits."""

    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        info = torch.iinfo(dtype)
        special = {
            "ones": [-1 if info.min else info.max],
            "sign": [info.min or 128],
            "alternating": [info.min, info.max],
            "zeros": [0],
        }.get(style)
        if special is not None:
            return torch.tensor(rng.choice(np.array(special), shape)).to(dtype)
        size = info.bits // 8
        raw = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(shape)

    return fill


def floats8(shape: tuple[int, ...], dtype: torch.dtype, stored: torch.dtype) -> Fill:
    """fp8 elements, stored as such or as bytes; infinities and NaN in no base draw."""

    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        raw = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
        if style in ("ones", "sign"):
            raw = torch.full_like(raw, 255 if style == "ones" else 128)
        if style == "base":
            finite = raw.view(dtype).float().isfinite()
            raw = torch.where(finite, raw, raw & 0x3F)
        return raw.view(stored)

    return fill


def integers(shape: tuple[int, ...], dtype: torch.dtype, low: int, high: int) -> Fill:
    """Integers from ``low`` to ``high``, inclusive."""

    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        return torch.as_tensor(rng.integers(low, high + 1, shape)).to(dtype)

    return fill


def unpacked(shape: tuple[int, ...], low: int, high: int) -> Fill:
    """int8 elements that hold narrower numbers, which nothing but a base draw respects."""

    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        if style != "base":
            return words(shape, torch.int8)(rng, style, data)
        return torch.from_numpy(rng.integers(low, high + 1, shape, dtype=np.int8))

    return fill


def table(value: torch.Tensor, most: int) -> Fill:
    """A table of shifts or slots: as given in base draws, else any numbers up to ``most``."""

    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        if style == "base":
            return value
        return torch.from_numpy(rng.integers(0, most + 1, tuple(value.shape))).to(value.dtype)

    return fill


def scales(
    shape: tuple[int, ...], dtype: torch.dtype, exponents: tuple[int, int], is_power_of_two: bool
) -> Fill:
    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        powers = 2.0 ** rng.integers(exponents[0], exponents[1] + 1, shape)
        if not is_power_of_two and style == "base":
            powers = powers * rng.choice([1.0, 1.5], shape)
        return torch.as_tensor(powers * rng.choice([1, 1, 1, -1], shape)).to(dtype)

    return fill


def floats(shape: tuple[int, ...], dtype: torch.dtype, low: int, high: int, step: float) -> Fill:
    """Multiples of ``step``, from ``low * step`` to ``high * step``."""

    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        return (torch.as_tensor(rng.integers(low, high + 1, shape)) * step).to(dtype)

    return fill


def folded(zeros: Fill, scale: str, dtype: torch.dtype, form: str) -> Fill:
    """A folded zero point: ``z * s`` for the scales in tensor ``scale``."""

    def fill(rng: np.random.Generator, style: str, data: Data) -> torch.Tensor:
        factor = data.values[scale].double()
        if form == "exp2":
            factor = factor.exp2()
        elif form in ("div", "reciprocal"):
            factor = 1 / factor
        return (zeros(rng, style, data).double().reshape(factor.shape) * factor).to(dtype)

    return fill
