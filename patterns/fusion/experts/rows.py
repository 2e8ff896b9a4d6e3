"""Experts read rows of x where they are, instead of rows that were gathered before.

    experts(x[perm // 8], ...)                       ->   experts(x, ..., rows=perm, repeats=8)
    experts(x.repeat_interleave(8, 0), ...)          ->   experts(x, ..., repeats=8)
    experts(x.repeat_interleave(8, 0)[perm], ...)    ->   experts(x, ..., rows=perm, repeats=8)

Rows of 8 bits, and their scales likewise. ``where(mask, _, x[perm // 8])`` is gathered without the
mask if each user of the result puts something else in place of the masked rows too, as
``transformers`` does with rows that have no expert. Nothing changes if anything else reads what was
gathered, which is in memory then.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from inductor_quant.ops import experts, scaled_experts

from ... import fx_utils
from ...fx_utils import aten
from ...matching.gathered_rows import Gathered, gathered, replaces_rows
from ...rewrite import add_node, erase_if_dead

_OPS = (experts.op, scaled_experts.op)


def gather_in_experts(owner: fx.Graph) -> int:
    """Returns how many calls read the rows of another tensor now."""
    found = {
        call: rows
        for op in _OPS
        for call in owner.find_nodes(op="call_function", target=op)
        if (rows := _operands(call))
    }
    inside = {node for each in found.values() for rows in each.values() for node in rows.inside}
    kept = {node for node in inside if not {*node.users} <= inside | found.keys()}
    done = 0
    for call, operands in found.items():
        if all(kept.isdisjoint(rows.inside) for rows in operands.values()):
            sources = {place: rows.source for place, rows in operands.items()}
            gather_in(call, sources, operands[0])
            done += 1
    return done


def _operands(call: fx.Node) -> dict[int, Gathered]:
    """How each operand of the activation is gathered, by its place; empty: not all are, alike."""
    if is_gathering(call):
        return {}
    places = operand_places(call)
    found = {place: rows for place in places if (rows := gathered(call.args[place])) is not None}
    if len(found) < len(places) or not all(found[0].is_like(rows) for rows in found.values()):
        return {}
    masks = {rows.mask for rows in found.values()} - {None}
    return found if all(replaces_rows(call, mask) for mask in masks) else {}


def operand_places(call: fx.Node) -> tuple[int, ...]:
    """The arguments that have a row for each of x: x itself, and its scale."""
    is_scaled = call.target == scaled_experts.op and call.args[2] is not None
    return (0, 2) if is_scaled else (0,)


def is_gathering(call: fx.Node) -> bool:
    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[union-attr]
    return len(call.args) > names.index("rows") or not {"rows", "repeats"}.isdisjoint(call.kwargs)


def gather_in(call: fx.Node, sources: dict[int, fx.Node], found: Gathered) -> None:
    """Let ``call`` read rows of ``sources``, by the place of its arguments."""
    args: list[Any] = list(call.args)
    with call.graph.inserting_before(call):
        for place, source in sources.items():
            if fx_utils.value(source).dim() != 2:
                width = fx_utils.value(args[place]).shape[1]
                source = add_node(call, aten.reshape.default, (source, [-1, width]), {})
            args[place] = source
    old: list[Any] = [call.args[place] for place in sources]
    call.args = (*args, found.rows)
    if found.repeats > 1:
        call.kwargs = call.kwargs | {"repeats": found.repeats}
    for node in old:
        erase_if_dead(node)
