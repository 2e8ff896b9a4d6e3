"""Lowering of ``inductor_quant::group_reduce`` and ``group_value``: inside the row's kernel.

A norm's row stays in registers, is normalized, reduced again in groups, and quantized: one kernel
that reads each row once. Inductor alone makes two, one that reduces rows and one that reduces
groups, and both read the row.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from inductor_quant import fallback
from inductor_quant._compat import group_reduce as groups
from inductor_quant._compat import inductor as compat
from inductor_quant.lowering.fusion.row_quant import absolute_bits, from_bits
from inductor_quant.lowering.select import lowering_of
from inductor_quant.ops.fusion import group_reduce as op

aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default


@fallback.lowering(op.reduce_op)
def lower_reduce(x: Any, kind: str, size: int) -> Any:
    if not _takes(x, size):
        return _spread(x, kind, size)
    value = lowering_of(cast)(x, torch.float32)
    if kind == "absmax":
        value = from_bits(groups.reduce(absolute_bits(value), "max", size))
    else:
        value = groups.reduce(value, kind, size)
    return lowering_of(cast)(value, x.get_dtype())


@fallback.lowering(op.value_op)
def lower_value(x: Any, size: int, along_rows: bool = False) -> Any:
    if _takes(x, size):
        return groups.value(x, size, along_rows=along_rows)
    *rows, k = x.get_size()
    value = lowering_of(aten.reshape.default)(x, [math.prod(rows), k])
    value = lowering_of(aten.slice.Tensor)(value, 1, 0, k, size)
    value = lowering_of(aten.permute.default)(value, [1, 0]) if along_rows else value
    value = lowering_of(aten.clone.default)(value)
    compat.realize(value)  # fixes the contiguous layout
    return lowering_of(aten.permute.default)(value, [1, 0]) if along_rows else value


def _takes(x: Any, size: int) -> bool:
    length = compat.known_int(x.get_size()[-1])
    return length is not None and compat.runs_triton(x.get_device()) and groups.takes(length, size)


def _spread(x: Any, kind: str, size: int) -> Any:
    """The group reduction in kernels of its own: reduce, then expand."""
    *rows, k = x.get_size()
    tile = [*rows, k // size, size]
    x = lowering_of(aten.reshape.default)(x, tile)
    if kind == "absmax":
        x, kind = lowering_of(aten.abs.default)(x), "amax"
    most = lowering_of(aten.expand.default)(lowering_of(op.KINDS[kind])(x, [-1], True), tile)
    return lowering_of(aten.reshape.default)(most, [*rows, k])
