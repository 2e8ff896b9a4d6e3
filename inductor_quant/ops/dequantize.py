"""The weight that a ``WeightFormat`` describes, evaluated in aten ops: the reference of everything.

``Evaluator`` goes through ``call``, which by default runs the op; the lowering passes Inductor's
own lowerings instead, and so gets the same arithmetic as IR.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_quant.weight_format import Field, Form, Step, WeightFormat

aten, prims = torch.ops.aten, torch.ops.prims

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# A number of 64 bits shifted by as much is its sign, whatever its width was before.
_SIGN = 63
_STEPS = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
}


def dequantize(
    format: WeightFormat, weight: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``W[k, n] = steps(element[k, n])``, [K, N] in ``dtype``, contiguous.

    Integers (elements, bit fields, what indices and offsets are made of) are int64, a shift by an
    amount below 0 or beyond the word gives its sign, as in torch. The element and every operand of
    a step are converted to ``dtype``, and the steps are that type's arithmetic, in order, rounded
    each. So with fp64 the result is the exact weight for all formats that are in use.

    ``format`` must fit the tensors: see ``weight_only.check_format``.
    """
    evaluator = Evaluator(format, weight, weight[0].device)
    return evaluator.weight(dtype).contiguous()


def call_eagerly(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


class Evaluator:
    """Values of a format's fields and steps, each as small as broadcasting to [K, N] allows.

    weight   what the fields' ``source`` counts: tensors, or IR nodes where ``call`` makes IR
    call     (op, *args, **kwargs) -> the op's result
    table    (table, digit) -> ``table[digit]``, int64
    """

    def __init__(
        self,
        format: WeightFormat,
        weight: Sequence[Any],
        device: torch.device,
        call: Callable[..., Any] = call_eagerly,
    ) -> None:
        self.format = format
        self.sources = weight
        self.device = device
        self.call = call
        self._digits: dict[str, Any] = {}
        self._fields: dict[Field, Any] = {}

    def weight(self, dtype: torch.dtype) -> Any:
        """W [K, N] in ``dtype``, not necessarily contiguous."""
        value = self.convert(self.field(self.format.element), dtype)
        value = self.apply(value, self.format.steps, dtype)
        return self.call(aten.expand.default, value, list(self.format.shape))

    def apply(self, value: Any, steps: Sequence[Step], dtype: torch.dtype) -> Any:
        """``steps`` applied to ``value``, both in ``dtype``."""
        for step in steps:
            operand = step.operand
            if isinstance(operand, Field):
                operand = self.convert(self.field(operand), dtype)
            value = self.call(_STEPS[step.kind], value, operand)
        return value

    def convert(self, value: Any, dtype: torch.dtype) -> Any:
        return self.call(prims.convert_element_type.default, value, dtype)

    def field(self, field: Field) -> Any:
        """The field's value: int64, or the tensor's own type where that is no integer."""
        if field not in self._fields:
            self._fields[field] = self._evaluate(field)
        return self._fields[field]

    def _evaluate(self, field: Field) -> Any:
        call, source = self.call, self.sources[field.source]
        value = source
        if not is_float(_dtype_of(source)):
            # Before it is indexed: not all integer types can be, and a copy of a packed tensor is
            # smaller than one of the weight.
            value = self.convert(value, torch.int64)
        if field.index:
            value = call(aten.index.Tensor, value, [self.form(form) for form in field.index])
        if field.width:
            value = call(aten.bitwise_right_shift.Tensor, value, self._shift(field.offset))
            value = self._low_bits(value, field.width)
        if field.signed:
            sign = 1 << field.width - 1  # flipped and subtracted: the bits above it follow
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
            value = self.convert(value, torch.uint8)
            value = call(aten.view.dtype, value, FLOAT8[field.float8])
        return value

    def _low_bits(self, value: Any, width: int) -> Any:
        return self.call(aten.bitwise_and.Scalar, value, (1 << width) - 1)

    def _shift(self, offset: Form) -> Any:
        amount = self.form(offset)
        if not offset.is_data:
            return amount
        call = self.call
        is_outside = call(
            aten.bitwise_or.Tensor,
            call(aten.lt.Scalar, amount, 0),
            call(aten.gt.Scalar, amount, _SIGN),
        )
        return call(aten.where.self, is_outside, self._full(_SIGN), amount)

    def form(self, form: Form) -> Any:
        """The form's value, int64, of two dimensions."""
        call = self.call
        terms = [call(aten.mul.Tensor, self.digit(name), coef) for name, coef in form.linear]
        terms += [self.table(table, self.digit(name)) for name, table in form.tables]
        terms += [call(aten.mul.Tensor, self.field(field), coef) for field, coef in form.fields]
        value = self._full(form.const)
        for term in terms:
            value = call(aten.add.Tensor, value, term)
        return value

    def digit(self, name: str) -> Any:
        """The digit's value at each k [K, 1] or n [1, N]."""
        if name not in self._digits:
            call, format = self.call, self.format
            is_k = name[0] == "k"
            count = math.prod(format.k if is_k else format.n)
            position = call(
                prims.iota.default,
                count,
                start=0,
                step=1,
                dtype=torch.int64,
                device=self.device,
                requires_grad=False,
            )
            high = call(
                aten.div.Tensor_mode, position, format.weight_of(name), rounding_mode="floor"
            )
            digit = call(aten.remainder.Scalar, high, format.radix(name))
            self._digits[name] = call(aten.unsqueeze.default, digit, 1 if is_k else 0)
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
