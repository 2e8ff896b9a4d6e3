"""What the pass costs a compilation: on a quantized Llama of 32 layers, and on a plain one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from inductor_quant.options import Options
from tests.support.graphs import printed, rewrite_graph
from tests.support.producers import PRODUCERS, capture, need

# The products of a layer of Llama 3 8B, (K, N), at a quarter of their sizes.
PRODUCTS = (
    *((1024, 1024), (1024, 256), (1024, 256), (1024, 1024)),  # q, k, v, o
    *((1024, 3584), (1024, 3584), (3584, 1024)),  # gate, up, down
)
LAYERS = 32
# Seconds of CPU time: a machine that is busy with something else is no reason to fail.
LIMIT = 2.0

pytestmark = pytest.mark.filterwarnings("ignore")


def llama(layers: dict[tuple[int, int], fx.GraphModule]) -> fx.GraphModule:
    """One graph of all products of all layers, each a copy of the graph of its shape; what is
    between them does not matter."""
    graph, results = fx.Graph(), []
    activations: dict[int, fx.Node] = {}
    for layer in range(LAYERS):
        for number, shape in enumerate(PRODUCTS):
            results += _copied(graph, layers[shape], activations, f"{layer}_{number}", shape[0])
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _copied(
    graph: fx.Graph, part: fx.GraphModule, activations: dict[int, fx.Node], name: str, k: int
) -> list[fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}
    for node in part.graph.nodes:
        if node.op == "output":
            return [copies[result] for result in node.args[0]]
        is_x = node.op == "placeholder" and node.meta["val"].shape == (32, k)
        if is_x and k in activations:
            copies[node] = activations[k]
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            copies[node].name = copies[node].target = f"{node.name}_{name}"
        if is_x:
            activations[k] = copies[node]
    raise AssertionError("a graph without output")


def layers_of(make: Callable[[int, int], torch.nn.Module], dtype: torch.dtype) -> fx.GraphModule:
    """The products of the modules that ``make(k, n)`` gives."""
    graphs = {}
    with torch.no_grad(), FakeTensorMode():
        for k, n in dict.fromkeys(PRODUCTS):
            with unset_fake_temporarily():
                graphs[k, n] = capture(make(k, n), torch.zeros(32, k, dtype=dtype))
            for node in graphs[k, n].graph.nodes:  # of one mode for all
                if isinstance(value := node.meta.get("val"), torch.Tensor):
                    shape = value.shape, value.stride()
                    node.meta["val"] = torch.empty_strided(*shape, dtype=value.dtype)
    return llama(graphs)


def timed(module: fx.GraphModule) -> float:
    start = time.process_time()
    rewrite_graph(module.graph, Options(on_error="raise"))
    return time.process_time() - start


@pytest.mark.parametrize("name", ["gptq_gm_4b_g64_base", "torchao_intx4_wo_g32_sym"])
def test_a_llama_of_32_layers_is_recognised_in_seconds(name: str) -> None:
    need(PRODUCERS[name])
    dtype = PRODUCERS[name].dtypes[0]
    module = layers_of(lambda k, n: PRODUCERS[name].make(dtype, k, n), dtype)
    took = timed(module)
    found = [node for node in module.graph.nodes if "weight_only" in str(node.target)]
    assert len(found) == LAYERS * len(PRODUCTS) == 224
    print(f"{name}: {took:.2f} s")
    assert took < LIMIT


def test_a_llama_without_quantization_costs_next_to_nothing() -> None:
    bf16 = torch.bfloat16
    module = layers_of(lambda k, n: torch.nn.Linear(k, n, dtype=bf16), bf16)
    before = printed(module)
    took = min(timed(module) for _ in range(5))
    assert printed(module) == before
    print(f"{1e3 * took:.1f} ms")
    assert took < 0.01 * LIMIT
