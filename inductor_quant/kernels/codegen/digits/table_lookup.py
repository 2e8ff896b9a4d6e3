"""Tables of 16 values in the registers of each thread, looked up by ``prmt``, which takes any four
of eight bytes.

The low bytes of 16 values of 16 bits are four registers, and so are the high bytes: the ``PLANES``
of a table. Four fields of a word select from the lower and from the upper half of the low bytes,
and of the high ones, and their highest bits choose between the halves.

A table that is known needs no lookup (``e2m1``): ``prmt`` spreads the sign, which is the highest
bit of a byte, so that one shift and one mask have the bits of a 16-bit float.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.base import Codegen, Hook
from inductor_quant.kernels.codegen.digits.tile import TilePlan
from inductor_quant.kernels.codegen.statements import Statements, Value
from inductor_quant.kernels.codegen.unpack_ptx import FMA_TYPES, Assembly, assembly
from inductor_quant.kernels.problem import Weight
from inductor_quant.ops.dequantize import EXPONENTS
from inductor_quant.spec.weight_format import Field

ENTRIES, PLANES = 16, 8
FIELDS = 8  # of a word
PLANE = [f"plane{i}" for i in range(PLANES)]
_CHOOSE = "0xd8"  # of lop3: b where c has ones, else a
# How far the bits of e2m1, the upper ones of a byte, are below those of a float; its bits; and what
# normalizes it: 2 to the power of what its exponent is too low by.
_SHIFT, _BITS, _NORMAL = (
    {torch.bfloat16: 2, torch.float16: 5},
    {torch.bfloat16: 0x81C0, torch.float16: 0x8E00},
    {torch.bfloat16: 0x7E80, torch.float16: 0x7400},
)


def places_of(weight: Weight, plan: TilePlan) -> tuple[int, ...]:
    """Which field of its word each of ``FIELDS`` neighbouring values of a thread is; () unless they
    make up one word, both values of a register are in the same half of it, and no scale or zero
    point varies among them."""
    format, code = weight.format, weight.format.code
    if format.element == code or weight.tensors[code.source].dtype != torch.int32:
        return ()
    index, inner = format.element.index[0], code.offset.digits
    if index.digits != code.digits or index.fields != ((code, 1),) or index.const:
        return ()
    if code.width != 4 or code.signed or code.add or code.wrap or code.size:
        return ()
    others = [field for field in format.fields() if field not in (format.element, code)]
    if any(inner & i.digits for i in code.index) or any(inner & each.digits for each in others):
        return ()
    last = [digit for digit in plan.digits if digit.digit in inner]
    count = math.prod(digit.inner for digit in last)
    if count != FIELDS or list(plan.digits[-len(last) :]) != last:
        return ()
    places = []
    for position in itertools.product(*(range(digit.inner) for digit in last)):
        digits = dict.fromkeys(inner, 0)
        for digit, value in zip(last, position, strict=True):
            digits[digit.digit] += digit.place * value
        places.append(code.offset.value(digits) // 4)
    strides = [math.prod(digit.inner for digit in plan.digits[i + 1 :]) for i in range(plan.rank)]
    firsts = [
        sum(step * stride for step, stride in zip(basis, strides, strict=True))
        for basis in plan.layout.registers[: FIELDS.bit_length() - 1]
    ]
    is_together = all(a // 4 == b // 4 for a, b in zip(places[::2], places[1::2], strict=True))
    is_in_order = firsts == [1, 2, 4] and sorted(places) == list(range(FIELDS))
    return tuple(places) if is_together and is_in_order else ()


def start(codegen: Codegen, table: Field, plan: TilePlan, stride: Hook) -> list[str]:
    """Statements before the loop that load the table, and make planes of it unless each group has
    its own."""
    if is_computed(codegen, table):
        return []
    source = codegen.sources[table.source]
    first = f"{source} + gl.full({[1] * plan.rank}, 0, gl.int32, TILE)"
    entries = [f"entry{i}" for i in range(ENTRIES)]
    lines = [
        f"{entry} = gl.load({first} + {i} * {stride(source, 0)}).to(gl.float32)"
        for i, entry in enumerate(entries)
    ]
    if scale_of(codegen, table) is None and codegen.loop_ops:
        return lines
    assembly = planes(codegen.x_dtype, is_uniform=True)
    return lines + codegen.dialect.inline_asm(assembly, PLANE, entries, torch.int32)


def scale_of(codegen: Codegen, table: Field) -> Field | None:
    """The scale, if one in x's dtype multiplies a table of x's dtype: the product is rounded to it
    either way. Else the table of each group is computed in fp32, and rounded."""
    if [op.kind for op in codegen.loop_ops] != ["mul"]:
        return None
    scale = codegen.loop_ops[0].operand
    is_exact = bool(table.entries) or codegen.dtypes[table.source] == codegen.x_dtype
    if not isinstance(scale, Field) or not is_exact:
        return None
    return scale if codegen.is_in_x_dtype(scale) else None


def is_computed(codegen: Codegen, table: Field) -> bool:
    """Whether no table is looked up. One that is rounded with a scale in fp32 is."""
    return bool(table.entries) and (not codegen.loop_ops or scale_of(codegen, table) is not None)


def looked_up(out: Statements, table: Field, plan: TilePlan, places: Sequence[int]) -> str:
    """The values of words in x's dtype; ``out`` gets the statements."""
    codegen, code = out.codegen, out.format.code
    scale = scale_of(codegen, table)
    inner = [f"d_{each.name}" for each in plan.digits if each.digit in code.offset.digits]
    computes = is_computed(codegen, table)
    # for each value of a word, though all get the same
    arguments = [f"{out.read(code)[0]} + ({' + '.join(inner)}) * 0"]
    arguments += [] if computes else PLANE
    registers = 0  # of the scale, for the values of a word
    if scale is not None and scale.float8 in EXPONENTS:
        registers = len(places)
        arguments.append(out.twice_in_bf16(scale))
    elif scale is not None:
        registers = len(places) // 2
        arguments.append(out.in_x_dtype(scale))
    elif codegen.loop_ops:
        whole = [Value(f"entry{i}", 1, 1, is_float=True) for i in range(ENTRIES)]
        entries = [out.apply(entry, codegen.loop_ops).code for entry in whole]
        made = planes(codegen.x_dtype)
        out.lines += codegen.dialect.inline_asm(made, PLANE, entries, torch.int32)
    assembly = (e2m1 if computes else look_up)(places, codegen.x_dtype, registers)
    out.lines += codegen.dialect.inline_asm(assembly, ["values"], arguments, codegen.x_dtype)
    return "values"


def planes(dtype: torch.dtype, *, is_uniform: bool = False) -> Assembly:
    """The planes of 16 values in fp32, rounded to ``dtype``: bytes of values 0-3, 4-7, 8-11, 12-15,
    the low ones of all, then the high ones. ``is_uniform``: a warp has one table. ptxas would keep
    it in uniform registers, which ``prmt`` cannot read; a zero that ptxas cannot fold prevents
    that."""
    lines = []
    for part in range(4):
        first = PLANES + 4 * part
        for half, value in (("a", first), ("b", first + 2)):
            lines.append(f"cvt.rn.{FMA_TYPES[dtype]}.f32 {half}, ${value + 1}, ${value};")
        lines += [f"prmt.b32 ${part}, a, b, 0x6420;", f"prmt.b32 ${part + 4}, a, b, 0x7531;"]
    if is_uniform:
        lines += ["mov.u32 a, %lanemask_lt;", "mov.u32 b, %lanemask_eq;", "and.b32 a, a, b;"]
        lines += [f"xor.b32 ${i}, ${i}, a;" for i in range(PLANES)]
    return assembly(lines, "a, b", ENTRIES, bits=32, is_early=True, pack=1, count=PLANES)


def look_up(places: Sequence[int], dtype: torch.dtype, of_scale: int) -> Assembly:
    """The values of the fields ``places`` of a word, times a scale of ``dtype`` if that is in
    registers, ``of_scale`` of them, the first of which has it twice.

    Arguments, the same for all: the word, the planes, and the scale."""
    outputs = len(places) // 2
    word, *plane, scale = (f"${outputs + len(places) * i}" for i in range(2 + PLANES))
    lines = [f"and.b32 s, {word}, 0x77777777;", f"shl.b32 u, {word}, 4;"]
    if of_scale:
        lines.append("mov.b32 none, 0x80008000;")
    for half in range(2):
        # bytes of ones for fields from 8 on: the sign of each byte is a field's highest bit
        lines += [f"prmt.b32 m, {word}, u, {(0x9D8C, 0xBFAE)[half]:#x};"]
        lines += ["shr.u32 s, s, 16;"] if half else []
        for to, (a, b, c, d) in (("l", plane[:4]), ("h", plane[4:8])):
            lines += [f"prmt.b32 {to}, {a}, {b}, s;", f"prmt.b32 t, {c}, {d}, s;"]
            lines.append(f"lop3.b32 {to}, {to}, t, m, {_CHOOSE};")
        for i, pair in enumerate(zip(places[::2], places[1::2], strict=True)):
            if pair[0] // 4 != half:
                continue
            first, second = (place % 4 for place in pair)
            selector = f"{second + 4:x}{second}{first + 4:x}{first}"
            target = "t" if of_scale else f"${i}"
            lines.append(f"prmt.b32 {target}, l, h, 0x{selector};")
            if of_scale:
                lines.append(f"fma.rn.{FMA_TYPES[dtype]} ${i}, t, {scale}, none;")
    registers = "s, u, m, l, h, t, none"
    inputs = len(places) * (1 + PLANES) + of_scale
    return assembly(lines, registers, inputs, pack=len(places), is_early=True)


def e2m1(places: Sequence[int], dtype: torch.dtype, of_scale: int) -> Assembly:
    """As ``look_up`` for the values of e2m1, without planes among the arguments."""
    outputs = len(places) // 2
    word, scale = f"${outputs}", f"${outputs + len(places)}"
    fma, twice = f"fma.rn.{FMA_TYPES[dtype]}", 0x10001
    lines = [f"shl.b32 s, {word}, 4;", f"mov.b32 none, {0x8000 * twice:#x};"]
    lines.append(f"mov.b32 normal, {_NORMAL[dtype] * twice:#x};")
    for i, pair in enumerate(zip(places[::2], places[1::2], strict=True)):
        first, second = (place // 2 + 4 * (place % 2) for place in pair)
        selector = f"{second + 8:x}{second}{first + 8:x}{first}"
        lines += [f"prmt.b32 t, s, {word}, 0x{selector};", f"shl.b32 t, t, {_SHIFT[dtype]};"]
        lines.append(f"and.b32 t, t, {_BITS[dtype] * twice:#x};")
        if of_scale:
            lines += [f"{fma} t, t, normal, none;", f"{fma} ${i}, t, {scale}, none;"]
        else:
            lines.append(f"{fma} ${i}, t, normal, none;")
    inputs = len(places) + of_scale
    return assembly(lines, "s, t, none, normal", inputs, pack=len(places), is_early=True)
