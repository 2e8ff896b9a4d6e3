"""Gluon statements of ``weight_only_mm_sm90``: W goes through shared memory."""

from __future__ import annotations

from typing import Any

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import Dim
from inductor_quant.kernels.codegen.digits import DigitCodegen, Uses
from inductor_quant.kernels.codegen.gluon_columns import copy_layout
from inductor_quant.kernels.codegen.gluon_layout import layout
from inductor_quant.kernels.codegen.tile_digits import TilePlan
from inductor_quant.kernels.codegen.words import WordView

T: Dim = ("t", 4)


class MMSm90Codegen(DigitCodegen):
    def __init__(
        self, tile: WeightTile, view: WordView, plan: TilePlan, n_order: list[str]
    ) -> None:
        super().__init__(tile, view, plan, n_order)
        # Bits of n as in memory, and as rows of the MMA: blocks, warps, halves of 16, and 8 lanes.
        names: tuple[Dim, ...] = tuple((f"n{bit}", 2) for bit in range(len(plan.rows)))
        rows = [names[bit] for bit in plan.rows]
        self.column_dims, self.mma_dims = names[::-1], tuple(rows[::-1])
        w = rows[4 : 4 + self.warps.bit_length() - 1]
        m: tuple[Dim, ...] = (("m", self.block_m // 8), T, ("pair", 2))
        placed: Any = {"lanes": (T, *rows[:3]), "warps": w}
        self.layouts |= {
            "STORED": layout((m, self.column_dims), **placed),
            "X_COPIED": copy_layout(self.block_k, 8, self.warps),
            "MMA": "gl.NVMMADistributedLayout("
            f"[3, 0], [{self.warps}, 1], [16, {self.block_m}, 16])",
            "X_SHARED": self._shared(self.block_m),
            "W_SHARED": self._shared(self.block_n),
        }

    def _shared(self, rows: int) -> str:
        shape = [rows, self.block_k]
        return f"gl.NVMMASharedLayout.get_default_for({shape}, {self.x_type})"

    def dequantized(self, stride: Hook, size: Hook) -> str:
        """Statements that leave in ``w`` [BLOCK_N, BLOCK_K] the tile of what was loaded."""
        out = Uses(self, stride, size)
        value = out.dequantized()
        k: Dim = ("k", self.block_k)
        code = self.dialect.reordered(
            value,
            (*self.column_dims, k),
            (*self.mma_dims, k),
            "[BLOCK_N, BLOCK_K]",
        )
        return "\n".join([*out.lines, f"w = {code}"])

    def in_order(self, value: str) -> str:
        """``value`` [N of the tile, BLOCK_M], its rows as in shared memory, as [BLOCK_M, N]."""
        m: Dim = ("m", self.block_m)
        dims, target = (*self.mma_dims, m), (m, *self.column_dims)
        return self.dialect.reordered(value, dims, target, f"[BLOCK_M, {self.block_n}]")
