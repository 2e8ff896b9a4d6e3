"""What a recognizer is, and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.exactness import Exactness
from inductor_quant.spec.gemm import QuantGemmSpec


@dataclasses.dataclass(frozen=True)
class RecognizedGemm:
    """A matched subgraph and the call of a canonical op that computes the same value.

    end            the node that the op replaces
    interior       the nodes that the rewrite makes dead, in graph order; those without users go
    op, args, kwargs  the call; ``Operand``, ``Derived`` and ``Constant`` arguments become nodes
    row_scale      the scale of the activation, or None
    shape          arguments of a reshape to the shape of ``end``; None: that is [M, N]
    too_many_rows  at this M the graph as it is runs faster
    row_kind       whose ranges of M it has (``spec/row_ranges.py``); "": those of its family
    weight_class   how close a dequantized weight is to the graph's
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
    row_kind: str = ""
    weight_class: Exactness = Exactness.REASSOCIATED


@dataclasses.dataclass(frozen=True)
class Operand:
    """``node`` reshaped to ``shape``, in which one size may be -1; an argument of a call."""

    node: fx.Node | Derived
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Constant:
    """A vector whose memory is ``values``: a table that the rewrite adds to the graph."""

    values: bytes
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int]:
        return (len(self.values) // self.dtype.itemsize,)

    def tensor(self) -> torch.Tensor:
        if not self.values:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.values), dtype=self.dtype)


@dataclasses.dataclass(frozen=True)
class Derived:
    """``target(*args, **kwargs)``: a node that the rewrite adds. Its arguments may be Operands,
    Constants or Derived as well, also within tuples, which become lists. ``dtype`` and ``shape``
    are those of the result, where a recognizer needs them."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pattern:
    """``recognize`` never mutates the graph, and returns a Rejection if the node does not match.

    It returns None, and nothing is reported, if the node is no matrix product at all: the anchor
    ``aten.sum`` may be any sum.
    """

    name: str
    family: str
    anchors: tuple[torch._ops.OpOverload | str, ...]  # str: name of a custom op
    recognize: Callable[[fx.Node], RecognizedGemm | Rejection | None]
