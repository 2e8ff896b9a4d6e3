"""Gluon statements of the kernel for more rows of x: as in many_rows_code, with layouts said.

The matrix instruction wants of a word's eight numbers along k two in each of four lanes. So every
one of the four reads the word, and unpacks the byte that it needs: k keeps its order, and x is read
from shared memory as it lies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant.kernels.config import GemmConfig, Weight
from inductor_quant.kernels.gluon_columns import (
    ColumnCode,
    GluonCode,
    Loads,
    Uses,
    columns_layout,
    gluon,
    kept,
)
from inductor_quant.kernels.gluon_layout import Layout, layout, positions
from inductor_quant.kernels.many_rows_code import split
from inductor_quant.kernels.weight_code import Hook, Value, arithmetic
from inductor_quant.kernels.word_tile import WordTile, reordered
from inductor_quant.kernels.words import NIBBLES, Assembly, Dim, Words, dequantize_byte
from inductor_quant.weight_format import Field, Step

T: Dim = ("t", 4)
G: Dim = ("g", 8)
HALF: Dim = ("v0", 2)  # of the instruction's 16 columns of W a warp
BYTES = 4
LANES = 32
LINE = 32  # words of 32 bits
PREFETCHED = 64  # rows of words: what the stages hold, and somewhat more


class ManyRowsGluonCode(GluonCode):
    """The code of one weight in one configuration: what the template's constant ``WEIGHT`` is."""

    def __init__(
        self,
        weight: Weight,
        words: Words,
        config: GemmConfig,
        *,
        x_dtype: torch.dtype,
        loop_steps: tuple[Step, ...],
        column_steps: tuple[Step, ...],
        shared_steps: int,
        by_tma: bool = False,
    ) -> None:
        self.words, self.x_dtype = words, x_dtype
        self.warps, self.shared_steps = config.num_warps, shared_steps
        self.split_k = config.split_k
        self.by_tma = by_tma  # whether words come to shared memory as its tiles lie
        self.block_m, self.block_n, self.block_k = config.block_m, config.block_n, config.block_k
        self.tile = WordTile(weight, words, config.block_k, config.block_n)
        self.rows_of_words = config.block_k // words.count
        self.plain = ColumnCode(
            weight.format,
            weight.tensors,
            config,
            x_dtype=x_dtype,
            loop_steps=loop_steps,
            column_steps=column_steps,
        )
        self.sources = self.plain.sources
        self.k, self.n = self.plain.k, self.plain.n
        # A lane's columns are neighbours in memory; of the instruction's operand, blocks of 64.
        self.parts = parts_of_steps(config)
        w: Dim = ("w", self.warps // self.parts)
        self.part = part = ("part", self.parts)
        blocks = self.block_n // (8 * w[1] * HALF[1])
        own: tuple[Dim, ...] = (("v1", blocks), HALF)
        self.order: tuple[Dim, ...] = (w, G, *own)
        self.order_mma: tuple[Dim, ...] = (("v1", blocks), w, HALF, G)
        self.rows_mma: tuple[Dim, ...] = (("v1", blocks), part, w, HALF, G)
        self.word_dims: tuple[Dim, ...] = (part, ("r", self.rows_of_words // self.parts))
        placed: Any = {"lanes": (T, G), "warps": (w, part)}
        in_warp: tuple[Dim, ...] = (("m", self.block_m // (8 * self.parts)), T, ("pair", 2))
        self.plain.of_columns = layout(((("s", 1),), self.order), **placed)
        self.layouts: dict[str, Layout | str] = {
            "W_READ": layout((self.word_dims, self.order), **placed),
            "W_UNPACKED": layout(
                (self.order_mma, self.word_dims, (("t", BYTES),), (("p", 2),)), **placed
            ),
            # a lane's neighbours along n are stored together
            "STORED": layout(((part, *in_warp), self.order), **placed),
            "X_COPIED": _blocked(self.block_k, 8, self.warps),
            "W_COPIED": _blocked(self.block_n, 4, self.warps),
        }
        if self.parts > 1:
            of: Dim = ("of", self.parts)
            self.layouts["SUMS"] = layout((self.order_mma, (part, *in_warp)), **placed)
            self.layouts["EXCHANGED"] = layout(((of,), self.order_mma, (part, *in_warp)), **placed)

    @property
    def assembly(self) -> Assembly:
        return dequantize_byte(self.words, self.x_dtype)

    def constants(self) -> str:
        """Statements that name the layouts."""
        lines = [f"{name}: tl.constexpr = {text}" for name, text in self.layouts.items()]
        for bit in range(self.block_n.bit_length()):
            name, text = columns_layout(1 << bit), self.plain.of_columns.coarser(1 << bit)
            lines.append(f"{name}: tl.constexpr = {text}")
        lines += [
            "MMA: tl.constexpr = gl.NVMMADistributedLayout("
            f"[3, 0], [{self.warps}, 1], [16, {self.block_m}, 16])",
            "W_MMA: tl.constexpr = gl.DotOperandLayout(0, MMA, 2)",
            f"X_SHARED: tl.constexpr = gl.NVMMASharedLayout.get_default_for("
            f"[{self.block_m}, {self.block_k // self.parts}], {self.x_type})",
            f"W_SHARED: tl.constexpr = {self._words_shared}",
        ]
        return gluon(lines)

    @property
    def _words_shared(self) -> str:
        if not self.by_tma:
            return "gl.SwizzledSharedLayout(1, 1, 1, [1, 0])"
        shape = [self.rows_of_words, self.block_n]
        return f"gl.NVMMASharedLayout.get_default_for({shape}, gl.int32)"

    def prefetch(self, stride: Hook) -> str:
        """Statements that have the L2 cache fetch a tile's first words, a line of 128 bytes each
        thread."""
        count, name = self.words.count, f"W{self.tile.source}"
        rows = min(PREFETCHED, self.k // (self.split_k * count))
        rows, lines = 1 << rows.bit_length() - 1, self.block_n // LINE
        side = min(LANES, lines)
        layout = f"gl.BlockedLayout([1, 1], [{LANES // side}, {side}], [{self.warps}, 1], [1, 0])"
        down = f"gl.arange(0, {rows}, gl.SliceLayout(1, {layout}))"
        across = f"gl.arange(0, {lines}, gl.SliceLayout(0, {layout}))"
        return "\n".join(
            [
                f"down = first // {count} + gl.expand_dims({down}, 1)",
                f"across = pid_n * {self.block_n} + gl.expand_dims({across}, 0) * {LINE}",
                f"warps.prefetch({name} + down * {stride(name, 0)} + across)",
            ]
        )

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: where the words of the tile lie."""
        rows = f"gl.arange(0, {self.rows_of_words}, gl.SliceLayout(1, W_COPIED))"
        columns = f"gl.arange(0, {self.block_n}, gl.SliceLayout(0, W_COPIED))"
        return "\n".join(
            [
                *self.tile.steps(stride),
                f"words = {self.tile.corner(stride)} + (first // {self.words.count}) * word_k"
                f" + gl.expand_dims({rows}, 1).to(INDEX_DTYPE) * word_k"
                f" + gl.expand_dims({columns}, 0).to(INDEX_DTYPE) * word_n",
            ]
        )

    def load(self, slot: int, step: str, stride: Hook, size: Hook) -> str:
        """Statements that read the scales and zero points of ``step`` into ``slot``."""
        position = f"first + ({step}) * BLOCK_K"
        out = Loads(self.plain, stride, size, tag=f"a{slot}_", position=position)
        for each in self.plain.loop_steps:
            if isinstance(each.operand, Field):
                out.field(each.operand)
        self.kept = len(out.words)
        return gluon([*out.lines, *out.keep(slot)])

    def passed_on(self, slots: int) -> str:
        """Statements that leave in the first ``slots`` what was read into as many behind them."""
        return "\n".join(
            f"{kept(slot, number)} = {kept(slots + slot, number)}"
            for slot in range(slots)
            for number in range(self.kept)
        )

    def operands(self, slot: int, step: str, stride: Hook, size: Hook) -> str:
        """Statements that leave in ``shifts`` and ``scales`` what was read into ``slot``, for each
        column, in x's type."""
        position = f"first + ({step}) * BLOCK_K"
        out = Uses(self.plain, stride, size, tag=f"b{slot}_", position=position, slot=slot)
        zero, scale = split(self.plain.loop_steps)
        shift, factor = Value("0.0", 1, 1), Value("1.0", 1, 1)
        if zero is not None:
            shift = out.widen(out.operand(zero), 1, self.block_n)
        if scale is not None:
            assert isinstance(scale.operand, Field)
            factor = out.widen(out.field(scale.operand), 1, self.block_n)
        bias = float(self.words.bias())
        for name, half in zip(("low", "high"), NIBBLES[self.x_dtype], strict=True):
            b = f"({shift.code}) * {-1 / half.parts} - {half.base + bias / half.parts}"
            c = f"({factor.code}) * {float(half.parts)}"
            out.lines += [
                f"{name}_shifts = {self._spread(dataclasses.replace(shift, code=b))}",
                f"{name}_scales = {self._spread(dataclasses.replace(factor, code=c))}",
            ]
        for name in ("shifts", "scales"):
            out.lines.append(f"{name} = gl.where(is_high, high_{name}, low_{name})")
        return gluon(out.lines)

    def _spread(self, value: Value) -> str:
        """A value for each column, or one for all, in x's type and the layout of what is
        unpacked."""
        code = value.code
        if value.columns == 1:
            columns = columns_layout(self.block_n)
            code = f"(gl.full([1, {self.block_n}], 0.0, tl.float32, {columns}) + {code})"
        rows = reordered(
            f"({code}).to({self.plain.x_type})", self.order, self.order_mma, f"[{self.block_n}]"
        )
        sliced = "gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, W_UNPACKED)))"
        whole = f"gl.convert_layout({rows}, {sliced}, assert_trivial=True)"
        for axis in (1, 2, 3):
            whole = f"gl.expand_dims({whole}, {axis})"
        return whole

    def bytes_of_lanes(self) -> str:
        """Statements before the loop that leave in ``which`` what picks a lane's byte of a word:
        selectors of ``prmt``, and in ``is_high`` which of its numbers is the second."""
        return "\n".join(
            [
                f"second = {positions('W_UNPACKED', 4, 3, 2)}",
                "is_high = second > 0",
                f"which = {positions('W_UNPACKED', 4, 2, BYTES)} * 0x101 + 0x4040 + second * 0",
            ]
        )

    def dequantized(self) -> str:
        """Statements that leave in ``w`` [BLOCK_N, BLOCK_K] the tile of the words ``q``, as the
        first operand of the matrix instruction."""
        dims = (*self.word_dims, *self.order)
        target = (*self.order_mma, *self.word_dims)
        q = reordered("q", dims, target, f"[BLOCK_N, {self.rows_of_words}]")
        sliced = "gl.SliceLayout(2, gl.SliceLayout(3, W_UNPACKED))"
        rows = self.word_dims[1:]
        bytes_of: tuple[Dim, ...] = (("t", BYTES), ("p", 2))
        w = reordered(
            "w",
            (*self.order_mma, *self.word_dims, *bytes_of),
            (*self.rows_mma, *rows, *bytes_of),
            f"[{self.parts * self.block_n}, {self.block_k // self.parts}]",
        )
        lines = [
            f"q = gl.convert_layout({q}, {sliced}, assert_trivial=True)",
            "q = gl.expand_dims(gl.expand_dims(q, 2), 3)",
            *self.assembly.call(["w"], ["q", "which", "shifts", "scales"], self.plain.x_type),
            f"w = gl.convert_layout({w}, W_MMA, assert_trivial=True)",
        ]
        return gluon(lines)

    def sums(self) -> str:
        """Statements behind the loop that leave in ``acc`` [BLOCK_N, BLOCK_M] the sums over all
        parts of the steps, each part of the warps with its part of the rows."""
        if self.parts == 1:
            return ""
        m: Dim = ("m", self.block_m)
        shape = f"[{self.parts}, BLOCK_N, BLOCK_M]"
        parts = reordered("acc", (*self.rows_mma, m), (self.part, *self.order_mma, m), shape)
        return gluon(
            [
                f"acc = gl.sum(gl.convert_layout({parts}, EXCHANGED), 0)",
                "acc = gl.convert_layout(acc, SUMS, assert_trivial=True)",
            ]
        )

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements behind the loop that apply the scales of whole columns to ``acc``."""
        out = Loads(self.plain, stride, size, tag="c_", position="first")
        sums = "SUMS" if self.parts > 1 else "MMA"
        lines = []
        for each in self.plain.column_steps:
            value = out.widen(out.operand(each), 1, self.block_n)
            code = value.code
            if value.columns > 1:
                rows = reordered(f"({code})", self.order, self.order_mma, f"[{self.block_n}]")
                code = f"gl.expand_dims(gl.convert_layout({rows}, gl.SliceLayout(1, {sums})), 1)"
            lines.append(f"acc = {arithmetic(each, 'acc', code)}")
        return gluon([*out.lines, *lines])

    def in_order(self, value: str) -> str:
        """``value`` [BLOCK_N, BLOCK_M] as [BLOCK_M, BLOCK_N], its columns of W as they count."""
        m: Dim = ("m", self.block_m)
        return gluon(
            [reordered(value, (*self.order_mma, m), (m, *self.order), "[BLOCK_M, BLOCK_N]")]
        )


def parts_of_steps(config: GemmConfig) -> int:
    """Into how many parts a step's K is divided, each for warps of its own: those that the columns
    leave over, at 16 columns a warp."""
    return max(1, 16 * config.num_warps // config.block_n)


def _blocked(columns: int, vector: int, warps: int) -> str:
    """The layout in which rows of ``columns`` are copied, ``vector`` neighbours at once."""
    lanes = min(LANES, columns // vector)
    return f"gl.BlockedLayout([1, {vector}], [{LANES // lanes}, {lanes}], [{warps}, 1], [1, 0])"
