"""Graphs that run while they are built, to compare with the decoded weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from inductor_quant.patterns import fx_utils
from inductor_quant.patterns.match import Constant, Derived
from inductor_quant.patterns.symbolic.reader import Reader, attempt
from inductor_quant.patterns.weights.decode import Weight, decode
from inductor_quant.spec.decisions import Rejection, RejectionCode

aten, prims = torch.ops.aten, torch.ops.prims
CPU = torch.device("cpu")
f32, i64 = torch.float32, torch.int64
Body = Callable[..., fx.Node]


class Graph:
    """Appends calls and runs them at once; ``values`` are the results."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.module = torch.nn.Module()
        self.graph.owning_module = self.module  # type: ignore[assignment]
        self.values: dict[fx.Node, Any] = {}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        known, named = fx.map_arg((args, kwargs), self.values.__getitem__)
        return self._add(self.graph.call_function(target, args, kwargs), target(*known, **named))

    def input(self, value: torch.Tensor) -> fx.Node:
        return self._add(self.graph.placeholder("x"), value)

    def constant(self, *numbers: int, dtype: torch.dtype = i64, name: str = "") -> fx.Node:
        """A literal of the code, or the buffer of an exported model of this name."""
        name = name or f"_tensor_constant{len(self.values)}"
        self.module.register_buffer(name, torch.tensor(numbers, dtype=dtype))
        return self._add(self.graph.get_attr(name), self.module.get_buffer(name))

    def iota(self, size: int, dtype: torch.dtype = i64) -> fx.Node:
        options = {"dtype": dtype, "device": CPU, "requires_grad": False}
        return self(prims.iota.default, size, start=0, step=1, **options)

    def full(self, shape: list[int], value: float, dtype: torch.dtype) -> fx.Node:
        return self(aten.full.default, shape, value, dtype=dtype, device=CPU)

    def cast(self, node: fx.Node, dtype: torch.dtype = f32) -> fx.Node:
        return self(prims.convert_element_type.default, node, dtype)

    def shift(self, node: fx.Node, amount: int) -> fx.Node:
        return self(aten.bitwise_right_shift.Tensor_Scalar, node, amount)

    def mask(self, node: fx.Node, mask: int = 15) -> fx.Node:
        return self(aten.bitwise_and.Scalar, node, mask)

    def rows(self, node: fx.Node, start: int, end: int, step: int = 1) -> fx.Node:
        return self(aten.slice.Tensor, node, 0, start, end, step)

    def _add(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["val"] = self.values[node] = value
        return node


def read_weight(node: fx.Node, *, transposed: bool = False) -> Weight | Rejection:
    """The weight ``node`` [K, N], or [N, K] if ``transposed``, as the recognizers decode it."""
    k, n = fx_utils.value(node).shape
    if transposed:
        k, n = n, k
    if fx_utils.is_symbolic(k) or fx_utils.is_symbolic(n):
        return Rejection(RejectionCode.WEIGHT_FORM, "its shape is symbolic", node.name)

    def read(reader: Reader) -> Weight | Rejection:
        row, column = reader.space.variable("k", k), reader.space.variable("n", n)
        index = (column, row) if transposed else (row, column)
        return decode(reader, reader.read(node, index), node)

    return attempt(read, lambda found: isinstance(found, Weight))


def tensors_of(weight: Weight, values: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    """The tensors that the format of ``weight`` reads, where nodes have these ``values``."""

    def tensor(item: Any) -> Any:
        if isinstance(item, Constant):
            return item.tensor()
        if isinstance(item, Derived):
            return item.target(*map(tensor, item.args), **dict(item.kwargs))
        if isinstance(item, tuple):
            return [tensor(part) for part in item]
        return values[item] if isinstance(item, fx.Node) else item

    return [tensor(source) for source in weight.sources]


def read(body: Body, *inputs: torch.Tensor) -> tuple[Weight | Rejection, Graph, torch.Tensor]:
    """The decoded weight of the matrix ``body(graph, *inputs)``, the graph, and its value."""
    graph = Graph()
    node = body(graph, *map(graph.input, inputs))
    if not graph.values[node].is_floating_point():
        node = graph.cast(node)
    return read_weight(node), graph, graph.values[node]
