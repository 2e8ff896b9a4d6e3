"""Bytes that are neighbours in memory as the fields of 32-bit words."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field

BYTES, BITS = 4, 8  # of a word, and of each of them
_FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_BYTE_TYPES = (torch.int8, torch.uint8, *_FLOAT8)


@dataclasses.dataclass(frozen=True)
class WordView:
    """``weight``, whose quantized values are read from 32-bit words. ``dim``: the dimension of
    their tensor along which ``BYTES`` bytes are one word; None: the tensor is read as it is.
    ``parts``: fields of the bytes of several such words, which are joined to the word that the
    code is read from; () if it is stored."""

    weight: Weight
    dim: int | None = None
    parts: tuple[Field, ...] = ()


@functools.lru_cache(maxsize=1024)  # asked for once a configuration
def as_words(weight: Weight) -> WordView:
    """The view, if quantized values are in bytes, the bytes of a word are neighbours along k or n,
    and words are aligned."""
    format, code = weight.format, weight.format.code
    tensor = weight.tensors[code.source]
    known = [stride for stride in tensor.strides if stride is not None]
    indices = (*code.index, code.offset)
    if (
        tensor.dtype not in _BYTE_TYPES
        or not tensor.is_aligned
        or code.wrap
        or code.minus
        or code.high
    ):
        return WordView(weight)
    if len(known) < len(code.index) or any(index.is_data for index in indices) or code.size:
        return WordView(weight)
    for dim, (index, stride) in enumerate(zip(code.index, known, strict=True)):
        for name, coef in index.linear:
            if coef * stride != 1 or format.radix(name) % BYTES or name[0] == "e":
                continue
            others = [
                c * s
                for i, s in zip(code.index, known, strict=True)
                for n, c in i.linear
                if n != name
            ]
            others += [i.const * s for i, s in zip(code.index, known, strict=True)]
            others += [
                s for d, s in enumerate(known) if d != dim and code.index[d] != AffineIndex()
            ]
            tables = [
                table
                for field in format.fields()
                for i in (*field.index, field.offset)
                for table in i.tables
            ]
            is_plain = name not in dict(tables) and not any(i.tables for i in code.index)
            if is_plain and not any(other % BYTES for other in others):
                return WordView(_split(weight, dim, name), dim)
    return WordView(weight)


def parts_of(code: Field) -> list[Field]:
    """The fields that make up a number, the lowest first."""
    found = [code]
    while high := found[-1].high:
        found.append(high)
    return found


@functools.lru_cache(maxsize=1024)
def joined_words(weight: Weight) -> WordView | None:
    """The view of a weight whose numbers are joined from fields of bytes, four neighbours from the
    words of each; None if these are no words."""
    format, code = weight.format, weight.format.code
    if format.element != code or code.wrap or code.size or code.minus:
        return None
    if code.total_width > BITS:
        return None  # the numbers of four neighbours would overlap
    views = []
    for part in parts_of(code):
        if any(index.tables for index in (*part.index, part.offset)):
            return None
        alone = dataclasses.replace(format, element=dataclasses.replace(part, high=None))
        views.append(as_words(Weight(alone, weight.tensors)))
    first, parts, tensors = views[0].weight.format, [], list(weight.tensors)
    for view in views:
        split, element = view.weight.format, view.weight.format.element
        if view.dim is None or (view.dim, split.k, split.n) != (views[0].dim, first.k, first.n):
            return None  # other bytes are neighbours there
        of_part = element.offset.linear[:-1]  # without the byte
        offset = dataclasses.replace(element.offset, linear=of_part)
        parts.append(dataclasses.replace(element, offset=offset))
        tensors[element.source] = view.weight.tensors[element.source]
    joined = dataclasses.replace(
        parts[0],
        offset=AffineIndex(linear=first.element.offset.linear[-1:]),
        width=code.total_width,
    )
    format = dataclasses.replace(first, element=joined)
    return WordView(Weight(format, tuple(tensors)), views[0].dim, tuple(parts))


def _split(weight: Weight, dim: int, name: str) -> Weight:
    """``weight`` with the digit ``name`` as two, the second of which chooses a byte of a word."""
    format, code = weight.format, weight.format.code
    axis, position = name[0], int(name[1:])
    dtype = weight.tensors[code.source].dtype

    def renamed(digit: str) -> str:
        moves = digit[0] == axis and int(digit[1:]) > position
        return f"{axis}{int(digit[1:]) + 1}" if moves else digit

    low = f"{axis}{position + 1}"

    def index(old: AffineIndex) -> AffineIndex:
        linear: list[tuple[str, int]] = []
        for digit, coef in old.linear:
            linear += (
                [(name, coef * BYTES), (low, coef)] if digit == name else [(renamed(digit), coef)]
            )
        tables: list[tuple[str, tuple[int, ...]]] = []
        for digit, table in old.tables:
            tables.append((renamed(digit), table))
        fields = tuple((field(each), coef) for each, coef in old.fields)
        return AffineIndex(old.const, tuple(linear), tuple(tables), fields)

    def field(old: Field) -> Field:
        if old != code:
            return dataclasses.replace(
                old, index=tuple(map(index, old.index)), offset=index(old.offset)
            )
        whole = index(old.index[dim])
        words = AffineIndex(
            whole.const // BYTES,
            tuple((digit, coef // BYTES) for digit, coef in whole.linear if digit != low),
        )
        offset = index(old.offset)
        offset = dataclasses.replace(offset, linear=(*offset.linear, (low, 8)))
        is_whole = not old.width
        return dataclasses.replace(
            old,
            index=tuple(words if d == dim else index(each) for d, each in enumerate(old.index)),
            offset=offset,
            width=8 if is_whole else old.width,
            signed=dtype.is_signed and not dtype.is_floating_point if is_whole else old.signed,
            float8=_FLOAT8.get(dtype, "") or old.float8,
        )

    digits = list(format.radices(axis))
    digits[position : position + 1] = [digits[position] // BYTES, BYTES]
    ops = tuple(
        DequantOp(op.kind, field(op.operand) if isinstance(op.operand, Field) else op.operand)
        for op in format.dequant_ops
    )
    tensor = weight.tensors[code.source]
    stride = tuple(s if d == dim or s is None else s // BYTES for d, s in enumerate(tensor.strides))
    tensors = list(weight.tensors)
    shape = tuple(
        size // BYTES if d == dim and size is not None else size
        for d, size in enumerate(tensor.shape)
    )
    tensors[code.source] = dataclasses.replace(
        tensor, dtype=torch.int32, shape=shape, stride=stride
    )
    radices: Any = {axis: tuple(digits)}
    split = dataclasses.replace(format, element=field(format.element), dequant_ops=ops, **radices)
    return Weight(split, tuple(tensors))
