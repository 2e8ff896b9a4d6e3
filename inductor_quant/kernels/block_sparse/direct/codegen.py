"""Gluon statements of ``block_sparse_direct``: layouts, and values of the words that were loaded.

A warp has units of its own: UNIT columns of a block, BLOCK_N of its rows. A lane holds LANE
neighbours along K of a row, which it loads at once, and of x the same k.
"""

from __future__ import annotations

import dataclasses

import torch

from inductor_quant.kernels.codegen.byte_layout import ByteLayout
from inductor_quant.kernels.codegen.dialect import Dim
from inductor_quant.kernels.codegen.gluon_columns import Gluon
from inductor_quant.kernels.codegen.gluon_layout import layout, positions, summed_outputs
from inductor_quant.kernels.codegen.unpack_ptx import (
    Assembly,
    ByteConversion,
    assembly,
    convert_bytes,
)
from inductor_quant.kernels.config import GemmConfig

UNIT, LANE = 32, 8
G: Dim = ("g", 8)
T: Dim = ("t", UNIT // LANE)
WORD_AS_HALVES = Assembly("mov.b32 $0, $1;", "=r,r,r", pack=2)


class BlockSparseDirectCodegen:
    """``str`` is what the statements depend on."""

    def __init__(self, config: GemmConfig, x_dtype: torch.dtype, stored: torch.dtype) -> None:
        self.block_n, self.warps = config.block_n, config.num_warps
        self.block_m, self.units = config.block_m, config.block_k // UNIT
        self.x_dtype, self.stored = x_dtype, stored
        self.per_word = 4 // stored.itemsize
        self.words = UNIT // self.per_word
        w: Dim = ("w", self.warps)
        units = (("u", self.units // self.warps), w)
        rows = (("b", self.block_n // G[1]), G)
        neighbours: Dim = ("v", LANE // self.per_word)
        lanes = (T, G)
        self.layouts = {
            "W_READ": layout((units, rows, (T, neighbours)), lanes=lanes, warps=(w,)),
            "W_VALUES": layout(
                (units, rows, (T, neighbours), (("e", self.per_word),)), lanes=lanes, warps=(w,)
            ),
            "X_READ": layout(
                (units, (("a", self.block_m // G[1]), G), (T, ("v", LANE))), lanes=lanes, warps=(w,)
            ),
        }
        columns = (("n", self.block_n),)
        partials, stored_layout, _ = summed_outputs(self.warps, self.block_m, columns, columns)
        self.layouts |= {"PARTIALS": partials, "STORED": stored_layout}
        self.dialect = Gluon(stored_layout)

    def __str__(self) -> str:
        return repr(f"{self.stored} as {self.x_dtype}".replace("torch.", ""))

    __repr__ = __str__

    @property
    def factor(self) -> int:
        """What the values are divided by."""
        return self._conversion.factor if self.stored == torch.int8 else 1

    @property
    def _conversion(self) -> ByteConversion:
        signed = ByteLayout("u8", (0,), 8, True, -128, 1, 1, 0, (), 1)
        return convert_bytes(signed, self.x_dtype)

    def constants(self) -> str:
        lines = [f"{name}: gl.constexpr = {each}" for name, each in self.layouts.items()]
        mma = f"gl.NVMMADistributedLayout([2, 0], [{self.warps}, 1, 1], [1, 16, 8])"
        lines += [
            f"MMA: gl.constexpr = {mma}",
            f"W_MMA: gl.constexpr = gl.DotOperandLayout(0, MMA, {LANE})",
            f"X_MMA: gl.constexpr = gl.DotOperandLayout(1, MMA, {LANE})",
            "X_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])",
            "PARTIALS_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 2, 0])",
        ]
        return "\n".join(lines)

    def position(self, of: str, axis: int) -> str:
        """Positions along an axis of a tensor with layout ``of``, rank 3."""
        sizes = {
            "W_READ": (self.units, self.block_n, self.words),
            "X_READ": (self.units, self.block_m, UNIT),
            "MMA": (self.units, self.block_n, self.block_m),
        }
        return positions(of, 3, axis, sizes[of][axis])

    def values(self) -> str:
        """Statements that leave in ``w`` the values of the words ``words``, over ``factor``."""
        shape = [self.units, self.block_n, self.words, self.per_word]
        given = "gl.convert_layout(words, gl.SliceLayout(3, W_VALUES), assert_trivial=True)"
        zeros = f"gl.full({shape}, 0, gl.int32, W_VALUES)"
        word = f"gl.broadcast(gl.expand_dims({given}, 3), {zeros})[0]"
        dtype = self.x_dtype
        if self.stored.itemsize == 2:
            found = WORD_AS_HALVES
        elif self.stored == torch.int8:
            found = dataclasses.replace(self._conversion.assembly, constraints="=r,=r,r,r,r,r")
        else:
            found, dtype = _float8_word(), torch.float16
        lines = self.dialect.inline_asm(found, ["w"], [word], dtype)
        if dtype != self.x_dtype:
            lines.append(f"w = w.to(gl.float32).to({self.dialect.type(self.x_dtype)})")
        whole = f"gl.reshape(w, [{self.units}, {self.block_n}, {UNIT}])"
        return "\n".join([*lines, f"w = {whole}"])


def _float8_word() -> Assembly:
    """fp16 of the four e4m3 in a word, exactly."""
    lines = [
        ".reg .b16 h;",
        "cvt.u16.u32 h, $2;",
        "shr.u32 t, $2, 16;",
        "cvt.rn.f16x2.e4m3x2 $0, h;",
        "cvt.u16.u32 h, t;",
        "cvt.rn.f16x2.e4m3x2 $1, h;",
    ]
    return assembly(lines, "t", 4, pack=4)
