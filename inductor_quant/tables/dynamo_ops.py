"""Calls of a Dynamo graph by name: it has functions, methods and operators for one op."""

from __future__ import annotations

import torch
from torch import fx

# Matrix products.
PRODUCTS = frozenset(
    ["linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "mv", "_int_mm", "_scaled_mm"]
)


def name_of(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return str(name)
