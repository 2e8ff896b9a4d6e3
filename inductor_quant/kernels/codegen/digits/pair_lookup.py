"""Tables of 16 values in shared memory, looked up two values at a time.

A byte of a word selects two values, so there is an entry for each byte: both values in x's dtype,
or in fp32 if the scale is to be applied in it. Each lane, or in fp32 two of them, has a copy in
banks of its own, so that a load never waits for another lane: ROW bytes for each entry.

Where lanes share words (``mm_sm90``) a thread has two values of a word and not eight, as
``table_lookup`` takes them.
"""

from __future__ import annotations

import itertools
import math

import torch

from inductor_quant.kernels.codegen.base import Codegen, Hook
from inductor_quant.kernels.codegen.dialect import bits
from inductor_quant.kernels.codegen.digits.table_lookup import scale_of
from inductor_quant.kernels.codegen.digits.tile import TileDigit, TilePlan, word_strides
from inductor_quant.kernels.codegen.gluon_layout import Layout, layout, positions
from inductor_quant.kernels.codegen.statements import Statements, Value
from inductor_quant.kernels.codegen.unpack_ptx import FMA_TYPES, Assembly, assembly
from inductor_quant.kernels.problem import Weight
from inductor_quant.ops.dequantize import EXPONENTS
from inductor_quant.spec.weight_format import Field

WIDTH = 4  # bits of a code
CODES, ROW = 1 << WIDTH, 128
MEMORY = CODES * CODES * ROW  # bytes of shared memory, beside those that Triton counts
Places = tuple[int, int]


def places_of(weight: Weight, plan: TilePlan) -> Places | None:
    """The bit offsets in their byte of two values that are dequantized together; None unless both
    are always in one byte of a word."""
    format, code = weight.format, weight.format.code
    if format.element == code or len(plan.low) != 1 or code.offset.tables or code.offset.is_data:
        return None
    if format.element.index[0].fields != ((code, 1),) or format.element.index[0].const:
        return None
    if format.element.index[0].digits != code.digits or code.width != WIDTH:
        return None
    if code.signed or code.add or code.wrap or code.size:
        return None
    [pair] = plan.low
    if word_strides(weight, code).get(pair.digit, math.inf):
        return None  # of two words
    parts = [digit for digit in plan.digits if digit.digit in code.offset.digits]
    found = set()
    for at in itertools.product(*(range(digit.inner) for digit in parts)):
        digits = dict.fromkeys(code.offset.digits, 0)
        for digit, value in zip(parts, at, strict=True):
            digits[digit.digit] += digit.place * (0 if digit == pair else value)
        first = code.offset.value(digits)
        digits[pair.digit] += pair.place
        second = code.offset.value(digits)
        if first // 8 != second // 8:
            return None
        found.add((first % 8, second % 8))
    return found.pop() if len(found) == 1 else None


def layout_of_entries(warps: int) -> Layout:
    """Of [high code, low code] of a byte. All lanes of a warp have the same entries, of all low
    codes: a thread loads few values of the table, and neighbours."""
    high = bits("high", CODES)
    own = high[len(high) - (warps.bit_length() - 1) :]
    return layout((high, bits("low", CODES)), lanes=(("none", 32),), warps=own)


HIGH, LOW = (positions("ENTRIES", 2, axis, CODES) for axis in range(2))


def start(codegen: Codegen, table: Field, places: Places, stride: Hook) -> list[str]:
    """Statements that load the values, once a CTA; ``entries`` is the address of a lane's copy."""
    source = codegen.sources[table.source]
    allocated = _allocate(is_in_fp32(codegen, table))
    lines = codegen.dialect.inline_asm(allocated, ["entries"], [], torch.int32)
    for i, place in enumerate(places):
        lines.append(
            f"value_{i} = gl.load({source} + {HIGH if place else LOW} * {stride(source, 0)})"
        )
    return lines


def written(codegen: Codegen, table: Field) -> list[str]:
    """Statements that write the table from what ``start`` has loaded."""
    values = [f"value_{i}.to(gl.float32)" for i in range(2)]
    arguments = [f"entries + ({HIGH} * {CODES} + {LOW}) * {ROW}", *values]
    store = _store(codegen.x_dtype, is_in_fp32(codegen, table))
    lines = codegen.dialect.inline_asm(store, ["written"], arguments, torch.int32)
    return [*lines, "cta_barrier()"]


def looked_up(out: Statements, table: Field, pair: TileDigit, offset: str) -> str:
    """The values of words in x's dtype; ``out`` gets the statements. ``offset``: the bit offset of
    the first of two values."""
    codegen, code = out.codegen, out.format.code
    none = out.assign("a", f"d_{pair.name} * 0")  # for each of two values that share a word
    byte = out.assign("a", f"0x4440 | ({offset}) >> 3 & 3")
    arguments = [
        f"{out.read(code)[0]}.to(gl.int32) + {none}",
        f"{byte} + {none}",
        f"entries + {none}",
    ]
    arguments = [out.assign("a", argument) for argument in arguments]
    if is_in_fp32(codegen, table):
        assembly = look_up_fp32()
        out.lines += codegen.dialect.inline_asm(assembly, ["pairs"], arguments, torch.float32)
        value = out.apply(Value("pairs", 1, 1, is_float=True), codegen.loop_ops)
        return f"({value.code}).to({codegen.x_type})"
    scale = scale_of(codegen, table)
    registers = 0  # of the scale, for both values
    if scale is not None and scale.float8 in EXPONENTS:
        registers = 2
        arguments.append(f"{out.twice_in_bf16(scale)} + {none}")
    elif scale is not None:
        registers = 1
        arguments.append(f"({out.in_x_dtype(scale)} + {none}).to({codegen.x_type})")
    assembly = look_up(codegen.x_dtype, registers)
    out.lines += codegen.dialect.inline_asm(assembly, ["pairs"], arguments, codegen.x_dtype)
    return "pairs"


def is_in_fp32(codegen: Codegen, table: Field) -> bool:
    """Whether values are looked up in fp32."""
    return bool(codegen.loop_ops) and scale_of(codegen, table) is None


def _allocate(is_wide: bool) -> Assembly:
    """The address of a lane's copy: 4 or 8 bytes of each entry."""
    lines = [
        f".shared .align {ROW} .b8 entries[{MEMORY}];",
        "mov.u32 base, entries;",
        "mov.u32 lane, %laneid;",
        *(["and.b32 lane, lane, 15;"] if is_wide else []),
        f"mad.lo.u32 $0, lane, {8 if is_wide else 4}, base;",
    ]
    return assembly(lines, "base, lane", 0, bits=32, is_pure=False, pack=1)


def _store(dtype: torch.dtype, is_wide: bool) -> Assembly:
    """Arguments: an address and two values in fp32."""
    if is_wide:
        lines = ["st.shared.b32 [$1], $2;", "st.shared.b32 [$1+4], $3;"]
    else:
        lines = [f"cvt.rn.{FMA_TYPES[dtype]}.f32 t, $3, $2;", "st.shared.b32 [$1], t;"]
    return assembly([*lines, "mov.u32 $0, 0;"], "t", 3, bits=32, is_pure=False, pack=1)


_ADDRESS = ["prmt.b32 t, {word}, 0, {byte};", f"mad.lo.u32 t, t, {ROW}, {{copy}};"]


def look_up(dtype: torch.dtype, of_scale: int) -> Assembly:
    """Both values of a byte, times a scale of ``dtype`` if that is in registers, ``of_scale`` of
    them, the first of which has it twice.

    Arguments: the word, the selector of the byte for ``prmt``, and the address of the lane's copy,
    the same for both values; and the scale.
    """
    lines = [line.format(word="$1", byte="$3", copy="$5") for line in _ADDRESS]
    if of_scale:
        fma = f"fma.rn.{FMA_TYPES[dtype]} $0, t, $7, none;"
        lines += ["ld.shared.b32 t, [t];", "mov.b32 none, 0x80008000;", fma]
    else:
        lines.append("ld.shared.b32 $0, [t];")
    return assembly(lines, "t, none", 6 + of_scale, pack=2)


def look_up_fp32() -> Assembly:
    """Likewise, in fp32 and without a scale."""
    lines = [line.format(word="$2", byte="$4", copy="$6") for line in _ADDRESS]
    return assembly([*lines, "ld.shared.v2.b32 {$0, $1}, [t];"], "t", 6, bits=32, pack=2)
