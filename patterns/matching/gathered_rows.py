"""Rows that are gathered: those of a matrix that a tensor selects, or each several times."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from .. import fx_utils
from ..fx_utils import CAST, aten

_VIEWS = (*fx_utils.RESHAPES, *fx_utils.SQUEEZES)
_INTEGERS = (torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Row s is row ``rows[s] // repeats`` of ``source``, ``s // repeats`` without ``rows``; where
    ``mask`` [S, 1] is true it is another one.

    ``inside``: the nodes that are computed from ``source`` on the way."""

    source: fx.Node
    rows: fx.Node | None
    repeats: int
    mask: fx.Node | None
    inside: frozenset[fx.Node]

    def is_like(self, other: Gathered) -> bool:
        """Whether both have the same rows, also those that count from the end."""
        tokens = (fx_utils.value(each.source).shape[0] for each in (self, other))
        same = (self.rows, self.repeats) == (other.rows, other.repeats)
        return same and fx_utils.same_size(*tokens)


def gathered(x: Any) -> Gathered | None:
    """How x [S, K] is gathered; None: it is not, or the graph writes to what it is made of."""
    inside, rows, repeats = {x}, None, 1
    mask: Any = None
    node: fx.Node = _before_views(x, inside)
    if node.target == aten.where.self:
        inner: Any
        mask, _, inner = node.args
        is_of_rows = fx_utils.is_tensor_node(inner) and fx_utils.same_shape(
            fx_utils.value(mask).shape, (fx_utils.value(node).shape[0], 1)
        )
        if not is_of_rows or not _is_of_shape(inner, node):
            return None
        if fx_utils.value(inner).dtype != fx_utils.value(node).dtype:
            return None  # what takes the masked rows' place promotes the others
        node = _before_views(inner, inside)
    if node.target == aten.index.Tensor and (found := _index(node)) is not None:
        inside.add(node)
        node, rows, repeats = found
    elif mask is not None:
        return None
    if (times := _repeated(node, inside)) is not None:
        node, repeats = times[0], repeats * times[1]
    if rows is None and repeats == 1:
        return None
    widths = (fx_utils.value(each).shape[-1] for each in (node, x))
    if not fx_utils.same_size(*widths):
        return None  # the rows are one row of x
    read = [each for each in (node, *inside, rows, mask) if each is not None]
    if fx_utils.mutated(read) is not None:
        return None
    return Gathered(node, rows, repeats, mask, frozenset(inside))


def _before_views(node: Any, inside: set[fx.Node]) -> Any:
    """Before views that keep the rows of a matrix."""
    while node.target in _VIEWS:
        before = node.args[0]
        if not fx_utils.same_shape(*map(_squeezed, (before, node))):
            break
        inside.add(node)
        node = before
    inside.add(node)
    return node


def _index(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """The matrix, the rows and the repeats of ``matrix[rows // repeats]``."""
    source, indices = fx_utils.arguments(node, "self", "indices")
    [rows, *others] = indices
    is_vector = fx_utils.is_tensor_node(rows) and fx_utils.value(rows).dim() == 1
    if not is_vector or any(others) or fx_utils.value(source).dim() != 2:
        return None
    if fx_utils.value(rows).dtype not in _INTEGERS:
        return None
    if rows.target == aten.div.Tensor_mode and rows.kwargs.get("rounding_mode") == "floor":
        numerator, divisor = rows.args
        is_whole = isinstance(divisor, int) and divisor > 0
        if is_whole and fx_utils.value(numerator).dtype in _INTEGERS:
            return source, numerator, divisor
    return source, rows, 1


def _repeated(node: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, int] | None:
    """``x [T, K]`` or [T, 1, K] and n, of ``x.expand(T, n, K)`` as a matrix."""
    nodes, wide = {node}, node
    while wide.target in (*fx_utils.RESHAPES, aten.clone.default):
        wide = wide.args[0]  # type: ignore[assignment]
        nodes.add(wide)
    if wide.target != aten.expand.default:
        return None
    source: Any = wide.args[0]
    shape, before = fx_utils.value(wide).shape, fx_utils.value(source).shape
    if len(shape) != 3 or len(before) != 3 or not fx_utils.is_one(before[1]):
        return None
    tokens, repeats, width = shape
    is_repeated = isinstance(repeats, int) and repeats > 0
    if not is_repeated or not fx_utils.same_shape(before, (tokens, 1, width)):
        return None
    flat = [size for size in (tokens * repeats, width) if not fx_utils.is_one(size)]
    if not fx_utils.same_shape(_squeezed(node), flat):
        return None
    inside |= nodes
    return (source.args[0] if _is_matrix_before(source) else source), repeats


def _is_matrix_before(node: fx.Node) -> bool:
    """Whether ``node`` [T, 1, K] is a view of a matrix [T, K]."""
    if node.target not in _VIEWS:
        return False
    tokens, _, width = fx_utils.value(node).shape
    return fx_utils.same_shape(fx_utils.value(node.args[0]).shape, (tokens, width))  # type: ignore[arg-type]


def replaces_rows(call: fx.Node, mask: fx.Node | None) -> bool:
    """Whether the rows in ``mask`` of the result of ``call`` are replaced, behind pointwise ops,
    before anything else reads them."""
    todo, results, replaced = [call], {call}, []
    while todo:
        for user in todo.pop().users:
            if user.op != "call_function" or not _is_of_shape(user, call):
                return False
            if user.target == aten.where.self and user.args[0] is mask:
                replaced.append(user)
            elif user.target in (*_VIEWS, CAST) or is_pointwise(user):
                if user not in results:
                    results.add(user)
                    todo.append(user)
            else:
                return False
    return all(user.args[1] not in results for user in replaced)


def is_pointwise(node: fx.Node) -> bool:
    """Whether an element of the result follows from those at its place."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _is_of_shape(a: fx.Node, b: fx.Node) -> bool:
    if not (fx_utils.is_tensor_node(a) and fx_utils.is_tensor_node(b)):
        return False
    return fx_utils.same_shape(fx_utils.value(a).shape, fx_utils.value(b).shape)


def _squeezed(node: fx.Node) -> list[Any]:
    """The shape without sizes of 1."""
    return [size for size in fx_utils.value(node).shape if not fx_utils.is_one(size)]
