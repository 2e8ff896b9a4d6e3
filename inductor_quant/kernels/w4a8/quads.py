"""Gluon statements that make int8, or e4m3, of the nibbles that a thread loaded, four at a time.

``DigitCodegen`` with a plan whose ``low`` are the two bits of k within a register of the MMA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.digits.codegen import DigitCodegen
from inductor_quant.kernels.codegen.digits.statements import Uses
from inductor_quant.kernels.codegen.digits.tile import TileDigit, TilePlan
from inductor_quant.kernels.codegen.digits.words import WordView
from inductor_quant.kernels.codegen.unpack_ptx import Quad, unpack_quad
from inductor_quant.ops import w4a8
from inductor_quant.spec.weight_format import Field, WeightFormat

SIGN = 8
SUBNORMAL = -9  # the bits of a small integer are a subnormal of e4m3, the integer times 2**-9
EACH_BYTE, EACH_HALF = 0x01010101, 0x00010001
# In fp16; up to 1024 plus MAX_ZERO neighbouring bits are neighbouring integers.
BITS_OF_1024, MAX_ZERO = 0x6400, 1000
# An int32 sum below 2**22 that starts at MAGIC_BITS is, read as fp32, ``MAGIC`` plus the sum. So a
# subtraction converts it, in an eighth of the time of a conversion.
MAGIC_BITS, MAGIC = 0x4B400000, 12582912.0
MAX_MAGIC_K = (1 << 22) // (128 * 128)


def zero_of(format: WeightFormat) -> int | None:
    """The number that is subtracted from a nibble with values 0 to 15; None: it is data."""
    element, (integers, _) = format.element, w4a8.split(format)
    total = (SIGN if element.signed else 0) - element.add
    for op in integers:
        if op.kind in ("add", "sub"):
            if isinstance(op.operand, Field):
                return None
            total += int(op.operand) * (1 if op.kind == "sub" else -1)
    return total


def shift_of(format: WeightFormat, dtype: torch.dtype = w4a8.INT8) -> int:
    """By how many bits the unpacked values, as ``dtype``, are the weight's integers shifted to the
    left."""
    if dtype == w4a8.E4M3:
        return SUBNORMAL
    return 4 if zero_of(format) == SIGN and not format.to_int8 else 0


def times_of(format: WeightFormat) -> int:
    """The factor of the integers."""
    if format.to_int8:
        return 1
    factors = [op.operand for op in w4a8.split(format)[0] if op.kind == "mul"]
    return math.prod(int(each) for each in factors if not isinstance(each, Field))


def is_scaled_quad(format: WeightFormat, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether there are statements for a format whose int8 is ``(nibble - zero) * scale``: the
    scale is an integer and the product wraps around, or it is fp16 and an fma rounds."""
    if len(format.dequant_ops) < 2:
        return False
    *zeros, scale, _ = format.dequant_ops
    if scale.kind != "mul" or not isinstance(scale.operand, Field):
        return False
    if len(zeros) > 1 or any(zero.kind != "sub" for zero in zeros):
        return False
    if format.to_int8 == "wrap":
        return True
    least, most = w4a8.ends_of(zeros[0].operand, dtypes) or (-1, -1) if zeros else (0, 0)
    known = (SIGN if format.element.signed else 0) - format.element.add
    is_small = least + known >= 0 and most + known <= MAX_ZERO
    return is_small and dtypes[scale.operand.source] == torch.float16


class Quads(Uses):
    """Computes with what was loaded into ``kept``."""

    codegen: QuadCodegen

    def unpacked(self) -> str:
        """The nibbles less their zero points, as int8, shifted by ``shift_of``."""
        codegen, field = self.codegen, self.format.element
        zero = zero_of(self.format)
        low = [part.digit for part in codegen.plan.low]
        of_words = [name for name in low if any(name in i.digits for i in field.index)]
        is_float = codegen.x_dtype == w4a8.E4M3
        is_high = codegen.shift > 0
        kind = Quad(
            is_high=is_high,
            is_flipped=field.signed != is_high,
            subtracts=zero not in (0, SIGN) and not self.format.to_int8,
            from_words=bool(of_words),
            becomes="e4m3" if is_float else self.format.to_int8,
        )
        at = [self.offset_of(f"{i >> 1}{i & 1}") for i in range(4)]
        if kind.from_words:
            byte = f"(({at[0]}) >> 3)"
            arguments = [f"{byte} | ({byte} + 4 << 4)"]
            arguments.append(f"{'4 - ' if kind.is_high else ''}(({at[0]}) & 4)")
        else:
            places = [f"(((({o}) >> 3) + (({o}) & 4)) << {4 * i})" for i, o in enumerate(at)]
            arguments = [" | ".join(places)]
        if kind.subtracts:
            arguments.append(f"({self._subtrahend()}) * {EACH_BYTE}")
        if self.format.to_int8:
            arguments += self._scaled(kind.becomes)
        # for each of the four, though they share a register
        none = " + ".join(f"d_{part.name}" for part in codegen.plan.low)
        arguments[0] = f"({arguments[0]}) + ({none}) * 0"
        names = [self.assign("a", code) for code in arguments]
        words = f"{self.read(field)[0]}.to(gl.int32)"
        assembly = unpack_quad(kind)
        lines = self.dialect.inline_asm(assembly, ["quads"], [words, *names], codegen.x_dtype)
        self.lines += lines
        return "quads"

    def _scaled(self, becomes: str) -> list[str]:
        """What is subtracted and what multiplies, each in both halves of a word."""
        operand = self.format.dequant_ops[-2].operand
        assert isinstance(operand, Field)
        scale, zero = self.field(operand), self._subtrahend()
        if becomes == "round":  # the bits of 1024 + zero, in fp16
            bits = f"{scale.code}.to(gl.int16, bitcast=True).to(gl.int32)"
            factor, zero = f"({bits} & 65535)", f"({BITS_OF_1024} + {zero})"
        else:
            whole = f"({scale.code}.to(gl.int32) + {scale.bias})"
            factor, zero = f"({whole} & 255)", f"((({zero}) * -{whole}) & 255)"
        return [f"{zero} * {EACH_HALF}", f"{factor} * {EACH_HALF if becomes == 'round' else 1}"]

    def _subtrahend(self) -> str:
        field, (integers, _) = self.format.element, w4a8.split(self.format)
        total, terms = (SIGN if field.signed else 0) - field.add, []
        for op in integers:
            if op.kind not in ("add", "sub"):
                continue
            sign = 1 if op.kind == "sub" else -1
            if isinstance(op.operand, Field):
                value = self.field(op.operand)
                total += sign * value.bias
                terms.append(f"{'-' if sign < 0 else ''}({value.code}).to(gl.int32)")
            else:
                total += sign * int(op.operand)
        return " + ".join([*terms, str(total)])

    def group_scale(self) -> str:
        """The scales of the tile's groups in fp32, for the sums of what is unpacked."""
        _, scale = w4a8.split(self.format)
        assert scale is not None
        value = self.to_float(self.field(scale)).code
        return self.assign("f", f"{value} * {self.codegen.factor!r}")


QUAD = (0, 1)  # the bits of k within a register of the MMA


def is_quad(format: WeightFormat, low: Sequence[TileDigit]) -> bool:
    """Whether the four nibbles are in one word, or have the same place in four."""
    code, (first, second) = format.code, (part.digit for part in low)
    in_index = [any(name in index.digits for index in code.index) for name in (first, second)]
    in_word = [name in code.offset.digits for name in (first, second)]
    return in_index != in_word and in_index[0] == in_index[1] and in_word[0] == in_word[1]


class QuadCodegen(DigitCodegen):
    """A ``DigitCodegen`` that unpacks to int8 or e4m3. A tile is within one group along K."""

    x = "A"
    acc_type: str  # of the sums over K

    def __init__(
        self, tile: WeightTile, view: WordView, plan: TilePlan, n_order: list[str]
    ) -> None:
        super().__init__(tile, view, plan, n_order)
        self.acc_type = "gl.float32" if self.has_groups or self.is_float else "gl.int32"

    @property
    def has_groups(self) -> bool:
        return w4a8.split(self.format)[1] is not None

    @property
    def is_float(self) -> bool:
        return self.x_dtype == w4a8.E4M3

    @property
    def shift(self) -> int:
        return shift_of(self.format, self.x_dtype)

    @property
    def factor(self) -> float:
        """What the sums of what is unpacked are multiplied by."""
        return math.ldexp(times_of(self.format), -self.shift)

    def total(self, sums: str) -> str:
        """The sums over K of a and the integers, which a scale may multiply."""
        if self.has_groups:
            return sums
        if self.is_float:
            return f"{sums} * {self.factor!r}"
        times = times_of(self.format)
        sums = f"({sums} >> {self.shift})" if self.shift else sums
        return f"{sums} * {times}" if times != 1 else sums

    def unpacked(self, stride: Hook, size: Hook, slot: int = 0) -> tuple[Quads, str]:
        out = Quads(self, stride, size, slot)
        return out, out.unpacked()
