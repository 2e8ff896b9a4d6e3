"""Dequantization programs as post-grad graphs: one for every value of ``Axes``.

The output of a program is W, [K, N] or [N, K]; its inputs are real tensors.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch
from torch import fx

from tests.support.programs import data
from tests.support.programs.axes import Axes, draw
from tests.support.programs.builder import evaluate
from tests.support.programs.data import Data
from tests.support.programs.writer import Writer


@dataclasses.dataclass
class Program:
    """A graph, its inputs, and the axes that it was written from.

    arrangements  how the [groups of K, groups of N] scales and zeros are stored: KN, NK, or flat
    marks         nodes that mutations look for: words, codes (the integers), numbers (before the
                  zero), result
    mutation      what was changed, for a mutant; ``must_reject`` if that left the family
    """

    axes: Axes
    module: fx.GraphModule
    data: Data
    arrangements: dict[str, str]
    marks: dict[str, fx.Node]
    values: dict[fx.Node, Any]
    mutation: str = ""
    must_reject: bool = False

    @property
    def inputs(self) -> list[torch.Tensor]:
        nodes = self.module.graph.find_nodes(op="placeholder")
        return [self.data.values[node.target] for node in nodes]

    @property
    def output(self) -> fx.Node:
        """The node of W."""
        [end] = self.module.graph.find_nodes(op="output")
        return end.args[0]

    @property
    def is_transposed(self) -> bool:
        return self.axes.output == "NK"

    @property
    def weight(self) -> torch.Tensor:
        """W [K, N] of these inputs."""
        return self.oriented(self.values[self.output])

    def oriented(self, value: torch.Tensor) -> torch.Tensor:
        return value.T if self.is_transposed else value

    def run(self, contents: Data, *, in_fp64: bool = False) -> dict[fx.Node, Any]:
        """The value of every node for other contents of the inputs."""
        nodes = self.module.graph.find_nodes(op="placeholder")
        inputs = [contents.values[node.target] for node in nodes]
        return evaluate(self.module, inputs, in_fp64=in_fp64)

    def refilled(self, rng: random.Random) -> list[Program]:
        """The program with other contents of its inputs, including extreme words."""
        numbers = np.random.default_rng(rng.getrandbits(32))
        contents = [self.data.redrawn(numbers, style) for style in data.STYLES]
        return [dataclasses.replace(self, data=c, values=self.run(c)) for c in contents]

    def __str__(self) -> str:
        lines = [f"# {self.axes}"]
        if self.mutation:
            lines.append(f"# mutation: {self.mutation}")
        for node in self.module.graph.nodes:
            value = self.values.get(node)
            kind = f"{str(value.dtype)[6:]}{list(value.shape)}" if value is not None else ""
            lines.append(f"{node.format_node() or node.op} # {kind}")
        return "\n".join(lines)


def draw_program(seed: object, *, is_mixed_radix: bool = True) -> Program:
    """The program of a seed."""
    rng = random.Random(str(seed))
    return build(draw(rng, is_mixed_radix=is_mixed_radix), rng)


def build(axes: Axes, rng: random.Random) -> Program:
    """``axes`` as a graph; ``rng`` makes the choices that are no axis, and fills the inputs."""
    writer = Writer(axes, rng)
    result = writer.write()
    module = writer.b.finish(result)
    return Program(axes, module, writer.data, writer.arrangements, writer.marks, writer.b.values)
