"""Gluon statements of ``w4a8_mm_sm90``: those of ``weight_only_mm_sm90`` with 8-bit operands."""

from __future__ import annotations

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.w4a8.quads import QuadCodegen
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
        type = "gl.float32" if self.is_float else "gl.int32"
        return (
            "acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)\n"
            f"zero = gl.zeros([BLOCK_N, BLOCK_M], {type}, MMA)"
        )

    def multiplied(self, stage: str, i: int, count: int) -> str:
        if not self.is_promoted:
            return super().multiplied(stage, i, count)
        # One product at a time, W is unpacked beside it; registers for a second one are lacking.
        lines = [self._promoted()] if i > 0 else []
        x = self.x_of(stage)
        lines.append(f"product = warpgroup_mma(w, {x}, zero, use_acc=False, is_async=True)")
        lines += ["scale_before = scale"] if self.has_groups else []
        # None runs when the loop comes round: that took a spill, or the registers of its operand.
        return "\n".join([*lines, self._promoted()] if i == count - 1 else lines)

    def _promoted(self) -> str:
        """Statements that wait for the product, scale and add it."""
        wait = "product = warpgroup_mma_wait(0, deps=(product,))"
        scale = " * gl.expand_dims(scale_before, 1)" if self.has_groups else ""
        return f"{wait}\nacc = acc + product.to(gl.float32){scale}"

    def finished(self) -> str:
        return "" if self.is_promoted else super().finished()
