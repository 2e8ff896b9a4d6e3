"""Lowering of ``inductor_quant::group_reduce`` and ``group_value``: within the kernel of the rows.

What a norm reads to reduce its rows stays in registers, is normalized, reduced again in groups and
quantized: one kernel that reads each row once, where Inductor makes two that both read it, since
one of them reduces rows and the other groups.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant import _group_reduce_compat as groups
from inductor_quant import _torch_compat as compat
from inductor_quant.lowering.common import lowering_of
from inductor_quant.lowering.row_reduce import absolute_bits, number_of
from inductor_quant.ops import group_reduce as op

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default


@compat.register_lowering(op.reduce_op, type_promotion_kind=None)
def lower_reduce(x: Any, kind: str, size: int) -> Any:
    if not _takes(x, size):
        return _spread(x, kind, size)
    number = lowering_of(cast)(x, torch.float32)
    if kind == "absmax":
        number = number_of(groups.reduce(absolute_bits(number), "max", size))
    else:
        number = groups.reduce(number, kind, size)
    return lowering_of(cast)(number, x.get_dtype())


@compat.register_lowering(op.value_op, type_promotion_kind=None)
def lower_value(x: Any, size: int, along_rows: bool = False) -> Any:
    if _takes(x, size):
        return groups.value(x, size, along_rows=along_rows)
    *rows, k = x.get_size()
    value = lowering_of(aten.reshape.default)(x, [math.prod(rows), k])
    value = lowering_of(aten.slice.Tensor)(value, 1, 0, k, size)
    value = lowering_of(aten.permute.default)(value, [1, 0]) if along_rows else value
    value = lowering_of(aten.clone.default)(value)
    compat.realize(value)  # contiguous, and so it stays
    return lowering_of(aten.permute.default)(value, [1, 0]) if along_rows else value


def _takes(x: Any, size: int) -> bool:
    length = compat.known_int(x.get_size()[-1])
    return length is not None and compat.runs_triton(x.get_device()) and groups.takes(length, size)


def _spread(x: Any, kind: str, size: int) -> Any:
    """As kernels of their own: reduce, and repeat."""
    *rows, k = x.get_size()
    tile = [*rows, k // size, size]
    x = lowering_of(aten.reshape.default)(x, tile)
    if kind == "absmax":
        x, kind = lowering_of(aten.abs.default)(x), "amax"
    most = lowering_of(aten.expand.default)(lowering_of(op.KINDS[kind])(x, [-1], True), tile)
    return lowering_of(aten.reshape.default)(most, [*rows, k])
