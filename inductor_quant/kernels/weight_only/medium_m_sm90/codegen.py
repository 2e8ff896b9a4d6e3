"""Gluon statements of ``weight_only_medium_m_sm90`` and ``weight_only_large_m_sm90``.

As in ``medium_m``, with layouts. wgmma wants two of a word's eight values along K in each of four
lanes. So all four lanes load the word, and each unpacks the byte that it needs: K keeps its order,
and x is read from shared memory as it is.
"""

from __future__ import annotations

from typing import Any

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import UNKNOWN_ZERO, Dim
from inductor_quant.kernels.codegen.gluon_columns import (
    Gluon,
    GluonCodegen,
    Loads,
    Uses,
    converted,
    copy_layout,
    kept,
)
from inductor_quant.kernels.codegen.gluon_layout import layout, positions
from inductor_quant.kernels.codegen.packed_layout import PackedLayout
from inductor_quant.kernels.codegen.packed_tile import PackedTile
from inductor_quant.kernels.codegen.statements import Value
from inductor_quant.kernels.codegen.unpack_ptx import NIBBLES, dequantize_byte
from inductor_quant.kernels.config import GemmConfig
from inductor_quant.kernels.weight_only.medium_m.codegen import zero_and_scale
from inductor_quant.kernels.weight_only.row_boxes import RowBoxes
from inductor_quant.spec.weight_format import Field

T: Dim = ("t", 4)
G: Dim = ("g", 8)
HALF: Dim = ("v0", 2)  # of the 16 columns of a warp in one wgmma
BYTES: tuple[Dim, ...] = (("t", 4), ("p", 2))  # of a word: the lane that unpacks it, its values
LINE = 32  # words in a cache line
PREFETCHED = 64  # rows of packed weights: slightly more than the stages hold


class MediumMSm90Codegen(GluonCodegen):
    """shared_iters  K iterations that share their scales and zero points
    by_tma           packed weights reach shared memory by TMA, which lays them out in its tiles
    """

    def __init__(
        self,
        tile: WeightTile,
        packed_layout: PackedLayout,
        *,
        shared_iters: int,
        by_tma: bool = False,
    ) -> None:
        super().__init__(tile)
        self.packed_layout, self.shared_iters = packed_layout, shared_iters
        self.row_boxes = RowBoxes(self.block_m)
        self.split_k = tile.config.split_k
        self.packed = PackedTile(tile.weight, packed_layout, self.block_k, self.block_n)
        self.packed_k = self.packed.packed_k
        # A lane's columns are neighbours in memory; in the operand, each is in a block of 64.
        self.warp_k_slices = slices = warp_k_slices(tile.config)
        w: Dim = ("w", self.warps // slices)
        self.k_slice: Dim = ("slice", slices)
        blocks: Dim = ("v1", self.block_n // (8 * w[1] * HALF[1]))
        self.column_dims, self.mma_dims = (w, G, blocks, HALF), (blocks, w, HALF, G)
        self.mma_rows: tuple[Dim, ...] = (blocks, self.k_slice, w, HALF, G)
        self.word_dims: tuple[Dim, ...] = (self.k_slice, ("r", self.packed_k // slices))
        placed: Any = {"lanes": (T, G), "warps": (w, self.k_slice)}
        m: tuple[Dim, ...] = (("m", self.block_m // (8 * slices)), T, ("pair", 2))
        rows = (self.k_slice, *m)
        self.dialect = Gluon(layout(((("s", 1),), self.column_dims), **placed))
        x_shape = f"[{self.block_m}, {self.block_k // slices}]"
        w_shared = "gl.SwizzledSharedLayout(1, 1, 1, [1, 0])"
        if by_tma:
            shape = [self.packed_k, self.block_n]
            w_shared = f"gl.NVMMASharedLayout.get_default_for({shape}, gl.int32)"
        unpacked = (self.mma_dims, self.word_dims, *((dim,) for dim in BYTES))
        self.layouts = {
            "W_READ": layout((self.word_dims, self.column_dims), **placed),
            "W_UNPACKED": layout(unpacked, **placed),
            # A lane's neighbours along n are stored together.
            "STORED": layout((rows, self.column_dims), **placed),
            "X_COPIED": copy_layout(self.block_k, 8, self.warps),
            "W_COPIED": copy_layout(self.block_n, 4, self.warps),
            "MMA": "gl.NVMMADistributedLayout("
            f"[3, 0], [{self.warps}, 1], [16, {self.block_m}, 16])",
            "W_MMA": "gl.DotOperandLayout(0, MMA, 2)",
            "X_SHARED": f"gl.NVMMASharedLayout.get_default_for({x_shape}, {self.x_type})",
            "W_SHARED": w_shared,
        }
        if slices > 1:
            of: Dim = ("of", slices)
            self.layouts["SUMS"] = layout((self.mma_dims, rows), **placed)
            self.layouts["EXCHANGED"] = layout(((of,), self.mma_dims, rows), **placed)

    def prefetch(self, stride: Hook) -> str:
        """Statements that prefetch a tile's first words to the L2 cache, a line per thread."""
        count, source = self.packed_layout.count, self.packed.source
        rows = min(PREFETCHED, self.k // (self.split_k * count))
        rows, lines = 1 << rows.bit_length() - 1, self.block_n // LINE
        layout = copy_layout(lines, 1, self.warps)
        down = f"gl.arange(0, {rows}, gl.SliceLayout(1, {layout}))"
        across = f"gl.arange(0, {lines}, gl.SliceLayout(0, {layout}))"
        return "\n".join(
            [
                f"down = first // {count} + gl.expand_dims({down}, 1)",
                f"across = pid_n * {self.block_n} + gl.expand_dims({across}, 0) * {LINE}",
                f"warps.prefetch({source} + down * {stride(source, 0)} + across)",
            ]
        )

    def offsets(self, stride: Hook) -> str:
        """Statements before the loop: the addresses of the tile's first words."""
        rows = positions("W_COPIED", 2, 0, self.packed_k)
        columns = positions("W_COPIED", 2, 1, self.block_n)
        first = f"(first // {self.packed_layout.count}) * stride_wk"
        return "\n".join(
            [
                *self.packed.strides(stride),
                f"w_at = {self.packed.base(stride)} + {first}"
                f" + {rows}.to(INDEX_DTYPE) * stride_wk"
                f" + {columns}.to(INDEX_DTYPE) * stride_wn",
            ]
        )

    def load(self, slot: int, k_iter: str, stride: Hook, size: Hook) -> str:
        """Statements that load the scales and zero points of ``k_iter`` into ``slot``."""
        position = f"first + ({k_iter}) * BLOCK_K"
        out = Loads(self, stride, size, tag=f"a{slot}_", position_k=position)
        out.load(self.loop_ops)
        self.loaded = len(out.loaded)
        return "\n".join([*out.lines, *out.keep(slot)])

    def shift_slots(self, slots: int) -> str:
        """Statements that move the contents of ``slots`` to ``2 * slots - 1`` to the first ones."""
        return "\n".join(
            f"{kept(slot, i)} = {kept(slots + slot, i)}"
            for slot in range(slots)
            for i in range(self.loaded)
        )

    def operands(self, slot: int, k_iter: str, stride: Hook, size: Hook) -> str:
        """Statements that compute ``shifts`` and ``scales``, per column and in x's dtype, from what
        was loaded into ``slot``."""
        position = f"first + ({k_iter}) * BLOCK_K"
        out = Uses(self, stride, size, tag=f"b{slot}_", position_k=position, slot=slot)
        zero, scale = zero_and_scale(self.loop_ops)
        shift, factor = Value("0.0", 1, 1), Value("1.0", 1, 1)
        if zero is not None:
            shift = out.widen(out.operand(zero), 1, self.block_n)
        if scale is not None:
            assert isinstance(scale.operand, Field)
            factor = out.widen(out.field(scale.operand), 1, self.block_n)
        bias = float(self.packed_layout.bias())
        # With a shift that it knows, ptxas copies the factor to a register for each product.
        is_known = zero is None or not isinstance(zero.operand, Field)
        hidden = f" + {UNKNOWN_ZERO}" if is_known else ""
        for name, nibble in zip(("low", "high"), NIBBLES[self.x_dtype], strict=True):
            divisor = nibble.divisor
            b = f"({shift.code}) * {-1 / divisor} - {nibble.base + bias / divisor}{hidden}"
            c = f"({factor.code}) * {float(divisor)}"
            for kind, value, code in (("shifts", shift, b), ("scales", factor, c)):
                code = f"({out.broadcast(value, code)}).to({self.x_type})"
                columns = self.mma_columns(code, "W_UNPACKED", (1, 2, 3))
                out.lines.append(f"{name}_{kind} = {columns}")
        for kind in ("shifts", "scales"):
            out.lines.append(f"{kind} = gl.where(is_high, high_{kind}, low_{kind})")
        return "\n".join(out.lines)

    def byte_selectors(self) -> str:
        """Statements before the loop that leave in ``which`` the selector (of ``prmt``) of a lane's
        byte of a word, and in ``is_high`` which of its values is the second."""
        return "\n".join(
            [
                f"second = {positions('W_UNPACKED', 4, 3, 2)}",
                "is_high = second > 0",
                f"which = {positions('W_UNPACKED', 4, 2, 4)} * 0x101 + 0x4040 + second * 0",
            ]
        )

    def dequantized(self) -> str:
        """Statements that leave in ``w`` [BLOCK_N, BLOCK_K] the tile of the packed weights ``q``,
        as the first operand of wgmma."""
        reordered, slices = self.dialect.reordered, self.warp_k_slices
        dims = (*self.word_dims, *self.column_dims)
        target = (*self.mma_dims, *self.word_dims)
        q = reordered("q", dims, target, f"[BLOCK_N, {self.packed_k}]")
        w = reordered(
            "w",
            (*target, *BYTES),
            (*self.mma_rows, *self.word_dims[1:], *BYTES),
            f"[{slices * self.block_n}, {self.block_k // slices}]",
        )
        assembly = dequantize_byte(self.packed_layout, self.x_dtype)
        arguments = ["q", "which", "shifts", "scales"]
        return "\n".join(
            [
                f"q = {converted(q, 'W_UNPACKED', (2, 3))}",
                *self.dialect.inline_asm(assembly, ["w"], arguments, self.x_dtype),
                f"w = gl.convert_layout({w}, W_MMA, assert_trivial=True)",
            ]
        )

    def sums(self) -> str:
        """Statements after the loop that leave in ``acc`` [BLOCK_N, BLOCK_M] the sums over all K
        slices, each slice of the warps with its slice of the rows."""
        if self.warp_k_slices == 1:
            return ""
        m: Dim = ("m", self.block_m)
        shape = f"[{self.warp_k_slices}, BLOCK_N, BLOCK_M]"
        dims, target = (*self.mma_rows, m), (self.k_slice, *self.mma_dims, m)
        partials = self.dialect.reordered("acc", dims, target, shape)
        return "\n".join(
            [
                f"acc = gl.sum(gl.convert_layout({partials}, EXCHANGED), 0)",
                "acc = gl.convert_layout(acc, SUMS, assert_trivial=True)",
            ]
        )

    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements after the loop that apply the column ops to ``acc``."""
        out = Loads(self, stride, size, tag="c_", position_k="first")
        sums = "SUMS" if self.warp_k_slices > 1 else "MMA"
        lines = []
        for op in self.column_ops:
            value = out.widen(out.operand(op), 1, self.block_n)
            code = value.code
            if value.columns > 1:
                code = self.mma_columns(code, sums, (1,), is_trivial=False)
            lines.append(f"acc = {self.dialect.apply(op, 'acc', code)}")
        return "\n".join([*out.lines, *lines])


def warp_k_slices(config: GemmConfig) -> int:
    """Into how many slices of K an iteration is divided among warps: those that the columns leave
    over, at 16 columns per warp."""
    return max(1, 16 * config.num_warps // config.block_n)
