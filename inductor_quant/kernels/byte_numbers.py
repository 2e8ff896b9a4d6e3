"""Weights whose numbers are bytes, neighbours along K: how they lie, and how a warp converts them.

``bytes_of`` reads that from a ``WeightFormat``; None: the format is not of this kind.
``conversion`` gives what turns bytes into numbers of 16 bits:

An unsigned byte under the exponent of fp16's 1024 is the number ``1024 + byte``. bf16 has seven
bits of fraction, one too few for that; but the bits of a byte alone are the number ``byte *
2**-133``, also where the eighth bit reaches into the exponent, since exponents 0 and 1 count the
same. So one multiply-add by a power of two makes four numbers of two instructions a pair. Both are
exact, and functions of one element, right in any layout.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from inductor_quant.kernels.config import Weight
from inductor_quant.weight_format import Field, Form, WeightFormat

Kind = Literal["u8", "e4m3", "e5m2"]
FLOATS: dict[torch.dtype, Kind] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
INTS = (torch.int8, torch.uint8)
# What is added to a byte must leave at most eight bits, or bf16 would round it.
MAX_ADD = 255


@dataclasses.dataclass(frozen=True)
class Bytes:
    """``W[k, n]`` is the byte of ``kind`` at ``sum((k * step_k + n * step_n + const) * stride)``.

    add    added to the byte as an unsigned number; of a signed byte, whose highest bit is turned
           over first, -128 more
    signed whether the highest bit is turned over
    width  of the tensor's elements in bytes; a word's bytes are neighbours along K
    steps  (k, n, const) for each dimension of the tensor; where width is 4, k counts words
    """

    kind: Kind
    add: int
    signed: bool
    width: int
    steps: tuple[tuple[int, int, int], ...]


def bytes_of(weight: Weight) -> Bytes | None:
    """How the numbers of ``weight`` lie, if they are bytes, each at a place that is linear in k and
    n, and neighbours along k are neighbours in memory."""
    format, element = weight.format, weight.format.element
    tensor = weight.tensors[element.source]
    forms = (*element.index, element.offset)
    if element != format.code or any(form.is_data or form.tables for form in forms):
        return None
    if element.wrap or element.size:
        return None
    kind: Kind = FLOATS.get(tensor.dtype, "u8")
    width = 4 if tensor.dtype == torch.int32 else 1
    is_signed = element.signed if element.width else tensor.dtype == torch.int8
    add = element.add - (128 if is_signed else 0)
    if tensor.dtype not in (*FLOATS, *INTS, torch.int32):
        return None
    if width == 1 and (element.width not in (0, 8) or element.offset != Form()):
        return None
    if width == 4 and not _is_byte_of_word(format, element):
        return None
    if element.float8 or not -MAX_ADD <= add <= 0:
        return None
    steps = [_linear(format, form, 4 if width == 4 else 1) for form in element.index]
    known = tuple(step for step in steps if step is not None)
    if len(known) < len(steps):
        return None
    strides = tensor.stride or _row_major(tensor.shape)
    along_k = [
        None if s is None else k * s for (k, _, _), s in zip(known, strides, strict=True) if k
    ]
    return Bytes(kind, add, is_signed, width, known) if along_k == [1] else None


def _is_byte_of_word(format: WeightFormat, element: Field) -> bool:
    """Whether the last digit of k that is one chooses the byte of a word, the lowest first."""
    names = [f"k{i}" for i, radix in enumerate(format.k) if radix > 1]
    return (
        element.width == 8
        and bool(names)
        and format.radix(names[-1]) == 4
        and element.offset == Form(linear=((names[-1], 8),))
    )


def _linear(format: WeightFormat, form: Form, of_k: int) -> tuple[int, int, int] | None:
    """(what ``of_k`` steps of k, one of n add to the form, the constant); None: it is not linear.

    Of k the last digits that count ``of_k`` together are none of the form's.
    """
    found = []
    for axis, radices, unit in (("k", format.k, of_k), ("n", format.n, 1)):
        ratios = set()
        for i, radix in enumerate(radices):
            name = f"{axis}{i}"
            coef, counts = dict(form.linear).get(name, 0), format.weight_of(name)
            if radix == 1:
                continue
            if counts < unit:
                ratios |= {-1} if coef else set()
            else:
                ratios.add(coef * unit // counts if coef * unit % counts == 0 else -1)
        if len(ratios) > 1 or min(ratios, default=0) < 0:
            return None
        found.append(ratios.pop() if ratios else 0)
    return (found[0], found[1], form.const) if form.const >= 0 else None


def _row_major(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    strides: list[int | None] = [1]
    for size in reversed(shape[1:]):
        last = strides[0]
        strides.insert(0, None if last is None or size is None else last * size)
    return tuple(strides[: len(shape)])


# ------------------------------------------------------------------------------------------
# conversion


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Arguments of ``tl.inline_asm_elementwise`` for bytes, four at a time; what it gives is the
    number over ``factor``, a power of two."""

    text: str
    factor: int

    constraints = "=r,=r,r"
    pack = 4


def conversion(numbers: Bytes, x_dtype: torch.dtype) -> Conversion:
    """Of bytes that are integers."""
    kind = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[x_dtype]
    if x_dtype == torch.bfloat16:
        # bits 0x00bb times the power below the largest, which leaves b / 128
        high, factor, times = "0", 128, 2.0**126
        add = numbers.add / factor
    else:
        high, factor, times = "0x64646464", 1, 1.0
        add = float(numbers.add - 1024)
    source = "u" if numbers.signed else "$2"
    lines = [
        "{",
        ".reg .b32 u, l, h, m, c;",
        f"mov.b32 m, {_twice(times, x_dtype):#010x};",
        f"mov.b32 c, {_twice(add or -0.0, x_dtype):#010x};",
        *(["xor.b32 u, $2, 0x80808080;"] if numbers.signed else []),
        f"prmt.b32 l, {source}, {high}, 0x4140;",
        f"prmt.b32 h, {source}, {high}, 0x4342;",
        f"fma.rn.{kind} $0, l, m, c;",
        f"fma.rn.{kind} $1, h, m, c;",
        "}",
    ]
    return Conversion("\n".join(lines), factor)


def _twice(value: float, dtype: torch.dtype) -> int:
    """The bits of a number of 16 bits, in both halves."""
    half = int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF
    return half << 16 | half
