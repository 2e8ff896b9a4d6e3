"""What is computed of rows by expert, and gathered by token, is computed by token.

    (experts(...) * weights[order][:, None])[place]   ->   experts(...)[place] * weights[:, None]

``order[place]`` is 0, 1, 2, ... So a thread that adds up the experts of a token reads its weights
where they are, and not by way of two tables.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from inductor_quant.ops.fusion import expert_routing as ops

from ... import fx_utils
from ...fx_utils import CAST, aten
from ...matching.gathered_rows import is_pointwise
from ...matching.sorted_ids import SORTS, inverses_of, is_of_ids, outputs_of
from ...rewrite import add_node, erase_if_dead


def compute_by_token(owner: fx.Graph) -> int:
    """Returns how many gathers are by fewer tables."""
    done = 0
    for order in _orders(owner):
        for place in inverses_of(order):
            for gather in list(place.users):
                source = _gathered_by(gather, place)
                if source is not None and _reads(source, order):
                    _move(gather, source, order)
                    done += 1
    return done


def _orders(owner: fx.Graph) -> list[fx.Node]:
    orders = list(owner.find_nodes(op="call_function", target=ops.order_op))
    for target in SORTS:
        for sort in filter(is_of_ids, owner.find_nodes(op="call_function", target=target)):
            orders += outputs_of(sort, 1)
    return orders


def _move(gather: fx.Node, source: fx.Node, order: fx.Node) -> None:
    with gather.graph.inserting_before(gather):
        new = _by_token(source, gather, order)
    gather.replace_all_uses_with(new)
    erase_if_dead(gather)


def _gathered_by(node: fx.Node, rows: fx.Node) -> fx.Node | None:
    """What ``node`` gathers, if ``rows`` say which rows, all of them."""
    if node.target != aten.index.Tensor:
        return None
    source: Any
    source, indices = fx_utils.arguments(node, "self", "indices")
    is_by_rows = list(indices) == [rows]
    return source if is_by_rows and _count(source) == _count(rows) else None


def _count(node: fx.Node) -> Any:
    size: Any = fx_utils.value(node).shape[0]
    return size if isinstance(size, int) else size.node.expr


def _rows_of(node: fx.Node) -> list[fx.Node]:
    """The arguments whose rows are computed with: [] unless a row of ``node`` follows from theirs,
    and from what all rows have."""
    inputs = node.all_input_nodes
    if node.target == aten.index.Tensor:  # of a table, as of biases
        rows, *others = fx_utils.arguments(node, "self", "indices")[1]
        is_by_row = fx_utils.is_tensor_node(rows) and fx_utils.value(rows).dim() == 1
        return [rows] if is_by_row and not any(others) else []
    if node.target == aten.unsqueeze.default:
        return inputs if node.args[1] not in (0, -1 - fx_utils.value(inputs[0]).dim()) else []
    if node.target not in (CAST, aten.where.self) and not is_pointwise(node):
        return []
    rank = fx_utils.value(node).dim()
    rows = [each for each in inputs if fx_utils.value(each).dim() == rank]
    rows = [each for each in rows if not fx_utils.is_one(fx_utils.value(each).shape[0])]
    return rows if all(_count(each) == _count(node) for each in rows) else []


def _reads(node: fx.Node, order: fx.Node) -> bool:
    if _gathered_by(node, order) is not None:
        return True
    return any(_reads(each, order) for each in _rows_of(node))


def _by_token(node: fx.Node, gather: fx.Node, order: fx.Node) -> fx.Node:
    """The rows of ``node`` that ``gather`` has; none is gathered that ``order`` has moved."""
    if (source := _gathered_by(node, order)) is not None:
        return source
    if not _reads(node, order):
        place = fx_utils.arguments(gather, "self", "indices")[1]
        return add_node(gather, aten.index.Tensor, (node, place), {})
    new = {each: _by_token(each, gather, order) for each in _rows_of(node)}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: new.get(each, each))
    return add_node(gather, node.target, args, kwargs)
