"""Argument checks of the canonical ops; every message says what is required."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError

# argument -> (the tensor or None, allowed shapes, allowed dtypes; empty: any)
Allowed = dict[str, tuple[torch.Tensor | None, Sequence[tuple[Any, ...]], tuple[torch.dtype, ...]]]


def check(op: str, allowed: Allowed) -> None:
    """Raises SpecError for a tensor of another shape or dtype."""
    for name, (tensor, shapes, dtypes) in allowed.items():
        if tensor is None:
            continue
        if all(differ(tensor.shape, wanted) for wanted in shapes):
            needed = " or ".join(str(list(shape)) for shape in shapes)
            raise SpecError(f"{op}: {name} is {list(tensor.shape)}, it must be {needed}")
        if dtypes and tensor.dtype not in dtypes:
            raise SpecError(f"{op}: {name} is {tensor.dtype}, it must be one of {dtypes}")


def differ(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether two shapes certainly differ. Symbolic sizes are not compared: that adds a guard."""
    return len(shape) != len(wanted) or any(
        isinstance(x, int) and isinstance(y, int) and x != y
        for x, y in zip(shape, wanted, strict=True)
    )


def check_matrices(
    op: str, a: torch.Tensor, b: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raises SpecError unless a is [M, K] and b [K, N], each of one of ``dtypes``."""
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in dtypes:
            raise SpecError(f"{op}: {name} is {tensor.dtype}, it must be one of {dtypes}")
    if a.dim() != 2 or b.dim() != 2 or differ(a.shape[1:], b.shape[:1]):
        shapes = f"a is {list(a.shape)}, b is {list(b.shape)}"
        raise SpecError(f"{op} takes a [M, K] and b [K, N]; {shapes}")
