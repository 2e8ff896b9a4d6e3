"""Splits a sum of scaled products into terms, for ``fp8_dequantized``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..symbolic.index import IndexExpr, Space, Unsupported
from ..symbolic.reader import At, sizes

Elements = frozenset[torch.dtype]
# The argument names up to the two factors.
PRODUCTS = {
    aten.mm.default: ("self", "mat2"),
    aten.addmm.default: ("self", "mat1", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten._int_mm.default: ("self", "mat2"),
}
# Nodes between an operand and its quantized values: views, casts, multiplications by scales.
_SEARCH_LIMIT = 24
VIEWS = (*fx_utils.RESHAPES, aten.permute.default)


@dataclasses.dataclass(frozen=True)
class Term:
    """One product of a sum, and its factors as (factor, mul node)."""

    product: fx.Node
    factors: tuple[tuple[fx.Node, fx.Node], ...]


def operands_of(product: fx.Node) -> tuple[Any, Any]:
    *_, x, w = fx_utils.arguments(product, *PRODUCTS[product.target])  # type: ignore[index]
    return x, w


def comes_from(node: fx.Node, elements: Elements) -> bool:
    """A cheap test whether ``node`` depends on a tensor of these dtypes."""
    todo, seen = [node], {node}
    while todo and len(seen) < _SEARCH_LIMIT:
        current = todo.pop(0)
        value = current.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype in elements:
            return True
        if current.target in PRODUCTS:
            continue
        fresh = [parent for parent in current.all_input_nodes if parent not in seen]
        todo += fresh
        seen.update(fresh)
    return False


def roots_of(anchor: fx.Node) -> list[fx.Node]:
    """The sums that ``anchor`` may be a term of, the widest first."""
    found: list[fx.Node] = []
    node = anchor
    while (user := fx_utils.single_user(node)) is not None:
        if user.target == aten.add.Tensor:
            found.append(user)
        elif user.target != aten.mul.Tensor and not is_widening(user):
            break
        node = user
    return found[::-1]


def is_widening(node: fx.Node) -> bool:
    return node.target == CAST and fx_utils.value(node).dtype == torch.float32


def terms_of(root: fx.Node) -> list[Term] | None:
    """The scaled products that ``root`` sums; None if it sums anything else."""
    todo, found = [root], []
    while todo:
        node = todo.pop()
        if node.target == aten.add.Tensor and (node is root or fx_utils.single_user(node)):
            given = fx_utils.arguments(node, "self", "other")
            parts = [part for part in given if not isinstance(part, (int, float)) or part != 0]
            if node.kwargs.get("alpha", 1) != 1 or not all(map(fx_utils.is_tensor_node, parts)):
                return None
            todo += parts
        elif _is_zero(node):
            continue
        else:
            term = term_of(node)
            if term is None:
                return None
            found.append(term)
    return found


def _is_zero(node: fx.Node) -> bool:
    return node.target == aten.full.default and node.args[1] in (0, 0.0)


def term_of(node: fx.Node, views: tuple[Any, ...] = ()) -> Term | None:
    """The product before factors, casts to fp32 and ``views``, each with a single user."""
    if not fx_utils.single_user(node):
        return None
    if node.target in (aten.mm.default, aten.bmm.default, aten._int_mm.default):
        return Term(node, ())
    if is_widening(node) or node.target in views:
        return term_of(node.args[0], views)  # type: ignore[arg-type]
    if node.target != aten.mul.Tensor:
        return None
    left, right = fx_utils.arguments(node, "self", "other")
    for inner, factor in ((left, right), (right, left)):
        if not fx_utils.is_tensor_node(inner) or not fx_utils.is_tensor_node(factor):
            continue
        found = term_of(inner, views)
        if found is not None:
            return Term(found.product, (*found.factors, (factor, node)))
    return None


def positions(product: fx.Node, index: At, space: Space) -> dict[fx.Node, At]:
    """The position of ``product[index]`` in each of the views, casts and factors that follow."""
    node, found = product, {product: index}
    while (user := fx_utils.single_user(node)) is not None:
        if user.target in fx_utils.RESHAPES:
            flat = IndexExpr()
            for size, part in zip(sizes(node), index, strict=True):
                flat = flat * size + part
            try:
                index = space.unflatten(flat, sizes(user))
            except Unsupported:  # of a product that is read in whole blocks
                break
        elif user.target == aten.permute.default:
            _, dims = fx_utils.arguments(user, "self", "dims")
            index = tuple(index[dim] for dim in dims)
        elif not _keeps_places(user) or sizes(user) != sizes(node):
            break
        node = user
        found[node] = index
    return found


def _keeps_places(node: fx.Node) -> bool:
    return is_widening(node) or node.target == aten.mul.Tensor
