"""The registry of weight-only producers, and the post-grad graphs of their modules.

    graph = capture(PRODUCERS["awq_autoawq_g64"].make(), x)

``Producer`` says what to expect.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
from torch import fx, nn

from inductor_quant.report.events import Report
from tests.support.graphs.post_grad import EagerBackend, Rewrite, RewritingPass, snapshot
from tests.support.producers.base import BY_INDEX, Producer
from tests.support.producers.bytes import BYTES
from tests.support.producers.gguf import GGUF
from tests.support.producers.handmade import HANDMADE
from tests.support.producers.microscaling import MICROSCALING
from tests.support.producers.packed import WORDS
from tests.support.producers.real import REAL

__all__ = [
    "BY_INDEX",
    "GIVEN",
    "PRODUCERS",
    "Producer",
    "capture",
    "record",
    "signature",
]

PARTS = (REAL, WORDS, BYTES, HANDMADE, MICROSCALING, GGUF)
PRODUCERS = {producer.name: producer for part in PARTS for producer in part}
GIVEN = [producer for producer in PRODUCERS.values() if producer.given]


# Set by .ci/run: a package that is missing is then an error.
REQUIRED_VARIABLE = "INDUCTOR_QUANT_REQUIRE_PRODUCERS"


def need(producer: Producer) -> None:
    """Skip the test if the producer's package cannot be imported; in CI, fail."""
    need_package(producer.needs)


def need_package(name: str | None) -> None:
    if name is None:
        return
    if os.environ.get(REQUIRED_VARIABLE) == "1":
        importlib.import_module(name)
    else:
        pytest.importorskip(name, exc_type=ImportError)


class _Recorder(RewritingPass):
    """In the place of our pass; changes nothing."""

    def __call__(self, graph: fx.Graph) -> None:
        self.rewrites.append(Rewrite(snapshot(graph), snapshot(graph), Report()))


class _RecordingBackend(EagerBackend):
    def __init__(self, *, read_tables: bool = False) -> None:
        super().__init__(read_tables=read_tables)
        self.passes = _Recorder()


def record(
    module: nn.Module, x: torch.Tensor, *, read_tables: bool = False
) -> tuple[torch.Tensor, Rewrite]:
    """The result of ``module(x)`` and its graph, unchanged, with the tensors of the call.

    Raises ValueError if there is not exactly one graph.
    """
    backend = _RecordingBackend(read_tables=read_tables)
    with torch.no_grad():
        result = torch.compile(module, backend=backend)(x)
    if len(backend.rewrites) != 1:
        raise ValueError(f"{len(backend.rewrites)} graphs, not one")
    return result, backend.rewrites[0]


def capture(module: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    """The graph of ``module(x)`` as the post-grad pre pass sees it."""
    return record(module, x)[1].before


def signature(graph: fx.GraphModule) -> list[str]:
    """The ops in order, each with the dtype of its result if that has changed."""
    found, last = [], ""
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        name = _packet(node).removeprefix("aten.").removeprefix("prims.")
        name = {"convert_element_type": "cvt"}.get(name, name)
        dtype = _short(node.meta.get("val"))
        found.append(name if dtype == last else f"{name}:{dtype}")
        last = dtype
    return found


def anchors(graph: fx.GraphModule, producer: Producer) -> list[fx.Node]:
    """The calls that multiply."""
    return [node for node in graph.graph.nodes if _packet(node) in producer.anchors]


def _packet(node: fx.Node) -> str:
    if node.op == "get_attr":
        return "const"
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(node.target, "__name__", "?")


def _short(value: Any) -> str:
    name = str(getattr(value, "dtype", "?")).removeprefix("torch.")
    return (
        name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "i")
    )
