"""The compile time of the pass: on a quantized Llama of 32 layers, and on a plain one."""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from inductor_quant.options import Options
from inductor_quant.patterns import graph_pass
from inductor_quant.patterns.matching import known_weights
from inductor_quant.patterns.symbolic import Reader
from inductor_quant.patterns.symbolic import reader as symbolic_reader
from tests.support.graphs.post_grad import capture as capture_graphs
from tests.support.graphs.post_grad import printed, rewrite_graph
from tests.support.producers.registry import PRODUCERS, capture, need, record
from tests.support.sampling import sampled

# The products of a layer of Llama 3 8B, (K, N), at a quarter of their sizes.
PRODUCTS = (
    *((1024, 1024), (1024, 256), (1024, 256), (1024, 1024)),  # q, k, v, o
    *((1024, 3584), (1024, 3584), (3584, 1024)),  # gate, up, down
)
LAYERS = 32
# In the time that torch.fx takes to copy the graph, which is work of the same kind: neither a slow
# machine nor a busy one is a reason to fail. Seen: 9 to 24 copies (0.6 to 0.9 s).
LIMIT = 60
# Calls for a product without quantization; 904 seen, which take 3 to 5 copies.
PLAIN_CALLS = 1_000
# Calls of Python functions and of C, for the first weight of its kind and for the next one that is
# computed alike, about a fifth above what was seen.
MOST_CALLS = {
    "gguf_q4_k": (20_000, 7_000),
    "gguf_q6_k_split": (13_500, 5_500),
    "torchao_nvfp4_wo": (20_000, 7_000),
    "gptq_gm_4b_g64_base": (9_500, 5_500),  # with its tables; 48,500 entry by entry
    "gptq_3b_g64": (50_000, 12_000),  # 131,000 case by case
}

pytestmark = pytest.mark.filterwarnings("ignore")


def llama(layers: dict[tuple[int, int], fx.GraphModule]) -> fx.GraphModule:
    """One graph with all products of all layers, each a copy of the graph of its shape, without the
    nodes between them."""
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


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def copying(module: fx.GraphModule) -> float:
    return min(timed(lambda: fx.Graph().graph_copy(module.graph, {})) for _ in range(5))


def rewriting(module: fx.GraphModule) -> float:
    return timed(lambda: rewrite_graph(module.graph, Options(on_error="raise")))


@pytest.mark.parametrize("name", sampled(["gptq_gm_4b_g64_base", "torchao_intx4_wo_g32_sym"]))
def test_a_llama_of_32_layers_is_recognized_in_seconds(name: str) -> None:
    need(PRODUCERS[name])
    dtype = PRODUCERS[name].dtypes[0]
    module = layers_of(lambda k, n: PRODUCERS[name].make(dtype, k, n), dtype)
    copy, took = copying(module), rewriting(module)
    found = [node for node in module.graph.nodes if "weight_only" in str(node.target)]
    assert len(found) == LAYERS * len(PRODUCTS) == 224
    print(f"{name}: {took:.2f} s, {took / copy:.1f} copies")
    assert took < LIMIT * copy


def test_a_llama_without_quantization_costs_next_to_nothing() -> None:
    bf16 = torch.bfloat16
    module = layers_of(lambda k, n: torch.nn.Linear(k, n, dtype=bf16), bf16)
    before = printed(module)
    rewriting(module)
    profile = cProfile.Profile()
    profile.runcall(rewriting, module)
    assert printed(module) == before
    calls = sum(entry.callcount for entry in profile.getstats())
    print(f"{calls} calls")
    assert calls < PLAIN_CALLS * LAYERS * len(PRODUCTS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_packed_weight_is_read_in_few_calls_and_without_fake_tensors(name: str) -> None:
    """An op on a fake tensor costs as much as a thousand calls."""
    need(PRODUCERS[name])
    dtype, k = PRODUCERS[name].dtypes[0], 4096 if name.startswith("gptq") else 256
    found: list[tuple[int, int]] = []  # of the first, and of the next
    read, dispatch = graph_pass._first_recognition, FakeTensorMode.dispatch
    ops = 0

    def counted_op(*args: Any, **kwargs: Any) -> Any:
        nonlocal ops
        ops += 1
        return dispatch(*args, **kwargs)

    def counted(*args: Any) -> Any:
        for _ in range(2):
            before, profile = ops, cProfile.Profile()
            result = profile.runcall(read, *args)
            found.append((ops - before, sum(entry.callcount for entry in profile.getstats())))
        return result

    with torch.no_grad(), FakeTensorMode():
        with unset_fake_temporarily():
            module, x = PRODUCERS[name].make(dtype, k, 128), torch.zeros(32, k, dtype=dtype)
            graph = record(module, x, read_tables=bool(PRODUCERS[name].reads))[1].before
        with (
            mock.patch.object(graph_pass, "_first_recognition", counted),
            mock.patch.object(FakeTensorMode, "dispatch", counted_op),
            mock.patch.object(known_weights, "_KNOWN", {}),
        ):
            rewrite_graph(graph.graph, Options(on_error="raise"))
    ops_on_fakes, calls = zip(*found, strict=True)
    assert ops_on_fakes == (0, 0)
    print(f"{name}: {calls} calls")
    first, following = MOST_CALLS[name]
    assert calls[0] < first
    assert calls[1] < following


def attend(q, cache, x, w, scale):
    """Keys of a cache, the last of them rotated and of an int8 product, for groups of heads."""
    new = (torch._int_mm(x, w.t()).float() * scale).to(cache.dtype).view(4, 2, 1, 64)
    rotated = torch.cat([-new[..., 32:], new[..., :32]], -1)
    cache = cache.slice_scatter(new + rotated, 2, 15, 16)
    keys = cache.unsqueeze(2).expand(4, 2, 4, 16, 64).reshape(32, 16, 64)
    return torch.bmm(q, keys.transpose(1, 2)), cache


def test_keys_of_attention_are_read_once_by_each_recognizer(monkeypatch):
    """They are torn, as packed weights are, but hold no codes: nothing is tried again."""
    readers = []

    class Counted(Reader):
        def __init__(self, *args):
            readers.append(self)
            super().__init__(*args)

    monkeypatch.setattr(symbolic_reader, "Reader", Counted)
    q, cache = torch.randn(32, 1, 64), torch.randn(4, 2, 16, 64)
    int8 = [torch.ones(rows, 256, dtype=torch.int8) for rows in (4, 128)]
    _, [rewrite] = capture_graphs(attend, [q.bfloat16(), cache.bfloat16(), *int8, torch.rand(128)])
    assert [match.family for match in rewrite.report.matches] == ["w8a8"]
    assert any(reader.space.is_torn for reader in readers)
    assert len(readers) == 2  # weight_only, experts
