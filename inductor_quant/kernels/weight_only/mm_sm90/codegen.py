"""Gluon statements of ``weight_only_mm_sm90``: W is dequantized in the registers of wgmma.

Packed words reach shared memory by TMA. The four lanes that share a row of the MMA read the same
words and dequantize different values of them, so x stays in the order of memory, or in parts that
do if values of a word are far apart along K.

If a tensor lists the group of each k, the relay leaves in shared memory where in their tensors the
scales and zero points of each k are. A thread reads them for its columns of a k at once, when it
uses them: from the rows that are copied to shared memory (``listed_rows``), or from memory. Scales
and zero points of each k that all columns of a tile share the relay leaves there itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import UNKNOWN_ZERO, Dim
from inductor_quant.kernels.codegen.digits import narrow, pair_lookup
from inductor_quant.kernels.codegen.digits.codegen import DigitCodegen, kept
from inductor_quant.kernels.codegen.digits.order import Order
from inductor_quant.kernels.codegen.digits.statements import DigitStatements, Listed
from inductor_quant.kernels.codegen.digits.tile import LINE, TilePlan
from inductor_quant.kernels.codegen.digits.words import WordView
from inductor_quant.kernels.codegen.gluon_layout import layout, positions
from inductor_quant.kernels.codegen.unpack_ptx import MULTIPLY_WIDE
from inductor_quant.kernels.weight_only.digit_tiles import relayed
from inductor_quant.kernels.weight_only.mm_sm90.box import WordBox, read_order, word_box
from inductor_quant.kernels.weight_only.mm_sm90.listed_rows import RowStatements, listed_rows
from inductor_quant.kernels.weight_only.mm_sm90.products import Products, products_of
from inductor_quant.kernels.weight_only.mm_sm90.relay import (
    OfConsumer,
    OfRelay,
    listed_positions,
    of_list,
)
from inductor_quant.kernels.weight_only.row_boxes import RowBoxes
from inductor_quant.kernels.weight_only.rules import ALIGNMENT
from inductor_quant.spec.weight_format import AffineIndex, Field

T: Dim = ("t", 4)
LANES = 32
PAIR_OF_M: Dim = ("pair", 2)


class MMSm90Codegen(Products, DigitCodegen):
    """``x`` is the activation's name; sums are of ``acc_type``. ``k_order``: that of W's K, if it
    is not that of x, which is then read in parts. ``has_halves``: of a tile that has no more than
    ``few_m`` rows, these alone are multiplied. A tile of 96 rows, say, has a product of the first
    64 and one of ``more``."""

    box: WordBox
    x, acc_type, unknown_zero = "X", "gl.float32", "unknown_zero"
    looks_up_pairs = ends_beyond = folds = True

    def __init__(
        self,
        tile: WeightTile,
        view: WordView,
        plan: TilePlan,
        n_order: list[str],
        *,
        k_order: Order | None = None,
        is_gated: bool = False,
        strips: int = 1,
        has_halves: bool = False,
    ) -> None:
        super().__init__(tile, view, plan, n_order, is_gated=is_gated)
        self.first_m, self.more_m = products_of(self.block_m)
        self.strips = self.block_m // self.more_m if self.more_m else strips
        self.has_halves = has_halves
        self.row_boxes = RowBoxes(self.block_m)
        self.box_iterations = 1  # whose words are a box
        self.k_order = k_order
        self.part_k = k_order.neighbours(self.block_k) if k_order else self.block_k
        self.parts = self.block_k // self.part_k
        box = word_box(tile.weight, plan)
        assert box is not None
        self.box = box
        self.packed_type = self.dialect.type(self.dtypes[self.format.code.source])
        itemsize = self.dtypes[self.format.code.source].itemsize
        self.packed_bytes = box.count * box.rows * box.columns * itemsize
        self.tensors = tile.weight.tensors
        self.positions = listed_positions(tile.weight)
        # Operands that each k has, the same for all columns of a tile: in fp32.
        of_k = relayed(self.format, self.n_digits)
        self.relayed = tuple(op for op in self.loop_ops if op.operand in of_k)
        self.is_in_fp32 = bool(self.relayed)
        # Of a zero point and a scale that are applied first, their product instead of the zero
        # point: then ``exact_product`` is all that takes it.
        self.relays_product = (
            len(self.relayed) == 2
            and self.relayed == tuple(self.loop_ops[:2])
            and self.is_exact_product(self.relayed)
            and narrow.is_in_place(self.format.element)
            and not self.format.element.float8
        )
        rows = self.mma_rows
        w = rows[4 : 4 + self.warps.bit_length() - 1]
        m: tuple[Dim, ...] = (("m", self.first_m // 8), T, PAIR_OF_M)
        stored_m: tuple[Dim, ...] = (("m", self.stored_m // 8), T, PAIR_OF_M)
        placed: Any = {"lanes": (T, *rows[:3]), "warps": w}
        # Sums in an order in which each thread has four neighbours, and a warp 128.
        self.sum_dims = (*self.mma_dims, *m)
        within = (*rows[:3:-1], *rows[2::-1], T, rows[3], PAIR_OF_M)
        self.exchanged_dims = (m[0], *within)
        self.strip_dims, self.stored_sum_dims = (stored_m[0], *within), (*self.mma_dims, *stored_m)
        self.layouts |= {
            "STORED": layout((stored_m, self.column_dims), **placed),
            **({"GATED": layout((stored_m, self.stored_dims), **placed)} if is_gated else {}),
            "EXCHANGED": layout((self.exchanged_dims,), **placed),
            **({"STRIP": layout((self.strip_dims,), **placed)} if strips > 1 else {}),
            **self.layouts_of_products(),
            "X_SHARED": self._shared([self.first_m, self.part_k], self.x_type),
            "W_SHARED": self._shared([box.rows, box.columns], self.packed_type),
            "W_READ": box.layout,
            "X_COPIED": self._copied(self.part_k, self.x_bytes),
            "W_COPIED": self._copied(box.columns, itemsize),
        }
        listed = listed_rows(tile.weight, plan, self.n_digits, self.warps)
        self.rows = RowStatements(self, listed) if listed else None
        if self.rows is not None:
            self.layouts["COPIED_ROWS"] = self.rows.layout
        if self.lists:
            each = self.block_k // LANES
            self.layouts |= {
                "OF_RELAY": f"gl.BlockedLayout([{each}], [{LANES}], [1], [0])",
                "LIST_SHARED": "gl.SwizzledSharedLayout(1, 1, 1, [0])",
                "LIST_READ": plan.of_k(),
            }
        zero = narrow.listed_zero(self, self.loop_ops)
        if zero is not None and self.rows is not None and self.is_in_16_bits():
            self.raised = (zero,)

    def load_in(self, boxes: RowBoxes) -> None:
        """x is loaded in ``boxes``. In shared memory the rows of one are neighbours within the
        columns of a swizzle, of which a K iteration, or a part of it, may have several. (The
        layouts of x stay: the swizzle is the same, and what is copied twice is the same.)"""
        self.row_boxes = boxes
        if boxes.rows < self.block_m:
            self.part_k = min(self.part_k, LINE // self.x_bytes)
            self.parts = self.block_k // self.part_k

    def load_together(self, count: int) -> None:
        """The words of ``count`` K iterations are one box, if they are neighbours in each row and K
        is not in parts."""
        if self.k_order is None and self.box.is_followed(self.format, self.block_k, count):
            self.box_iterations = count
            columns = count * self.box.columns
            self.layouts["W_SHARED"] = self._shared([self.box.rows, columns], self.packed_type)

    def place_of_words(self, stage: str, member: int, i: int) -> str:
        """The ``i``-th box of an iteration's words, the ``member``-th under its barrier."""
        if self.box_iterations == 1:
            return f"w_stages.index({self.stage_of_box(stage, i)})"
        of_all = self.stage_of_box(f"({stage}) // {self.box_iterations}", i)
        columns = self.box.columns
        return f"w_stages.index({of_all}).slice({member * columns}, {columns}, 1)"

    @property
    def has_small_groups(self) -> bool:
        """Whether a K iteration has scales or zero points of several groups."""
        operands = [op.operand for op in self.loop_ops if isinstance(op.operand, Field)]
        return any(0 < self.format.block(each)[0] < self.block_k for each in operands)

    def start(self, stride: Hook, size: Hook) -> str:
        zero = f"{self.unknown_zero} = {UNKNOWN_ZERO}.to(gl.float32)"
        of_lists = self.rows.start if self.rows else self._start_of_lists
        return "\n".join([zero, super().start(stride, size), *of_lists(stride, size)])

    def store_rows(self, stride: Hook, size: Hook) -> str:
        """Statements after ``start`` and the first loads."""
        return "\n".join(self.rows.stored(stride, size)) if self.rows else ""

    def _start_of_lists(self, stride: Hook, size: Hook) -> list[str]:
        """Statements that leave in ``listed<i>`` the addresses of the ``i``-th field of ``listed``
        at position 0, in bytes."""
        out = DigitStatements(self, stride, size, "b", self.digits("g_", "n"))
        for i, field in enumerate(self.listed):
            own = (AffineIndex() if index.is_data else index for index in field.index)
            first, _, _ = out.pointer(Field(field.source, tuple(own)))
            out.lines.append(f"listed{i} = ({first}).to({self._pointer(torch.int8)}, bitcast=True)")
        return out.lines

    def _pointer(self, dtype: torch.dtype) -> str:
        return f"gl.pointer_type({self.dialect.type(dtype)})"

    def _shared(self, shape: list[int], type: str) -> str:
        return f"gl.NVMMASharedLayout.get_default_for({shape}, {type})"

    def _copied(self, columns: int, itemsize: int) -> str:
        """The layout in which each thread copies as much as one instruction can."""
        each = ALIGNMENT // itemsize
        lanes = min(columns // each, LANES)
        return (
            f"gl.BlockedLayout([1, {each}], [{LANES // lanes}, {lanes}], [{self.warps}, 1], [1, 0])"
        )

    @property
    def packed(self) -> str:
        """The packed tensor, as words."""
        source = self.sources[self.format.code.source]
        is_word = self.view.dim is not None
        return f"{source}.to(gl.pointer_type(gl.int32), bitcast=True)" if is_word else source

    @property
    def lists(self) -> int:
        """How many numbers the relay leaves in a stage for each k."""
        return len(self.positions) + len(self.relayed)

    def is_fetched(self, field: Field, slot: int = 0) -> bool:
        is_list = any(field in each.nested for each in self.listed)
        return (
            is_list or field == self.format.code or any(field == op.operand for op in self.relayed)
        )

    def first_word(self) -> str:
        """The position of a tile's first word."""
        of_expert = [f"{code} * {self.box.strides[name]}" for name, [code] in self.expert().items()]
        return " + ".join([self.box.first((*self.n_digits, *self.k_digits)), *of_expert])

    def first_column(self, k_iter: str, part: int) -> str:
        """Of a part of x, in a K iteration; K beyond the last one."""
        if self.k_order is None:
            return f"{k_iter} * BLOCK_K" + (f" + {part * self.part_k}" if part else "")
        first = self.k_order.place_of_block(k_iter, self.block_k)
        within = self.k_order.place_within(str(part * self.part_k), self.block_k)
        return f"gl.where({k_iter} < K // BLOCK_K, {first} + {within}, K)"

    def start_of_cta(self, stride: Hook) -> str:
        lines = [super().start_of_cta(stride)]
        if self.rows is not None:
            lines += self.rows.allocated()
        return "\n".join(lines)

    def start_copies(self, first_row: str, end_row: str, stride: Hook) -> str:
        """Statements before ``copies``: where a CTA's first tiles of x and of words are."""
        box, each = self.box, ALIGNMENT // self.x_bytes
        stages = f"parts_of_tiles(x_stages, {self.parts}, 1)" if self.parts > 1 else "x_stages"
        row, column = self._positions("X_COPIED", self.block_m, self.part_k)
        lines = [
            f"copied_x = {stages}",
            f"row = {first_row} + {row}",
            f"is_row = row < {end_row}",
            f"row = gl.multiple_of(row.to(INDEX_DTYPE) * {stride(self.x, 0)}, [1, {each}])",
            f"x_at = {self.x} + row + {column}",
            *self.first_digits("n", "pid_n"),
        ]
        row, column = self._positions("W_COPIED", box.rows, box.columns)
        return "\n".join([*lines, f"words_at = {row} * {box.pitch} + {column}"])

    def _positions(self, layout: str, rows: int, columns: int) -> list[str]:
        """Of rows and of columns, in a layout."""
        return [positions(layout, 2, axis, size) for axis, size in enumerate((rows, columns))]

    def copies(self, k_iter: str, stage: int) -> str:
        """Statements that start to copy the tiles of a K iteration to a stage."""
        box, lines, each = self.box, [], ALIGNMENT // self.x_bytes
        for part in range(self.parts):
            to = f"copied_x.index({stage * self.parts + part})"
            lines += [
                f"column = gl.multiple_of({self.first_column(k_iter, part)}, {each})",
                f"copy_async({to}, x_at + column, mask=is_row)",
            ]
        lines += [*self.first_digits("k", k_iter), f"word = {self.first_word()}"]
        each = ALIGNMENT // self.dtypes[self.format.code.source].itemsize
        for i in range(box.count):
            at = (
                f"gl.multiple_of(word + {i * box.apart}, {each})"
                if i
                else f"gl.multiple_of(word, {each})"
            )
            to = self.place_of_words(str(stage), stage % self.box_iterations, i)
            lines.append(f"copy_async({to}, {self.packed} + {at} + words_at)")
        return "\n".join(lines)

    def read(self, stage: str, slot: int) -> str:
        """Statements that read the words of a stage."""
        box, digits = self.box, self.plan.digits
        dims, target, sizes = read_order(self.plan, box)
        code = self.dialect.reordered("words", dims, target, sizes)
        name = kept(self.loaded.index(self.format.code), slot)
        boxes = [
            f"{self.place_of_words(stage, slot % self.box_iterations, i)}.load(W_READ)"
            for i in range(box.count)
        ]
        words = f"gl.join({', '.join(boxes)})" if box.count > 1 else boxes[0]
        lines = [f"words = {words}", f"{name} = {code}"]
        shape = [digit.inner if digit.digit[0] == "k" else 1 for digit in digits]
        for i in range(self.lists):
            read = f"list_stages.index({self.stage_of_list(stage, i)}).load(LIST_READ)"
            lines.append(f"{of_list(i, slot)} = gl.reshape({read}, {shape})")
        return "\n".join(lines)

    def stage_of_list(self, stage: str, i: int) -> str:
        """The stage of the ``i``-th of ``lists``."""
        return stage if self.lists == 1 else f"({stage}) * {self.lists} + {i}"

    def digits_of_lists(self) -> dict[str, list[str]]:
        """The terms of the digits, for each ``k`` and for all columns of a tile."""
        return self._digits_of("k", "k") | {
            digit.name: [f"first_{digit.name}"] if digit.outer > 1 else []
            for digit in self.n_digits
        }

    def load_lists(self, tile: str, stride: Hook, size: Hook, slot: int = 0) -> str:
        """Statements of the relay that load what the lists of a K iteration, number ``tile``, are
        computed from."""
        out = DigitStatements(self, stride, size, f"l{slot}_", self.digits_of_lists())
        lists = [each for field in self.listed for each in field.nested]
        operands = [op.operand for op in self.relayed if isinstance(op.operand, Field)]
        for field in dict.fromkeys([*lists, *operands]):
            pointer, _, _ = out.pointer(field)
            out.lines.append(f"{self.used(self.loaded.index(field), slot)} = gl.load({pointer})")
        return "\n".join([f"k = {tile} * BLOCK_K + gl.arange(0, BLOCK_K, OF_RELAY)", *out.lines])

    def store_lists(self, stage: str, barrier: str, stride: Hook, size: Hook, slot: int = 0) -> str:
        """Statements of the relay that leave in a stage the ``positions``, and the operands of
        ``relayed``, of what ``load_lists`` loaded: each thread of the consumers would compute them
        again."""
        out = OfRelay(self, stride, size, slot)
        found = []
        for (index, _), (source, dim) in self.positions.items():
            position = out.assign("i", out.index(index))
            found.append(f"{out.inside(position, index, self.sources[source], dim)}.to(gl.int32)")
        operands = [out.operand(op).code for op in self.relayed]
        if self.relays_product:
            operands[0] = out.assign("f", f"{operands[0]} * {operands[1]}")
        found += [f"{code}.to(gl.int32, bitcast=True)" for code in operands]
        for i, code in enumerate(found):
            to = f"list_stages.index({self.stage_of_list(stage, i)})"
            out.lines.append(f"warps.store_early({to}, {code}, {barrier})")
        return "\n".join(out.lines)

    def load_listed(self, out: Listed, field: Field) -> str:
        if self.rows is None:
            return f"gl.load({self._pointer_of_listed(out, field)})"
        position = f"gl.convert_layout({of_list(0, out.slot)}, LISTED, assert_trivial=True)"
        return self.rows.read(out, field, out.assign("w", position))

    def _pointer_of_listed(self, out: Listed, field: Field) -> str:
        number, tensor = self.listed.index(field), self.tensors[field.source]
        source, itemsize = self.sources[field.source], tensor.dtype.itemsize
        address = f"listed{number}"
        for dim, index in enumerate(field.index):
            if not index.is_data:
                continue
            i, moved = [*self.positions].index((index, tensor.shape[dim])), f"moved{number}_{dim}"
            read = f"gl.convert_layout({of_list(i, out.slot)}, LISTED, assert_trivial=True)"
            apart = f"gl.to_tensor({out.stride(source, dim)} * {itemsize}).to(gl.int32)"
            # With the sum it is one instruction.
            arguments = [out.assign("w", read), apart]
            out.lines += self.dialect.inline_asm(MULTIPLY_WIDE, [moved], arguments, torch.int64)
            multiple = math.gcd((tensor.strides[dim] or 1) * itemsize, ALIGNMENT)
            address += f" + gl.multiple_of({moved}, {[multiple] * self.plan.rank})"
        return f"({address}).to({self._pointer(tensor.dtype)}, bitcast=True)"

    def stage_of_box(self, stage: str, i: int) -> str:
        """The stage of the ``i``-th box of a tile."""
        return stage if self.box.count == 1 else f"({stage}) * {self.box.count} + {i}"

    def shift_slots(self, slots: int) -> str:
        """Statements that move the contents of ``slots`` to ``2 * slots - 1`` to the first ones."""
        return "\n".join(
            f"{kept(i, slot)} = {kept(i, slots + slot)}"
            for slot in range(slots)
            for i, field in enumerate(self.loaded)
            if not self.is_fetched(field)
        )

    def dequantized(self, stride: Hook, size: Hook, slot: int) -> str:
        """Statements that leave in ``w`` the first operand, of what was loaded."""
        out = OfConsumer(self, stride, size, slot)
        code = self.w_operand(out.dequantized())
        return "\n".join([*out.lines, f"w = {code}"])

    def w_operand(self, code: str) -> str:
        """``code``, a tile of W, as the first operand."""
        k: Dim = ("k", self.block_k)
        dims, target = (*self.column_dims, k), (*self.mma_dims, k)
        code = self.dialect.reordered(code, dims, target, "[BLOCK_N, BLOCK_K]")
        return f"gl.convert_layout({code}, W_MMA, assert_trivial=True)"

    def finished(self) -> str:
        """Statements that wait for the last product. ptxas was seen to round sums before the wait,
        not to compute with them."""
        if self.are_divided:
            change = f" * {float(self.divisor)}"
        else:
            change = f" + {self.unknown_zero}" if self.acc_type == "gl.float32" else ""
        changed = [f"{name} = {name}{change}" for name in self.names_of_sums if change]
        return "\n".join([self.waited(), *changed])

    def exchanged(self, sums: str) -> str:
        """``sums`` [BLOCK_N, BLOCK_M] as one axis, as they are left in memory for another CTA."""
        return self.dialect.reordered(
            sums, self.sum_dims, self.exchanged_dims, "[BLOCK_N * BLOCK_M]"
        )

    def merged(self, sums: str) -> str:
        """The inverse of ``exchanged``."""
        return self.dialect.reordered(
            sums, self.exchanged_dims, self.sum_dims, "[BLOCK_N, BLOCK_M]"
        )

    def strips_of_sums(self, sums: str) -> str:
        """Statements that split ``exchanged`` sums into ``strip<i>``, of equally many rows."""
        size = self.block_n * self.block_m
        lines, names = [f"whole = {sums}"], ["whole"]
        while len(names) < self.strips:
            size //= 2
            halves = [f"{name}_{i}" for name in names for i in range(2)]
            for name, low, high in zip(names, halves[::2], halves[1::2], strict=True):
                code = f"gl.permute(gl.reshape({name}, [2, {size}]), [1, 0])"
                lines.append(f"{low}, {high} = gl.split({code})")
            names = halves
        lines += [
            f"strip{i} = gl.convert_layout({name}, STRIP, assert_trivial=True)"
            for i, name in enumerate(names)
        ]
        return "\n".join(lines)

    def received(self, sums: str) -> str:
        """The inverse of ``exchanged``, of the rows of a strip."""
        return self.dialect.reordered(
            sums, self.strip_dims, self.stored_sum_dims, f"[BLOCK_N, {self.stored_m}]"
        )

    @property
    def stored_m(self) -> int:
        return self.block_m // self.strips

    @property
    def reads_pairs(self) -> bool:
        """Whether values are taken from pairs of words: by bytes, without shifts of words."""
        if self.format.element.float8:
            return not self.loop_ops
        return self.is_in_16_bits() and not narrow.is_in_halves(self)

    def is_looked_up_in_16_bits(self) -> bool:
        return self.pair_places is not None and not pair_lookup.is_in_fp32(
            self, self.format.element
        )
