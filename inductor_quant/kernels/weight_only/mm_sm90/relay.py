"""Statements of ``weight_only_mm_sm90`` that compute what the relay leaves in a stage for each k,
and that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inductor_quant.kernels.codegen.base import Hook
from inductor_quant.kernels.codegen.digits.statements import DigitStatements, Uses
from inductor_quant.kernels.codegen.digits.tile import is_listed
from inductor_quant.kernels.codegen.statements import Value
from inductor_quant.kernels.problem import Weight
from inductor_quant.kernels.weight_only.digit_tiles import varying
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field


def listed_positions(weight: Weight) -> dict[tuple[AffineIndex, int | None], tuple[int, int]]:
    """The positions that tensors list for each k, of so many: the source and the dimension of one
    of the fields that are there."""
    format, tensors = weight.format, weight.tensors
    operands = [op.operand for op in format.dequant_ops if isinstance(op.operand, Field)]
    return {
        (index, tensors[field.source].shape[dim]): (field.source, dim)
        for field in operands
        if is_listed(format, field)
        for dim, index in enumerate(field.index)
        if index.is_data
    }


def most_lists(weight: Weight) -> int:
    """Numbers that the relay leaves in a stage for each k, at most."""
    fields = [each for each in varying(weight.format) if not is_listed(weight.format, each)]
    return len(fields) + len(listed_positions(weight))


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
