"""Repack constant weights, once, where Inductor folds constants, as ``prepack_`` does.

    weight_only(x, [w0, w1, ...], None, bias, format=f)
    ->  weight_only(x[:, order], [qdata, ...], None, bias, format=g)

``ops/repack.py`` says which layouts become which. x is gathered if a list of groups was sorted.
A scale of columns that stands beside the weight is applied to the sum: such a weight stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.ops import repack, weight_only
from inductor_quant.spec.weight_format import WeightFormat

from .. import fx_utils
from ..fx_utils import aten
from ..rewrite import add_node, add_tensor

# What repacking makes of a weight, and where: its tensors and the order of K, and their format.
_Made = tuple[list[fx.Node], fx.Node | None, str]


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
        call.args = (x, tensors, None, bias)
        call.kwargs = {**call.kwargs, "format": format}
        count += 1
    return count


def _repacked(
    call: fx.Node, weight: Sequence[fx.Node], values: Mapping[fx.Node, torch.Tensor]
) -> _Made | None:
    with compat.real_tensors(), torch.no_grad():
        tensors = [_value(node, values) for node in weight]
        found = None
        if all(tensor is not None for tensor in tensors):
            format = WeightFormat.decode(str(call.kwargs["format"]))
            found = repack.repacked(format, tensors)  # type: ignore[arg-type]
    if found is None:
        return None
    [first, *_] = call.graph.nodes
    with call.graph.inserting_before(first):
        nodes = [add_tensor(call, tensor) for tensor in found.buffers]
        order = None if found.order is None else add_tensor(call, found.order)
    return nodes, order, found.format.encode()


def _value(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of a constant, or of a view of one."""
    if node in values:
        return values[node].detach()
    if not fx_utils.is_view(node):
        return None
    owner, *rest = node.args
    assert isinstance(owner, fx.Node)
    value = _value(owner, values)
    if value is None or any(isinstance(arg, fx.Node) for arg in rest) or node.kwargs:
        return None
    viewed: torch.Tensor = node.target(value, *rest)  # type: ignore[operator]
    return viewed
