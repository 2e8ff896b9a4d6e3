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
_PLAIN = {"repeats": 1, "gate": ""}
_OPTIONS = {*_PLAIN, "format", "out_dtype"}


def in_order(x: Any, order: Order) -> Any:
    """x [S, K] with K in that order, written once with what computes x."""
    rows, width = x.get_size()
    names = order.format.digits("k")
    places = [1 + names.index(name) for name in order.digits]
    x = lowering_of(aten.view.default)(x, [rows, *map(order.format.radix, names)])
    x = lowering_of(aten.permute.default)(x, [0, *places])
    x = lowering_of(aten.clone.default)(x, memory_format=torch.contiguous_format)
    return lowering_of(aten.view.default)(x, [rows, width])


def is_read_once(node: fx.Node | None) -> bool:
    """Whether one call alone reads the rows that ``node`` computes."""
    return node is not None and len(node.users) == 1


def reader_of(node: fx.Node | None) -> fx.Node | None:
    """The call that alone reads the rows of the call ``node``, which are sorted, as its x."""
    if node is None or not is_read_once(node):
        return None
    [reader] = node.users
    if reader.target is not op.op or reader.args[0] is not node:
        return None
    # Without ids, and rows, a gate and a bias of its own.
    has_others = any(other is not None for other in reader.args[3:])
    options = {**_PLAIN, **reader.kwargs}
    is_plain = all(options[name] == value for name, value in _PLAIN.items())
    return reader if is_plain and not has_others and set(options) == _OPTIONS else None


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
