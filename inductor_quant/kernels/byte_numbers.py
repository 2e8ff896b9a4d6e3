"""Weights whose numbers are bytes, or fields of bytes that lie far apart along N.

``bytes_of`` reads that from a ``WeightFormat``; None: the format is not of this kind. Neighbours
along K are neighbours in memory, one byte each, as in int8 and fp8 weights [N, K]; or a byte holds
the same k of the first and the second half of N (HQQ, quanto), of four quarters, and so on.

How a byte becomes a number of 16 bits. An unsigned byte under the exponent of fp16's 1024 is the
number ``1024 + byte``. bf16 has seven bits of fraction, one too few for that; but the bits of a
byte alone are the number ``byte * 2**-133``, also where the eighth bit reaches into the exponent,
since exponents 0 and 1 count the same. So one multiply-add by a power of two makes four numbers of
two instructions a pair. A field of fewer bits is put under an exponent, as in ``words``. All of
that is exact, and functions of one element, right in any layout.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import torch

from inductor_quant.kernels.config import Weight
from inductor_quant.kernels.words import BASES
from inductor_quant.weight_format import Field, Form, Step, WeightFormat

Kind = Literal["u8", "e4m3", "e5m2"]
FLOATS: dict[torch.dtype, Kind] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
INTS = (torch.int8, torch.uint8)
# What is added to a byte must leave at most eight bits, or bf16 would round it.
MAX_ADD = 255


@dataclasses.dataclass(frozen=True)
class Bytes:
    """``W[k, n]`` is field ``n // rows`` of the byte at ``k + n % rows * step + start``.

    kind     of the number in a byte: unsigned, or a float of 8 bits
    offsets  bits at which the fields of a byte begin, of ``width`` bits; one of 8 bits: the byte
    signed   whether a number's highest bit counts negatively
    add      added to the number, of which the highest bit was turned over where it is signed
    step     from one of ``rows`` to the next, in bytes; ``start`` of the first
    strides  of the tensor, by which that is so, and the bytes of one of its elements
    """

    kind: Kind
    offsets: tuple[int, ...]
    width: int
    signed: bool
    add: int
    rows: int
    step: int
    start: int
    strides: tuple[int, ...]
    element_bytes: int

    @property
    def count(self) -> int:
        """Fields of a byte."""
        return len(self.offsets)

    def column(self, position: str) -> str:
        """The column of W that stands at ``position`` in the order in which a byte's fields are
        neighbours: that of the format which ``bytes_of`` gives."""
        if self.count == 1:
            return position
        return f"({position} % {self.count} * {self.rows} + {position} // {self.count})"


def bytes_of(weight: Weight) -> tuple[Weight, Bytes] | None:
    """The weight with columns in the order of its bytes' fields, and how its numbers lie."""
    format, element = weight.format, weight.format.element
    tensor = weight.tensors[element.source]
    forms = (*element.index, element.offset)
    if element != format.code or any(form.is_data for form in forms) or element.float8:
        return None
    if element.wrap or element.size or any(form.tables for form in element.index):
        return None
    if tensor.dtype not in (*FLOATS, *INTS, torch.int32):
        return None
    width = element.width or 8
    is_signed = element.signed if element.width else tensor.dtype == torch.int8
    add = element.add - (1 << width - 1 if is_signed else 0)
    strides = tensor.strides
    known = tuple(stride for stride in strides if stride is not None)
    if len(known) < len(strides) or not -MAX_ADD <= add <= 0:
        return None
    element_bytes = tensor.dtype.itemsize
    chosen = {name for name in element.offset.digits if format.radix(name) > 1}
    of_words: set[str] = set()
    if element_bytes == 4:  # the bytes of a word are neighbours along K
        of_words, chosen = chosen, set()
        if width != 8 or not _is_byte_of_word(format, element):
            return None
    axis = [f"n{i}" for i, radix in enumerate(format.n) if radix > 1]
    if chosen != set(axis[: len(chosen)]) or (width == 8 and chosen):
        return None
    cases = [range(format.radix(name)) for name in axis[: len(chosen)]]
    offsets = tuple(
        0
        if of_words
        else element.offset.value(
            dict.fromkeys(element.offset.digits, 0)
            | dict(zip(axis[: len(chosen)], case, strict=True))
        )
        for case in itertools.product(*cases)
    )
    if len(offsets) & len(offsets) - 1 or any(not 0 <= o <= 8 - width for o in offsets):
        return None
    # where a byte is: linear in k and in the digits of n that choose no field
    rows = format.shape[1] // len(offsets)
    coefs: dict[str, int] = {}
    start = 0
    for form, stride in zip(element.index, known, strict=True):
        if form.const < 0 or any(coef < 0 for _, coef in form.linear):
            return None  # counted from the end
        start += form.const * stride * element_bytes
        for name, coef in form.linear:
            coefs[name] = coefs.get(name, 0) + coef * stride * element_bytes
    coefs |= dict.fromkeys(of_words, 1)
    steps = {
        axis: {
            coefs.get(name, 0) / format.weight_of(name)
            for name in (f"{axis}{i}" for i in range(len(radices)))
            if format.radix(name) > 1 and name not in chosen
        }
        for axis, radices in (("k", format.k), ("n", format.n))
    }
    if steps["k"] not in ({1.0}, set()) or len(steps["n"]) > 1 or any(coefs.get(n) for n in chosen):
        return None
    step = steps["n"].pop() if steps["n"] else 0.0
    if not step.is_integer():
        return None
    numbers = Bytes(
        FLOATS.get(tensor.dtype, "u8"),
        offsets,
        width,
        is_signed,
        add,
        rows,
        int(step),
        start,
        known,
        element_bytes,
    )
    if chosen:
        weight = dataclasses.replace(weight, format=_with_last(format, len(chosen)))
    return weight, numbers


def _is_byte_of_word(format: WeightFormat, element: Field) -> bool:
    """Whether the last digit of k that is one chooses the byte of a word, the lowest first."""
    names = [f"k{i}" for i, radix in enumerate(format.k) if radix > 1]
    return (
        bool(names)
        and format.radix(names[-1]) == 4
        and element.offset == Form(linear=((names[-1], 8),))
    )


def _with_last(format: WeightFormat, count: int) -> WeightFormat:
    """The format of the same weight whose columns count with their first ``count`` digits (but for
    those of one value) last."""
    names = range(len(format.n))
    first = [i for i in names if format.n[i] > 1][:count]
    order = [*(i for i in names if i not in first), *first]
    renamed = {f"n{old}": f"n{new}" for new, old in enumerate(order)}

    def of_form(form: Form) -> Form:
        return Form(
            form.const,
            tuple((renamed.get(name, name), coef) for name, coef in form.linear),
            tuple((renamed.get(name, name), table) for name, table in form.tables),
            tuple((of_field(field), coef) for field, coef in form.fields),
        )

    def of_field(field: Field) -> Field:
        index = tuple(map(of_form, field.index))
        return dataclasses.replace(field, index=index, offset=of_form(field.offset))

    def of_step(step: Step) -> Step:
        operand = step.operand
        return Step(step.kind, of_field(operand) if isinstance(operand, Field) else operand)

    return WeightFormat(
        format.k,
        tuple(format.n[i] for i in order),
        of_field(format.element),
        tuple(map(of_step, format.steps)),
    )


# ------------------------------------------------------------------------------------------
# conversion


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Arguments of ``tl.inline_asm_elementwise`` for four bytes at a time, and what its outputs,
    one for each field, are: ``(number + bias) / factor``."""

    text: str
    count: int
    factor: int = 1
    bias: int = 0

    pack = 4

    @property
    def constraints(self) -> str:
        return ",".join([*["=r"] * (2 * self.count), "r"])


def conversion(numbers: Bytes, x_dtype: torch.dtype) -> Conversion:
    """Of bytes that are integers."""
    if numbers.width < 8:
        return _of_fields(numbers, x_dtype)
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
    return Conversion("\n".join(lines), 1, factor)


def _of_fields(numbers: Bytes, x_dtype: torch.dtype) -> Conversion:
    base, source = BASES[x_dtype], f"${2 * numbers.count}"
    mask = (1 << numbers.width) - 1 << 16 | (1 << numbers.width) - 1
    exponent = base.bits << 16 | base.bits
    if numbers.signed:  # (a & b) ^ c in place of (a & b) | c turns the sign over
        exponent ^= (1 << numbers.width - 1) << 16 | 1 << numbers.width - 1
    table = "0x6a" if numbers.signed else "0xea"
    lines = ["{", ".reg .b32 l, h, t;"]
    lines += [f"prmt.b32 l, {source}, 0, 0x4140;", f"prmt.b32 h, {source}, 0, 0x4342;"]
    for i, offset in enumerate(numbers.offsets):
        for j, half in enumerate("lh"):
            if offset:
                lines.append(f"shr.u32 t, {half}, {offset};")
            bits = "t" if offset else half
            target = f"${2 * i + j}"
            lines.append(f"lop3.b32 {target}, {bits}, {mask:#010x}, {exponent:#010x}, {table};")
    text = "\n".join([*lines, "}"])
    return Conversion(text, numbers.count, bias=base.value - numbers.add)


def _twice(value: float, dtype: torch.dtype) -> int:
    """The bits of a number of 16 bits, in both halves."""
    half = int(torch.tensor(value, dtype=dtype).view(torch.int16)) & 0xFFFF
    return half << 16 | half
