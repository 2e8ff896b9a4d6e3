"""Gluon statements of ``w4a8_mm_sm90``: those of ``weight_only_mm_sm90`` with 8-bit operands."""

from __future__ import annotations

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.w4a8.quads import MAGIC, MAGIC_BITS, QuadCodegen
from inductor_quant.kernels.weight_only.mm_sm90.codegen import MMSm90Codegen


class W4A8MMSm90Codegen(QuadCodegen, MMSm90Codegen):
    """Sums of a tile's products are ``promoted`` to fp32 where they are scaled, and those of e4m3,
    which the matrix unit does not add in fp32."""

    @property
    def is_promoted(self) -> bool:
        return self.has_groups or self.is_float

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
        if not self.is_promoted:
            return "acc = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, MMA)"
        start = ("0.0", "gl.float32") if self.is_float else (MAGIC_BITS, "gl.int32")
        lines = [
            "acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)",
            f"start = gl.full([BLOCK_N, BLOCK_M], {start[0]}, {start[1]}, MMA)",
            "group = warpgroup_mma_init(start)",
        ]
        if self.has_groups:
            lines.append("scale_before = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, MMA))")
        return "\n".join(lines)

    def multiplied(self, x: str) -> str:
        if not self.is_promoted:
            return super().multiplied(x)
        # One product at a time: registers for a second one are lacking.
        how = ", use_acc=False" if self.is_float else ""
        lines = [self.finished(), f"group = warpgroup_mma(w, {x}, start{how}, is_async=True)"]
        return "\n".join([*lines, "scale_before = scale"] if self.has_groups else lines)

    def finished(self) -> str:
        if not self.is_promoted:
            return super().finished()
        product = "group" if self.is_float else f"(group.to(gl.float32, bitcast=True) - {MAGIC})"
        scale = " * gl.expand_dims(scale_before, 1)" if self.has_groups else ""
        return "\n".join(
            ["group = warpgroup_mma_wait(0, deps=(group,))", f"acc = acc + {product}{scale}"]
        )
