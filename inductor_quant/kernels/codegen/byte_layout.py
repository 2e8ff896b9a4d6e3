"""Weights stored as bytes, or as fields of bytes that are far apart along N.

Neighbours along K are neighbours in memory, one byte each: int8 and fp8 weights [N, K]; or a byte
holds the same k of the first and the second half of N (HQQ, quanto), of four quarters, and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Literal, TypeVar

import torch

from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat

T = TypeVar("T")
Kind = Literal["u8", "e4m3", "e5m2"]
FLOATS: dict[torch.dtype, Kind] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
INTS = (torch.int8, torch.uint8)
# Byte and summand must fit in eight bits, or bf16 would round the sum.
MAX_ADD = 255


@dataclasses.dataclass(frozen=True)
class ByteLayout:
    """``W[k, n]`` is field ``n // rows`` of the byte at ``k + n % rows * stride_n + start``.

    kind     of a byte: unsigned, or an 8-bit float
    offsets  the bit offset of each field of a byte, of ``width`` bits; 8 bits: the whole byte
    signed   whether the value's highest bit is its sign
    add      added to the value, of which the highest bit was flipped if it is signed
    stride_n, start  in bytes
    strides  of the tensor, in elements of ``element_bytes``, for which this holds
    """

    kind: Kind
    offsets: tuple[int, ...]
    width: int
    signed: bool
    add: int
    rows: int
    stride_n: int
    start: int
    strides: tuple[int, ...]
    element_bytes: int

    bits: ClassVar[int] = 8

    @property
    def count(self) -> int:
        """Fields of a byte."""
        return len(self.offsets)

    def column(self, position: str) -> str:
        """The n at ``position`` in the format that ``byte_layout_of`` returns, in which the fields
        of a byte are neighbours."""
        if self.count == 1:
            return position
        return f"({position} % {self.count} * {self.rows} + {position} // {self.count})"


def byte_layout_of(weight: Weight) -> tuple[Weight, ByteLayout] | None:
    """The weight with N in the order of the bytes' fields, and its layout; None: it is not stored
    as bytes."""
    format, element = weight.format, weight.format.element
    tensor = weight.tensors[element.source]
    indices = (*element.index, element.offset)
    if element != format.code or any(index.is_data for index in indices) or element.float8:
        return None
    if element.wrap or element.size or element.minus or element.high:
        return None
    if any(index.tables for index in element.index):
        return None
    if tensor.dtype not in (*FLOATS, *INTS, torch.int32):
        return None
    width = element.width or 8
    is_signed = element.signed if element.width else tensor.dtype == torch.int8
    add = element.add - (1 << width - 1 if is_signed else 0)
    strides = tuple(stride for stride in tensor.strides if stride is not None)
    if len(strides) < len(tensor.strides) or not -MAX_ADD <= add <= 0:
        return None
    element_bytes = tensor.dtype.itemsize
    chosen = {name for name in element.offset.digits if format.radix(name) > 1}
    byte_of_word: set[str] = set()
    if element_bytes == 4:  # the bytes of a word are neighbours along K
        if width != 8 or not _is_byte_of_word(format, element):
            return None
        byte_of_word, chosen = chosen, set()
    if chosen != set(format.digits("n")[: len(chosen)]) or (width == 8 and chosen):
        return None
    offsets = (0,) if byte_of_word else format.pack_order
    if len(offsets) & len(offsets) - 1 or any(not 0 <= o <= 8 - width for o in offsets):
        return None
    # The address of a byte is linear in k and in the digits of n that choose no field.
    coefs: dict[str, int] = dict.fromkeys(byte_of_word, 1)
    start = 0
    for index, stride in zip(element.index, strides, strict=True):
        if index.const < 0 or any(coef < 0 for _, coef in index.linear):
            return None  # counted from the end
        start += index.const * stride * element_bytes
        for name, coef in index.linear:
            coefs[name] = coefs.get(name, 0) + coef * stride * element_bytes
    along_k, along_n = (
        {
            coefs.get(name, 0) / format.weight_of(name)
            for name in format.digits(axis)
            if name not in chosen
        }
        for axis in "kn"
    )
    if along_k not in ({1.0}, set()) or len(along_n) > 1 or any(coefs.get(n) for n in chosen):
        return None
    stride_n = along_n.pop() if along_n else 0.0
    if not stride_n.is_integer():
        return None
    layout = ByteLayout(
        FLOATS.get(tensor.dtype, "u8"),
        offsets,
        width,
        is_signed,
        add,
        format.shape[1] // len(offsets),
        int(stride_n),
        start,
        strides,
        element_bytes,
    )
    if chosen:
        weight = dataclasses.replace(weight, format=_rotated(format, len(chosen)))
    return weight, layout


def _is_byte_of_word(format: WeightFormat, element: Field) -> bool:
    """Whether the last digit of k chooses the byte of a word, the lowest first."""
    names = format.digits("k")
    return (
        bool(names)
        and format.radix(names[-1]) == 4
        and element.offset == AffineIndex(linear=((names[-1], 8),))
    )


def _rotated(format: WeightFormat, count: int) -> WeightFormat:
    """The format of the same weight in another order of N: the first ``count`` digits last."""
    first = [int(name[1:]) for name in format.digits("n")[:count]]
    order = [*(i for i in range(len(format.n)) if i not in first), *first]
    renamed = {f"n{old}": f"n{new}" for new, old in enumerate(order)}

    def rename(terms: Iterable[tuple[str, T]]) -> tuple[tuple[str, T], ...]:
        return tuple((renamed.get(name, name), term) for name, term in terms)

    def of_index(index: AffineIndex) -> AffineIndex:
        fields = tuple((of_field(field), coef) for field, coef in index.fields)
        return AffineIndex(index.const, rename(index.linear), rename(index.tables), fields)

    def of_field(field: Field) -> Field:
        index = tuple(map(of_index, field.index))
        return dataclasses.replace(field, index=index, offset=of_index(field.offset))

    def of_op(op: DequantOp) -> DequantOp:
        operand = op.operand
        return DequantOp(op.kind, of_field(operand) if isinstance(operand, Field) else operand)

    return WeightFormat(
        format.k,
        tuple(format.n[i] for i in order),
        of_field(format.element),
        tuple(map(of_op, format.dequant_ops)),
    )
