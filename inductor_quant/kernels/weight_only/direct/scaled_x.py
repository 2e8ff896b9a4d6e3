"""x times scales that change with every k, where a tile's columns share them.

HQQ groups along N: each k has a scale and a zero point of its own, and 64 columns have the same.
So 16 rows of x are scaled instead of 64 of W::

    sum over k of x[m, k] * (w[k, n] - zero[k]) * scale[k]
        = sum over k of x'[m, k] * w[k, n]  -  sum over k of x'[m, k] * zero[k]

x' is x times the scale, rounded to x's dtype. W stays integers, and the second sum, the same for
all columns, is one tile of the MMA.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.digits.statements import DigitStatements
from inductor_quant.kernels.codegen.gluon_layout import positions
from inductor_quant.kernels.codegen.unpack_ptx import product
from inductor_quant.spec.weight_format import Field, WeightFormat

LAYOUT = "gl.SliceLayout(1, X_READ)"  # of [warps, slice of K]


class ScaledX:
    """Gluon statements about the ``x_ops`` of a ``DirectCodegen``: a scale, or a zero point and a
    scale."""

    def __init__(self, codegen: Any) -> None:
        self.codegen, self.count = codegen, len(codegen.x_ops)

    def start(self, stride: Hook, size: Hook) -> list[str]:
        """Statements that leave in ``of_k_at<i>`` the addresses of the ``i``-th operand at each k
        of the first slice."""
        codegen = self.codegen
        lines = [f"of_k_warps = {self._positions(0, codegen.warps)}"]
        out = DigitStatements(codegen, stride, size, "k", codegen.digits("", "n"))
        for i, op in enumerate(codegen.x_ops):
            found = along_k(codegen.format, op.operand)
            assert found is not None
            field, dim, step = found
            pointer, _, _ = out.pointer(field)
            lines += [
                *out.lines,
                f"of_k_step{i} = {stride(codegen.sources[field.source], dim)} * {step}",
                f"of_k_at{i} = {pointer} + {self._positions(1, codegen.tile_k)} * of_k_step{i}",
            ]
            out.lines.clear()
        return lines

    def load(self, k_iter: str) -> list[str]:
        """Statements that load the operands of an iteration; beyond K, the last ones."""
        codegen = self.codegen
        at = f"first_slice + ({k_iter}) * {codegen.warps} + of_k_warps"
        if not codegen.is_even:
            at = f"gl.minimum({at}, {codegen.slices - 1})"
        return [
            f"of_k_ahead{i} = gl.load(of_k_at{i} + ({at}) * {codegen.tile_k} * of_k_step{i})"
            for i in range(self.count)
        ]

    def keep(self) -> list[str]:
        """Statements that keep what was loaded while the next operands are loaded."""
        return [f"of_k{i} = of_k_ahead{i}" for i in range(self.count)]

    def scaled(self) -> list[str]:
        """Statements that scale ``x``, and add its products with zero points to ``x_sums``."""
        codegen = self.codegen
        x = "gl.convert_layout(x, X_READ)" if codegen.x_is_shared else "x"
        scale = f"gl.broadcast({x}, gl.expand_dims(of_k{self.count - 1}, 1))[1]"
        made = product(codegen.x_dtype)
        lines: list[str] = codegen.dialect.inline_asm(made, ["x"], [x, scale], codegen.x_dtype)
        if self.count == 1:
            return lines
        shape = [codegen.warps, codegen.tile_k]
        dims, target = (
            (*codegen.warp_dims, *each) for each in (codegen.k_dims, codegen.mma_k_dims)
        )
        zero = codegen.dialect.reordered("of_k0", dims, target, str(shape))
        zero = f"gl.convert_layout({zero}, gl.SliceLayout(1, W_MMA), assert_trivial=True)"
        whole = f"gl.full({codegen.mma_rows_shape}, 0.0, {codegen.x_type}, W_MMA)"
        zero = f"gl.broadcast(gl.expand_dims({zero}, 1), {whole})[0]"
        return [*lines, f"x_sums = mma_v2({zero}, {codegen.x_operand('x')}, x_sums)"]

    def _positions(self, axis: int, count: int) -> str:
        return positions(LAYOUT, 2, axis, count)


def along_k(format: WeightFormat, field: Field) -> tuple[Field, int, int] | None:
    """The field at k = 0, the dimension of its tensor that k counts through, and in what steps;
    None if it does not."""
    weights = {name: format.weight_of(name) for name in format.digits("k")}
    found = list[tuple[int, dict[str, int]]]()
    for dim, index in enumerate(field.index):
        if index.is_data or index.tables or index.fields:
            return None
        if steps := {name: coef for name, coef in index.linear if name in weights}:
            found.append((dim, steps))
    if len(found) != 1 or field.width or field.float8:
        return None
    [(dim, steps)] = found
    per_k = {steps.get(name, 0) / weight for name, weight in weights.items()}
    if len(per_k) != 1 or not (step := per_k.pop()).is_integer():
        return None
    of_n = tuple(item for item in field.index[dim].linear if item[0] not in weights)
    at_0 = dataclasses.replace(field.index[dim], linear=of_n)
    indices = (*field.index[:dim], at_0, *field.index[dim + 1 :])
    return dataclasses.replace(field, index=indices), dim, int(step)
