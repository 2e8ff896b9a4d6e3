"""What no kernel of a graph has stored yet, while Inductor lowers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant._compat.symbols import symbol


def is_computed(box: Any) -> bool:
    """Whether ``box`` is a pointwise expression that will have a kernel of its own, which may store
    it in any order: it cannot be an epilogue of a template, element by element."""
    while isinstance(box, symbol("torch._inductor.ir:MutableBox")):
        box = box.data
    if not isinstance(box, symbol("torch._inductor.ir:Pointwise")):
        return False
    graph = symbol("torch._inductor.virtualized:V").graph
    template = symbol("torch._inductor.ir:TemplateBuffer")
    read = (graph.try_get_buffer(name) for name in box.get_read_names())
    return not any(
        isinstance(each, template) and each.get_numel() == box.get_numel() for each in read
    )


def buffer(device: torch.device, dtype: torch.dtype, size: Sequence[Any]) -> Any:
    """In place of a contiguous buffer that is not there yet, to choose a kernel by."""
    layout = symbol("torch._inductor.ir:FixedLayout")(device, dtype, size)
    made = symbol("torch._inductor.ir:InputBuffer")(name="not_stored", layout=layout)
    return symbol("torch._inductor.ir:TensorBox").create(made)


def lowered(node: torch.fx.Node) -> Any | None:
    """What an FX node was lowered to; None: it is not yet."""
    return symbol("torch._inductor.virtualized:V").graph.env.get(node)
