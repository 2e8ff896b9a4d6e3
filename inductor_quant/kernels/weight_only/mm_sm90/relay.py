"""Statements of ``weight_only_mm_sm90`` that compute what the relay leaves in a stage for each k,
and that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.digits.statements import DigitStatements, Uses
from inductor_quant.kernels.codegen.statements import Value
from inductor_quant.spec.weight_format import DequantOp, Field


class OfRelay(DigitStatements):
    """Computes what it leaves in a stage, of the fields loaded into a ``slot``."""

    def __init__(self, codegen: Any, stride: Hook, size: Hook, slot: int) -> None:
        super().__init__(codegen, stride, size, f"r{slot}_", codegen.digits_of_lists())
        self.slot = slot

    def read(self, field: Field) -> tuple[str, int, int]:
        return self.codegen.used(self.codegen.loaded.index(field), self.slot), 1, 1


class OfConsumer(Uses):
    """Reads the operands that the relay has left in a stage."""

    def operand(self, op: DequantOp) -> Value:
        codegen = self.codegen
        if op not in codegen.relayed:
            return super().operand(op)
        i = len(codegen.positions) + codegen.relayed.index(op)
        code = f"gl.convert_layout({of_list(i, self.slot)}, TILE, assert_trivial=True)"
        code = self.assign("f", f"{code}.to(gl.float32, bitcast=True)")
        return Value(code, 1, 1, is_float=True)

    def integer_within(self, op: DequantOp, low: int, high: int) -> str:
        return "" if op in self.codegen.relayed else super().integer_within(op, low, high)

    def exact_product(self, ops: Sequence[DequantOp]) -> str:
        is_there = self.codegen.relays_product
        return self.operand(ops[0]).code if is_there else super().exact_product(ops)


def of_list(i: int, slot: int) -> str:
    """The variable with the ``i``-th of ``lists`` in a K iteration."""
    return f"listed{slot}_at{i}"
