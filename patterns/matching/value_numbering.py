"""Value numbering: finds nodes that compute the same value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .. import fx_utils

# Namespaces whose ops are functions of their arguments, except those that ``is_function`` names.
_NAMESPACES = ("aten", "prims", "quantized_decomposed", "inductor_quant")


class Numbering:
    """Two nodes have the same value if they are the same op of the same arguments."""

    def __init__(self) -> None:
        self._firsts: dict[object, fx.Node] = {}
        self._first_of: dict[fx.Node, fx.Node] = {}
        self._mutated: dict[fx.Node, bool] = {}

    def first(self, node: fx.Node) -> fx.Node:
        """The first node that was queried with this value."""
        todo = [node]
        while todo:  # arguments first; no recursion, a graph may be deep
            last = todo[-1]
            waiting = [n for n in last.all_input_nodes if n not in self._first_of]
            if waiting and last not in self._first_of and is_function(last):
                todo += waiting
                continue
            todo.pop()
            self._add(last)
        return self._first_of[node]

    def _add(self, node: fx.Node) -> None:
        if node in self._first_of:
            return
        # a mutated tensor has several values
        is_kept = is_function(node) and not any(
            map(self._is_mutated, (node, *node.all_input_nodes))
        )
        self._first_of[node] = self._firsts.setdefault(self._key(node), node) if is_kept else node

    def _is_mutated(self, node: fx.Node) -> bool:
        if node not in self._mutated:
            self._mutated[node] = fx_utils.is_mutated(node)
        return self._mutated[node]

    def _key(self, node: fx.Node) -> object:
        return node.target, self._frozen(node.args), self._frozen(node.kwargs)

    def _frozen(self, item: Any) -> object:
        if isinstance(item, fx.Node):
            return self._first_of[item]
        if isinstance(item, (list, tuple)):
            return tuple(map(self._frozen, item))
        if isinstance(item, dict):
            return tuple((name, self._frozen(item[name])) for name in sorted(item))
        if isinstance(item, slice):
            return tuple(map(self._frozen, (item.start, item.stop, item.step)))
        return type(item), repr(item)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0

    def equal(self, a: fx.Node, b: fx.Node) -> bool:
        return self.first(a) is self.first(b)


def is_function(node: fx.Node) -> bool:
    """Whether the value depends on nothing but the arguments."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    is_known = target.namespace in _NAMESPACES and not target._schema.is_mutable
    is_random = (
        torch.Tag.nondeterministic_seeded in target.tags
        or "inductor_" in target._schema.name.removeprefix("inductor_quant::")
        or "empty" in target._schema.name
    )
    # Of a size that follows from values: each result has a symbol of its own.
    is_sized = not node.meta.get("unbacked_bindings")
    return is_known and not is_random and is_sized and not node.is_impure()
