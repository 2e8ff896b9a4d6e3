"""Gluon statements of ``w4a8_direct``: those of ``weight_only_direct`` with int8 operands."""

from __future__ import annotations

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.digits.tile import TilePlan
from inductor_quant.kernels.codegen.digits.words import BYTES, WordView
from inductor_quant.kernels.codegen.gluon_layout import layout
from inductor_quant.kernels.codegen.unpack_ptx import WORD_AS_BYTES
from inductor_quant.kernels.w4a8.quads import MAGIC, MAGIC_BITS, QuadCodegen
from inductor_quant.kernels.weight_only.direct.codegen import DirectCodegen, G


class W4A8DirectCodegen(QuadCodegen, DirectCodegen):
    """A is loaded as words: Triton keeps bytes, from one iteration to the next, in registers of
    their own."""

    x, x_base, x_packs = "A", "A.to(gl.pointer_type(gl.int32), bitcast=True)", BYTES

    def __init__(
        self, tile: WeightTile, view: WordView, plan: TilePlan, n_order: list[str]
    ) -> None:
        super().__init__(tile, view, plan, n_order)
        self.layouts["X_BYTES"] = layout(
            (self.warp_dims, self.row_dims, self.k_dims[:-2], self.k_dims[-2:]),
            lanes=(*self.lane_dims, G),
            warps=self.warp_dims,
        )

    def unpacked_x(self) -> list[str]:
        """Statements that leave in ``x_bytes`` the bytes of the words ``x``."""
        shape = [self.warps, self.block_m, self.tile_k // BYTES, BYTES]
        words = "gl.convert_layout(x, gl.SliceLayout(3, X_BYTES), assert_trivial=True)"
        whole = f"gl.full({shape}, 0, gl.int32, X_BYTES)"
        each = f"gl.broadcast(gl.expand_dims({words}, 3), {whole})[0]"
        return self.dialect.inline_asm(WORD_AS_BYTES, ["x_bytes"], [each], self.x_dtype)

    def sums(self) -> str:
        zero = "0.0" if self.has_groups else "0"
        return f"acc = gl.full({self.sums_shape}, {zero}, {self.acc_type}, MMA)"

    def multiplied(self, stride: Hook, size: Hook) -> str:
        out, code = self.unpacked(stride, size)
        w, x = self.w_operand(code), self.x_operand("x_bytes")
        out.lines += self.unpacked_x()
        if not self.has_groups:
            return "\n".join([*out.lines, f"acc = mma_v2({w}, {x}, acc)"])
        scale = self.of_columns(out.group_scale())
        scale = f"gl.convert_layout({scale}, gl.SliceLayout(2, MMA), assert_trivial=True)"
        return "\n".join(
            [
                *out.lines,
                f"part = gl.full({self.sums_shape}, {MAGIC_BITS}, gl.int32, MMA)",
                f"part = mma_v2({w}, {x}, part).to(gl.float32, bitcast=True) - {MAGIC}",
                f"acc = acc + part * gl.expand_dims({scale}, 2)",
            ]
        )
