"""What a recogniser is, and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant.decisions import Rejection
from inductor_quant.spec import QuantGemmSpec


@dataclasses.dataclass(frozen=True)
class RecognizedGemm:
    """A matched subgraph and the canonical op that means the same.

    end        the node whose value the op replaces
    interior   nodes that the rewrite makes dead, in graph order; each is erased if nobody uses it
    op, args, kwargs
               the call; an ``Operand`` among the arguments stands for a node seen in another shape
    row_scale  the scale of the activation, if it has one
    shape      of ``end``, if that is not [M, N]: arguments of a reshape
    too_many_rows
               with so many rows the graph is faster as it is
    """

    family: str
    spec: QuantGemmSpec
    anchor: fx.Node
    end: fx.Node
    interior: tuple[fx.Node, ...]
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    m: int | str
    n: int | str
    k: int | str
    row_scale: fx.Node | None = None
    shape: tuple[Any, ...] | None = None
    too_many_rows: bool = False


@dataclasses.dataclass(frozen=True)
class Operand:
    """``node`` reshaped to ``shape`` (-1: what remains), as an argument of a canonical op."""

    node: fx.Node | Derived
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Derived:
    """``target(*args, **kwargs)``, a node that the rewrite adds; its arguments may be Operands and
    Derived ones themselves."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Pattern:
    """``recognize`` must not mutate the graph and must not raise for "not a match".

    It gives None for a node that is no matrix product at all (an anchor may be any sum); then
    nothing is reported.
    """

    name: str
    family: str
    anchors: tuple[torch._ops.OpOverload | str, ...]  # str: the name of an op of a producer
    recognize: Callable[[fx.Node], RecognizedGemm | Rejection | None]
