"""Builds post-grad graphs node by node, running every node on real tensors as it goes.

Tracing thousands of programs through Inductor would take minutes; here a program of 60 nodes takes
a few milliseconds, and the ops are those that are left after Inductor's decompositions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

aten, prims = torch.ops.aten, torch.ops.prims
CAST = prims.convert_element_type.default
EMPTY = aten.empty.memory_format
END = 2**63 - 1
CPU = torch.device("cpu")
MODE = FakeTensorMode()


def garbage(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Contents of ``empty``, different every time."""
    return torch.randint(-128, 127, tuple(size)).to(dtype)


def execute(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One op on real tensors."""
    if target is EMPTY:
        return garbage(args[0], kwargs["dtype"])
    if target is CAST:  # its Python implementation takes ten times as long
        return args[0].to(args[1])
    return target(*args, **kwargs)


def evaluate(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], *, in_fp64: bool = False
) -> dict[fx.Node, Any]:
    """The value of every node; the output's is the program's result.

    in_fp64  with every float in fp64, so that casts between floats drop out and nothing rounds
    """
    widened = _widened if in_fp64 else _same
    values: dict[fx.Node, Any] = {}
    left = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = widened(next(left))
        elif node.op == "get_attr":
            values[node] = widened(getattr(module, node.target))
        elif node.op == "output":
            values[node] = values[node.args[0]]
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target is CAST:
                args = (args[0], widened(args[1]))
            values[node] = execute(node.target, args, {k: widened(v) for k, v in kwargs.items()})
    return values


def _same(value: Any) -> Any:
    return value


def _widened(value: Any) -> Any:
    """A tensor or a dtype, fp64 if it is a float of more than 8 bits."""
    dtype = value.dtype if isinstance(value, torch.Tensor) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        return value
    return value.double() if isinstance(value, torch.Tensor) else torch.float64


class Builder:
    """A graph under construction. ``values``: the value of each node for the given inputs.

    ``rng`` chooses between spellings that are not worth an axis.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.values: dict[fx.Node, torch.Tensor] = {}
        self.inputs: list[fx.Node] = []

    # ---- nodes

    def evaluated(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        node.meta["val"] = FakeTensor(MODE, empty, CPU)
        self.values[node] = value
        return node

    def input(self, name: str, value: torch.Tensor) -> fx.Node:
        calls = (node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(next(calls, None)):
            node = self.graph.placeholder(name)
        self.inputs.append(self.evaluated(node, value))
        return node

    def attribute(self, value: torch.Tensor) -> fx.Node:
        name = f"_tensor_constant{len(list(self.root.buffers()))}"
        self.root.register_buffer(name, value)
        return self.evaluated(self.graph.get_attr(name), value)

    def constant(self, value: torch.Tensor) -> fx.Node:
        """A literal of the program: a tensor of the module, and a copy."""
        return self.call(aten.lift_fresh_copy.default, self.attribute(value))

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        values, named = fx.map_arg((args, kwargs), self.values.__getitem__)
        value = execute(target, values, named)
        return self.evaluated(self.graph.call_function(target, args, kwargs), value)

    def finish(self, result: fx.Node) -> fx.GraphModule:
        self.graph.output(result)
        return _LazyGraphModule(self.root, self.graph)

    def shape(self, x: fx.Node) -> list[int]:
        return list(self.values[x].shape)

    def dtype(self, x: fx.Node) -> torch.dtype:
        return self.values[x].dtype

    # ---- views

    def reshape(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        given = list(shape)
        if self.shape(x) == given:
            return x
        if -1 not in given and given and self.rng.random() < 0.2:
            given[self.rng.randrange(len(given))] = -1
        return self.call(aten.reshape.default, x, given)

    def unsqueeze(self, x: fx.Node, dim: int) -> fx.Node:
        if self.rng.random() < 0.1:
            dim -= len(self.shape(x)) + 1
        return self.call(aten.unsqueeze.default, x, dim)

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        return self.call(aten.permute.default, x, list(dims))

    def swap(self, x: fx.Node) -> fx.Node:
        return self.permute(x, (1, 0))

    def expand(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        keep = self.rng.random() < 0.5
        sizes = [-1 if keep and a == b else b for a, b in zip(self.shape(x), shape, strict=True)]
        return self.call(aten.expand.default, x, sizes)

    def contiguous(self, x: fx.Node) -> fx.Node:
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def slice(self, x: fx.Node, dim: int, start: int, end: int = END, step: int = 1) -> fx.Node:
        return self.call(aten.slice.Tensor, x, dim, start, end, *([step] if step != 1 else []))

    def cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        if dim == len(self.shape(parts[0])) - 1 and self.rng.random() < 0.5:
            dim = -1
        return self.call(aten.cat.default, list(parts), *([dim] if dim else []))

    def stack(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        return self.cat([self.call(aten.unsqueeze.default, part, dim) for part in parts], dim)

    def index(self, x: fx.Node, dim: int, at: fx.Node) -> fx.Node:
        return self.call(aten.index.Tensor, x, [None] * dim + [at])

    # ---- numbers

    def iota(self, size: int, start: int, step: int, dtype: torch.dtype) -> fx.Node:
        named = {"start": start, "step": step, "dtype": dtype, "device": CPU}
        return self.call(prims.iota.default, size, **named, requires_grad=False)

    def full(self, shape: Sequence[int], number: float, dtype: torch.dtype) -> fx.Node:
        named = {"dtype": dtype, "layout": torch.strided, "device": CPU, "pin_memory": False}
        return self.call(aten.full.default, list(shape), number, **named)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        return self.call(EMPTY, list(shape), dtype=dtype, device=CPU, pin_memory=False)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if self.dtype(x) == dtype else self.call(CAST, x, dtype)

    def shr(self, x: fx.Node, amount: int | fx.Node) -> fx.Node:
        if isinstance(amount, fx.Node):
            ops = (aten.bitwise_right_shift.Tensor, aten.__rshift__.Tensor)
        else:
            ops = (aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)
        return self.call(self.rng.choice(ops), x, amount)

    def shl(self, x: fx.Node, amount: int | fx.Node) -> fx.Node:
        if isinstance(amount, fx.Node):
            ops = (aten.bitwise_left_shift.Tensor, aten.__lshift__.Tensor)
        else:
            ops = (aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar)
        return self.call(self.rng.choice(ops), x, amount)

    def mask(self, x: fx.Node, mask: int | fx.Node) -> fx.Node:
        overload = "Tensor" if isinstance(mask, fx.Node) else "Scalar"
        return self.call(getattr(aten.bitwise_and, overload), x, mask)

    def add(self, x: fx.Node, y: fx.Node | float) -> fx.Node:
        return self.call(aten.add.Tensor, x, y)

    def sub(self, x: fx.Node | float, y: fx.Node | float) -> fx.Node:
        return self.call(aten.sub.Tensor, x, y)

    def mul(self, x: fx.Node, y: fx.Node | float) -> fx.Node:
        return self.call(aten.mul.Tensor, x, y)


def noop(b: Builder, x: fx.Node, kind: str) -> fx.Node:
    """``x`` after ops that change nothing; a clone if its dtype does not allow ``kind``."""
    dtype = b.dtype(x)
    if kind == "mul 1":
        return b.mul(x, b.rng.choice((1, 1.0)))
    if kind == "lshift 0" and not dtype.is_floating_point:
        return b.shl(x, 0)
    if kind == "slice":
        dim = b.rng.randrange(2)
        return b.slice(x, dim, 0, b.rng.choice((END, b.shape(x)[dim])))
    if kind == "transposes":
        return b.swap(b.swap(x))
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    if kind == "casts" and dtype != wide and not is_float8:
        return b.cast(b.cast(x, wide), dtype)
    return b.call(aten.clone.default, x)
