"""Gluon statements of ``weight_only_direct``: W is dequantized in the registers of ``mma.sync``.

Each warp has a tile of its own, the same BLOCK_N columns at another slice of K. Which k and which
n a thread holds is free, as long as x has the same k and the output the same n: ``tile_plan``
chooses them, so that a thread loads whole words.

A slice of K may be multiplied ``in_halves``: the second half of it is dequantized when the first
one is multiplied, so that W in 16 bits takes half the registers. Or W are integers, and the scale
of a group, or its zero point too, is applied to the sums of the slice (``sum_ops``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import HOISTS_MORE, Dim, bits
from inductor_quant.kernels.codegen.digits import table_lookup
from inductor_quant.kernels.codegen.digits.codegen import DigitCodegen, kept
from inductor_quant.kernels.codegen.digits.order import Order
from inductor_quant.kernels.codegen.digits.statements import Uses
from inductor_quant.kernels.codegen.digits.tile import WARP, TileDigit, TilePlan
from inductor_quant.kernels.codegen.digits.words import WordView
from inductor_quant.kernels.codegen.gluon_layout import layout, positions, summed_outputs
from inductor_quant.kernels.codegen.unpack_ptx import assembly, hidden_zero
from inductor_quant.kernels.problem import DECODE_M
from inductor_quant.kernels.weight_only.direct.scaled_x import ScaledX
from inductor_quant.spec.weight_format import Field

# Of the MMA's sums: 8 rows of lanes, 2 of a thread; four pairs of columns.
G: Dim = ("g", 8)
R: Dim = ("r", 2)
T: Dim = ("t", 4)
PAIR: Dim = ("pair", 2)
MMA_ROWS = 16
# Per SM at once: with more, a thread lacks registers for what it loads ahead, and for masks of N.
MAX_WARPS, MAX_WARPS_MASKED = 16, 14
REGISTERS = 65536
WARP_SIZE, VECTOR_WORDS = 32, 4
VECTOR = 8  # elements of x that a thread should load at once


def warps_at_once(block_m: int) -> int:
    """On an SM, with tiles of rows: x and the sums of 64 (or a table) exceed 128 registers."""
    return MAX_WARPS if block_m <= 32 else MAX_WARPS // 2


def half_digit(k_digits: Sequence[TileDigit]) -> TileDigit | None:
    """The digit of K by which two tiles, the halves of a slice, differ; None: by several."""
    found = next((digit for digit in reversed(k_digits) if digit.outer > 1), None)
    return found if found is not None and found.outer % 2 == 0 else None


def shares_x(plan: TilePlan, block_m: int, width: int = 2) -> bool:
    """Whether x, of which ``width`` elements fill a register, takes the way of shared memory."""
    return block_m > G[1] and 1 << min(_lane_bits(plan, width)) < VECTOR


def _lane_bits(plan: TilePlan, width: int) -> tuple[int, ...]:
    """The bits of k that lanes differ in."""
    in_register = width.bit_length() - 1
    return plan.depth[in_register : in_register + 2]


class DirectCodegen(DigitCodegen):
    """``x`` is the activation's name, loaded from ``x_base`` in elements of which ``x_packs`` are
    one; sums are of ``acc_type``. ``tile`` and ``plan`` are those of a half, if ``in_halves``.
    ``k_order``: that of W's K, if it is not that of x. ``masks_rows``: rows of x beyond M, or
    of an expert, are not loaded. ``reads_once``: words leave the L2 cache first, as few CTAs read
    the same. ``looks_up_pairs``: a table is in shared memory."""

    x = x_base = "X"
    x_packs, acc_type = 1, "gl.float32"
    or_hidden_zero = " | hidden_zero"

    def __init__(
        self,
        tile: WeightTile,
        view: WordView,
        plan: TilePlan,
        n_order: list[str],
        *,
        in_halves: bool = False,
        k_order: Order | None = None,
        is_gated: bool = False,
        masks_rows: bool = False,
        reads_once: bool = False,
        looks_up_pairs: bool = False,
    ) -> None:
        self.looks_up_pairs = looks_up_pairs
        super().__init__(tile, view, plan, n_order, is_gated=is_gated)
        if self.pair_places:
            self.places = ()  # in registers
        self.masks_rows = masks_rows
        self.word_policy = ', eviction_policy="evict_first"' if reads_once else ""
        self.k_order = k_order
        self.scaled_x = ScaledX(self) if self.x_ops else None
        self.parts = 1 + in_halves
        self.x_k = self.tile_k * self.parts
        ks: tuple[Dim, ...] = tuple((f"k{bit}", 2) for bit in range(len(plan.depth)))
        self.slices = self.k // self.x_k
        self.split_k = tile.config.split_k
        self.is_even = self.slices % (self.warps * self.split_k) == 0
        self.iterations = math.ceil(math.ceil(self.slices / self.split_k) / self.warps)
        self.k_dims = ks[::-1]
        self.mma_k_dims = tuple(ks[bit] for bit in plan.depth)[::-1]
        w: Dim = ("w", self.warps)
        self.warp_dims = (w,)
        self.row_dims: tuple[Dim, ...] = (("b", self.block_m // G[1]), G)
        width = 4 // tile.x_dtype.itemsize  # neighbours along K in a register
        self.lane_dims = tuple(ks[bit] for bit in _lane_bits(plan, width))
        x_dims: tuple[Dim, ...] = ((("part", 2),) if in_halves else ()) + self.k_dims
        loaded = x_dims[: len(x_dims) - (self.x_packs.bit_length() - 1)]
        self.of_tile_k_dims = tuple(ks[bit] for bit in plan.order)
        partials, stored, gated = summed_outputs(
            *(self.warps, self.block_m, self.column_dims, self.mma_dims), self.pair
        )
        self.layouts |= {
            "X_READ": layout(
                (self.warp_dims, self.row_dims, loaded), lanes=(*self.lane_dims, G), warps=(w,)
            ),
            "PARTIALS": partials,
            "STORED": stored,
            **({"GATED": gated} if self.pair else {}),
            "MMA": f"gl.NVMMADistributedLayout([2, 0], [{self.warps}, 1, 1], [1, 16, 8])",
            "W_MMA": f"gl.DotOperandLayout(0, MMA, {width})",
            "X_MMA": f"gl.DotOperandLayout(1, MMA, {width})",
            # Free of bank conflicts for what the MMA leaves and for a row of columns.
            "PARTIALS_SHARED": "gl.SwizzledSharedLayout(8, 2, 4, [1, 2, 0])",
        }
        if self.has_sums_of_x:  # the rows of the MMA's tiles
            m: tuple[Dim, ...] = (("b", self.block_m // G[1]), T, PAIR)
            tiles: Dim = ("n", self.block_n // MMA_ROWS)
            axes: tuple[tuple[Dim, ...], ...] = (self.warp_dims, (tiles,), (R, G), m)
            self.layouts["MMA_TILES"] = layout(axes, lanes=(T, G), warps=self.warp_dims)
        # Whether x is loaded one iteration ahead, like W: not if that takes many registers, as
        # tables and the sums of a tile do, nor with zero points where 16 warps have a CTA's few
        # iterations.
        has_zeros = any(op.kind == "sub" for op in view.weight.format.dequant_ops)
        is_crowded = self.places or self.has_sums_of_x or (has_zeros and self.warps == MAX_WARPS)
        self.loads_x_early = self.block_m == G[1] and not is_crowded
        self.x_layout = "X_READ"
        if self.x_packs == 1 and shares_x(plan, self.block_m, width):
            # Lanes load whole lines of rows, and get what they multiply through shared memory.
            rows = bits("m", self.block_m)
            lanes = [*reversed(x_dims), *reversed(rows)][VECTOR.bit_length() - 1 :][:5]
            axes = (self.warp_dims, tuple(rows), x_dims)
            self.layouts["X_LOADED"] = layout(axes, lanes=lanes, warps=(w,))
            self.x_layout = "X_LOADED"

    @property
    def computes_table(self) -> bool:
        """Whether W's values are those of a table, and none is looked up."""
        return table_lookup.is_computed(self, self.format.element)

    @property
    def has_sums_of_x(self) -> bool:
        """Whether a zero point is applied to sums."""
        return len(self.sum_ops) > 1 or len(self.x_ops) > 1

    def summed(self, code: str) -> str:
        """``code``, the sums over K, times what W was divided by."""
        return f"{code} * {float(self.divisor)}" if self.are_divided else code

    def start(self, stride: Hook, size: Hook) -> str:
        zero = self.dialect.inline_asm(hidden_zero(), ["hidden_zero"], [], torch.int32)
        of_x = self.scaled_x.start(stride, size) if self.scaled_x else []
        return "\n".join([*zero, super().start(stride, size), *of_x])

    def x_rows(self, first: str, last: str) -> str:
        """Statements that leave in ``x_rows`` the rows of x, from ``first`` on. Rows beyond
        ``last``, which the store masks, repeat it, and those not in ``has_x`` are not loaded: a row
        that lanes share takes as long as one of each."""
        rows = f"{first} + {positions(self.x_layout, 3, 1, self.block_m)}"
        has_x = [f"has_x = {rows} <= {last}"] if self.masks_rows else []
        return "\n".join([*has_x, f"x_rows = gl.minimum({rows}, {last})"])

    def x_offsets(self, stride_m: str) -> str:
        """Statements that leave in ``x_at`` the addresses of x at k = 0, of ``x_rows``."""
        columns = "x_columns"
        if self.k_order is not None:
            columns = self.k_order.place_within(columns, self.x_k)
        return "\n".join(
            [
                f"x_warps = {positions(self.x_layout, 3, 0, self.warps)}",
                f"x_columns = {positions(self.x_layout, 3, 2, self.x_k // self.x_packs)}",
                f"x_at = {self.x_base} + x_rows.to(INDEX_DTYPE) * {self.x_elements(stride_m)}",
                f"x_at = x_at + {columns}",
            ]
        )

    def x_elements(self, count: str) -> str:
        """How many elements are loaded for ``count`` of x."""
        return count if self.x_packs == 1 else f"({count} // {self.x_packs})"

    def load_x(self, k_iter: str) -> str:
        """x in an iteration; 0 in rows that are not loaded, and beyond the CTA's slices of K, which
        cancels any W there."""
        at = f"({k_iter}) * {self.warps} + x_warps"
        masks = ["has_x"] if self.masks_rows else []
        masks += [] if self.is_even else [f"({at} < slices)"]
        how = f", mask={' & '.join(masks)}, other={self.zero}" if masks else ""
        number, step = f"first_slice + {at}", self.x_k // self.x_packs
        slice_at = f"({number}) * {step}"
        if self.k_order is not None:
            slice_at = self.k_order.place_of_block(number, step)
        return f"gl.load(x_at + {slice_at}{how})"

    def load_w(self, k_iter: str, stride: Hook, size: Hook) -> str:
        """Statements that load the words of an iteration, or of its first half; beyond K, the last
        ones."""
        tile = f"first_slice + ({k_iter}) * {self.warps} + l_{WARP}"
        if not self.is_even:
            tile = f"gl.minimum({tile}, {self.slices - 1})"
        tile = tile if self.parts == 1 else f"({tile}) * 2"
        of_x = self.scaled_x.load(k_iter) if self.scaled_x else []
        return "\n".join([f"tile = {tile}", self.load("tile", stride, size), *of_x])

    def load_second_half(self, stride: Hook, size: Hook) -> str:
        """Statements that load the words of the second half, after those of the first one. In the
        loop that is when a first half is multiplied: until then they would take registers."""
        return self.load("tile", stride, size, 1, beyond=half_digit(self.k_digits))

    def is_fetched(self, field: Field, slot: int = 0) -> bool:
        """Whether the field's value in the second half is that of the first one; or x is scaled
        with it."""
        if any(field == op.operand for op in self.x_ops):
            return True
        if slot == 0 or field == self.format.code:
            return False
        group = self.format.block(field)[0]
        return group == 0 or group % self.x_k == 0

    @property
    def x_is_shared(self) -> bool:
        """Whether x takes the way of shared memory."""
        return self.x_layout == "X_LOADED"

    @property
    def zero(self) -> str:
        return "0.0" if self.x_dtype.is_floating_point else "0"

    def x_operand(self, x: str = "x") -> str:
        """``x`` [warps, BLOCK_M, slice of K] as the second operand."""
        dims = (*self.warp_dims, *self.row_dims, *self.k_dims)
        target = (*self.warp_dims, *self.mma_k_dims, *self.row_dims)
        shape = f"[{self.warps}, {self.tile_k}, {self.block_m}]"
        x = f"gl.convert_layout({x}, X_READ)" if self.x_is_shared and self.parts == 1 else x
        code = self.dialect.reordered(x, dims, target, shape)
        return f"gl.convert_layout({code}, X_MMA, assert_trivial=True)"

    @property
    def max_registers(self) -> int:
        """Per thread, so that ``MAX_WARPS`` warps of several CTAs run at once; with more than a CTA
        can have, ptxas does as it is told, and the launch fails."""
        warps = MAX_WARPS_MASKED if self.n % self.block_n else MAX_WARPS
        if self.has_row_tiles:
            warps = min(warps, warps_at_once(64 if self.table else self.block_m))
        return REGISTERS // (32 * max(self.warps, warps))

    @property
    def hides_turns(self) -> bool:
        """Whether the compiler shall not know how many turns there are: LLVM would load what
        is the same in each before the loop, all of W if there are two, and it would spill."""
        return HOISTS_MORE and not self.has_row_tiles

    @property
    def has_row_tiles(self) -> bool:
        """Whether M may have several tiles."""
        return self.block_m > DECODE_M

    def used(self, i: int, slot: int) -> str:
        return f"now{0 if self.is_fetched(self.loaded[i], slot) else slot}_{i}"

    def keep(self) -> str:
        """Statements that keep what was loaded while the next words are loaded."""
        places = [
            f"was_{name} = gl.convert_layout(first_{name}, TILE, assert_trivial=True)"
            for name in self.digits_of_places
        ]
        fields = [
            f"{self.used(i, part)} = {kept(i, part)}"
            for part in range(self.parts)
            for i, field in enumerate(self.loaded)
            if not self.is_fetched(field, part)
        ]
        of_x = self.scaled_x.keep() if self.scaled_x else []
        return "\n".join([*places, *fields, *of_x])

    @property
    def in_turn(self) -> int:
        """Iterations of a turn: of two, what one loads for the next stays in its registers."""
        return 1 if self.has_row_tiles or self.parts > 1 else 2

    @property
    def turns(self) -> int:
        """Of the loop, behind which are the last iterations: of many rows none, as two iterations
        beside each other would spill."""
        return self.iterations if self.has_row_tiles else (self.iterations - 1) // self.in_turn

    def needed(self) -> str:
        """Statements that need the words that were loaded, one of each load: ptxas would load what
        only the next turn needs at the end of this one. (Single bytes are left to it.)"""
        code = self.format.code
        is_of_words = self.view.dim is not None or self.dtypes[code.source] == torch.int32
        if self.view.parts or not is_of_words or self.in_turn == 1:
            return ""
        count = self.block_n * self.tile_k * code.width // 32 // WARP_SIZE
        pack = max(1, min(VECTOR_WORDS, count))
        lines = [f"xor.b32 $0, ${pack}, ${2 * pack};"]
        lines += [f"mov.b32 ${i}, ${pack + i};" for i in range(1, pack)]
        asm = assembly(lines, "none", 2 * pack, bits=32, pack=pack)
        name = kept(self.loaded.index(code))
        return "\n".join(self.dialect.inline_asm(asm, [name], [name, "hidden_zero"], torch.int32))

    @property
    def sums_shape(self) -> str:
        return f"[{self.warps}, {self.block_n}, {self.block_m}]"

    def sums(self) -> str:
        """Statements that set the sums before the loop."""
        lines = [f"acc = gl.full({self.sums_shape}, {self.zero}, {self.acc_type}, MMA)"]
        if len(self.x_ops) > 1:
            lines.append(self._no_x_sums())
        return "\n".join(lines)

    def _no_x_sums(self) -> str:
        return f"x_sums = gl.full({[self.warps, MMA_ROWS, self.block_m]}, 0.0, gl.float32, MMA)"

    def widened(self, rows: int) -> str:
        """Statements that leave in ``acc`` sums of twice as many rows, ``rows``, of which the last
        ones are 0."""
        none = f"gl.full({self.sums_shape}, {self.zero}, {self.acc_type}, MMA)"
        both = f"gl.permute(gl.join(acc, {none}), (0, 1, 3, 2))"
        shape = [self.warps, self.block_n, rows]
        return f"acc = gl.convert_layout(gl.reshape({both}, {shape}), MMA, assert_trivial=True)"

    def end(self) -> str:
        """Statements behind the loop."""
        if len(self.x_ops) < 2:
            return ""
        return f"acc = acc - {self._of_mma_tiles('x_sums')} * {1 / self.divisor}"

    def multiplied(self, stride: Hook, size: Hook) -> str:
        """Statements that add to ``acc`` the product of what was loaded with ``x``, and load the
        second half of the next iteration."""
        names, lines = ["x"], []
        if self.parts > 1:
            names = ["x_first", "x_second"]
            x = "gl.convert_layout(x, X_READ)" if self.x_is_shared else "x"
            shape = [self.warps, self.block_m, 2, self.tile_k]
            x = f"gl.permute(gl.reshape({x}, {shape}), [0, 1, 3, 2])"
            lines.append(f"{', '.join(names)} = gl.split({x})")
        if self.scaled_x:
            lines += self.scaled_x.scaled()
        target = "tile_sums" if self.sum_ops else "acc"
        if self.sum_ops:
            lines.append(f"{target} = gl.full({self.sums_shape}, 0.0, gl.float32, MMA)")
        for part, x in enumerate(names):
            out = Uses(self, stride, size, part)
            w = self.w_operand(out.dequantized())
            lines += [
                *out.lines,
                f"{x} = {self.x_operand(x)}",
                f"{target} = mma_v2({w}, {x}, {target})",
            ]
            if part < self.parts - 1:
                lines.append(self.load_second_half(stride, size))
        if self.sum_ops:
            lines += self._added(Uses(self, stride, size))
        return "\n".join(lines)

    def _added(self, out: Uses) -> list[str]:
        """Statements that add ``tile_sums`` to ``acc``, scaled, and less what a zero point, if that
        is one of ``sum_ops``, takes of the sums of ``x``, which a product with ones leaves in each
        row."""

        def of_rows(code: str) -> str:
            layout = "gl.SliceLayout(2, MMA)"
            code = f"gl.convert_layout({self.of_columns(code)}, {layout}, assert_trivial=True)"
            return out.assign("c", f"gl.expand_dims({code}, 2)")

        *zeros, scale = (out.operand(op).code for op in self.sum_ops)
        factor = of_rows(f"{scale} * {float(self.divisor)}")
        added = f"acc = acc + tile_sums * {factor}"
        if not zeros:
            return [*out.lines, added]
        [zero] = zeros
        zero = of_rows(out.assign("f", f"{zero} * {scale}"))
        ones = f"gl.full({self.mma_rows_shape}, 1.0, {self.x_type}, W_MMA)"
        return [
            *out.lines,
            self._no_x_sums(),
            f"x_sums = mma_v2({ones}, x, x_sums)",
            f"x_sums = {self._of_mma_tiles('x_sums')}",
            added,
            f"acc = acc - x_sums * {zero}",
        ]

    @property
    def mma_rows_shape(self) -> list[int]:
        """Of a first operand that is the same for all columns."""
        return [self.warps, MMA_ROWS, self.tile_k]

    def _of_mma_tiles(self, sums: str) -> str:
        """``sums`` of one tile of the MMA, for all of a warp's columns."""
        shape = [MMA_ROWS, self.block_m]
        whole = (
            f"gl.full({[self.warps, self.block_n // MMA_ROWS, *shape]}, 0.0, gl.float32, MMA_TILES)"
        )
        sums = f"gl.reshape({sums}, {[self.warps, 1, *shape]})"
        sums = f"gl.convert_layout({sums}, MMA_TILES, assert_trivial=True)"
        sums = f"gl.reshape(gl.broadcast({sums}, {whole})[0], {self.sums_shape})"
        return f"gl.convert_layout({sums}, MMA, assert_trivial=True)"

    def w_operand(self, code: str) -> str:
        """``code``, a tile of W, as the first operand."""
        dims = (*self.warp_dims, *self.column_dims, *self.of_tile_k_dims)
        target = (*self.warp_dims, *self.mma_dims, *self.mma_k_dims)
        shape = f"[{self.warps}, {self.block_n}, {self.tile_k}]"
        code = self.dialect.reordered(code, dims, target, shape)
        return f"gl.convert_layout({code}, W_MMA, assert_trivial=True)"
