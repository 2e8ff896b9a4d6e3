"""Rows that the graph chooses of those of a matrix, 0 where a mask says so: what follows when it
becomes arguments. ``gathered_rows.py`` reads an argument that is there."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from .. import fx_utils
from ..fx_utils import aten
from ..match import Derived, Operand
from .value_range import constant


@dataclasses.dataclass(frozen=True)
class Chosen:
    """How rows are made of those of ``source``: those that ``rows`` selects; where ``mask`` [S, 1]
    is true, ``zero``."""

    source: fx.Node
    rows: fx.Node | None = None
    mask: fx.Node | None = None
    zero: fx.Node | None = None

    def nodes(self) -> set[fx.Node]:
        found = (self.rows, self.mask, self.zero)
        return {node for node in found if node is not None}


def ungathered(x: fx.Node) -> Chosen:
    mask = value = None
    if x.target == aten.where.self:
        cond, zero, inner = fx_utils.arguments(x, "condition", "self", "other")
        is_column = fx_utils.is_tensor_node(inner) and fx_utils.same_shape(
            fx_utils.value(cond).shape, (fx_utils.value(x).shape[0], 1)
        )
        is_number = not fx_utils.is_tensor_node(zero) or fx_utils.value(zero).dim() == 0
        is_zero = is_number and constant(zero) == 0
        if is_column and is_zero and inner.target == aten.index.Tensor:
            x, mask, value = inner, cond, zero
    if x.target != aten.index.Tensor:
        return Chosen(x)
    source, indices = fx_utils.arguments(x, "self", "indices")
    [first, *others] = indices
    is_vector = fx_utils.is_tensor_node(first) and fx_utils.value(first).dim() == 1
    is_integer = is_vector and fx_utils.value(first).dtype in (torch.int32, torch.int64)
    if not is_integer or any(others) or fx_utils.value(source).dim() != 2:
        return Chosen(x)
    return Chosen(source, first, mask, value)


def rows_of(node: fx.Node, size: int, times: int, chosen: Chosen) -> Any:
    """A tensor with a vector for each row as an argument: each row ``times``, of these the chosen
    ones, 0 where they are masked."""
    rows = Operand(node, (-1, size))
    if times > 1:
        row = Operand(node, (-1, 1, size))
        rows = Operand(Derived(aten.expand.default, (row, (-1, times, size))), (-1, size))
    if chosen.rows is None:
        return rows
    found = Derived(aten.index.Tensor, (rows, [chosen.rows]))
    if chosen.mask is None:
        return found
    return Derived(aten.where.self, (chosen.mask, chosen.zero, found))
