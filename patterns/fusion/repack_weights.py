"""Repack constant weights, once, where Inductor folds constants, as ``prepack_`` does.

    weight_only(x, [w0, w1, ...], None, bias, format=f)
    ->  weight_only(x[:, order], [qdata, ...], None, bias, format=g)

``ops/repack.py`` says which layouts become which. x is gathered if a list of groups was sorted.
A scale of columns that stands beside the weight is applied to the sum: such a weight stays, as does
one that would grow.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from inductor_quant._compat import inductor as compat
from inductor_quant.ops import repack, weight_only
from inductor_quant.spec.weight_format import WeightFormat

from .. import fx_utils
from ..fx_utils import aten
from ..rewrite import add_node, add_tensor, replace_call

log = logging.getLogger(__name__)

# What repacking makes of a weight: its tensors and the order of K in the graph, and their format.
_Made = tuple[list[fx.Node], fx.Node | None, str]
# By a tensor of the weight: what was made of it, of which versions, for all compilations to share.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def repack_weights(owner: fx.Graph, values: Mapping[fx.Node, torch.Tensor]) -> int:
    """Returns how many GEMMs have another weight. ``values``: of the nodes that Inductor will
    fold."""
    made: dict[object, _Made | None] = {}
    count = 0
    for call in owner.find_nodes(op="call_function", target=weight_only.op):
        x, weight, column_scale, bias = call.args
        if column_scale is not None or not isinstance(weight, (list, tuple)):
            continue
        key = (*weight, call.kwargs["format"])
        if key not in made:
            made[key] = _repacked(call, weight, values)
        if (new := made[key]) is None:
            continue
        tensors, order, format = new
        with owner.inserting_before(call):
            if order is not None:
                x = add_node(call, aten.index.Tensor, (x, [None, order]), {})
            replace_call(call, (x, tensors, None, bias), {**call.kwargs, "format": format})
        count += 1
    return count


def _repacked(
    call: fx.Node, weight: Sequence[fx.Node], values: Mapping[fx.Node, torch.Tensor]
) -> _Made | None:
    with compat.real_tensors(), torch.no_grad():
        tensors = [tensor for node in weight if (tensor := _value(node, values)) is not None]
        if len(tensors) < len(weight):
            return None
        format = str(call.kwargs["format"])
        if any(tensor.is_inference() for tensor in tensors):  # of unknown version
            found = _made(format, tensors)
        else:
            kept = _kept.setdefault(values[fx_utils.base(weight[0])], {})
            key = (format, *((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors))
            versions = [tensor._version for tensor in tensors]
            if key not in kept or kept[key][0] != versions:
                kept[key] = versions, _made(format, tensors)
            _, found = kept[key]
    if found is None:
        return None
    [first, *_] = call.graph.nodes
    with call.graph.inserting_before(first):
        nodes = [add_tensor(call, tensor) for tensor in found.buffers]
        order = None if found.order is None else add_tensor(call, found.order)
    return nodes, order, found.format.encode()


def _made(format: str, tensors: Sequence[torch.Tensor]) -> repack.Repacked | None:
    try:
        found = repack.repacked(WeightFormat.decode(format), tensors)
    except torch.OutOfMemoryError:
        log.warning("no memory to repack a weight of %s: it stays", list(tensors[0].shape))
        return None
    if found is None or not found.is_readable:
        return None
    size = sum(buffer.nbytes for buffer in found.buffers)
    size += found.order.nbytes if found.order is not None else 0
    return found if size <= sum(tensor.nbytes for tensor in tensors) else None


def _value(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a constant, or of a view of one."""
    if node in values:
        return values[node].detach()
    if not fx_utils.is_view(node) or node.all_input_nodes != [node.args[0]]:
        return None
    value = _value(node.all_input_nodes[0], values)
    if value is None:
        return None
    viewed: torch.Tensor = node.target(value, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return viewed
