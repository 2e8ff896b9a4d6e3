"""Gluon statements of ``w4a8_mm_sm90``: those of ``weight_only_mm_sm90`` with int8 operands."""

from __future__ import annotations

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.quads import MAGIC, MAGIC_BITS, QuadCodegen
from inductor_quant.kernels.weight_only.mm_sm90.codegen import MMSm90Codegen


class W4A8MMSm90Codegen(QuadCodegen, MMSm90Codegen):
    @property
    def acc_type(self) -> str:  # type: ignore[override]
        return "gl.float32" if self.has_groups else "gl.int32"

    def dequantized(self, stride: Hook, size: Hook, slot: int) -> str:
        """Statements that leave in ``w`` the first operand and in ``scale`` the group's scales."""
        out, code = self.unpacked(stride, size, slot)
        lines = [f"w = {self.w_operand(code)}"]
        if self.has_groups:
            scale = self.of_columns(out.group_scale())
            lines.append(
                f"scale = gl.convert_layout({scale}, gl.SliceLayout(1, MMA), assert_trivial=True)"
            )
        return "\n".join([*out.lines, *lines])

    def sums(self) -> str:
        if not self.has_groups:
            return "acc = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, MMA)"
        return "\n".join(
            [
                "acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)",
                f"start = gl.full([BLOCK_N, BLOCK_M], {MAGIC_BITS}, gl.int32, MMA)",
                "group = warpgroup_mma_init(start)",
                "scale_before = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, MMA))",
            ]
        )

    def multiplied(self, x: str) -> str:
        if not self.has_groups:
            return super().multiplied(x)
        # One product at a time: registers for a second one are lacking.
        start = f"group = warpgroup_mma(w, {x}, start, is_async=True)"
        return "\n".join([self.finished(), start, "scale_before = scale"])

    def finished(self) -> str:
        if not self.has_groups:
            return super().finished()
        product = f"(group.to(gl.float32, bitcast=True) - {MAGIC})"
        return "\n".join(
            [
                "group = warpgroup_mma_wait(0, deps=(group,))",
                f"acc = acc + {product} * gl.expand_dims(scale_before, 1)",
            ]
        )
