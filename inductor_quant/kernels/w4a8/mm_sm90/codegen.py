"""Gluon statements of ``w4a8_mm_sm90``: those of ``weight_only_mm_sm90`` with int8 operands."""

from __future__ import annotations

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.quads import MAGIC, MAGIC_BITS, QuadCodegen
from inductor_quant.kernels.weight_only.mm_sm90.codegen import MMSm90Codegen


class W4A8MMSm90Codegen(QuadCodegen, MMSm90Codegen):
    def __init__(self, *args):
        super().__init__(*args)
        rows = self.block_m // self.parts
        mma = f"gl.NVMMADistributedLayout([3, 0], [{self.warps}, 1], [16, {rows}, 32])"
        self.layouts["PART_MMA"] = mma
        self.layouts["W_MMA"] = f"gl.DotOperandLayout(0, {mma}, 4)"

    """Sums of a tile's products are ``promoted`` to fp32 where they are scaled, and those of e4m3,
    which the matrix unit does not add in fp32."""

    @property
    def is_promoted(self) -> bool:
        return self.has_groups or self.is_float

    def dequantized(self, stride: Hook, size: Hook, slot: int) -> str:
        """Statements that leave in ``w`` the first operand and in ``scale`` the group's scales."""
        self._slot = slot
        out, code = self.unpacked(stride, size, slot)
        lines = [f"w = {self.w_operand(code)}"]
        if self.has_groups:
            scale = self.of_columns(out.group_scale())
            lines.append(
                f"scale{slot} = gl.convert_layout({scale}, gl.SliceLayout(1, PART_MMA), assert_trivial=True)"
            )
        return "\n".join([*out.lines, *lines])

    @property
    def parts(self) -> int:
        """Products of a K iteration, of BLOCK_M / parts rows each: one runs while the sums of the
        other are promoted."""
        import os

        return int(os.environ.get("W4A8_PARTS", "1")) if self.is_promoted else 1

    def sums(self) -> str:
        if not self.is_promoted:
            return "acc = gl.zeros([BLOCK_N, BLOCK_M], gl.int32, MMA)"
        rows = self.block_m // self.parts
        start = ("0.0", "gl.float32") if self.is_float else (MAGIC_BITS, "gl.int32")
        lines = [f"start = gl.full([BLOCK_N, {rows}], {start[0]}, {start[1]}, PART_MMA)"]
        for i in range(self.parts):
            lines += [f"acc{i} = gl.zeros([BLOCK_N, {rows}], gl.float32, PART_MMA)"]
        return "\n".join(lines)

    def multiplied(self, x: str) -> str:
        if not self.is_promoted:
            return super().multiplied(x)
        how = ", use_acc=False" if self.is_float else ""
        lines = []
        rows = self.block_m // self.parts
        slot = self._slot
        for i in range(self.parts):
            part = (
                x.replace(".permute", f".slice({i * rows}, {rows}).permute")
                if self.parts > 1
                else x
            )
            if slot:
                lines.append(self.added(i, self.parts - 1, slot - 1))
            lines += [f"group{i} = warpgroup_mma(w, {part}, start{how}, is_async=True)"]
        return "\n".join(lines)

    def added(self, i: int, left: int, slot: int) -> str:
        lines = [f"done = warpgroup_mma_wait({left}, deps=(group{i},))"]
        product = "done" if self.is_float else f"(done.to(gl.float32, bitcast=True) - {MAGIC})"
        scale = f" * gl.expand_dims(scale{slot}, 1)" if self.has_groups else ""
        return "\n".join([*lines, f"acc{i} = acc{i} + {product}{scale}"])

    def shift_slots(self, slots: int) -> str:
        lines = []
        if self.is_promoted:
            lines = [self.added(i, self.parts - 1 - i, slots - 1) for i in range(self.parts)]
        return "\n".join([*lines, super().shift_slots(slots)])

    def finished(self) -> str:
        if not self.is_promoted:
            return super().finished()
        if self.parts == 1:
            return "acc = acc0"
        return "\n".join(
            [
                "acc = gl.permute(gl.join(acc0, acc1), (0, 2, 1)).reshape([BLOCK_N, BLOCK_M])",
                "acc = gl.convert_layout(acc, MMA, assert_trivial=True)",
            ]
        )
