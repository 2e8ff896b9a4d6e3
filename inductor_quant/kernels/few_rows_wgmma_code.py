"""Gluon statements of the kernel for few rows of x whose matrix instruction is wgmma.

The weight is the first operand, from registers: 64 columns of W of a warpgroup, so that the rows
of x, the second, are read from shared memory once for all of them, and by the matrix unit itself.
As in few_rows_gluon_code a lane takes whole words, two fields of a word that lie 16 bits apart are
a register, and zero points are taken off as numbers are unpacked; the order of k that follows is
x's in shared memory.

All that a step needs is copied to shared memory ahead (``cp.async``): words, scales, zero points,
and x as it lies, one step earlier, for a step puts x of the next in order. What is loaded into
registers a step ahead (x or scales, in trials) ptxas uses as soon as it has been asked for, and
waits for it. Of each 128 of K (a slice) a buffer is an allocation of its own: between accesses to
one allocation, whichever part of it, Triton has all warps wait for each other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from inductor_quant.kernels.config import GemmConfig, Weight
from inductor_quant.kernels.few_rows_gluon_code import REGISTERS, SLICE, is_taken_off
from inductor_quant.kernels.gluon_columns import (
    ColumnCode,
    Copies,
    GluonCode,
    Uses,
    columns_layout,
    copied_layout,
    gluon,
    kept,
)
from inductor_quant.kernels.gluon_layout import layout, positions
from inductor_quant.kernels.weight_code import TRITON_TYPES, Hook, Value, arithmetic
from inductor_quant.kernels.word_tile import WordTile, reordered
from inductor_quant.kernels.words import TINY, Dim, Words, bits, unpack_pair_shifted
from inductor_quant.weight_format import Field, Step, WeightFormat

WORDS = SLICE // 8
WARPGROUP = 4
MAX_WARPS = 16  # of a multiprocessor at once
# The words of a slice by row: t counts lanes. Not r1, r0, t: of 8 lanes of a warp, that read words
# at once, those of two rows would read the same banks.
R1: Dim = ("r1", 2)
T: Dim = ("t", 4)
R0: Dim = ("r0", 2)
ROWS: tuple[Dim, ...] = (R1, T, R0)
# The fields of a word: which of a pair, in which half of the slice's products, which of the two
# pairs in the instruction's 16 of k.
PAIR: Dim = ("pair", 2)
HALF: Dim = ("half", 2)
K0: Dim = ("k0", 2)
G: Dim = ("g", 8)
V: Dim = ("v", 2)  # neighbouring columns, a lane's
INTEGERS = {
    torch.int32: "gl.int32",
    torch.int16: "gl.int16",
    torch.int8: "gl.int8",
    torch.uint8: "gl.uint8",
}


class FewRowsWgmmaCode(GluonCode):
    """The code of one weight in one configuration: what the template's constant ``WEIGHT`` is.

    A tile is BLOCK_N columns, 16 for each warp; a step ``slices`` of 128 of K. ``has_all_rows``: x
    has BLOCK_M rows; else those behind the last one are not read. (Read again, the last one takes
    longer than rows of their own: at 9 rows 26.0 us, at 16 of them 23.3.)
    """

    def __init__(
        self,
        weight: Weight,
        words: Words,
        config: GemmConfig,
        *,
        x_dtype: torch.dtype,
        loop_steps: tuple[Step, ...],
        has_all_rows: bool,
    ) -> None:
        self.has_all_rows = has_all_rows
        self.words, self.x_dtype = words, x_dtype
        self.warps, self.block_m, self.block_n = config.num_warps, config.block_m, config.block_n
        self.slices, self.stages = config.block_k // SLICE, config.num_stages
        self.tile = WordTile(weight, words, SLICE, self.block_n)
        self.plain = ColumnCode(
            weight.format,
            weight.tensors,
            config,
            x_dtype=x_dtype,
            loop_steps=loop_steps,
            column_steps=(),
        )
        self.sources = self.plain.sources
        self.k, self.n = self.plain.k, self.plain.n
        self.fields = fields_of(loop_steps)
        w: Dim = ("w", self.warps)
        self.order: tuple[Dim, ...] = (w, G, V)
        self.order_mma: tuple[Dim, ...] = (w, V, G)
        self.rows = bits("m", self.block_m)
        self.x_order: tuple[Dim, ...] = (*ROWS, PAIR, HALF, K0)
        placed: Any = {"lanes": (T, G), "warps": (w,)}
        self.plain.of_columns = layout(((("s", 1),), self.order), **placed)
        self.layouts = {
            "WORDS": str(layout((ROWS, self.order), **placed)),
            "UNPACKED": str(layout((self.order_mma, ROWS, (PAIR,)), **placed)),
            "X_PUT": self._x_put(),
            # a lane's neighbours along n are stored together
            "STORED": str(
                layout(((("m", self.block_m // 8), T, ("pair", 2)), self.order), **placed)
            ),
            "WORDS_COPIED": self._copied(self.block_n, 4),
            "X_COPIED": self._copied(SLICE, 8),
        }

    @property
    def parts(self) -> int:
        """What the sums are to be multiplied by in the end."""
        return TINY[self.x_dtype].parts

    @property
    def max_registers(self) -> int:
        return REGISTERS // (32 * MAX_WARPS)

    def _x_put(self) -> str:
        """The layout in which x is read to be put in order: 16 bytes a lane. Neither those nor the
        4 that each is stored in meet in a bank."""
        places: list[Dim] = [("m1", 2), *reversed(self.rows[:-3]), R1]
        count = self.warps.bit_length() - 1
        places += [("none", 2)] * (count - len(places))
        lanes: tuple[Dim, ...] = (R0, T, ("m0", 2), ("m2", 2))
        return str(layout((self.rows, self.x_order), lanes=lanes, warps=places[:count]))

    def _copied(self, columns: int, vector: int) -> str:
        """The layout in which rows of ``columns`` are copied, ``vector`` neighbours at once."""
        lanes = min(32, columns // vector)
        return (
            f"gl.BlockedLayout([1, {vector}], [{32 // lanes}, {lanes}], [{self.warps}, 1], [1, 0])"
        )

    def constants(self) -> str:
        """Statements that name the layouts."""
        lines = [f"{name}: gl.constexpr = {text}" for name, text in self.layouts.items()]
        for bit in range(self.block_n.bit_length()):
            name, text = columns_layout(1 << bit), self.plain.of_columns.coarser(1 << bit)
            lines.append(f"{name}: gl.constexpr = {text}")
        for field in self.fields:
            columns, itemsize = self._columns(field), self.plain.dtypes[field.source].itemsize
            name = copied_layout(columns, itemsize)
            lines.append(f"{name}: gl.constexpr = {self._copied(columns, 16 // itemsize)}")
        lines += [
            "MMA: gl.constexpr = gl.NVMMADistributedLayout("
            f"[3, 0], [{self.warps}, 1], [16, {self.block_m}, 16])",
            "W_MMA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)",
            f"X_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for("
            f"[{2 * self.block_m}, {SLICE // 2}], {self.x_type})",
            "WORDS_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])",
            "PLAIN_SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])",
        ]
        return "\n".join(dict.fromkeys(lines))

    def _columns(self, field: Field) -> int:
        """How many values of a field the tile has."""
        return self.plain.resolution(*field.index)[1]

    # shared memory

    def buffers(self) -> str:
        """Statements that allocate what a step is copied to, and x in order of two steps."""
        buffers: dict[str, tuple[str, int, int, str]] = {}
        for stage in range(self.stages):
            for i in range(self.slices):
                at = f"{stage}_{i}"
                buffers[f"words{at}"] = ("gl.int32", WORDS, self.block_n, "WORDS_SHARED")
                buffers[f"raw{at}"] = (self.x_type, self.block_m, SLICE, "PLAIN_SHARED")
                for number, field in enumerate(self.fields):
                    type = _type(self.plain.dtypes[field.source])
                    buffers[f"field{number}_{at}"] = (type, 1, self._columns(field), "PLAIN_SHARED")
        for turn in range(2):
            for i in range(self.slices):
                shape = (2 * self.block_m, SLICE // 2)
                buffers[f"x{turn}_{i}"] = (self.x_type, *shape, "X_SHARED")
        return "\n".join(
            f"{name} = gl.allocate_shared_memory({type}, [1, {rows}, {columns}], {shared}).index(0)"
            for name, (type, rows, columns, shared) in buffers.items()
        )

    def shared_bytes(self) -> int:
        fields = sum(
            self._columns(field) * self.plain.dtypes[field.source].itemsize for field in self.fields
        )
        x = self.block_m * SLICE * self.x_dtype.itemsize
        stage = WORDS * self.block_n * 4 + x + fields
        return self.slices * (self.stages * stage + 2 * x)

    # what is copied

    def offsets(self, stride: Hook, stride_m: str, stride_k: str) -> str:
        """Statements before the loop: where the words of a slice and x lie."""
        rows = positions("WORDS_COPIED", 2, 0, WORDS)
        columns = positions("WORDS_COPIED", 2, 1, self.block_n)
        return "\n".join(
            [
                *self.tile.steps(stride),
                f"words = {self.tile.corner(stride)} + ({rows}).to(INDEX_DTYPE) * word_k"
                f" + ({columns}).to(INDEX_DTYPE) * word_n",
                f"x_rows = {positions('X_COPIED', 2, 0, self.block_m)}",
                f"x_columns = {positions('X_COPIED', 2, 1, SLICE)}",
                f"x_at = X + x_rows.to(INDEX_DTYPE) * {stride_m}"
                f" + x_columns.to(INDEX_DTYPE) * {stride_k}",
            ]
        )

    def copy(self, stage: int, i: int, stride: Hook, size: Hook, mask: str = "") -> str:
        """Statements that copy slice i of the step at k to ``stage``, all but x."""
        out = Copies(self.plain, stride, size, tag=f"c{stage}_{i}_", position="k")
        how = f", mask={mask}" if mask else ""
        first = f"(k // {self.words.count}).to(INDEX_DTYPE) * word_k"
        out.lines.append(f"copy_async(words{stage}_{i}, words + {first}{how})")
        for number, field in enumerate(self.fields):
            out.copy(field, f"field{number}_{stage}_{i}", mask)
        return gluon(out.lines)

    def copy_x(self, stage: int, i: int, stride_k: str, mask: str = "") -> str:
        masks = [mask] if mask else []
        masks += [] if self.has_all_rows else ["(x_rows < M)"]
        how = f", mask={' & '.join(masks)}" if masks else ""
        return f"copy_async(raw{stage}_{i}, x_at + k.to(INDEX_DTYPE) * {stride_k}{how})"

    # what is made of it

    def put_x(self, turn: int, stage: int, i: int) -> str:
        """Statements that put x in the order of the words: [half of the products, row], k."""
        target = (HALF, *self.rows, R1, R0, K0, T, PAIR)
        shape = f"[{2 * self.block_m}, {SLICE // 2}]"
        dims = (*self.rows, *self.x_order)
        return gluon(
            [
                f"x = raw{stage}_{i}.load(X_PUT)",
                f"x{turn}_{i}.store({reordered('x', dims, target, shape)})",
            ]
        )

    def products(self, turn: int, stage: int, i: int, stride: Hook, size: Hook) -> str:
        """Statements that add the scaled sums of slice i to ``acc``."""
        out = Uses(self.plain, stride, size, tag=f"u{stage}_{i}_", position="k", slot=0)
        for number, field in enumerate(self.fields):
            columns = columns_layout(self._columns(field))
            out.lines.append(f"{kept(0, number)} = field{number}_{stage}_{i}.load({columns})")
        zero, *scales = self._steps
        shifts = self._shifts(out, zero)
        dims, target = (*ROWS, *self.order), (*self.order_mma, *ROWS)
        q = reordered("q", dims, target, f"[BLOCK_N, {WORDS}]")
        lines = [
            f"q = words{stage}_{i}.load(WORDS)",
            f"q = gl.convert_layout({q}, gl.SliceLayout(2, UNPACKED), assert_trivial=True)",
            f"whole = gl.full([BLOCK_N, {WORDS}, 2], 0, gl.int32, UNPACKED)",
            "q = gl.broadcast(gl.expand_dims(q, 2), whole)[0]",
        ]
        for half in range(2):
            for k0 in range(2):
                assembly = unpack_pair_shifted(self.words, self.x_dtype, 2 * half + k0)
                lines += assembly.call([f"w{k0}"], ["q", "shifts"], self.plain.x_type)
            dims = (*self.order_mma, *ROWS, PAIR, K0)
            target = (*self.order_mma, R1, R0, K0, T, PAIR)
            w = reordered("gl.join(w0, w1)", dims, target, f"[BLOCK_N, {SLICE // 2}]")
            x = f"x{turn}_{i}.slice({half * self.block_m}, {self.block_m}).permute((1, 0))"
            before = "sums" if half else "no_sums"
            lines += [
                f"w = gl.convert_layout({w}, W_MMA, assert_trivial=True)",
                f"sums = warpgroup_mma(w, {x}, {before}, use_acc={bool(half)}, is_async=True)",
            ]
        after = self._scaled(out, scales)
        return gluon([*out.lines, *shifts, *lines, *after])

    @property
    def _steps(self) -> tuple[Step | None, ...]:
        """What is taken off, or None; then the scales."""
        steps = self.plain.loop_steps
        return steps if steps and steps[0].kind == "sub" else (None, *steps)

    def _shifts(self, out: Uses, zero: Step | None) -> list[str]:
        """``shifts``, what is added to the numbers of a column."""
        bias = float(self.words.bias())
        value = Value("0.0", 1, 1)
        if zero is not None:
            value = out.widen(out.operand(zero), 1, self.block_n)
        code = self._of_all(value, f"((-({value.code}) - {bias}) * {1 / self.parts})")
        code = reordered(
            f"({code}).to({self.plain.x_type})", self.order, self.order_mma, f"[{self.block_n}]"
        )
        sliced = "gl.SliceLayout(1, gl.SliceLayout(2, UNPACKED))"
        code = f"gl.convert_layout({code}, {sliced}, assert_trivial=True)"
        return [f"shifts = gl.expand_dims(gl.expand_dims({code}, 1), 2)"]

    def _scaled(self, out: Uses, scales: list[Step | None]) -> list[str]:
        """Statements that add ``sums``, scaled, to ``acc`` when they are there."""
        lines = ["sums = warpgroup_mma_wait(0, deps=(sums,))"]
        for each in scales:
            assert each is not None
            value = out.widen(out.operand(each), 1, self.block_n)
            code = value.code
            if value.columns > 1:
                code = reordered(f"({code})", self.order, self.order_mma, f"[{self.block_n}]")
                code = f"gl.convert_layout({code}, gl.SliceLayout(1, MMA), assert_trivial=True)"
                code = f"gl.expand_dims({code}, 1)"
            lines.append(f"sums = {arithmetic(each, 'sums', code)}")
        return [*lines, "acc = acc + sums"]

    def _of_all(self, value: Value, code: str) -> str:
        """``code``, made of a value for each column or of one for all, for each column."""
        if value.columns > 1:
            return f"({code})"
        columns = columns_layout(self.block_n)
        return f"(gl.full([1, {self.block_n}], 0.0, gl.float32, {columns}) + {code})"

    def in_order(self, value: str) -> str:
        """``value`` [BLOCK_N, BLOCK_M] as [BLOCK_M, BLOCK_N], its columns of W as they count."""
        m: Dim = ("m", self.block_m)
        return gluon(
            [reordered(value, (*self.order_mma, m), (m, *self.order), "[BLOCK_M, BLOCK_N]")]
        )


def fields_of(steps: tuple[Step, ...]) -> tuple[Field, ...]:
    """What the steps read, each once."""
    operands = [step.operand for step in steps]
    return tuple(dict.fromkeys(each for each in operands if isinstance(each, Field)))


def supports_steps(steps: tuple[Step, ...], words: Words, x_dtype: torch.dtype) -> bool:
    """Whether a small integer, or nothing, is taken off, and all else are scales."""
    if steps and is_taken_off(steps[0], words, x_dtype):
        steps = steps[1:]
    return all(step.kind == "mul" for step in steps)


def are_neighbours(field: Field, weight: Weight, columns: int) -> bool:
    """Whether what ``columns`` columns of W read of a field is contiguous, 16 bytes or more, and
    of a type that shared memory has here."""
    tensor, format = weight.tensors[field.source], weight.format
    if tensor.dtype not in INTEGERS and tensor.dtype not in TRITON_TYPES:
        return False
    digits = [_digits(format, n) for n in range(columns)]
    places = list(dict.fromkeys(tuple(form.value(at) for form in field.index) for at in digits))
    *others, last = zip(*places, strict=True)
    is_row = all(len(set(each)) == 1 for each in others)
    is_row = is_row and list(last) == list(range(last[0], last[0] + len(last)))
    return is_row and len(last) * tensor.dtype.itemsize >= 16


@functools.cache  # layers of a model are alike, and this counts through all columns
def are_aligned(field: Field, weight: Weight, columns: int) -> bool:
    """Whether neighbours along the last axis of a field's tensor are neighbours in memory, and what
    each ``columns`` columns read begins at a multiple of 16 bytes, whatever k is: ``cp.async``
    copies 4 bytes at least, and 16 in the least time."""
    tensor, format = weight.tensors[field.source], weight.format
    strides = [stride for stride in tensor.strides if stride is not None]
    if not tensor.is_aligned or len(strides) < len(tensor.shape) or strides[-1] != 1:
        return False

    def is_at_16(digits: dict[str, int]) -> bool:
        places = [form.value(digits) for form in field.index]
        elements = sum(place * stride for place, stride in zip(places, strides, strict=True))
        return elements * tensor.dtype.itemsize % 16 == 0

    _, n = format.shape
    of_k = [
        _digits(format, 0) | {name: digit}
        for name in (f"k{i}" for i in range(len(format.k)))
        for digit in range(format.radix(name))
    ]
    return all(map(is_at_16, [_digits(format, first) for first in range(0, n, columns)] + of_k))


def _digits(format: WeightFormat, n: int) -> dict[str, int]:
    """The digits of column n in row 0."""
    of_n = (f"n{i}" for i in range(len(format.n)))
    return dict.fromkeys((f"k{i}" for i in range(len(format.k))), 0) | {
        name: n // format.weight_of(name) % format.radix(name) for name in of_n
    }


def _type(dtype: torch.dtype) -> str:
    return INTEGERS.get(dtype) or TRITON_TYPES[dtype].replace("tl.", "gl.")
