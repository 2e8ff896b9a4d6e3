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
    """The values of the placeholders that freezing turns into constants."""
    context = symbol("torch._guards:TracingContext.try_get")()
    values = getattr(context, "params_flat_unwrap_subclasses", None) or ()
    inputs = getattr(getattr(context, "fw_metadata", None), "input_info", None) or ()
    found = {}
    for node, value, info in zip(graph.find_nodes(op="placeholder"), values, inputs, strict=False):
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if is_plain and not (info.mutates_data or info.mutates_metadata):
            found[node] = value
    return found


def frozen(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, marked as freezing marks parameters."""
    tensor._is_frozen_param = True  # type: ignore[attr-defined]
    return tensor
