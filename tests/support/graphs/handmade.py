"""Graphs built node by node that tracing would not give, for example with mutations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_quant.options import Options
from inductor_quant.report import events
from tests.support.graphs.post_grad import Rewrite, rewrite_graph, snapshot

Call = Callable[..., fx.Node]


def rewritten(
    body: Callable[..., fx.Node], args: list[torch.Tensor], options: Options | None = None
) -> Rewrite:
    """The graph that ``body(call, *inputs)`` builds, before and after our pass.

    ``call(op, *args, **kwargs)`` appends a node; ``body`` returns the output.
    """
    mode, graph = FakeTensorMode(), fx.Graph()

    def evaluated(node: fx.Node, value: Any) -> fx.Node:
        node.meta["val"] = value
        return node

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        values, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
        with mode:
            return evaluated(graph.call_function(target, args, kwargs), target(*values, **named))

    inputs = [
        evaluated(graph.placeholder(f"x{number}"), mode.from_tensor(arg))
        for number, arg in enumerate(args)
    ]
    graph.output(body(call, *inputs))
    module = fx.GraphModule(torch.nn.Module(), graph)
    before = snapshot(module.graph)
    with events.collect() as found:
        rewrite_graph(module.graph, options or Options(on_error="raise"))
    module.graph.lint()
    return Rewrite(before, snapshot(module.graph), found, inputs=args)


def results(rewrite: Rewrite) -> tuple[torch.Tensor, torch.Tensor]:
    """The results before and after, each from its own copy of the inputs."""
    return tuple(
        module(*copy.deepcopy(rewrite.inputs)) for module in (rewrite.before, rewrite.after)
    )  # type: ignore[return-value]
