"""Triton statements of the kernel for few rows of x: unpack words, multiply, scale the sums.

Within a group of rows of W all steps are linear with the same operands, so they are applied to the
sum over the group: ``sum x * (q - z) * s = (sum x*q - z * sum x) * s``. What the matrix unit gets
are the words' own numbers, with the bias of their unpacking, which ``sum x`` takes out too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inductor_quant.kernels.config import GemmConfig, Weight
from inductor_quant.kernels.weight_code import Hook, Statements, WeightCode, arithmetic
from inductor_quant.kernels.word_tile import WordTile, join, reordered
from inductor_quant.kernels.words import BASES, Dim, Words, tile_order
from inductor_quant.weight_format import Step


class FewRowsCode:
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
        self.x_dtype = x_dtype
        self.block_n, self.block_m = config.block_n, config.block_m
        self.words_tile = WordTile(weight, words, config.block_k, config.block_n)
        order = tile_order(
            words,
            block_k=config.block_k,
            block_n=config.block_n,
            warps=config.num_warps,
            contiguous=self.words_tile.contiguous,
        )
        assert order is not None, config
        self.order = order
        # Everything but the words is read as in the kernel for all formats.
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
        self.bias = words.bias(BASES[x_dtype])

    def __str__(self) -> str:
        return str(self.plain)

    __repr__ = __str__

    @property
    def needs_sum(self) -> bool:
        """Whether the sum of x over a block is used: not where only scales are applied to exact
        numbers."""
        steps = self.plain.loop_steps
        return self.bias != 0 or any(step.kind in ("add", "sub") for step in steps)

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: where the words of the tile lie."""
        return self.words_tile.offsets(stride)

    def tile(self) -> str:
        """Statements inside the loop that leave in ``w`` [BLOCK_N, BLOCK_K] what is unpacked of the
        words at k, and in ``x`` [BLOCK_M, BLOCK_K] its numbers in the same order."""
        lines, numbers = self.words_tile.unpacked(BASES[self.x_dtype], self.plain.x_type)
        joined, whole = join(numbers)
        lines += joined
        order = self.order
        target = (*order.n_mma, *order.k_mma)
        shape = "[BLOCK_N, BLOCK_K]"
        lines.append(f"w = {reordered(whole, order.unpacked, target, shape)}")
        m: Dim = ("m", self.block_m)
        x = reordered("x", (m, *order.k), (m, *order.k_mma), "[BLOCK_M, BLOCK_K]")
        lines.append(f"x = {x}")
        return "\n".join(lines)

    def scaled(self, stride: Hook, size: Hook) -> str:
        """Statements inside the loop that apply the bias and the steps to ``sums``, [BLOCK_N,
        BLOCK_M]; ``x_sum`` [1, BLOCK_M]."""
        out = Statements(self.plain, stride, size)
        lines = []
        if self.bias:
            lines.append(f"sums = sums - {float(self.bias)} * x_sum")
        for step in self.plain.loop_steps:
            value = out.widen(out.operand(step), 1, self.block_n)
            code = value.code
            if value.columns > 1:
                shape = f"[{self.block_n}, 1]"
                code = reordered(f"({code})", self.order.n, self.order.n_mma, shape)
            if step.kind in ("add", "sub"):
                lines.append(f"sums = sums {'+' if step.kind == 'add' else '-'} {code} * x_sum")
            else:
                lines.append(f"sums = {arithmetic(step, 'sums', code)}")
        return "\n".join([*out.lines, *lines])

    def in_order(self, value: str) -> str:
        """``value`` [BLOCK_N, BLOCK_M] with its columns of W as they count."""
        m: Dim = ("m", self.block_m)
        return reordered(value, (*self.order.n_mma, m), (*self.order.n, m), "[BLOCK_N, BLOCK_M]")

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements behind the loop that apply the scales of whole columns to ``out``."""
        return self.plain.columns(stride, size)
