"""K of rows that are written for experts, in the order in which their kernel is faster.

``Kernel.k_order`` names it. What writes x puts it in that order, for nothing: the kernel that
gathers its rows or computes them, or the product before, whose columns are this one's K. Formats
say so: K of the weight is counted in another order, and the columns of the weight before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant.kernels.codegen.digits.order import Order, divided, reordered
from inductor_quant.lowering.select import lowering_of
from inductor_quant.ops import experts as op
from inductor_quant.spec.gate import Gate
from inductor_quant.spec.weight_format import WeightFormat

aten = torch.ops.aten


def in_order(x: Any, order: Order) -> Any:
    """x [S, K] with K in that order, written once with what computes x."""
    rows, width = x.get_size()
    names = order.format.digits("k")
    places = [1 + names.index(name) for name in order.digits]
    x = lowering_of(aten.view.default)(x, [rows, *map(order.format.radix, names)])
    x = lowering_of(aten.permute.default)(x, [0, *places])
    x = lowering_of(aten.clone.default)(x, memory_format=torch.contiguous_format)
    return lowering_of(aten.view.default)(x, [rows, width])


def reader_of(node: fx.Node | None) -> fx.Node | None:
    """The call that alone reads the rows of the call ``node``, which are sorted, as its x."""
    if node is None or len(node.users) != 1:
        return None
    [reader] = node.users
    if reader.target is not op.op or reader.args[0] is not node:
        return None
    _, _, _, *others = reader.args  # without ids, and rows and a bias of its own
    others += [reader.kwargs.get("gate") or None]
    is_plain = all(other is None for other in others) and reader.kwargs.get("repeats", 1) == 1
    return reader if is_plain else None


def columns_in_order(format: WeightFormat, order: Order) -> WeightFormat | None:
    """``paired`` columns, counted so that what is stored of them is K in ``order``; None: they are
    counted by other digits."""
    if format.shape[1] != 2 * order.format.shape[0]:
        return None
    runs = order.runs()
    for low, _ in runs:
        found = divided(format, "n", 2 * low)
        if found is None:
            return None
        format = found
    *stored, pair = format.digits("n")
    places = {name: format.weight_of(name) // 2 for name in stored}
    names = [name for low, high in runs for name in stored if low <= places[name] < high]
    return reordered(format, "n", [*names, pair])


def as_columns(format: WeightFormat, gate: Gate) -> WeightFormat:
    """The inverse of ``paired``."""
    *stored, pair = format.digits("n")
    return reordered(format, "n", [*stored, pair] if gate.is_interleaved else [pair, *stored])
