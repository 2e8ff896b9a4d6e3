"""Triton statements of ``weight_only_medium_m``: unpack packed weights, dequantize in 16 bits.

``(q - z) * s``: the unpacked value minus its base and the zero point is a small integer, exact in
16 bits. Its product with a scale of x's dtype is rounded once, as in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inductor_quant.kernels.codegen.base import Hook, WeightTile
from inductor_quant.kernels.codegen.dialect import Dim, bits
from inductor_quant.kernels.codegen.packed_layout import BASES, PackedLayout
from inductor_quant.kernels.codegen.packed_tile import PackedTile, join, split
from inductor_quant.kernels.codegen.statements import Statements
from inductor_quant.kernels.codegen.unpack_ptx import add_and_scale
from inductor_quant.kernels.codegen.weight import TritonCodegen
from inductor_quant.kernels.problem import Weight
from inductor_quant.spec.weight_format import DequantOp, Field


class MediumMCodegen(TritonCodegen):
    def __init__(self, tile: WeightTile, layout: PackedLayout) -> None:
        super().__init__(tile)
        self.packed = PackedTile(tile.weight, layout, self.block_k, self.block_n)

    def tile(self, stride: Hook, size: Hook) -> str:
        """Statements in the loop that leave the tile at k in ``w`` [BLOCK_N, BLOCK_K]."""
        packed, layout = self.packed, self.packed.layout
        out = Statements(self, stride, size)
        bias = float(layout.bias(BASES[self.x_dtype]))
        zero, scale = zero_and_scale(self.loop_ops)
        if zero is not None and isinstance(zero.operand, Field):
            value = out.operand(zero)
            narrow = f"(-({value.code}) - {bias}).to({self.x_type})"
            shifts = self._like_packed(out, narrow, value.columns)
        else:
            constant = zero.operand if zero is not None else 0.0
            assert not isinstance(constant, Field)
            shifts = [f"tl.full({list(packed.shape)}, {-bias - constant}, {self.x_type})"]
        lines, values = packed.unpacked(self.x_dtype)
        scales = [f"tl.full({list(packed.shape)}, 1.0, {self.x_type})"]
        if scale is not None:
            assert isinstance(scale.operand, Field)
            value = out.field(scale.operand)
            scales = self._like_packed(out, value.code, value.columns)
        assembly = add_and_scale(self.x_dtype)
        for i, name in enumerate(values):
            arguments = (name, shifts[i % len(shifts)], scales[i % len(scales)])
            lines += self.dialect.inline_asm(assembly, [name], arguments, self.x_dtype)
        joined, whole = join(values)
        k: Dim = ("k", packed.packed_k)
        n: Dim = ("n", packed.packed_n)
        fields = bits("f", len(values))
        tile = (k, n) if packed.contiguous == "n" else (n, k)
        target = (n, k, *fields) if layout.axis == "k" else (n, *fields, k)
        dims = (*tile, *reversed(fields))
        w = self.dialect.reordered(whole, dims, target, "[BLOCK_N, BLOCK_K]")
        return "\n".join([*out.lines, *lines, *joined, f"w = {w}"])

    def _like_packed(self, out: Statements, code: str, columns: int) -> list[str]:
        """``code``, a value per column or one for all, as tiles of the packed shape: one tile for
        all values of a word, or one for each."""
        packed, shape = self.packed, list(self.packed.shape)
        if columns == 1:
            return [f"tl.full({shape}, 0.0, {self.x_type}) + {code}"]
        whole = out.assign("c", code)
        if columns < self.block_n:
            repeated = self.dialect.repeat(f"({whole})", (1, columns), 1, self.block_n)
            whole = out.assign("c", repeated)
        n = packed.packed_n
        row = f"[1, {n}]" if packed.contiguous == "n" else f"[{n}, 1]"
        count = packed.layout.count if packed.layout.axis == "n" else 1
        columns_of = [whole] if count == 1 else split(out, whole, count, n)
        return [f"tl.broadcast_to(tl.reshape({each}, {row}), {shape})" for each in columns_of]


def zero_and_scale(ops: Sequence[DequantOp]) -> tuple[DequantOp | None, DequantOp | None]:
    """The op of the zero point and that of the scale; ``ops`` must pass ``supports_ops``."""
    zero = next((op for op in ops if op.kind == "sub"), None)
    scale = next((op for op in ops if op.kind == "mul"), None)
    return zero, scale


def supports_ops(
    ops: Sequence[DequantOp], weight: Weight, layout: PackedLayout, x_dtype: torch.dtype
) -> bool:
    """Whether ``ops`` are at most a small integer zero point and a scale of x's dtype, in this
    order."""
    if [op.kind for op in ops] not in ([], ["sub"], ["mul"], ["sub", "mul"]):
        return False
    zero, scale = zero_and_scale(ops)
    if scale is not None:
        operand = scale.operand
        if not isinstance(operand, Field) or operand.float8:
            return False
        if weight.tensors[operand.source].dtype != x_dtype:
            return False
    if zero is None:
        return True
    base = BASES[x_dtype]
    # The subtrahend, base included, must be an integer that 16 bits hold exactly.
    most = 2 * base.value - layout.bias(base)
    operand = zero.operand
    if not isinstance(operand, Field):
        return operand.is_integer() and 0 <= operand <= most
    if not 0 < operand.width < base.width or operand.signed or operand.float8:
        return False
    return operand.add >= 0 and (1 << operand.width) - 1 + operand.add <= most
