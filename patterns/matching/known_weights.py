"""Weights that are computed alike are read once: layers of a model differ in their tensors alone.

Two are alike if the same ops with the same arguments compute them, from tensors of the same dtypes
and shapes, and if the constants that are read by value are equal. Then the second has the format of
the first, with its own nodes in the same places, or is declined for the same reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.spec.decisions import Rejection

from .. import fx_utils
from ..match import Derived
from ..products.matmul_ops import Matmul
from ..symbolic import Reader
from ..symbolic.code_tables import bytes_of
from ..symbolic.pointwise import MAX_CONSTANT
from ..weights.decode import Weight, decode

MAX_NODES = 256  # that compute a weight; behind an activation there is the whole model
MAX_KNOWN = 256
# By what computes a weight: the weight, with places for nodes, and the places that were read; or
# why no attempt has found one.
_KNOWN: dict[Any, tuple[Weight, frozenset[_Place]] | Rejection] = {}


class _Place(str):
    """A node, by its number among those that compute a weight."""


class WeightOf:
    """The weight of one product, whose reading may take several attempts."""

    def __init__(self) -> None:
        self._places: dict[fx.Node, _Place] = {}
        self._key: Any = None
        self._is_first = True

    def read(self, product: Matmul, reader: Reader) -> Weight | Rejection:
        if self._is_first and product.is_matrix and not fx_utils.is_stored(product.node):
            self._describe(product)
        self._is_first = False
        known = _KNOWN.get(self._key)
        if known is None:
            found = decode(reader, product.weight, product.node)
            if isinstance(found, Weight) and self._key is not None:
                read = frozenset(map(self._places.__getitem__, reader.nodes()))
                self._keep((_mapped(found, self._places), read))
            return found
        nodes: dict[str, fx.Node] = {place: node for node, place in self._places.items()}
        if isinstance(known, Rejection):
            return dataclasses.replace(known, node=nodes[known.node].name)
        weight, read = known
        reader.known_nodes = set(map(nodes.__getitem__, read))
        return _mapped(weight, nodes)

    def decline(self, reason: Rejection) -> None:
        """No attempt has found a weight."""
        if self._key is None:
            return
        places = {node.name: place for node, place in self._places.items()}
        if reason.node in places and places.keys().isdisjoint(reason.detail.split()):
            self._keep(dataclasses.replace(reason, node=places[reason.node]))

    def _keep(self, found: Any) -> None:
        if len(_KNOWN) == MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[self._key] = found

    def _describe(self, product: Matmul) -> None:
        """Number the nodes that compute the weight, arguments first, and say what they are."""
        todo, found = [product.node], list[Any]()
        while todo:
            node = todo[-1]
            waiting = [item for item in node.all_input_nodes if item not in self._places]
            if waiting and len(todo) + len(found) < MAX_NODES:
                todo += waiting
                continue
            todo.pop()
            if node not in self._places:
                described = None if waiting else self._described(node)
                if described is None:
                    return
                self._places[node] = _Place(f"#{len(found)}")
                found.append(described)
        self._key = product.anchor.target, tuple(found)  # [K, N], or transposed

    def _described(self, node: fx.Node) -> Any:
        """All that reading depends on; None: more than dtypes, shapes and short constants."""
        value = node.meta.get("val")
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return None
        kinds = tuple([(tensor.dtype, *tensor.shape) for tensor in tensors])
        if any(type(size) is not int for _, *shape in kinds for size in shape):
            return None
        if node.op == "placeholder":
            return kinds
        if node.op == "get_attr":
            return fx_utils.is_literal(node), _values_of(node), kinds
        args = fx.map_arg((node.args, node.kwargs), self._places.__getitem__)
        return node.target, repr(args), kinds  # 1 and True are equal, and so are 0.0 and -0.0


def _values_of(node: fx.Node) -> bytes:
    """SHA-256 of a constant, if reading may depend on its values."""
    tensor = fx_utils.attribute(node) if fx_utils.has_fixed_values(node) else None
    if tensor is None or tensor.numel() > MAX_CONSTANT or tensor.dtype.is_complex:
        return b""
    with compat.real_tensors():
        return hashlib.sha256(bytes_of(tensor.detach().cpu().contiguous())).digest()


def _mapped(weight: Weight, nodes: Mapping[Any, Any]) -> Weight:
    def mapped(item: Any) -> Any:
        if isinstance(item, (fx.Node, _Place)):
            return nodes[item]
        if isinstance(item, Derived):
            return dataclasses.replace(item, args=mapped(item.args))
        return type(item)(map(mapped, item)) if isinstance(item, (tuple, list)) else item

    return dataclasses.replace(weight, sources=mapped(weight.sources))
