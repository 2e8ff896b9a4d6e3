"""Tokens are quantized before they are gathered for their experts: each once.

    rows = x[perm // 8]                          q, s = quantize(x)
    q, s = quantize(rows)                  ->    scaled_experts(q, ..., s, rows=perm, repeats=8)
    scaled_experts(q, ..., s)

Each row is quantized by itself, so it has the same value. Applies if there are no more tokens than
rows, and nothing else reads what is computed of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from inductor_quant.ops import scaled_experts
from inductor_quant.ops.fusion import quantize, row_reduce

from ... import fx_utils
from ...fx_utils import CAST, aten
from ...matching.gathered_rows import Gathered, gathered, is_pointwise, replaces_rows
from ...rewrite import add_node
from .rows import gather_in, is_gathering, operand_places

_REDUCTIONS = (aten.amax.default, aten.amin.default)
_UNARY = (CAST, aten.clone.default, quantize.op)
_LIMIT = 60  # nodes; known quantizers take about 20


def quantize_tokens_once(owner: fx.Graph) -> int:
    """Returns for how many calls tokens are quantized before they are gathered."""
    calls = owner.find_nodes(op="call_function", target=scaled_experts.op)
    return sum(map(_move, calls))


def _move(call: fx.Node) -> bool:
    if is_gathering(call):
        return False
    operands: dict[int, Any] = {place: call.args[place] for place in operand_places(call)}
    found = _chain([*operands.values()])
    if found is None:
        return False
    root, rows, chain = found
    inside = {root, *chain, *rows.inside}
    if any(not {*node.users} <= inside | {call} for node in inside):
        return False
    if rows.mask is not None and not replaces_rows(call, rows.mask):
        return False
    new: dict[fx.Node, fx.Node] = {}
    with call.graph.inserting_before(call):
        width = fx_utils.value(root).shape[1]
        new[root] = rows.source
        if fx_utils.value(rows.source).dim() != 2:
            new[root] = add_node(call, aten.reshape.default, (rows.source, [-1, width]), {})
        for node in chain:
            args, kwargs = fx.map_arg((_of_any_rows(node), node.kwargs), lambda n: new.get(n, n))
            new[node] = add_node(node, node.target, args, kwargs)
    gather_in(call, {place: new[node] for place, node in operands.items()}, rows)
    return True


def _chain(operands: list[fx.Node]) -> tuple[fx.Node, Gathered, list[fx.Node]] | None:
    """The gathered rows, and what computes ``operands`` from them, in order; None if anything but
    each row by itself is needed, or nothing would be saved."""
    root, rows, todo = None, None, list(operands)
    chain: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in chain or node is root:
            continue
        found = gathered(node) if fx_utils.value(node).dim() == 2 else None
        if found is not None:
            if root is not None or not _is_longer(node, found.source):
                return None
            root, rows = node, found
            continue
        parents = list(_parents(node)) if len(chain) < _LIMIT else []
        if not parents:
            return None
        chain.add(node)
        todo += parents
    if root is None or rows is None or root in operands:
        return None
    count = fx_utils.value(root).shape[0]
    if not all(fx_utils.same_size(fx_utils.value(node).shape[0], count) for node in chain):
        return None
    if not all(_reads_own_rows(node, chain | {root}) for node in chain):
        return None
    return root, rows, sorted(chain)


def _reads_own_rows(node: fx.Node, of_rows: set[fx.Node]) -> bool:
    """Whether what ``node`` reads beside its own rows is the same for all, and nobody writes to it.
    ``x[:, None] - x`` reads each row for each."""
    others = {*node.all_input_nodes}.difference(_parents(node))
    return others.isdisjoint(of_rows) and fx_utils.mutated(others) is None


def _is_longer(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` has as many rows as ``source`` in the call that is compiled, or more."""
    rows, tokens = (fx_utils.size_hint(fx_utils.value(each).shape[0]) for each in (node, source))
    return rows is not None and tokens is not None and tokens <= rows


def _parents(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments whose rows the rows of ``node`` are computed from, each from its own; none:
    ``node`` is no such op."""
    if node.op != "call_function" or fx_utils.value(node).dim() < 2:
        return
    first: Any = node.args[0] if node.args else None
    if not fx_utils.is_tensor_node(first) or fx_utils.is_mutated(node):
        return
    rank = fx_utils.value(first).dim()
    (dim,) = fx_utils.arguments(node, "self", "dim")[1:]
    if node.target in _REDUCTIONS:
        is_own = bool(dim) and all(axis % rank for axis in dim)
    elif node.target == row_reduce.op:
        is_own = rank > 1
    elif node.target in (*fx_utils.RESHAPES, aten.expand.default):
        is_own = all(isinstance(size, int) for size in fx_utils.value(node).shape[1:])
        # an expand to more dimensions puts them in front
        is_own &= node.target != aten.expand.default or fx_utils.value(node).dim() == rank
    elif node.target in (aten.unsqueeze.default, aten.squeeze.dim):
        rank += node.target == aten.unsqueeze.default
        is_own = dim % rank != 0
    elif node.target in _UNARY or is_pointwise(node):
        yield from _with_rows(node)
        return
    else:
        return
    if is_own:
        yield first


def _with_rows(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments of a pointwise ``node`` that are not the same for each row."""
    rank = fx_utils.value(node).dim()
    for argument in node.all_input_nodes:
        if fx_utils.is_tensor_node(argument):
            shape = fx_utils.value(argument).shape
            if len(shape) == rank and not fx_utils.is_one(shape[0]):
                yield argument


def _of_any_rows(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of ``node``, for another number of rows."""
    if node.target not in (*fx_utils.RESHAPES, aten.expand.default):
        return node.args
    first: Any = node.args[0]
    sizes: list[Any] = list(fx_utils.value(node).shape)
    return first, [-1, *sizes[1:]]
