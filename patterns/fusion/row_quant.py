"""Dynamic per-token quantization: one kernel reduces a row and quantizes it.

    amax(abs(x), -1)  ->  row_reduce(x, "absmax")
    amax(x, -1)       ->  row_reduce(x, "amax")        amin the same

The op has the same value; its lowering (``lowering/fusion/row_quant``) keeps a row in one CTA.
Applies to the reductions that the scale of a match is computed from, of rows up to ``_MAX_ROW``
elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant.ops.fusion import row_reduce

from .. import fx_utils
from ..fx_utils import aten
from ..rewrite import add_node, erase_if_dead

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = {aten.amax.default: "amax", aten.amin.default: "amin"}
# From a scale up to its amax: known producers take about 15 nodes.
_SEARCH_LIMIT = 60
# A row that one CTA reads quickly, longer than the K of every model that we know. One CTA must not
# reduce a whole tensor that is flattened to a row.
_MAX_ROW = 1 << 16


def mark_row_reductions(scale: fx.Node) -> None:
    """Replace the row reductions that a per-token ``scale`` is computed from by ``row_reduce``."""
    todo, seen = [scale], {scale}
    while todo and len(seen) < _SEARCH_LIMIT:
        node = todo.pop()
        if node.target in REDUCTIONS:
            _mark(node)
            continue
        for parent in node.all_input_nodes:
            # A node with one value per row comes after the reduction; a longer row is its input.
            if parent not in seen and _is_short(parent):
                seen.add(parent)
                todo.append(parent)


def _is_short(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (
        value.dim() == 0 or fx_utils.is_one(value.shape[-1])
    )


def reduced_rows(node: fx.Node) -> fx.Node | None:
    """What an amax or amin over the last dimension reduces; None for other dimensions."""
    x, dims = fx_utils.arguments(node, "self", "dim")
    if not fx_utils.is_tensor_node(x) or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    assert isinstance(x, fx.Node)
    rank = fx_utils.value(x).dim()
    return x if rank and dims[0] in (-1, rank - 1) else None


def _mark(node: fx.Node) -> None:
    x = reduced_rows(node) or _only_row(node)
    if x is None:
        return
    length = fx_utils.value(x).shape[-1]
    if fx_utils.is_symbolic(length) or length > _MAX_ROW:
        return
    source, kind = x, REDUCTIONS[node.target]  # type: ignore[index]
    if kind == "amax" and x.target == aten.abs.default and fx_utils.value(x).dtype in FLOATS:
        source, kind = x.args[0], "absmax"  # type: ignore[assignment]
    shape = fx_utils.value(node).shape
    (keepdim,) = fx_utils.arguments(node, "self", "dim", "keepdim")[2:]
    if reduced_rows(node) is None:  # of all dimensions
        with node.graph.inserting_before(node):
            row = add_node(node, row_reduce.op, (source, kind, False), {})
        replace(node, aten.reshape.default, row, list(shape))
    else:
        replace(node, row_reduce.op, source, kind, bool(keepdim))


def _only_row(node: fx.Node) -> fx.Node | None:
    """What an amax or amin over several dimensions reduces, if that has one row."""
    x, dims = fx_utils.arguments(node, "self", "dim")
    if not fx_utils.is_tensor_node(x) or not all(
        map(fx_utils.is_one, fx_utils.value(x).shape[:-1])
    ):
        return None
    rank = fx_utils.value(x).dim()
    is_reduced = rank > 0 and (not dims or {-1, rank - 1} & {*dims})
    return x if is_reduced else None


def replace(node: fx.Node, op: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``node`` by ``op(*args, **kwargs)``, a tensor of the same shape and dtype."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(op, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    erase_if_dead(node)
