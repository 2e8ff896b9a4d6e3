"""What several GEMMs compute of the same tensor again is computed once: value numbering.

q, k and v, or gate and up, each quantize the same activation: nodes that are equal in op and
arguments. Nothing before us merges them, and Inductor stores one copy for each. ``equal`` asks
without writing; ``share`` merges, among that which feeds canonical ops and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant.ops import group_reduce, quantize, row_reduce
from inductor_quant.patterns import graph, survey

# Their ops are known to be functions of their arguments, but for those that say otherwise.
_NAMESPACES = ("aten", "prims", "quantized_decomposed", "inductor_quant")
_OURS = "inductor_quant"
# parts of a quantization
_HELPERS = (row_reduce.op, quantize.op, group_reduce.reduce_op, group_reduce.value_op)


class Numbering:
    """Which nodes have the same value, as far as the same op of the same arguments tells."""

    def __init__(self) -> None:
        self._firsts: dict[object, fx.Node] = {}
        self._first_of: dict[fx.Node, fx.Node] = {}
        self._mutated: dict[fx.Node, bool] = {}

    def first(self, node: fx.Node) -> fx.Node:
        """The first node asked for of those with this value."""
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
        # What is written to in the midst has another value before than after.
        is_kept = is_function(node) and not any(
            map(self._is_mutated, (node, *node.all_input_nodes))
        )
        self._first_of[node] = self._firsts.setdefault(self._key(node), node) if is_kept else node

    def _is_mutated(self, node: fx.Node) -> bool:
        if node not in self._mutated:
            self._mutated[node] = graph.is_mutated(node)
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
    """Whether the value is a function of the arguments alone."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    is_known = target.namespace in _NAMESPACES and not target._schema.is_mutable
    is_random = (
        torch.Tag.nondeterministic_seeded in target.tags
        or "inductor_" in target._schema.name.removeprefix(f"{_OURS}::")  # prims.inductor_random
        or "empty" in target._schema.name
    )
    return is_known and not is_random and not node.is_impure()


def share(owner: fx.Graph) -> int:
    """Merge equal nodes among those that the inputs of canonical ops are computed from, up to
    matrix products. Returns how many nodes are gone."""
    cone = _cone([node for node in owner.nodes if is_canonical(node)])
    numbering = Numbering()
    merged = 0
    for node in list(owner.nodes):
        if node not in cone:
            continue
        first = numbering.first(node)
        # Two results of the graph must not be one tensor: the caller may write to either.
        if first is node or (_escapes(node) and _escapes(first)):
            continue
        node.replace_all_uses_with(first)
        owner.erase_node(node)
        merged += 1
    return merged


def is_canonical(node: fx.Node) -> bool:
    """Whether it is a GEMM of ours."""
    return getattr(node.target, "namespace", "") == _OURS and node.target not in _HELPERS


def _cone(calls: list[fx.Node]) -> set[fx.Node]:
    todo = [node for call in calls for node in call.all_input_nodes]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in found or node.op != "call_function":
            continue
        if is_canonical(node) or survey.is_matrix_product(node):
            continue
        found.add(node)
        todo += node.all_input_nodes
    return found


def _escapes(node: fx.Node) -> bool:
    """Whether the memory of ``node`` is returned, as it is or as a view."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if user not in seen and graph.base(user) is not user:
                seen.add(user)
                todo.append(user)
    return False
