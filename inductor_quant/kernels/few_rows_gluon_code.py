"""Gluon statements of the kernel for few rows of x whose warps share out K.

Each lane of the matrix instruction (``mma.sync``, the weight as its first operand) multiplies
certain k of certain columns. Which k these are is free, as long as x has the same: so a lane takes
whole words, straight from memory into registers, and of x the numbers at their k. Nothing of the
weight passes through shared memory. Of a word two fields that lie 16 bits apart are one register.

A step's words are asked for when those before them have been used, 2 KB a warp. More on their way,
by copies to shared memory (``cp.async``) in 3 to 8 stages, was slower on an H200 at every size.

A zero point that is a small integer is taken off as numbers are unpacked. All other steps within a
group of rows are applied to the sum over the group, as in few_rows_code, with what unpacking leaves
where there is none such: ``(sum x*u - (bias + z) * sum x) * s``. The sum of x comes from the matrix
instruction too, which multiplies it by ones.
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
)
from inductor_quant.kernels.gluon_layout import Layout, layout, positions
from inductor_quant.kernels.weight_code import Hook, Value, arithmetic
from inductor_quant.kernels.word_tile import WordTile, reordered
from inductor_quant.kernels.words import (
    BASES,
    TINY,
    Dim,
    Words,
    bits,
    unpack_pair,
    unpack_pair_shifted,
)
from inductor_quant.weight_format import Field, Step

SLICE = 128  # of K, that a warp takes at once
WORDS = SLICE // 8
COLUMNS = 32  # of W, that it takes of them: 16 bytes of words a lane
# Of a multiprocessor at once: of more each thread had too few registers for what it has asked for.
MAX_WARPS = 16
REGISTERS = 65536
T: Dim = ("t", 4)
R: Dim = ("r", 4)
G: Dim = ("g", 8)
PAIR: Dim = ("pair", 2)
OWN: tuple[Dim, ...] = (("v1", 2), ("v0", 2))  # a lane's columns
# As they lie in memory, and as the instruction has them
OF_COLUMNS, COLUMNS_MMA = (G, *OWN), (*OWN, G)
OF_PAIRS: tuple[Dim, ...] = (("f1", 2), ("f0", 2))  # pairs of fields in a word


class FewRowsGluonCode(GluonCode):
    """The code of one weight in one configuration: what the template's constant ``WEIGHT`` is.

    A tile is ``blocks`` of 32 columns, a step along K ``slices`` of 128 for each warp;
    ``is_resident``: there is one step, and x is kept from tile to tile. ``is_even``: steps end
    where K does, or its part; else some warps have nothing in the last one.
    """

    def __init__(
        self,
        weight: Weight,
        words: Words,
        config: GemmConfig,
        *,
        x_dtype: torch.dtype,
        loop_steps: tuple[Step, ...],
    ) -> None:
        self.words, self.x_dtype = words, x_dtype
        self.warps, self.block_m = config.num_warps, config.block_m
        self.slices = config.block_k // (SLICE * self.warps)
        part = weight.format.shape[0] // config.split_k
        self.is_resident = part <= config.block_k
        self.is_even = part % config.block_k == 0
        self.blocks = config.block_n // COLUMNS
        self.tile = WordTile(weight, words, SLICE, COLUMNS)
        self.plain = ColumnCode(
            weight.format,
            weight.tensors,
            dataclasses.replace(config, block_n=COLUMNS),
            x_dtype=x_dtype,
            loop_steps=loop_steps,
            column_steps=(),
        )
        self.plain.rows, self.plain.rows_apart = self.warps, SLICE
        self.plain.is_even = self.is_even
        self.sources = self.plain.sources
        self.k, self.n = self.plain.k, self.plain.n
        self.w: Dim = ("w", self.warps)
        self.rows: tuple[Dim, ...] = (("b", self.block_m // G[1]), G)
        # 16 bytes of words along n, or along k
        self.of_k: tuple[Dim, ...] = (R, T) if self.tile.contiguous == "n" else (T, R)
        placed: Any = {"lanes": (T, G), "warps": (self.w,)}
        self.plain.of_columns = layout(((self.w,), OF_COLUMNS), **placed)
        self.layouts = {
            "WORDS": layout(((self.w,), self.of_k, OF_COLUMNS), **placed),
            "UNPACKED": layout(((self.w,), COLUMNS_MMA, (R, T), (PAIR,)), **placed),
            "X_READ": layout(((self.w,), self.rows, (*self.of_k, PAIR, *OF_PAIRS)), **placed),
            "X_SUMS": self._x_sums(),
            **dict(zip(("PARTS", "STORED"), self._outputs(), strict=True)),
        }

    @property
    def buffers(self) -> int:
        """Of sums in shared memory: those of a tile are read while those of the next are stored."""
        return self.blocks * (2 if self.is_resident else 1)

    @property
    def is_shifted(self) -> bool:
        """Whether the zero point is taken off the numbers as they are unpacked, which is exact for
        small integers and leaves them ``1 / parts`` as large: no shift for half of them, and no
        sums of x, which would take the matrix unit, and registers."""
        zero, *others = self.plain.loop_steps or (None,)
        return (
            zero is not None
            and is_taken_off(zero, self.words, self.x_dtype)
            and all(each.kind == "mul" for each in others)
        )

    @property
    def parts(self) -> int:
        """What the sums are to be multiplied by in the end."""
        return TINY[self.x_dtype].parts if self.is_shifted else 1

    @property
    def loads_x_early(self) -> bool:
        """Whether x is read a step ahead, as words are: not where a thread has so many of its
        numbers that registers lack."""
        return self.is_resident or self.block_m == G[1]

    @property
    def max_registers(self) -> int:
        """Of a thread, so that ``MAX_WARPS`` warps of several programs run at once."""
        return REGISTERS // (32 * MAX_WARPS)

    def _x_sums(self) -> Layout:
        """The layout of sums for each 8 columns, as the instruction leaves them."""
        axes = ((self.w,), OWN, (G,), bits("m", self.block_m))
        return layout(axes, lanes=(("m1", 2), ("m2", 2), G), warps=(self.w,))

    def _outputs(self) -> tuple[Layout, Layout]:
        """The layouts in which the sums of all warps are read, each thread all of its outputs, and
        outputs are stored: neighbouring lanes have neighbouring columns."""
        rows, columns, mma = (
            [bit for name, size in dims for bit in bits(name, size)]
            for dims in ((("m", self.block_m),), OF_COLUMNS, COLUMNS_MMA)
        )
        lowest = [*reversed(columns), *reversed(rows)]
        count = self.warps.bit_length() - 1
        lanes, warps = lowest[:5], lowest[5 : 5 + count]
        warps += [("none", 2)] * (count - len(warps))
        placed: Any = {"lanes": lanes, "warps": warps}
        return layout(((self.w,), mma, rows), **placed), layout((rows, columns), **placed)

    def constants(self) -> str:
        """Statements that name the layouts."""
        lines = [f"{name}: gl.constexpr = {text}" for name, text in self.layouts.items()]
        for bit in range(COLUMNS.bit_length()):
            name, text = columns_layout(1 << bit), self.plain.of_columns.coarser(1 << bit)
            lines.append(f"{name}: gl.constexpr = {text}")
        lines += [
            "MMA: gl.constexpr = gl.NVMMADistributedLayout("
            f"[2, 0], [{self.warps}, 1, 1], [1, 16, 8])",
            "W_MMA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)",
            "X_MMA: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)",
            # neither what the instruction leaves nor a row of columns meets a bank twice
            "PARTS_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 2, 0])",
        ]
        return "\n".join(lines)

    # x

    def x_offsets(self, stride_m: str, stride_k: str) -> str:
        """Statements that leave in ``x_at`` the addresses of x at k = 0. Rows behind the last one
        are it: what comes of them is not stored."""
        return "\n".join(
            [
                f"x_rows = gl.minimum({positions('X_READ', 3, 1, self.block_m)}, M - 1)",
                f"x_slices = {positions('X_READ', 3, 0, self.warps)} * {SLICE}",
                f"x_columns = x_slices + {positions('X_READ', 3, 2, SLICE)}",
                f"x_at = X + x_rows.to(INDEX_DTYPE) * {stride_m}"
                f" + x_columns.to(INDEX_DTYPE) * {stride_k}",
            ]
        )

    def load_x(self, i: int, stride_k: str) -> str:
        """Statements that read x at k for slice i. Where there is nothing it is 0, and with it what
        comes of any words."""
        how = "" if self.is_even else ", mask=k + x_slices < first + K_PART, other=0.0"
        return f"x{i} = gl.load(x_at + k.to(INDEX_DTYPE) * {stride_k}{how})"

    def x_operands(self, i: int) -> str:
        """Statements that make of ``x<i>`` [WARPS, BLOCK_M, 128] the second operands ``x<i>_<j>``,
        for pair j of each word, and ``x_sum<i>``, the sums over k."""
        dims = (self.w, *self.rows, *self.of_k, PAIR, *OF_PAIRS)
        target = (self.w, R, T, PAIR, *self.rows, *OF_PAIRS)
        shape = f"[{self.warps}, {SLICE // 4}, BLOCK_M, 2, 2]"
        lines = [
            f"x = {reordered(f'x{i}', dims, target, shape)}",
            "even, odd = gl.split(x)",
            "pair0, pair2 = gl.split(even)",
            "pair1, pair3 = gl.split(odd)",
        ]
        for j in range(4):
            lines.append(f"x{i}_{j} = gl.convert_layout(pair{j}, X_MMA, assert_trivial=True)")
            if not self.is_shifted:
                lines.append(f"x_sum = mma_v2(ones, x{i}_{j}, {'x_sum' if j else 'no_sum'})")
        return gluon(lines if self.is_shifted else [*lines, *self._of_all_columns(i)])

    def _of_all_columns(self, i: int) -> list[str]:
        """``x_sum`` has the same in all of its 16 rows. To keep it, one of them is enough; without
        that a lane uses for other columns what it has for these."""
        if self.is_resident:
            return [f"x_sum{i} = gl.expand_dims(gl.max(x_sum, axis=1), 1)"]
        halves = f"gl.permute(gl.reshape(x_sum, [{self.warps}, 2, 8, BLOCK_M]), [0, 2, 3, 1])"
        sliced = "gl.convert_layout(x_sum, gl.SliceLayout(1, X_SUMS), assert_trivial=True)"
        zeros = f"gl.full([{self.warps}, {COLUMNS // 8}, 8, BLOCK_M], 0.0, gl.float32, X_SUMS)"
        return [
            f"x_sum, _ = gl.split({halves})",
            f"x_sum = gl.broadcast(gl.expand_dims({sliced}, 1), {zeros})[0]",
            f"x_sum = gl.reshape(x_sum, [{self.warps}, {COLUMNS}, BLOCK_M])",
            f"x_sum{i} = gl.convert_layout(x_sum, MMA, assert_trivial=True)",
        ]

    # the weight

    def offsets(self) -> str:
        """Statements before the loop: which words are a warp's, in a slice and a block."""
        slices, rows, columns = (
            positions("WORDS", 3, axis, size)
            for axis, size in enumerate((self.warps, WORDS, COLUMNS))
        )
        return "\n".join(
            [
                f"word_slices = {slices} * {SLICE}",
                f"word_rows = {slices} * {WORDS} + {rows}",
                f"word_columns = {columns}",
            ]
        )

    def load(self, i: int, c: int, stride: Hook, size: Hook, mask: str = "") -> str:
        """Statements that read words, scales and zero points of slice i at k, of block c, which is
        the block ``pid_n`` of all columns."""
        first = f"{self.tile.corner(stride)} + (k // {self.words.count}).to(INDEX_DTYPE) * word_k"
        words = "word_rows.to(INDEX_DTYPE) * word_k + word_columns.to(INDEX_DTYPE) * word_n"
        masks = [mask] if mask else []
        masks += [] if self.is_even else ["(k + word_slices < first + K_PART)"]
        how = (f", mask={' & '.join(masks)}" if masks else "") + ", eviction_policy='evict_first'"
        out = self._statements(Loads, i, c, stride, size, mask=mask)
        for each in self.plain.loop_steps:
            if isinstance(each.operand, Field):
                out.field(each.operand)
        return gluon(
            [
                *self.tile.steps(stride),
                f"q{i}_{c} = gl.load({first} + ({words}){how})",
                *out.lines,
                *out.keep(self._slot(i, c)),
            ]
        )

    def sums(self, i: int, c: int, stride: Hook, size: Hook) -> str:
        """Statements that leave in ``sums`` [WARPS, 32, BLOCK_M] the scaled products of slice i,
        block c."""
        out = self._statements(Uses, i, c, stride, size, slot=self._slot(i, c))
        shifts = self._shifts(out) if self.is_shifted else []
        before, out.lines = [*out.lines, *shifts], []
        after = self._scaled(out, i)
        return gluon([*before, *self._products(i, c), *out.lines, *after])

    def _shifts(self, out: Uses) -> list[str]:
        """``shifts``, what is added to the numbers of a column."""
        zero, *_ = self.plain.loop_steps
        value = out.widen(out.operand(zero), 1, COLUMNS)
        code = f"((-({value.code}) - {float(self.words.bias())}) * {1 / self.parts})"
        code = f"{code}.to({self.plain.x_type})"
        dims, target = (self.w, *OF_COLUMNS), (self.w, *COLUMNS_MMA)
        code = reordered(code, dims, target, f"[{self.warps}, {COLUMNS}]")
        sliced = "gl.SliceLayout(2, gl.SliceLayout(3, UNPACKED))"
        code = f"gl.convert_layout({code}, {sliced}, assert_trivial=True)"
        return [f"shifts = gl.expand_dims(gl.expand_dims({code}, 2), 3)"]

    def _products(self, i: int, c: int) -> list[str]:
        dims, target = (self.w, *self.of_k, *OF_COLUMNS), (self.w, *COLUMNS_MMA, R, T)
        q = reordered(f"q{i}_{c}", dims, target, f"[{self.warps}, {COLUMNS}, {WORDS}]")
        zeros = f"gl.full([{self.warps}, {COLUMNS}, {WORDS}, 2], 0, gl.int32, UNPACKED)"
        lines = [
            f"q = gl.convert_layout({q}, gl.SliceLayout(3, UNPACKED), assert_trivial=True)",
            f"q = gl.broadcast(gl.expand_dims(q, 3), {zeros})[0]",
        ]
        arguments = ["q", "shifts"] if self.is_shifted else ["q"]
        for j in range(4):  # one after the other: fewer of them are in registers at once
            if self.is_shifted:
                assembly = unpack_pair_shifted(self.words, self.x_dtype, j)
            else:
                assembly = unpack_pair(self.words, BASES[self.x_dtype], j)
            lines += [
                *assembly.call(["w"], arguments, self.plain.x_type),
                f"w = gl.reshape(w, [{self.warps}, {COLUMNS}, {SLICE // 4}])",
                "w = gl.convert_layout(w, W_MMA, assert_trivial=True)",
                f"sums = mma_v2(w, x{i}_{j}, {'sums' if j else 'no_sums'})",
            ]
        return lines

    def _scaled(self, out: Uses, i: int) -> list[str]:
        """Statements that apply the bias and the steps to ``sums``."""
        bias = 0.0 if self.is_shifted else float(self.words.bias(BASES[self.x_dtype]))
        lines = []
        for each in self.plain.loop_steps[1 if self.is_shifted else 0 :]:
            value = out.widen(out.operand(each), 1, COLUMNS)
            if bias and each.kind == "sub":
                value = dataclasses.replace(value, code=f"({value.code} + {bias})")
            elif bias:
                lines.append(f"sums = sums - {bias} * x_sum{i}")
            bias = 0.0
            code = self._of_sums(value)
            if each.kind in ("add", "sub"):
                sign = "+" if each.kind == "add" else "-"
                lines.append(f"sums = sums {sign} {code} * x_sum{i}")
            else:
                lines.append(f"sums = {arithmetic(each, 'sums', code)}")
        if bias:
            lines.append(f"sums = sums - {bias} * x_sum{i}")
        return lines

    def _of_sums(self, value: Value) -> str:
        """A value for each column and warp, for each warp, or one for all, as it meets the sums."""
        code = value.code
        if value.columns > 1:
            dims, target = (self.w, *OF_COLUMNS), (self.w, *COLUMNS_MMA)
            code = reordered(f"({code})", dims, target, f"[{self.warps}, {COLUMNS}]")
        elif value.rows == 1:
            return code
        code = f"gl.convert_layout({code}, gl.SliceLayout(2, MMA), assert_trivial=True)"
        return f"gl.expand_dims({code}, 2)"

    def in_order(self, value: str) -> str:
        """``value`` [32, BLOCK_M] as [BLOCK_M, 32], its columns of W as they count."""
        m: Dim = ("m", self.block_m)
        shape = f"[BLOCK_M, {COLUMNS}]"
        return gluon([reordered(value, (*COLUMNS_MMA, m), (m, *OF_COLUMNS), shape)])

    def _slot(self, i: int, c: int) -> int:
        return i * self.blocks + c

    def _statements(self, kind: type, i: int, c: int, stride: Hook, size: Hook, **more: Any) -> Any:
        tag = f"{kind.__name__[0].lower()}{self._slot(i, c)}_"
        return kind(self.plain, stride, size, tag=tag, position="k", **more)


def is_taken_off(step: Step, words: Words, x_dtype: torch.dtype) -> bool:
    """Whether ``step`` subtracts small integers, which ``unpack_pair_shifted`` does exactly."""
    field = step.operand
    if step.kind != "sub" or not isinstance(field, Field):
        return False
    if not field.width or field.float8 or field.size:
        return False
    highest = abs(words.bias()) + abs(field.add) + (1 << field.width)
    return highest <= 2 * BASES[x_dtype].value
