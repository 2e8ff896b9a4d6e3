"""Packed weights: several quantized values in each int32 or uint8, and where they are stored."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import AffineIndex, WeightFormat

# Bits of the packed word types.
WORD_BITS = {torch.int32: 32, torch.uint8: 8}


@dataclasses.dataclass(frozen=True)
class Base:
    """A float whose last bit counts as 1: ``bits | i`` is ``value + i`` for i of ``width`` bits."""

    value: int
    bits: int
    width: int


BASES = {
    torch.bfloat16: Base(128, 0x4300, 7),
    torch.float16: Base(1024, 0x6400, 10),
}


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """``W[k, n]`` is field ``k % count`` of the packed word at ``(k // count, n)``; with axis "n"
    field ``n % count`` of the word at ``(k, n // count)``.

    axis     the axis of W along which one word packs its values
    bits     of a word
    offsets  the bit offset of each field, in their order along the axis
    width    bits of a field, sign-extended if ``signed``; ``add`` is added to the value
    strides  (along k, along n, constant) for each dimension of the packed tensor: the index of the
             word at (k, n)
    """

    axis: Literal["k", "n"]
    bits: int
    offsets: tuple[int, ...]
    width: int
    signed: bool
    add: int
    strides: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        return len(self.offsets)

    def bias(self, base: Base | None = None) -> int:
        """The excess of an unpacked value, ``base + field``, over the quantized value; without
        ``base`` that of the field."""
        above = base.value if base else 0
        return above + (1 << self.width - 1 if self.signed else 0) - self.add


def packed_layout_of(weight: Weight) -> PackedLayout | None:
    """The layout of ``weight`` if the index of each packed word is linear in k and n and a word
    packs neighbours along one axis; else None."""
    format, element = weight.format, weight.format.element
    bits = WORD_BITS.get(weight.tensors[element.source].dtype)
    indices = (*element.index, element.offset)
    has_tables = any(index.tables for index in element.index)
    if bits is None or element != format.code or has_tables or any(i.is_data for i in indices):
        return None
    if not 0 < element.width <= min(base.width for base in BASES.values()):
        return None
    if element.float8 or element.wrap or element.size or element.minus or element.high:
        return None
    chosen = {name for name in element.offset.digits if format.radix(name) > 1}
    axis = format.pack_axis
    if axis is None or not chosen or chosen != set(format.digits(axis)[-len(chosen) :]):
        return None
    offsets = format.pack_order
    if len(offsets) & len(offsets) - 1:
        return None
    # ``unpack_ptx.unpack`` takes fields from one half of a word.
    if any(offset % 16 + element.width > min(16, bits) for offset in offsets):
        return None
    strides = tuple(
        found
        for index in element.index
        if (found := _strides(format, index, axis, chosen, len(offsets))) is not None
    )
    if len(strides) < len(element.index):
        return None
    return PackedLayout(axis, bits, offsets, element.width, element.signed, element.add, strides)


def _strides(
    format: WeightFormat, index: AffineIndex, axis: str, chosen: set[str], count: int
) -> tuple[int, int, int] | None:
    """(along k, along n, constant) of an index that is linear in the word's position."""
    coefs = dict(index.linear)
    if index.const < 0 or chosen & coefs.keys():
        return None
    found = []
    for name in "kn":
        strides = set()
        for digit in format.digits(name):
            if digit not in chosen:
                unit = format.weight_of(digit) // (count if name == axis else 1)
                stride, rest = divmod(coefs.get(digit, 0), unit)
                strides.add(-1 if rest else stride)
        if len(strides) > 1 or min(strides, default=0) < 0:
            return None
        found.append(strides.pop() if strides else 0)
    return found[0], found[1], index.const
