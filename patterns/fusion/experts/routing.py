"""Rows are sorted by expert, and the experts of a token added, in kernels of their size.

    order = sort(ids)[1]                           ->   place, ends = expert_places(ids, E)
    ends = cumsum(histc(ids, E, 0, E - 1), 0)           order = expert_order(place)
    place[order] = 0, 1, 2, ...

    sum(x [T, k, N], 1)                            ->   expert_sum(x)

``ends`` are the offsets of experts. Of more ids than ``MAX_IDS``, or of an unknown number, the sort
remains, of the fewest bytes that tell the experts apart: a radix sort passes over each. Ids that
these bytes do not have become one, if there are none or nothing tells their rows apart. (With
ids below 0 ``histc`` leaves rows to other experts than their own; those below -128 become one.)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from inductor_quant.ops import experts, scaled_experts
from inductor_quant.ops.fusion import expert_routing as ops

from ... import fx_utils
from ...fx_utils import CAST, aten
from ...matching.gathered_rows import is_pointwise
from ...matching.sorted_ids import SORTS, inverses_of, is_of_ids, outputs_of
from ...matching.unordered_rows import are_unordered
from ...matching.value_range import value_range
from ...rewrite import add_node, erase_if_dead
from ..row_quant import replace

_CALLS = (experts.op, scaled_experts.op)
_VIEWS = (*fx_utils.RESHAPES, *fx_utils.SQUEEZES)
_END = 2**63 - 1
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
# From the sum over experts up to their product: transformers has six nodes.
_SEARCH_LIMIT = 24


def route_experts(owner: fx.Graph) -> int:
    """Returns how many sorts of ids are counts, or of fewer bytes."""
    calls = [call for op in _CALLS for call in owner.find_nodes(op="call_function", target=op)]
    done = 0
    for call in calls:
        names = [argument.name for argument in call.target._schema.arguments]
        offsets = fx_utils.arguments(call, *names)[names.index("offsets")]
        counted = _counted(offsets) if offsets is not None else None
        done += counted is not None and _count(offsets, *counted)
    return done


def sum_experts(owner: fx.Graph) -> int:
    """Returns how many sums over the experts of a token are marked."""
    sums = owner.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    found = [node for node in sums if _is_of_tokens(node) and _is_of_experts(node)]
    for node in found:
        x, _, keepdim, dtype = fx_utils.arguments(node, "self", "dim", "keepdim", "dtype")
        replace(node, ops.sum_op, x, bool(keepdim), dtype)
    return len(found)


def _counted(offsets: fx.Node) -> tuple[fx.Node, int] | None:
    """The sort, and the number of experts, if ``offsets`` counts what is sorted: ``cumsum(histc(
    sort(ids)[0], E, 0, E - 1), 0)``."""
    node = _before_casts(offsets)
    if node.target != aten.cumsum.default or node.args[1] not in (0, -1):
        return None
    if fx_utils.value(node).dtype not in _EXACT:
        return None
    node = _before_casts(node.args[0])
    if node.target != aten.histc.default:
        return None
    values, bins, low, high = fx_utils.arguments(node, "self", "bins", "min", "max")
    if (low, high) != (0, bins - 1) or fx_utils.same_size(bins, 1):
        return None
    values = _before_casts(values)
    if values.target is not operator.getitem or values.args[1] != 0:
        return None
    sort = values.args[0]
    if sort.target not in SORTS or not is_of_ids(sort):
        return None
    return sort, bins


def _before_casts(node: Any) -> Any:
    """Before casts that keep the numbers of experts, which are few."""
    while node.target == CAST and fx_utils.value(node).dtype in _EXACT:
        node = node.args[0]
    return node


def _count(offsets: fx.Node, sort: fx.Node, bins: int) -> bool:
    ids: Any = sort.args[0]
    (count,) = fx_utils.value(ids).shape
    bounds = [bound for bound in (fx_utils.limit(count), fx_utils.most(count)) if bound is not None]
    if not bounds or min(bounds) > ops.MAX_IDS:
        if fx_utils.value(ids).dtype.itemsize <= ops.key_dtype(bins).itemsize:
            return False
        are_keys = value_range(ids).is_within(*ops.key_range(bins))
        if not are_keys and not are_unordered(sort, offsets):
            return False
        _narrow(sort, bins)
        return True
    with sort.graph.inserting_before(sort):
        found = add_node(sort, ops.places_op, (ids, bins), {})
        short = add_node(sort, aten.slice.Tensor, (found, 0, 0, -bins), {})
        order = add_node(sort, ops.order_op, (short,), {})
        place = add_node(sort, CAST, (short, torch.int64), {})
    for old in outputs_of(sort, 1):
        for user in inverses_of(old):
            _become(user, place)
    with offsets.graph.inserting_before(offsets):
        ends = add_node(offsets, aten.slice.Tensor, (found, 0, -bins, _END), {})
        if (dtype := fx_utils.value(offsets).dtype) != torch.int32:
            ends = add_node(offsets, CAST, (ends, dtype), {})
    _become(offsets, ends)
    _sorted_by(sort, order)
    return True


def _narrow(sort: fx.Node, bins: int) -> None:
    """Sort ids of fewer bytes."""
    with sort.graph.inserting_before(sort):
        keys = add_node(sort, ops.keys_op, (sort.args[0], bins), {})
        new = add_node(sort, sort.target, (keys, *sort.args[1:]), sort.kwargs)
        order = add_node(sort, operator.getitem, (new, 1), {})
    _sorted_by(sort, order)


def _sorted_by(sort: fx.Node, order: fx.Node) -> None:
    """Let ``order`` be that of the ids which ``sort`` sorts."""
    for old in outputs_of(sort, 1):
        _become(old, order)
    for old in outputs_of(sort, 0):
        with old.graph.inserting_before(old):
            values = add_node(old, aten.index.Tensor, (sort.args[0], [order]), {})
        _become(old, values)


def _become(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    erase_if_dead(old)


def _is_of_tokens(node: fx.Node) -> bool:
    x, dims = fx_utils.arguments(node, "self", "dim")
    shape = fx_utils.value(x).shape
    if len(shape) != 3 or list(dims or ()) not in ([1], [-2]):
        return False
    is_few = isinstance(shape[1], int) and shape[1] <= ops.MAX_SUMMED
    return is_few and fx_utils.value(x).dtype.is_floating_point


def _is_of_experts(node: fx.Node) -> bool:
    """Whether what is summed comes from a product of experts, by row."""
    todo, seen = [node], {node}
    while todo and len(seen) < _SEARCH_LIMIT:
        for parent in todo.pop().all_input_nodes:
            if parent.target in _CALLS:
                return True
            is_by_row = parent.target in (*_VIEWS, CAST, aten.index.Tensor) or is_pointwise(parent)
            if is_by_row and parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return False
