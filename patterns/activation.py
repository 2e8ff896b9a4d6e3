"""Dynamic activation quantization: a row is reduced and quantized in one kernel."""

from __future__ import annotations

import torch
from torch import fx

from inductor_quant.ops import row_reduce
from inductor_quant.patterns import graph
from inductor_quant.patterns.graph import aten

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = {aten.amax.default: "amax", aten.amin.default: "amin"}
# From a scale up to its amax: the longest recipe of a known producer has about 15 nodes.
_SEARCH_LIMIT = 60
# A row that one program reads quickly. Longer than the K of every model that we know; a tensor that
# is quantized as a whole, flattened to one row, is not to be reduced by a single program.
_MAX_ROW = 1 << 16


def keep_rows_whole(scale: fx.Node) -> None:
    """Mark the row reductions that a per-token ``scale`` is computed from: ``aten.amax`` and
    ``aten.amin`` over the last dimension become ``inductor_quant::row_reduce``, of the same value.
    """
    todo, seen = [scale], {scale}
    while todo and len(seen) < _SEARCH_LIMIT:
        node = todo.pop()
        if node.target in _KINDS:
            _mark(node)
            continue
        for parent in node.all_input_nodes:
            # what has one value a row was computed from the reduction; a longer row is the input
            if parent not in seen and _is_short(parent):
                seen.add(parent)
                todo.append(parent)


def _is_short(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.dim() == 0 or graph.is_one(value.shape[-1]))


def _mark(node: fx.Node) -> None:
    x, dims, keepdim = graph.arguments(node, "self", "dim", "keepdim")
    if not graph.is_tensor_node(x) or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return
    assert isinstance(x, fx.Node)
    if graph.value(x).dim() == 0 or dims[0] not in (-1, graph.value(x).dim() - 1):
        return
    length = graph.value(x).shape[-1]
    if graph.is_symbolic(length) or length > _MAX_ROW:
        return
    kind = _KINDS[node.target]  # type: ignore[index]
    if kind == "amax" and x.target == aten.abs.default and graph.value(x).dtype in FLOATS:
        kind, x = "absmax", x.args[0]
    with node.graph.inserting_before(node):
        marked = node.graph.call_function(row_reduce.op, (x, kind, bool(keepdim)))
    marked.meta = dict(node.meta)
    node.replace_all_uses_with(marked)
    node.graph.erase_node(node)
