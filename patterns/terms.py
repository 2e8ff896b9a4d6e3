"""A sum of products, each multiplied by factors of its own: what ``fp8_dequantized`` reads."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from inductor_quant.patterns import graph
from inductor_quant.patterns.epilogue import CAST
from inductor_quant.patterns.graph import aten


@dataclasses.dataclass(frozen=True)
class Term:
    """One product of a sum, and the factors that it is multiplied by: (factor, the mul)."""

    product: fx.Node
    factors: tuple[tuple[fx.Node, fx.Node], ...]


def roots_of(anchor: fx.Node) -> list[fx.Node]:
    """The sums that ``anchor`` may be a term of, the widest first."""
    found: list[fx.Node] = []
    node = anchor
    while (user := graph.single_user(node)) is not None:
        if user.target == aten.add.Tensor:
            found.append(user)
        elif user.target != aten.mul.Tensor and not is_widening(user):
            break
        node = user
    return found[::-1]


def is_widening(node: fx.Node) -> bool:
    return node.target == CAST and graph.value(node).dtype == torch.float32


def terms_of(root: fx.Node) -> list[Term] | None:
    """The scaled products that ``root`` adds up; None where it adds something else."""
    todo, found = [root], []
    while todo:
        node = todo.pop()
        if node.target == aten.add.Tensor and (node is root or graph.single_user(node)):
            given = graph.arguments(node, "self", "other")
            parts = [part for part in given if not isinstance(part, (int, float)) or part != 0]
            if node.kwargs.get("alpha", 1) != 1 or not all(map(graph.is_tensor_node, parts)):
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


def term_of(node: fx.Node) -> Term | None:
    """A product behind factors and casts to fp32; nothing of it is used elsewhere."""
    if not graph.single_user(node):
        return None
    if node.target in (aten.mm.default, aten.bmm.default, aten._int_mm.default):
        return Term(node, ())
    if is_widening(node):
        return term_of(node.args[0])  # type: ignore[arg-type]
    if node.target != aten.mul.Tensor:
        return None
    left, right = graph.arguments(node, "self", "other")
    for inner, factor in ((left, right), (right, left)):
        if not graph.is_tensor_node(inner) or not graph.is_tensor_node(factor):
            continue
        found = term_of(inner)
        if found is not None:
            return Term(found.product, (*found.factors, (factor, node)))
    return None
