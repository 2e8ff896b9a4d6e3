"""What Inductor freezes: parameters that become constants of a graph."""

from __future__ import annotations

import torch

from inductor_quant._compat.symbols import symbol


def inputs_to_be_frozen() -> int:
    """How many of a graph's placeholders, from the first on, freezing turns into constants (except
    those that are written to or returned)."""
    context = symbol("torch._guards:TracingContext.try_get")()
    return len(getattr(context, "params_flat_unwrap_subclasses", None) or ())


def values_to_be_frozen(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.Tensor]:
    """The values of the placeholders that freezing turns into constants: of no tensor that the
    graph writes to or returns, as far as AOTAutograd knows."""
    context = symbol("torch._guards:TracingContext.try_get")()
    values = getattr(context, "params_flat_unwrap_subclasses", None) or ()
    metadata = getattr(context, "fw_metadata", None)
    inputs = getattr(metadata, "input_info", None) or ()
    returned = {info.base_idx for info in getattr(metadata, "output_info", None) or ()}
    placeholders = graph.find_nodes(op="placeholder")
    found = {}
    for i, (node, value, info) in enumerate(zip(placeholders, values, inputs, strict=False)):
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain or info.mutates_data or info.mutates_metadata or i in returned:
            continue
        traced = node.meta.get("val")
        if isinstance(traced, torch.Tensor) and _kind(traced) == _kind(value):
            found[node] = value
    return found


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


def frozen(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, marked as freezing marks parameters."""
    tensor._is_frozen_param = True  # type: ignore[attr-defined]
    return tensor
