"""Sorts of experts' ids: their outputs, and the inverses of their order."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from inductor_quant.ops.fusion import expert_routing as ops

from .. import fx_utils
from ..fx_utils import CAST, aten

SORTS = (aten.sort.default, aten.sort.stable)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def is_of_ids(sort: fx.Node) -> bool:
    """Whether integers of one dimension are sorted, the smallest first."""
    stable = ("stable",) if sort.target == aten.sort.stable else ()
    names = ("self", *stable, "dim", "descending")
    ids, *_, descending = fx_utils.arguments(sort, *names)
    value = fx_utils.value(ids)
    is_vector = value.dim() == 1 and value.dtype in _INTEGERS and not descending
    outputs = [user for user in sort.users if user.target is operator.getitem]
    return is_vector and fx_utils.mutated([ids, *outputs]) is None


def outputs_of(sort: fx.Node, number: int) -> list[fx.Node]:
    return [user for user in sort.users if user.args[1] == number]


def inverses_of(order: fx.Node) -> list[fx.Node]:
    """The inverse permutations of ``order``: ``place[order] = 0, 1, 2, ...``, ``sort(order)[1]``,
    and what ``expert_order`` is of."""
    found = []
    if order.target == ops.order_op:
        places: Any = order.args[0]
        found += [user for user in places.users if user.target == CAST]
    for user in order.users:
        if user.target in SORTS and is_of_ids(user):
            found += outputs_of(user, 1)
        elif user.target == aten.index_put.default and _puts_numbers(user, order):
            found.append(user)
    return found


def _puts_numbers(put: fx.Node, order: fx.Node) -> bool:
    into, indices, values, accumulate = fx_utils.arguments(
        put, "self", "indices", "values", "accumulate"
    )
    if list(indices) != [order] or accumulate or values.target != torch.ops.prims.iota.default:
        return False
    numbers = (values.kwargs["start"], values.kwargs["step"], fx_utils.value(values).dtype)
    shapes = (fx_utils.value(each).shape for each in (into, values))
    size = fx_utils.value(order).shape
    is_whole = all(fx_utils.same_shape(shape, size) for shape in shapes)
    return is_whole and numbers == (0, 1, torch.int64)
