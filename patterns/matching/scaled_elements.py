"""Operands as products of a quantized element and its scales, and where each is read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from .. import fx_utils
from ..fx_utils import CAST, aten
from ..products.sum_of_products import Elements
from ..symbolic import Reader
from ..symbolic.expr import Bits, Expr, Load, Op, is_whole
from ..symbolic.index import IndexExpr
from ..symbolic.reader import sizes
from .value_range import constant

BLOCKS = (32, 64, 128, 256, 512, 1024)  # elements along K or N that may share a scale


@dataclasses.dataclass(frozen=True)
class Place:
    """An element of ``node``, at this position in row-major order."""

    node: fx.Node
    position: IndexExpr

    @property
    def count(self) -> int:
        return math.prod(sizes(self.node))


class ElementReader(Reader):
    """Stops at quantized values: how they were computed does not matter. Skips a zero point of 0,
    which a symmetric quantizer may write."""

    def __init__(self, elements: Elements) -> None:
        super().__init__()
        self.elements = elements

    def _read(self, node: fx.Node, index: tuple[IndexExpr, ...]) -> Expr:
        is_computed = node.op == "call_function" and fx_utils.value(node).dtype in self.elements
        if is_computed and node.target in (CAST, aten.clamp.default):
            return self.leaf(node, index)
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and constant(node.args[1]) == 0:
            value: Any = node.args[0]
            if (
                fx_utils.is_tensor_node(value)
                and fx_utils.value(value).dtype == fx_utils.value(node).dtype
            ):
                return self.operand(value, node, index)
        return super()._read(node, index)


def unwound(expr: Expr, elements: Elements) -> tuple[Place | None, list[Place]]:
    """The quantized element and the scales in a product of both."""
    if _is_element(expr, elements):
        return place_of(expr), []
    if isinstance(expr, Op) and expr.name == "cast":
        return unwound(expr.args[0], elements)
    if isinstance(expr, Op) and expr.name == "mul":
        for inner, factor in (expr.args, expr.args[::-1]):
            element, scales = unwound(inner, elements)
            place = place_of(factor)
            if element is not None and place is not None:
                return element, [*scales, place]
    return None, []


def _is_element(expr: Expr, elements: Elements) -> bool:
    if isinstance(expr, Load) or (isinstance(expr, Bits) and is_whole(expr)):
        return fx_utils.value(expr.node).dtype in elements
    return False


def place_of(expr: Expr) -> Place | None:
    while isinstance(expr, Op) and expr.name == "cast" and isinstance(expr.args[0], Load):
        if expr.dtype != torch.float32:
            break
        expr = expr.args[0]  # exact
    if isinstance(expr, Load) or (isinstance(expr, Bits) and is_whole(expr)):
        node, index = expr.node, expr.index
    elif (found := getattr(expr, "at", None)) is not None:
        node, index = found
    else:
        return None
    position = IndexExpr()
    for size, part in zip(sizes(node), index, strict=True):
        position = position * size + part
    return Place(node, position)
