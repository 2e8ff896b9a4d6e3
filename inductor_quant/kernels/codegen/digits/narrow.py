"""Statements that dequantize two values at once in 16 bits.

A scale in fp16 of codes of few bits, for x in bf16, is the sum of two parts in bf16: its first 8
bits, and the other 3. The product of a small integer with the second is exact, so that a
multiply-add with the first rounds the product with the scale, once. (An infinite scale gives NaN.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import Codegen
from inductor_quant.kernels.codegen.unpack_ptx import PLACES, dequantize_pair, multiply_pair
from inductor_quant.ops.dequantize import EXPONENTS
from inductor_quant.spec.weight_format import DequantOp, Field

# Of a field less its zero point: bf16 has it exactly; its 5 bits and those 3 are the 8 of bf16.
MAX_DIFFERENCE, MAX_IN_PARTS = 256, 32
HALF = 16  # bits of a word
# W is divided by 2**48 where one multiply-add subtracts the zero point and scales, as the factor of
# a subnormal field would be infinite: it is for scales of 2**43 and more, and what is below 2**-78,
# values of W and their products with x, loses bits. The biased exponent of that factor without a
# scale.
FOLDED_BITS, SUBNORMAL = 48, 127 + 133


def in_16_bits(out: Any) -> str:
    """W by 16-bit arithmetic; "" if that is not exact until the last rounding: it takes a small
    integer as zero point, and a scale in x's dtype, or one ``in_parts``. ``out``, of
    ``statements.Uses``, gets the statements.
    """
    codegen, field = out.codegen, out.format.element
    ops, x_dtype = list(codegen.loop_ops), codegen.x_dtype
    if codegen.is_in_fp32 or not (codegen.is_paired and is_in_place(field, 8)):
        return ""
    sign = 1 << field.width - 1 if field.signed else 0
    less = sign - field.add
    zero = str(float(less))
    has_zero = bool(ops) and ops[0].kind == "sub"
    is_in_parts = in_parts(codegen, ops[has_zero:])
    most = MAX_IN_PARTS if is_in_parts else MAX_DIFFERENCE
    # what may be subtracted from 0, and from the largest field, and leave no more
    low, high = (1 << field.width) - 1 - most - less, most - less
    listed = listed_zero(codegen, ops)
    # Nothing is loaded for ``added`` below: the compiler would know it.
    is_number = bool(listed) or not (has_zero and isinstance(ops[0].operand, Field))
    if listed:
        ops.pop(0)
        least = 0 if listed.wrap else listed.add
        if not low <= least <= high - (1 << listed.width) + 1:
            return ""
    elif has_zero:
        subtrahend = out.integer_within(ops.pop(0), low, high)
        zero = f"{subtrahend} + {zero}"
        if not subtrahend:
            return ""
    elif not low <= 0 <= high:
        return ""
    if [op.kind for op in ops] not in ([], ["mul"], ["mul", "add"], ["mul", "sub"]):
        return ""
    factors = []
    for op in ops:
        if not isinstance(op.operand, Field):
            return ""
        # a power of two may be infinite if it is multiplied by the divisor
        is_exact = codegen.is_in_x_dtype(op.operand) and op.operand.float8 not in EXPONENTS
        if not (is_exact or is_in_parts):
            return ""
        code = out.in_x_dtype(op.operand) if is_exact else out.field(op.operand).code
        factors.append(f"{'-' if op.kind == 'sub' else ''}{code}")
    place, mask = PLACES[x_dtype], (1 << field.width) - 1
    base = _base(place, out.index(field.offset))
    halves = [out.offset_of(half) for half in "01"]
    ats = [f"(({offset}) & 7)" for offset in halves]

    def both(code: str) -> str:
        low, high = (code.format(at=at) for at in ats)
        return f"({low}) | (({high}) << 16)"

    [pair] = codegen.plan.low
    none = out.assign("a", f"d_{pair.name} * 0.0")  # for each of two values that share a word
    x_type = codegen.x_type
    if listed:
        zero = f"{less + least:.1f} - {_base(place, out.index(listed.offset))}"
    added = f"({zero} + {base}) * {-1 / place.divisor} + {none}"
    if is_number and codegen.unknown_zero:
        added += f" + {codegen.unknown_zero}"
    # The assembly takes 32-bit registers; bytes that form no words are widened.
    bytes_of = [f"({half}) >> 3" for half in halves]
    selector = f"({halves[0]}) & -8" if is_in_halves(codegen) else codegen.selector_of(*bytes_of)
    arguments = [
        f"{out.read(field)[0]}.to(gl.int32)",
        selector,
        both(f"{mask} << {{at}}"),
        both(f"{place.exponent} | ({sign} << {{at}})"),
    ]
    if folds_zero(codegen):
        at = f"({out.index(field.offset)}) & 7"
        factor = power(f"{SUBNORMAL - FOLDED_BITS} - ({at})")
        summand = f"({zero}) * {-(2.0**-FOLDED_BITS)}"
        arguments += [
            f"{factors[0]} * ({each} + {none}).to({x_type})" for each in (factor, summand)
        ]
        arguments = [out.assign("a", code) for code in arguments]
        assembly = multiply_pair(x_dtype, in_halves=is_in_halves(codegen))
        out.lines += out.dialect.inline_asm(assembly, ["pairs"], arguments, x_dtype)
        return "pairs"
    arguments += [
        both(f"({place.power} - {{at}}) << {place.mantissa}") + codegen.or_hidden_zero,
        f"({added}).to({x_type})",
    ]
    # Of each value, and of no pair that shares it: as it is.
    is_rescaled = not is_in_parts and bool(factors) and ops[0].operand in codegen.listed
    if is_in_parts:
        scale = out.assign("f", f"{factors[0]}.to(gl.float32) * {float(place.divisor)} + {none}")
        bits = f"{scale}.to(gl.int32, bitcast=True) & {-1 << 16}"
        first = out.assign("f", f"({bits}).to(gl.float32, bitcast=True)")
        arguments += [f"{first}.to({x_type})", f"({scale} - {first}).to({x_type})"]
    elif is_rescaled:
        arguments.append(factors[0])
    elif factors or place.divisor > codegen.divisor:
        scale = f"{factors[0]} * " if factors else ""
        arguments.append(f"({scale}{float(place.divisor)} + {none}).to({x_type})")
    arguments += [f"({term} + {none}).to({x_type})" for term in factors[1:]]
    is_scaled = len(arguments) > 6
    if listed:
        offset = out.index(listed.offset)
        selector, at = f"({offset}) >> 3", f"(({offset}) & 7)"
        powers = f"({place.power} - {at}) << {place.mantissa} | {1 << 15}"
        word = out.read(listed)[0]
        word = word if listed in codegen.raised else raised(word, listed)
        arguments += [
            f"{out.assign('w', word)} + d_{pair.name} * 0",
            f"({selector}) | (({selector}) + 4 << 8)",
            f"({(1 << listed.width) - 1} << {at}) * {0x10001}",
            str(place.exponent * 0x10001),
            f"({powers}) * {0x10001}",
        ]
    arguments = [out.assign("a", code) for code in arguments]
    assembly = dequantize_pair(
        x_dtype,
        is_scaled=is_scaled,
        is_added_to=len(factors) > 1,
        is_in_parts=is_in_parts,
        is_rescaled=is_rescaled and place.divisor > 1,
        has_zeros=listed is not None,
        in_halves=is_in_halves(codegen),
    )
    out.lines += out.dialect.inline_asm(assembly, ["pairs"], arguments, x_dtype)
    return "pairs"


def folds_zero(codegen: Any) -> bool:
    """Whether one multiply-add subtracts the zero point of a field and scales it: what is
    subtracted is 0 or a power of two, times the scale exactly, and fields are subnormals of bf16.
    W is left divided by ``2**FOLDED_BITS``."""
    field, ops = codegen.format.element, list(codegen.loop_ops)
    if not codegen.folds or codegen.is_in_fp32 or codegen.x_dtype != torch.bfloat16:
        return False
    if not (codegen.is_paired and is_in_place(field, 8)):
        return False
    zero = (1 << field.width - 1 if field.signed else 0) - field.add
    if ops and ops[0].kind == "sub" and not isinstance(ops[0].operand, Field):
        zero += float(ops.pop(0).operand)
    scale = ops[0].operand if [op.kind for op in ops] == ["mul"] else None
    if not isinstance(scale, Field) or scale in codegen.listed or scale.float8 in EXPONENTS:
        return False
    is_power = math.frexp(zero)[0] in (0, 0.5) and float(zero).is_integer()
    return codegen.is_in_x_dtype(scale) and is_power and 0 <= zero < 1 << field.width


def is_in_halves(codegen: Any) -> bool:
    """Whether the two values of a register are 16 bits apart in one word."""
    [pair] = codegen.plan.low
    step = dict(codegen.format.code.offset.linear).get(pair.digit, 0) * pair.place
    return bool(step == HALF)


def _base(place: Any, offset: str) -> str:
    """The base of a field, in units of it."""
    return f"{place.base} * {power(f'127 - (({offset}) & 7)')}" if place.base else "0.0"


def listed_zero(codegen: Any, ops: Sequence[DequantOp]) -> Field | None:
    """The zero point, if each k has its own from a list, within a byte of a word."""
    field = ops[0].operand if ops and ops[0].kind == "sub" else None
    if not isinstance(field, Field) or field not in codegen.listed or field.signed:
        return None
    is_word = codegen.dtypes[field.source] == torch.int32
    is_whole = not field.wrap or field.width in (2, 4, 8)  # the fields are all bits of the word
    within = dataclasses.replace(field, wrap=False)
    return field if is_word and is_whole and is_in_place(within, 8) else None


def raised(word: str, field: Field) -> str:
    """The words of a field; if it wraps around, ``add`` is added to each field of them."""
    if not field.wrap:
        return word
    each = ((1 << 32) - 1) // ((1 << field.width) - 1)
    high = each << field.width - 1
    added = each * (field.add & (1 << field.width) - 1)
    low, carry, flip = (int32(bits) for bits in (~high, added & ~high, added & high))
    return f"((({word} & {low}) + {carry}) ^ (({word} & {int32(high)}) ^ {flip}))"


def int32(bits: int) -> int:
    """The int32 of these bits: a larger constant is refused beside a tensor of int32."""
    bits &= (1 << 32) - 1
    return bits - (bits >> 31 << 32)


def in_parts(codegen: Codegen, ops: Sequence[DequantOp]) -> bool:
    """Whether ``ops`` are one scale in fp16, for x in bf16."""
    if [op.kind for op in ops] != ["mul"] or not isinstance(ops[0].operand, Field):
        return False
    dtypes = codegen.dtypes[ops[0].operand.source], codegen.x_dtype
    return dtypes == (torch.float16, torch.bfloat16)


def power(exponent: str) -> str:
    """2 to the power of a biased exponent, which may be a constant: a word has one value."""
    return f"gl.to_tensor(({exponent}) << 23).to(gl.float32, bitcast=True)"


def is_in_place(field: Field, part: int = 16, *, is_float: bool = False) -> bool:
    """Whether the field of a word lies within a half, or a byte, of it: then it needs no shift.
    ``is_float``: of a field that is a float of eight bits too."""
    if not 0 < field.width <= 8 or field.wrap or field.size or field.high or field.offset.is_data:
        return False
    if field.float8 and not is_float:
        return False
    tables = {value for _, table in field.offset.tables for value in table}
    coefs = {coef for _, coef in field.offset.linear}
    # Then the offsets are multiples of a divisor of 16 that the field fits into.
    unit = math.gcd(part, *tables, *coefs, field.offset.const)
    return field.width <= unit
