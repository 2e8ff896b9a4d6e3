"""Rows that nothing tells apart by where a sort has put them.

A sort by fewer bytes takes ids that no expert has for equal ones. That changes where their rows
are, not what is computed of each, unless something reads rows by their number: a result of the
graph, experts with other offsets, numbers that are added to rows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import experts, scaled_experts
from inductor_quant.ops.fusion import group_reduce, row_reduce

from .. import fx_utils
from ..fx_utils import CAST, aten
from .gathered_rows import is_pointwise
from .sorted_ids import inverses_of, outputs_of

_CALLS = (experts.op, scaled_experts.op)
_VIEWS = (*fx_utils.RESHAPES, *fx_utils.SQUEEZES, aten.unsqueeze.default)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_REDUCTIONS = (aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim)
_OURS = (row_reduce.op, group_reduce.reduce_op, group_reduce.value_op)


def are_unordered(sort: fx.Node, offsets: fx.Node) -> bool:
    """Whether rows in the order of ``sort`` that no expert has by ``offsets`` may change places."""
    return _Walk(sort, offsets).is_right()


class _Walk:
    """Over all that is computed by row from the outputs of a sort.

    rows    nodes whose row follows from the row of others of them
    own     nodes that must be among them, or rows would be computed with their number
    others  nodes that must not
    """

    def __init__(self, sort: fx.Node, offsets: fx.Node) -> None:
        self.offsets = offsets
        orders = outputs_of(sort, 1)
        self.places = {place for order in orders for place in inverses_of(order)}
        self.rows = {*orders, *outputs_of(sort, 0)}
        self.own: set[fx.Node] = set()
        self.others: set[fx.Node] = set()

    def is_right(self) -> bool:
        todo = list(self.rows)
        while todo:
            node = todo.pop()
            for user in _readers(node):
                if self._is_end(user) or user in self.rows:
                    continue
                if not self._is_by_row(user, fx_utils.value(node).shape[0]):
                    return False
                self.rows.add(user)
                todo.append(user)
        for place in self.places:
            for user in place.users:
                source: Any = user.args[0]
                if _gathers(user) != place:
                    return False
                self.own.add(source)
        return self.own <= self.rows and not self.others & self.rows

    def _is_end(self, user: fx.Node) -> bool:
        """Whether rows are in another order behind ``user``, that of tokens, or none."""
        if user.target == aten.index_put.default and user not in self.places:
            into, indices, values = fx_utils.arguments(user, "self", "indices", "values")
            self.own |= {*indices, values}
            self.others.add(into)
            rank = fx_utils.value(into).dim()
            return _is_of_rows(indices) and fx_utils.value(values).dim() == rank
        if user.target == aten.index_add.default:
            into, dim, index, source = fx_utils.arguments(user, "self", "dim", "index", "source")
            self.own |= {index, source}
            self.others.add(into)
            return dim == 0
        is_inverse = user in self.places or (bool(user.users) and self.places >= {*user.users})
        return is_inverse or user.target == aten.histc.default or _gathers(user) in self.places

    def _is_by_row(self, user: fx.Node, size: Any) -> bool:
        """Whether a row of ``user`` is computed from those of nodes, which are noted."""
        value = user.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dim():
            return False
        if not fx_utils.same_size(value.shape[0], size):
            return False
        inputs: list[Any] = [node for node in user.all_input_nodes if fx_utils.is_tensor_node(node)]
        rank = value.dim()
        if user.target in _CALLS:
            op: Any = user.target
            names = [argument.name for argument in op._schema.arguments]
            named = dict(zip(names, fx_utils.arguments(user, *names), strict=True))
            if named["offsets"] is not self.offsets:
                return False
            read = {named[name] for name in ("x", "a", "a_scale") if named.get(name) is not None}
            rows = {named[name] for name in ("rows", "bias_rows") if named.get(name) is not None}
            is_gathered = named["rows"] is not None
            own = rows if is_gathered else rows | read
            self.own |= own
            self.others |= {*inputs} - own
            return is_gathered or (named.get("repeats") or 1) == 1
        if user.target == aten.index.Tensor:
            self.own.add(_gathers(user))
            self.others.add(inputs[0])
            return _gathers(user) is not None
        if user.target in _REDUCTIONS:
            dims: Any = fx_utils.arguments(user, "self", "dim")[1]
            ranks = fx_utils.value(inputs[0]).dim()
            return bool(dims) and all(dim % ranks for dim in dims)
        if user.target == aten.slice.Tensor:
            return fx_utils.arguments(user, "self", "dim")[1] not in (None, 0, -rank)
        if user.target in (*_VIEWS, operator.getitem):  # of a split
            return True
        is_ours = user.target in _OURS and fx_utils.value(inputs[0]).dim() > 1
        for each in inputs:
            shape = fx_utils.value(each).shape
            has_rows = len(shape) == rank or (is_ours and len(shape) > 0)
            is_own = has_rows and fx_utils.same_size(shape[0], size)
            (self.own if is_own else self.others).add(each)
        return is_ours or is_pointwise(user) or user.target == CAST


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The users, in place of a split by columns its parts."""
    for user in node.users:
        dim: Any = (
            fx_utils.arguments(user, "self", "", "dim")[2] if user.target in _SPLITS else None
        )
        if dim is not None and dim % fx_utils.value(node).dim():
            yield from user.users
        else:
            yield user


def _gathers(node: fx.Node) -> Any:
    """The vector of rows that ``node`` gathers; None: it is no such gather."""
    if node.target != aten.index.Tensor:
        return None
    indices: Any = fx_utils.arguments(node, "self", "indices")[1]
    return indices[0] if _is_of_rows(indices) else None


def _is_of_rows(indices: Any) -> bool:
    """Whether numbers of rows are indices, not a mask."""
    if len(indices) != 1 or indices[0] is None:
        return False
    value = fx_utils.value(indices[0])
    return value.dim() == 1 and value.dtype in (torch.int32, torch.int64)
