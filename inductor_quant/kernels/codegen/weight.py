"""Codegens of Triton templates: that of the kernels for all formats, and their common base."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inductor_quant.kernels.codegen.base import Codegen, Hook
from inductor_quant.kernels.codegen.statements import Statements, Value
from inductor_quant.spec.weight_format import Field


class TritonCodegen(Codegen):
    def columns(self, stride: Hook, size: Hook) -> str:
        """Statements after the loop that apply the column ops to ``out`` [BLOCK_M, BLOCK_N]."""
        out = Statements(self, stride, size)
        for op in self.column_ops:
            value = out.widen(out.operand(op), 1, self.block_n)
            out.apply_to_sums(op, "out", value.code)
        return "\n".join(out.lines)


class WeightCodegen(TritonCodegen):
    """Dequantizes a tile of any format. ``is_finite``: W never holds an infinity or a NaN;
    ``column``: which column of W is at ``idx_n``."""

    is_finite, column = False, "idx_n"

    @property
    def is_even_k(self) -> bool:
        return self.is_within("k")

    def tile(self, stride: Hook, size: Hook) -> str:
        """Statements in the loop that leave the tile at k in ``w`` [BLOCK_K, BLOCK_N]."""
        out = self.statements(stride, size)
        value = out.widen(self.value(out), self.block_k, self.block_n)
        code = f"{value.code}.to({self.x_type})"
        if 1 in (value.rows, value.columns):
            code = f"tl.broadcast_to({code}, [BLOCK_K, BLOCK_N])"
        out.lines.append(f"w = {code}")
        if not (self.is_even_k or self.is_finite):
            # x is 0 beyond K, but W wraps around there and may be infinite.
            out.lines.append("w = tl.where((k + tl.arange(0, BLOCK_K))[:, None] < K, w, 0.0)")
        return "\n".join(out.lines)

    def statements(self, stride: Hook, size: Hook) -> Statements:
        return Statements(self, stride, size)

    def value(self, out: Statements) -> Value:
        """W at the resolution of its operands, before it becomes x's dtype."""
        value = out.field(self.format.element)
        if self.loop_ops or not self.casts_directly:
            value = out.apply(out.to_float(value), self.loop_ops)
        return value

    def loaded_bytes(self) -> int:
        """Bytes of the weight that one iteration of the loop loads: one pipeline stage."""
        fields = [self.format.element]
        fields += [op.operand for op in self.loop_ops if isinstance(op.operand, Field)]
        total = 0
        for field in _with_nested(fields):
            rows, columns = self.resolution(*field.index)
            total += rows * columns * self.dtypes[field.source].itemsize
        return total


class WholeCodegen(WeightCodegen):
    """The same with all ops, of which none is left to sums: scales become one number before the
    values are multiplied, of which there are more."""

    def value(self, out: Statements) -> Value:
        count = 0  # of the scales at the end, the first of which multiplies
        for op in reversed(self.loop_ops):
            if op.kind not in ("mul", "div"):
                break
            count += 1
        ops = self.loop_ops[len(self.loop_ops) - count :]
        if count < 2 or ops[0].kind != "mul":
            return super().value(out)
        value = out.apply(out.to_float(out.field(self.format.element)), self.loop_ops[:-count])
        scale = out.apply(out.operand(ops[0]), ops[1:])
        rows, columns = max(value.rows, scale.rows), max(value.columns, scale.columns)
        value, scale = (out.widen(each, rows, columns) for each in (value, scale))
        code = out.assign("f", f"{value.code} * {scale.code}")
        return Value(code, rows, columns, is_float=True)


class IntegerCodegen(WeightCodegen):
    """The same of an int8 weight, whose ops are on integers: as int32, without conversions."""

    is_finite = True

    def value(self, out: Statements) -> Value:
        value = out.field(self.format.element)
        code = out.assign("b", f"{value.code}.to(tl.int32)")
        return out.integers(dataclasses.replace(value, code=code), self.loop_ops)


def _with_nested(fields: Sequence[Field]) -> list[Field]:
    todo, found = list(fields), []
    while todo:
        field = todo.pop()
        if field not in found:
            found.append(field)
            todo.extend(field.nested)
    return found
