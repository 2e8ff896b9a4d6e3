"""Dequantizes the weight of a ``WeightFormat`` in aten ops: the reference of all kernels.

``Evaluator`` runs each op through ``call``. By default that executes it; the lowering passes
Inductor's lowerings instead, and gets the same arithmetic as IR.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_quant.spec.weight_format import TO_INT8, AffineIndex, DequantOp, Field, WeightFormat

aten, prims = torch.ops.aten, torch.ops.prims

INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# The kinds of float8 that are 2**(code - 127), and what they are for the codes 0 and 255.
EXPONENTS = {
    "e8m0": (2.0**-127, math.nan),  # torch.float8_e8m0fnu
    "e8m0_inf": (2.0**-127, math.inf),  # 2.0 ** (code - 127)
    "e8m0_bits": (0.0, math.inf),  # the exponent of an fp32 number
}
_SIGN = 63  # an int64 shifted by this is its sign
_OPS = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
}


def dequantize(
    format: WeightFormat,
    weight: Sequence[torch.Tensor],
    dtype: torch.dtype = torch.float32,
    expert: int | None = None,
) -> torch.Tensor:
    """``W[k, n] = dequant_ops(element[k, n])``, [K, N] in ``dtype``, contiguous; of a stack
    [E, K, N], or W[expert].

    Integers (elements, bit fields, indices, offsets) are int64; a shift below 0 or beyond the word
    gives its sign, as in torch. The element and all operands are converted to ``dtype``, and the
    ops are applied in order in that dtype, each rounded. With fp64 the result is exact for all
    formats in use. ``weight_only.check_format`` checks that ``format`` fits the tensors.
    """
    evaluator = Evaluator(format, weight, weight[0].device, expert=expert)
    return evaluator.weight(dtype).contiguous()


def call_eagerly(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


class Evaluator:
    """Evaluates a format's fields and ops; each value is as small as broadcasting to [K, N] allows.

    weight   the tensors that the fields' ``source`` counts, or IR nodes if ``call`` makes IR
    expert   which weight of a stack; None: all, values are [E, K, N]
    call     (op, *args, **kwargs) -> the op's result
    table    (table, digit) -> ``table[digit]``, int64
    """

    def __init__(
        self,
        format: WeightFormat,
        weight: Sequence[Any],
        device: torch.device,
        call: Callable[..., Any] = call_eagerly,
        expert: int | None = None,
    ) -> None:
        self.format = format
        self.expert = expert
        self.sources = weight
        self.device = device
        self.call = call
        self.shape = [*format.shape]
        if format.e and expert is None:
            self.shape.insert(0, format.experts)
        self._digits: dict[str, Any] = {}
        self._fields: dict[Field, Any] = {}

    def weight(self, dtype: torch.dtype) -> Any:
        """W [K, N], or [E, K, N], in ``dtype``, not necessarily contiguous."""
        value = self.convert(self.field(self.format.element), dtype)
        value = self.apply(value, self.format.dequant_ops, dtype)
        return self.call(aten.expand.default, value, self.shape)

    def apply(self, value: Any, ops: Sequence[DequantOp], dtype: torch.dtype) -> Any:
        """``ops`` applied to ``value``, all in ``dtype``."""
        for op in ops:
            if op.kind in TO_INT8:
                value = self._as_int8(value, op.kind)
                continue
            operand = op.operand
            if isinstance(operand, Field):
                operand = self.convert(self.field(operand), dtype)
            value = self.call(_OPS[op.kind], value, operand)
        return value

    def _as_int8(self, value: Any, kind: str) -> Any:
        """``value``, a float, as ``DequantOp`` says."""
        if kind == "round":
            rounded = self.call(aten.round.default, value)
            return self.call(
                aten.clamp_max.default, self.call(aten.clamp_min.default, rounded, -128), 127
            )
        low = self.convert(self.convert(value, torch.int32), torch.int8)
        return self.convert(low, _dtype_of(value))

    def convert(self, value: Any, dtype: torch.dtype) -> Any:
        return self.call(prims.convert_element_type.default, value, dtype)

    def field(self, field: Field) -> Any:
        """The field's value: int64, or the tensor's dtype if that is a float."""
        if field not in self._fields:
            self._fields[field] = self._evaluate(field)
        return self._fields[field]

    def _evaluate(self, field: Field) -> Any:
        call = self.call
        if field.is_position:
            value = self.index(field.index[0])
            value = call(aten.div.Tensor_mode, value, field.divisor, rounding_mode="floor")
            value = call(aten.remainder.Scalar, value, field.modulus)
            return self.table(field.table, value) if field.table else value
        index = [self.index(each) for each in field.index]
        value = self.read(self.sources[field.source], index)
        if field.width:
            value = call(aten.bitwise_right_shift.Tensor, value, self._shift(field.offset))
            value = self._low_bits(value, field.width)
        if field.high:
            factor = 1 << field.width
            above = call(aten.mul.Tensor, self.field(field.high), factor)
            value = call(aten.add.Tensor, value, above)
        if field.signed:
            sign = 1 << field.width - 1  # flipped and subtracted: sign extension
            value = call(aten.bitwise_xor.Scalar, value, sign)
            value = call(aten.sub.Tensor, value, sign)
        if field.add:
            value = call(aten.add.Tensor, value, field.add)
        if field.wrap:
            value = self._low_bits(value, field.width)
        if field.size:
            from_end = call(aten.add.Tensor, value, field.size)
            value = call(aten.where.self, call(aten.lt.Scalar, value, 0), from_end, value)
        if field.float8:
            value = self._float8(value, field.float8)
        if field.minus:
            value = call(aten.sub.Tensor, value, self.field(field.minus))
            value = self.convert(self.convert(value, INTEGERS[field.bits]), torch.int64)
        return value

    def read(self, source: Any, index: list[Any]) -> Any:
        """The elements of a tensor at ``index``, integers as int64."""
        if not is_float(_dtype_of(source)):
            # Before indexing, which some integer dtypes lack; the packed tensor is also smaller.
            source = self.convert(source, torch.int64)
        return self.call(aten.index.Tensor, source, index) if index else source

    def _float8(self, code: Any, kind: str) -> Any:
        call = self.call
        if kind not in EXPONENTS:
            return call(aten.view.dtype, self.convert(code, torch.uint8), FLOAT8[kind])
        first, last = EXPONENTS[kind]
        one = 1 << 23  # of an exponent of fp32
        bits = call(aten.mul.Tensor, code, one)
        if first:  # half of the smallest number that has an exponent
            bits = call(aten.clamp_min.default, bits, one // 2)
        if math.isnan(last):
            nan = self._full(255 * one + one // 2)
            bits = call(aten.where.self, call(aten.eq.Scalar, code, 255), nan, bits)
        return call(aten.view.dtype, self.convert(bits, torch.int32), torch.float32)

    def _low_bits(self, value: Any, width: int) -> Any:
        return self.call(aten.bitwise_and.Scalar, value, (1 << width) - 1)

    def _shift(self, offset: AffineIndex) -> Any:
        amount = self.index(offset)
        if not offset.is_data:
            return amount
        call = self.call
        is_outside = call(
            aten.bitwise_or.Tensor,
            call(aten.lt.Scalar, amount, 0),
            call(aten.gt.Scalar, amount, _SIGN),
        )
        return call(aten.where.self, is_outside, self._full(_SIGN), amount)

    def index(self, index: AffineIndex) -> Any:
        """The value of an index, int64, of as many dimensions as W."""
        call = self.call
        terms = [call(aten.mul.Tensor, self.digit(name), coef) for name, coef in index.linear]
        terms += [self.table(table, self.digit(name)) for name, table in index.tables]
        terms += [call(aten.mul.Tensor, self.field(field), coef) for field, coef in index.fields]
        value = self._full(index.const)
        for term in terms:
            value = call(aten.add.Tensor, value, term)
        return value

    def digit(self, name: str) -> Any:
        """The digit's value at each k [K, 1] or n [1, N], or e [E, 1, 1] (of one expert [1, 1])."""
        if name not in self._digits and name[0] == "e" and self.expert is not None:
            value = self.expert // self.format.weight_of(name) % self.format.radix(name)
            self._digits[name] = self._full(value)
        if name not in self._digits:
            call, format = self.call, self.format
            count = math.prod(format.radices(name[0]))
            position = call(
                prims.iota.default,
                count,
                start=0,
                step=1,
                dtype=torch.int64,
                device=self.device,
                requires_grad=False,
            )
            unit = format.weight_of(name)
            high = call(aten.div.Tensor_mode, position, unit, rounding_mode="floor")
            digit = call(aten.remainder.Scalar, high, format.radix(name))
            shape = {"k": [-1, 1], "n": [1, -1], "e": [-1, 1, 1]}[name[0]]
            self._digits[name] = call(aten.view.default, digit, shape)
        return self._digits[name]

    def table(self, table: tuple[int, ...], digit: Any) -> Any:
        return torch.tensor(table, dtype=torch.int64, device=self.device)[digit]

    def _full(self, value: int) -> Any:
        return self.call(aten.full.default, [1, 1], value, dtype=torch.int64, device=self.device)


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _dtype_of(source: Any) -> torch.dtype:
    dtype: torch.dtype = source.dtype if isinstance(source, torch.Tensor) else source.get_dtype()
    return dtype
