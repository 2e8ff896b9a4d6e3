"""What no kernel of a graph has stored yet, while Inductor lowers it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant._compat.symbols import symbol


def computed(box: Any) -> Any | None:
    """``box`` as a pointwise expression that a kernel of its own computes, which may store it in
    any order; None: it is none, or can be an epilogue of a template, element by element.

    A long expression has a buffer already, which is dead if nothing else reads it. It is computed
    again unless something has written to that buffer since, or to one that it was computed from.
    """
    data, graph = box, symbol("torch._inductor.virtualized:V").graph
    while isinstance(data, symbol("torch._inductor.ir:MutableBox")):
        data = data.data
    stored = None
    if isinstance(data, symbol("torch._inductor.ir:ComputedBuffer")):
        stored, data = data, data.data
    if not isinstance(data, symbol("torch._inductor.ir:Pointwise")):
        return None
    read = set(data.get_read_names())
    if stored is not None and not _written_since(stored).isdisjoint({stored.get_name(), *read}):
        return None
    template, size = symbol("torch._inductor.ir:TemplateBuffer"), data.get_numel()
    buffers = map(graph.try_get_buffer, read)
    if any(isinstance(each, template) and each.get_numel() == size for each in buffers):
        return None
    return symbol("torch._inductor.ir:TensorBox").create(data)


def _written_since(stored: Any) -> set[str]:
    """The buffers to which something writes after ``stored`` is computed."""
    written: set[str] = set()
    for each in reversed(symbol("torch._inductor.virtualized:V").graph.buffers):
        if each is stored:
            break
        written.update(each.get_mutation_names())
    return written


def buffer(
    device: torch.device,
    dtype: torch.dtype,
    size: Sequence[Any],
    stride: Sequence[Any] | None = None,
) -> Any:
    """In place of a buffer that is not there yet, to choose a kernel by; contiguous without
    ``stride``."""
    layout = symbol("torch._inductor.ir:FixedLayout")(device, dtype, size, stride)
    made = symbol("torch._inductor.ir:InputBuffer")(name="not_stored", layout=layout)
    return symbol("torch._inductor.ir:TensorBox").create(made)


def lowered(node: torch.fx.Node) -> Any | None:
    """What an FX node was lowered to, or will be; None: that is not known, or of symbolic size."""
    graph = symbol("torch._inductor.virtualized:V").graph
    if node in graph.env:
        return graph.env[node]
    value = node.meta.get("val")
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(graph.module)
    if not isinstance(value, torch.Tensor):
        return None
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return None
    return buffer(value.device, value.dtype, value.shape, value.stride())
