"""An int8 weight that lies along N is copied so that it lies along K, where that pays.

The int8 matrix units take both operands along K, so from a weight ``[K, N]`` that is contiguous
along N a kernel has to transpose each tile on the way, step by step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_quant import _torch_compat as compat
from inductor_quant.ops import w8a8
from inductor_quant.patterns import graph
from inductor_quant.patterns.graph import aten

# From so many rows on the copy is made in each call. An estimate: it moves two bytes for each
# element of the weight, the product then takes more than twice that; not measured.
MIN_ROWS = 1024


def make_weights_k_major(owner: fx.Graph, constants: set[fx.Node]) -> int:
    """Of every w8a8 call with ``MIN_ROWS`` rows, and of every one whose weight is one of the
    ``constants`` that Inductor will fold: the copy is then made once, and it alone is kept. Returns
    how many copies there are."""
    copies: dict[fx.Node, fx.Node] = {}
    for call in owner.find_nodes(op="call_function", target=w8a8.op):
        b = call.args[1]
        assert isinstance(b, fx.Node)
        rows = graph.size_hint(graph.value(call).shape[0])
        pays = rows is not None and rows >= MIN_ROWS
        pays = pays or graph.base(b) in constants
        if not pays or not graph.is_stored(b) or not _is_n_major(graph.value(b)):
            continue
        if b not in copies:
            with owner.inserting_before(call):
                copies[b] = _copied(b)
        call.update_arg(1, copies[b])
    return len(copies)


def _is_n_major(weight: torch.Tensor) -> bool:
    along_k, along_n = weight.stride()
    is_known = isinstance(along_k, int) and isinstance(along_n, int)
    return is_known and along_n == 1 and along_k > 1


def _copied(b: fx.Node) -> fx.Node:
    """``b`` with the same values and K its innermost dimension, in memory of its own."""
    node = b
    contiguous = {"memory_format": torch.contiguous_format}
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
        (aten.permute.default, ([1, 0],), {}),
        (aten.clone.default, (), contiguous),
        (aten.permute.default, ([1, 0],), {}),
    )
    for target, args, kwargs in steps:
        new = b.graph.call_function(target, (node, *args), kwargs)
        with compat.fake_mode_of([graph.value(b)]):
            new.meta["val"] = target(graph.value(node), *args, **kwargs)
        node = new
    return node
