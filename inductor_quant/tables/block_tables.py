"""Which integer tensors of a Dynamo graph say where the blocks of a sparse weight are.

``constant_buffers`` makes them constants, compared on every call: that their indices are in range
and distinct is a fact of their values. Which blocks they make is read later, from the ops
(``patterns/weights/block_places``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from inductor_quant.tables.dynamo_ops import PRODUCTS, name_of


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# What fills a tensor, of the shape or dtype of its inputs, with one number.
_FILLS = _names("zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full")
# What computes a table from tables.
_COMPUTES = _names(
    "to long int bool half bfloat16 type type_as view reshape flatten unsqueeze squeeze expand",
    "expand_as t permute transpose contiguous clone detach getitem add sub mul floordiv",
    "floor_divide mod remainder arange searchsorted bucketize cumsum diff repeat_interleave kron",
    "eq ne lt le gt ge and_ or_ invert logical_and logical_or logical_not",
)
# What writes at positions of a table, or selects by one, and which argument the table is.
_WRITES = {
    **dict.fromkeys(("setitem", "index_put", "index_put_"), 1),
    **dict.fromkeys(("index_copy", "index_copy_", "index_add", "index_add_"), 2),
    **dict.fromkeys(("scatter", "scatter_"), 2),
}
_SELECTS = {
    **dict.fromkeys(("getitem", "masked_fill"), 1),
    "index_select": 2,
    "where": 0,
}
_SUMS = frozenset(["index_add", "index_add_", "index_put", "index_put_"])
# What leaves the elements of a weight, or of a product, where they are, or moves all of them.
_MOVES = _names(
    "view reshape flatten permute transpose t getattr contiguous clone detach to unsqueeze squeeze",
    "expand float half bfloat16 type type_as",
)


def find(graph: fx.Graph, held: Sequence[fx.Node], weight_side: set[fx.Node]) -> set[fx.Node]:
    """Those of the integer tensors ``held`` whose every use ends in the positions of a weight's
    blocks: of the weight itself, or of what is gathered for a product and added up after it.

    ``weight_side``: what is computed from tensors of modules alone.
    """
    tables = _computed_from(graph, held)
    has_sum = any(_sums_product(node) for node in graph.nodes)
    # without a sum, rows of an activation are gathered for another reason
    gathers = None if has_sum else weight_side | tables
    return {node for node in held if _places_blocks(node, tables, gathers, weight_side)}


def _computed_from(graph: fx.Graph, held: Iterable[fx.Node]) -> set[fx.Node]:
    """The tables: what is computed from ``held``, and what holds one number or counts."""
    found = set(held)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = name_of(node)
        is_table = name in _COMPUTES and found.issuperset(node.all_input_nodes)
        if name in _FILLS or is_table:
            found.add(node)
    return found


def _places_blocks(
    table: fx.Node, tables: set[fx.Node], gathers: set[fx.Node] | None, weight_side: set[fx.Node]
) -> bool:
    is_mask = getattr(_example(table), "dtype", None) == torch.bool
    todo, seen = [table], {table}
    is_used = False
    while todo:
        node = todo.pop()
        for user in node.users:
            name = name_of(user)
            if user in tables and name not in _FILLS:
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
                continue
            is_place = is_mask if name == "mul" else _is_position(node, user)
            is_gather = name in ("getitem", "index_select")
            if is_gather and gathers is not None:
                is_place &= user in gathers
            if not is_place or not _ends_in_product(user, tables, weight_side):
                return False
            is_used = True
    return is_used


def _is_position(table: fx.Node, user: fx.Node) -> bool:
    """Whether ``table`` says where ``user`` writes or what it selects, and nothing else."""
    name, args = name_of(user), user.args
    position = _WRITES.get(name, _SELECTS.get(name))
    if position is None or position >= len(args):
        return False
    dims = getattr(_example(args[0]), "ndim", 0)
    if name in ("getitem", "index_select") and dims < 3:
        return False  # rows of a matrix, not blocks
    if name == "index_select" and args[1] in (-1, dims - 1):
        return False  # single columns
    others = [*args[:position], *args[position + 1 :]]
    return _holds(args[position], table) and not any(_holds(item, table) for item in others)


def _example(node: Any) -> Any:
    """The fake tensor that Dynamo has for ``node``; None if there is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _holds(argument: Any, node: fx.Node) -> bool:
    found: list[fx.Node] = []
    fx.map_arg((argument,), found.append)
    return node in found


def _ends_in_product(node: fx.Node, tables: set[fx.Node], weight_side: set[fx.Node]) -> bool:
    """Whether all that becomes of ``node`` is a factor of matrix products, or it sums up one."""
    if _sums_product(node):
        return True
    # what is written in place goes on under the name of the whole tensor
    begin = node.args[0] if name_of(node) == "setitem" or name_of(node).endswith("_") else node
    todo, seen = [begin], {begin, node}
    is_factor = False
    while todo:
        current = todo.pop()
        assert isinstance(current, fx.Node)
        for user in current.users:
            name = name_of(user)
            if name in PRODUCTS:
                is_factor = True
            elif user in seen:
                continue
            elif (
                name in _MOVES
                or _is_written_to(user, current, tables)
                or (name == "mul" and weight_side.issuperset({*user.all_input_nodes} - {current}))
            ):
                seen.add(user)
                todo.append(user)
            else:
                return False
    return is_factor


def _is_written_to(user: fx.Node, node: fx.Node, tables: set[fx.Node]) -> bool:
    """Whether ``user`` writes into ``node``, or masks it, by another table."""
    is_first = bool(user.args) and user.args[0] is node
    return (is_first and name_of(user) in _WRITES) or (
        name_of(user) == "mul" and len({*user.args} & tables) == 1
    )


def _sums_product(node: fx.Node) -> bool:
    """Whether ``node`` adds up the parts of a product at positions."""
    part = node.args[-1] if name_of(node) in _SUMS and node.args else None
    while isinstance(part, fx.Node) and name_of(part) in _MOVES:
        part = part.args[0]
    return isinstance(part, fx.Node) and name_of(part) in PRODUCTS
