"""Triton statements of the kernel for more rows of x: unpack words and dequantize them in 16 bits.

``(q - z) * s``: the unpacked number with its base less the base and the zero point is a small
integer, exact in 16 bits; its product with a scale of x's type is rounded once, as fp32 would be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inductor_quant.kernels.config import GemmConfig, Weight
from inductor_quant.kernels.weight_code import Hook, Statements, WeightCode
from inductor_quant.kernels.word_tile import WordTile, join, reordered
from inductor_quant.kernels.words import BASES, Dim, Words, scale_and_shift
from inductor_quant.weight_format import Field, Step


class ManyRowsCode:
    """The code of one weight in one configuration: what the template's constant ``WEIGHT`` is."""

    def __init__(
        self,
        weight: Weight,
        words: Words,
        config: GemmConfig,
        *,
        x_dtype: torch.dtype,
        loop_steps: Sequence[Step],
        column_steps: Sequence[Step],
    ) -> None:
        self.words, self.x_dtype, self.block_n = words, x_dtype, config.block_n
        self.words_tile = WordTile(weight, words, config.block_k, config.block_n)
        self.plain = WeightCode(
            weight.format,
            weight.tensors,
            config,
            x_dtype=x_dtype,
            loop_steps=loop_steps,
            column_steps=column_steps,
        )
        self.sources, self.column_steps = self.plain.sources, self.plain.column_steps
        self.k, self.n = self.plain.k, self.plain.n

    def __str__(self) -> str:
        return str(self.plain)

    __repr__ = __str__

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: where the words of the tile lie."""
        return self.words_tile.offsets(stride)

    def tile(self, stride: Hook, size: Hook) -> str:
        """Statements inside the loop that leave the tile at k in ``w`` [BLOCK_N, BLOCK_K]."""
        base, x_type = BASES[self.x_dtype], self.plain.x_type
        out = Statements(self.plain, stride, size)
        shift = float(self.words.bias(base))
        zero, scale = split(self.plain.loop_steps)
        if zero is None or not isinstance(zero.operand, Field):
            constant = zero.operand if zero is not None else 0.0
            assert not isinstance(constant, Field)
            total = shift + constant
            shifts = [f"tl.full({list(self.words_tile.shape)}, {-total}, {x_type})"]
        else:
            value = out.operand(zero)
            narrow = f"(-({value.code}) - {shift}).to({x_type})"
            shifts = self._of_words(out, narrow, value.columns)
        lines, numbers = self.words_tile.unpacked(base, x_type)
        scales = [f"tl.full({list(self.words_tile.shape)}, 1.0, {x_type})"]
        if scale is not None:
            assert isinstance(scale.operand, Field)
            value = out.field(scale.operand)
            scales = self._of_words(out, value.code, value.columns)
        assembly = scale_and_shift(self.x_dtype)
        for i, number in enumerate(numbers):
            arguments = (number, shifts[i % len(shifts)], scales[i % len(scales)])
            lines += assembly.call([number], arguments, x_type)
        joined, whole = join(numbers)
        fields: tuple[Dim, ...] = tuple((f"f{i}", 2) for i in range(len(numbers).bit_length() - 1))
        k: Dim = ("k", self.words_tile.of_k)
        n: Dim = ("n", self.words_tile.of_n)
        tile = (k, n) if self.words_tile.contiguous == "n" else (n, k)
        high = tuple(reversed(fields))
        target = (n, k, *high) if self.words.axis == "k" else (n, *high, k)
        w = reordered(whole, (*tile, *fields), target, "[BLOCK_N, BLOCK_K]")
        return "\n".join([*out.lines, *lines, *joined, f"w = {w}"])

    def _of_words(self, out: Statements, value: str, columns: int) -> list[str]:
        """A value for each column of W, or one for all, as tiles of the words' shape: one tile if
        the numbers of a word share it, else one for each."""
        shape = list(self.words_tile.shape)
        if columns == 1:
            return [f"tl.full({shape}, 0.0, {self.plain.x_type}) + {value}"]
        whole = out.assign("c", value)
        if columns < self.block_n:
            times = self.block_n // columns
            wide = f"tl.broadcast_to(({whole})[:, :, None], [1, {columns}, {times}])"
            whole = out.assign("c", f"tl.reshape({wide}, [1, {self.block_n}])")
        of_n = self.words_tile.of_n
        row = f"[1, {of_n}]" if self.words_tile.contiguous == "n" else f"[{of_n}, 1]"
        parts = [whole]
        if self.words.axis == "n":
            parts = self._split(out, whole)
        return [f"tl.broadcast_to(tl.reshape({part}, {row}), {shape})" for part in parts]

    def _split(self, out: Statements, whole: str) -> list[str]:
        """[1, BLOCK_N] as one [words] for each number of a word."""
        bits = self.words.count.bit_length() - 1
        sizes = [self.words_tile.of_n, *[2] * bits]
        parts = [out.assign("c", f"tl.reshape({whole}, {sizes})")]
        for _ in range(bits):  # the lowest bit first
            halves = []
            for part in parts:
                low, high = f"{part}l", f"{part}h"
                out.lines.append(f"{low}, {high} = tl.split({part})")
                halves.append((low, high))
            parts = [low for low, _ in halves] + [high for _, high in halves]
        return parts

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements behind the loop that apply the scales of whole columns to ``out``."""
        return self.plain.columns(stride, size)


def split(steps: Sequence[Step]) -> tuple[Step | None, Step | None]:
    """(the step of the zero point, that of the scale) of steps that ``suits`` approves."""
    zero = next((step for step in steps if step.kind == "sub"), None)
    scale = next((step for step in steps if step.kind == "mul"), None)
    return zero, scale


def suits(steps: Sequence[Step], weight: Weight, words: Words, x_dtype: torch.dtype) -> bool:
    """Whether ``steps`` are at most a small integer and a scale of x's type, in this order."""
    kinds = [step.kind for step in steps]
    if kinds not in ([], ["sub"], ["mul"], ["sub", "mul"]):
        return False
    zero, scale = split(steps)
    if scale is not None:
        operand = scale.operand
        if not isinstance(operand, Field) or operand.float8:
            return False
        if weight.tensors[operand.source].dtype != x_dtype:
            return False
    if zero is None:
        return True
    base = BASES[x_dtype]
    # What is taken off a number, base and all, must be an integer that 16 bits hold exactly.
    room = 2 * base.value - words.bias(base)
    operand = zero.operand
    if not isinstance(operand, Field):
        return operand.is_integer() and 0 <= operand <= room
    is_small = 0 < operand.width < base.width and not operand.signed and not operand.float8
    most = (1 << operand.width) - 1 + max(0, operand.add)
    return is_small and operand.add >= 0 and most <= room
