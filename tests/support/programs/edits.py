"""Changes one place of a program's graph, and copies the rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from tests.support.programs import data
from tests.support.programs.builder import Builder, aten
from tests.support.programs.data import Data
from tests.support.programs.dequantization import Program

# What takes a node's place, given its arguments in the new graph.
Edit = Callable[["Rewriter", Any, Any, Any], fx.Node]
Mutation = Callable[["Sites", random.Random], Any]  # the node and its edit, or nothing

ATTEMPTS = 12  # programs tried for one mutation
SCALAR_SHIFTS = (
    *(aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar),
    *(aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar),
)
SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


class Rewriter(Builder):
    """A builder that copies a program's graph, with one node replaced."""

    def __init__(self, program: Program, rng: random.Random) -> None:
        super().__init__(rng)
        self.program = program
        self.data = Data(dict(program.data.fills), dict(program.data.values))
        self.numbers = np.random.default_rng(rng.getrandbits(32))

    def rewritten(self, at: fx.Node, edit: Edit) -> Program:
        copies: dict[fx.Node, fx.Node] = {}
        module = self.program.module
        for node in module.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            if node is at:
                copies[node] = edit(self, node, args, kwargs)
            elif node.op == "placeholder":
                copies[node] = self.input(node.target, self.data.values[node.target])
            elif node.op == "get_attr":
                copies[node] = self.attribute(getattr(module, node.target))
            elif node.op == "output":
                result = args[0]
            else:
                copies[node] = self.call(node.target, *args, **kwargs)
        mutant = self.finish(result)
        axes, arrangements = self.program.axes, self.program.arrangements
        return Program(axes, mutant, self.data, arrangements, {}, self.values)

    def more(self, like: fx.Node) -> fx.Node:
        """An input like ``like``, with other contents."""
        value = self.values[like]
        is_float = value.dtype.is_floating_point
        fill = data.floats if is_float else data.integers
        args = (-7, 7, 0.5) if is_float else (0, 7)
        shape = tuple(value.shape)
        return self.input(
            "more", self.data.add(self.numbers, "more", fill(shape, value.dtype, *args))
        )

    def rolled(self, x: fx.Node, dim: int) -> fx.Node:
        """``x`` rolled by one."""
        return self.cat([self.slice(x, dim, 1), self.slice(x, dim, 0, 1)], dim)


class Sites:
    """The nodes of a program that may be changed, by purpose."""

    def __init__(self, program: Program) -> None:
        self.program, self.axes = program, program.axes
        words = program.marks["words"]
        self.computed: set[fx.Node] = set()  # from the words
        self.calls = [node for node in program.module.graph.nodes if node.op == "call_function"]
        for node in self.calls:
            if node is words or not self.computed.isdisjoint(node.all_input_nodes):
                self.computed.add(node)
        if words.op == "placeholder":
            self.computed.add(words)
            for node in self.calls:
                if not self.computed.isdisjoint(node.all_input_nodes):
                    self.computed.add(node)
        self.codes = program.marks["codes"]

    def value(self, node: fx.Node) -> torch.Tensor:
        value: torch.Tensor = self.program.values[node]
        return value

    def of(self, *targets: Any) -> list[Any]:
        """Calls of ``targets`` that are computed from the words."""
        return [node for node in self.calls if node in self.computed and node.target in targets]

    def integers(self) -> list[fx.Node]:
        return [node for node in self.computed if not self.value(node).is_floating_point()]

    def floats(self) -> list[fx.Node]:
        """The float nodes that W is computed from."""
        nodes = [node for node in self.calls if node in self.computed]
        return [
            node
            for node in nodes
            if self.value(node).is_floating_point()
            and self.value(node).dtype.itemsize > 1
            # in a chain of writes the rest would be written over
            and not any(user.target in (*SCATTERS, aten.copy.default) for user in node.users)
        ]

    def has_integer_codes(self) -> bool:
        return not self.value(self.codes).is_floating_point() and self.codes.op != "placeholder"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are equal; all NaNs count as one value."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    clean = [torch.where(x.isnan(), torch.nan, x).contiguous() for x in (a, b)]
    kind = kinds[a.dtype.itemsize]
    return torch.equal(clean[0].to(a.dtype).view(kind), clean[1].to(a.dtype).view(kind))


# ------------------------------------------------------------------------------------------
# helpers


def with_argument(position: int, change: Callable[[Any], Any]) -> Edit:
    """The same call with one argument changed."""

    def edit(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
        changed = list(args)
        changed[position] = change(changed[position])
        return b.call(node.target, *changed, **kwargs)

    return edit


def and_then(wrap: Callable[[Rewriter, fx.Node], fx.Node]) -> Edit:
    """The same call, with ``wrap`` applied to its result."""

    def edit(b: Rewriter, node: Any, args: Any, kwargs: Any) -> fx.Node:
        if node.op == "placeholder":
            return wrap(b, b.input(node.target, b.data.values[node.target]))
        return wrap(b, b.call(node.target, *args, **kwargs))

    return edit


def pick(rng: random.Random, nodes: list[fx.Node]) -> Any:
    return rng.choice(nodes) if nodes else None


def changed(position: int, change: Callable[[Any, random.Random], Any], *targets: Any) -> Mutation:
    """One argument of one call of ``targets`` changed."""

    def mutation(sites: Sites, rng: random.Random) -> Any:
        node = pick(rng, [n for n in sites.of(*targets) if not is_node(n.args[position])])
        return node and (node, with_argument(position, lambda value: change(value, rng)))

    return mutation


def is_node(item: Any) -> bool:
    return isinstance(item, fx.Node)


def on_codes(
    wrap: Callable[[Rewriter, fx.Node, Sites], fx.Node],
    allowed: Callable[[Sites], bool] = lambda sites: True,
) -> Mutation:
    """A change of the integers."""

    def mutation(sites: Sites, rng: random.Random) -> Any:
        if not sites.has_integer_codes() or not allowed(sites):
            return None
        return sites.codes, and_then(lambda b, x: wrap(b, x, sites))

    return mutation


def on_numbers(wrap: Callable[[Rewriter, fx.Node], fx.Node]) -> Mutation:
    """A change of W, or of a float that it is computed from."""

    def mutation(sites: Sites, rng: random.Random) -> Any:
        node = pick(rng, sites.floats())
        return node and (node, and_then(wrap))

    return mutation


def is_unsigned(sites: Sites) -> bool:
    value = sites.value(sites.codes)
    return not sites.axes.is_signed and sites.axes.bits < 8 and int(value.min()) >= 0
