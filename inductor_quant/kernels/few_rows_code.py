"""Triton statements of the kernel for few rows of x: unpack words, multiply, scale the sums.

Within a group of rows of W all steps are linear with the same operands, so they are applied to the
sum over the group: ``sum x * (q - z) * s = (sum x*q - z * sum x) * s``. What the matrix unit gets
are the words' own numbers, with the bias of their unpacking, which ``sum x`` takes out too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from inductor_quant.kernels.config import GemmConfig, Weight
from inductor_quant.kernels.weight_code import Hook, Statements, WeightCode, arithmetic
from inductor_quant.kernels.words import BASES, Dim, Words, tile_order, unpack
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
        self.words, self.x_dtype = words, x_dtype
        self.block_k, self.block_n, self.block_m = config.block_k, config.block_n, config.block_m
        self.source = weight.format.element.source
        order = tile_order(
            words,
            block_k=config.block_k,
            block_n=config.block_n,
            warps=config.num_warps,
            contiguous=contiguous_axis(weight, words),
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
        """Statements before the loop: where the words of the tile lie, counted from its corner."""
        name = f"W{self.source}"
        step_k = _sum(
            f"{k} * {stride(name, d)}" for d, (k, _, _) in enumerate(self.words.steps) if k
        )
        step_n = _sum(
            f"{n} * {stride(name, d)}" for d, (_, n, _) in enumerate(self.words.steps) if n
        )
        const = _sum(
            f"{c} * {stride(name, d)}" for d, (_, _, c) in enumerate(self.words.steps) if c
        )
        of_k = math.prod(size for _, size in self._words_of("k"))
        of_n = math.prod(size for _, size in self._words_of("n"))
        rows, columns = ("k", "n") if self._rows_are_k else ("n", "k")
        spread = {"k": f"tl.arange(0, {of_k}) * word_k", "n": f"tl.arange(0, {of_n}) * word_n"}
        return "\n".join(
            [
                f"word_k = {step_k}",
                f"word_n = {step_n}",
                f"words = ({spread[rows]})[:, None] + ({spread[columns]})[None, :]",
                f"corner = {name} + (pid_n * {of_n}).to(INDEX_DTYPE) * word_n + {const}",
            ]
        )

    def tile(self) -> str:
        """Statements inside the loop that leave in ``w`` [BLOCK_N, BLOCK_K] what is unpacked of the
        words at k, and in ``x`` [BLOCK_M, BLOCK_K] its numbers in the same order."""
        count = self.words.count if self.words.axis == "k" else 1
        assembly = unpack(self.words, BASES[self.x_dtype])
        numbers = [f"u{i}" for i in range(assembly.count)]
        lines = [
            f"q = tl.load(corner + (k // {count}).to(INDEX_DTYPE) * word_k + words)",
            f"{', '.join(numbers)} = tl.inline_asm_elementwise(",
            f'    """{assembly.text}""",',
            f'    "{assembly.constraints}",',
            "    [q],",
            f"    dtype=({self.plain.x_type},) * {assembly.count},",
            "    is_pure=True,",
            f"    pack={assembly.pack},",
            ")",
        ]
        while len(numbers) > 1:  # neighbours first: the lowest dimension
            joined = []
            for low, high in zip(numbers[::2], numbers[1::2], strict=True):
                joined.append(f"{low}_")
                lines.append(f"{joined[-1]} = tl.join({low}, {high})")
            numbers = joined
        order = self.order
        target = (*order.n_mma, *order.k_mma)
        shape = "[BLOCK_N, BLOCK_K]"
        lines.append(f"w = {reordered(numbers[0], order.unpacked, target, shape)}")
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

    @property
    def _rows_are_k(self) -> bool:
        return ("t", 4) in self.order.rows

    def _words_of(self, axis: str) -> tuple[Dim, ...]:
        return self.order.rows if (axis == "k") == self._rows_are_k else self.order.columns


def contiguous_axis(weight: Weight, words: Words) -> str:
    """The axis of W along which neighbouring words are neighbours in memory; n if it is not known:
    then only speed suffers."""
    tensor = weight.tensors[weight.format.element.source]
    strides = tensor.stride or _row_major(tensor.shape)
    along_k = sum(k * s for (k, _, _), s in zip(words.steps, strides, strict=True) if s is not None)
    return "k" if along_k == 1 else "n"


def _row_major(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    strides: list[int | None] = [1]
    for size in reversed(shape[1:]):
        last = strides[0]
        strides.insert(0, None if last is None or size is None else last * size)
    return tuple(strides[: len(shape)])


def reordered(value: str, dims: Sequence[Dim], target: Sequence[Dim], shape: str) -> str:
    """``value``, whose elements count through ``dims``, as they count through ``target``."""
    dims = [dim for dim in dims if dim[1] > 1]
    target = [dim for dim in target if dim[1] > 1]
    if dims == target:
        return f"tl.reshape({value}, {shape})"
    order = [dims.index(dim) for dim in target]
    sizes = [size for _, size in dims]
    return f"tl.reshape(tl.permute(tl.reshape({value}, {sizes}), {order}), {shape})"


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms) or "0"
