"""Triton statements of ``weight_only_small_m``: unpack packed weights, multiply, scale the sums.

Within a group along K all dequantization ops are linear with the same operands, so they are applied
to the sum over the group: ``sum x * (q - z) * s = (sum x*q - z * sum x) * s``. The MMA gets the
unpacked values with the bias of their unpacking, which ``sum x`` also removes.
"""

from __future__ import annotations

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import Dim
from inductor_quant.kernels.codegen.packed_layout import BASES, PackedLayout
from inductor_quant.kernels.codegen.packed_tile import PackedTile, join, tile_order
from inductor_quant.kernels.codegen.statements import Statements
from inductor_quant.kernels.codegen.weight import TritonCodegen


class SmallMCodegen(TritonCodegen):
    def __init__(self, tile: WeightTile, layout: PackedLayout) -> None:
        super().__init__(tile)
        self.packed = PackedTile(tile.weight, layout, self.block_k, self.block_n)
        order = tile_order(
            layout,
            block_k=self.block_k,
            block_n=self.block_n,
            warps=self.warps,
            contiguous=self.packed.contiguous,
        )
        assert order is not None, tile.config
        self.order = order
        self.bias = layout.bias(BASES[self.x_dtype])

    @property
    def needs_sum(self) -> bool:
        """Whether the sum of x over a block is used: not if exact values are only scaled."""
        return self.bias != 0 or any(op.kind in ("add", "sub") for op in self.loop_ops)

    def tile(self) -> str:
        """Statements in the loop that leave the unpacked values at k in ``w`` [BLOCK_N, BLOCK_K],
        and ``x`` [BLOCK_M, BLOCK_K] in the same order."""
        lines, values = self.packed.unpacked(self.x_dtype)
        joined, whole = join(values)
        order, m = self.order, ("m", self.block_m)
        target = (*order.n_mma, *order.k_mma)
        w = self.dialect.reordered(whole, order.unpacked, target, "[BLOCK_N, BLOCK_K]")
        x = self.dialect.reordered("x", (m, *order.k), (m, *order.k_mma), "[BLOCK_M, BLOCK_K]")
        return "\n".join([*lines, *joined, f"w = {w}", f"x = {x}"])

    def scaled(self, stride: Hook, size: Hook) -> str:
        """Statements in the loop that apply the bias and the loop ops to ``sums`` [BLOCK_N,
        BLOCK_M]; ``x_sum`` [1, BLOCK_M]."""
        out = Statements(self, stride, size)
        lines = [f"sums = sums - {float(self.bias)} * x_sum"] if self.bias else []
        for op in self.loop_ops:
            value = out.widen(out.operand(op), 1, self.block_n)
            code = value.code
            if value.columns > 1:
                shape = f"[{self.block_n}, 1]"
                order = self.order
                code = self.dialect.reordered(f"({code})", order.n, order.n_mma, shape)
            if op.kind in ("add", "sub"):
                code += " * x_sum"
            lines.append(f"sums = {self.dialect.apply(op, 'sums', code)}")
        return "\n".join([*out.lines, *lines])

    def in_order(self, value: str) -> str:
        """``value`` [BLOCK_N, BLOCK_M] in natural order of N."""
        m: Dim = ("m", self.block_m)
        dims, target = (*self.order.n_mma, m), (*self.order.n, m)
        return self.dialect.reordered(value, dims, target, "[BLOCK_N, BLOCK_M]")
