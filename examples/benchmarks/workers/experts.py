"""Experts in one system: the worker process of ``examples.benchmarks.experts``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from examples.benchmarks.experts import MODELS, PUBLISHED
from examples.benchmarks.harness import NotMeasured, serve
from examples.benchmarks.timing import Replay, machine
from examples.benchmarks.workers import expert_peers
from examples.benchmarks.workers.expert_layers import Experts, Product
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.report.roofline import roofs

L2_BYTES = 64 * 2**20
PROFILED = 5  # replays of all calls
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
# Kernels of products by their names: of Triton's templates, PyTorch's library, OpenAI's and vLLM's.
PRODUCTS = re.compile(r"triton_tem|cutlass|gemm|nvjet|matmul_ogs|fused_moe", re.IGNORECASE)
# name -> (is quantized, backend, mode)
COMPILED: dict[str, tuple[bool, Any, str | None]] = {
    "ours": (True, inductor_quant_backend, None),
    "ours-autotune": (True, inductor_quant_backend, MAX_AUTOTUNE),
    "stock": (True, "inductor", None),
    "stock-autotune": (True, "inductor", MAX_AUTOTUNE),
    "bf16": (False, "inductor", None),
    "bf16-autotune": (False, "inductor", MAX_AUTOTUNE),
}
Layer = Experts | Product
Call = Callable[[], Tensor]


def build(name: str, format: str, tiny: bool) -> Layer:
    if name in PUBLISHED:
        product = PUBLISHED[name]
        n, k = (256, 128) if tiny else (product.n, product.k)
        return Product(product.experts, n, k, format)
    model = MODELS[name]
    if tiny:
        model = dataclasses.replace(model, experts=8, top_k=2, hidden=256, inner=128)
    return Experts(model, format)


class Worker:
    def __init__(self, system: str, device: str, peer_path: Path | None) -> None:
        self.system, self.device, self.peer_path = system, device, peer_path
        self.layer: Layer | None = None
        self.built: tuple[Any, ...] = ()
        self.replay: Replay | None = None

    @torch.no_grad()
    def prepare(
        self, model: str, format: str, tokens: int, skew: float, tiny: bool
    ) -> dict[str, Any]:
        self.replay = None
        torch.compiler.reset()
        stored = format if COMPILED.get(self.system, (True,))[0] else "bf16"
        if self.built != (model, stored, tiny):
            self.layer, self.built = None, ()
            self.free()
            torch.manual_seed(0)
            with torch.device(self.device):
                self.layer = build(model, stored, tiny)
            self.built = model, stored, tiny
        assert self.layer is not None
        with torch.device("meta"):
            quantized = build(model, format, tiny)
        torch.manual_seed(1)  # the same routings in each system
        with torch.device(self.device):
            count = calls_of(quantized, tokens, self.device)
            routes = [self.layer.draw(tokens, skew) for _ in range(count)]
        hit = statistics.mean(self.layer.hit(*route) for route in routes)
        self.free()
        calls, more = self.calls(routes)
        got = calls[0]().float()
        want = self.layer.one_by_one(*routes[0])
        difference = float((got - want).norm() / want.norm())
        del got, want
        peak = self.peak_mb(calls[0])
        dense_bytes = sum(2 * quantized.num_experts * n * k for n, k in quantized.named.values())
        self.replay = Replay(calls, self.device)
        return {
            "difference": difference,
            "peak_mb": peak,
            "hit": hit,
            "least": quantized.least(quantized.rows(tokens), hit),
            "dense_mb": dense_bytes / 1e6,
            "weights_mb": sum(buffer.nbytes for buffer in quantized.buffers()) / 1e6,
            **more,
        }

    def calls(self, routes: list[tuple[Tensor, ...]]) -> tuple[list[Call], dict[str, Any]]:
        """A call for each routing, and what else is printed."""
        assert self.layer is not None
        if self.system in COMPILED:
            _, backend, mode = COMPILED[self.system]
            run = torch.compile(self.layer, backend=backend, mode=mode, dynamic=False)
            return [functools.partial(run, *route) for route in routes], {}
        if self.peer_path is None:
            raise NotMeasured("give --peer-path DIR, a folder that contains vllm/")
        peer = expert_peers.PEERS[self.system](self.layer, self.peer_path)
        calls = [peer.planned(*route) for route in routes]
        return calls, {"config": peer.used} if hasattr(peer, "used") else {}

    def peak_mb(self, call: Call) -> float | None:
        """Most memory during one call, beyond what was allocated before it: result, temporaries."""
        if self.device != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def profile(self) -> dict[str, float | None]:
        """What the kernels of the products of a call take."""
        assert self.replay is not None
        if self.device != "cuda":
            return {"products_us": None}
        for _ in range(2):
            self.replay.run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                self.replay.run()
            torch.cuda.synchronize()
        each = [e.self_device_time_total for e in found.key_averages() if PRODUCTS.search(e.key)]
        return {"products_us": sum(each) / PROFILED / len(self.replay.calls)}

    def time(self) -> dict[str, float]:
        assert self.replay is not None
        return {"us": self.replay.seconds() * 1e6}

    def free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def ceilings(self) -> dict[str, Any]:
        """By size of the operands: bytes/s and operations/s; empty where they are not known."""
        known = roofs(torch.device(self.device)) if self.device == "cuda" else {}
        self.free()
        return {size: [1e12 * rate for rate in rates] for size, rates in known.items()}


def calls_of(layer: Layer, tokens: int, device: str) -> int:
    """How many routings exceed the L2 cache with the weights that they hit."""
    share = min(1.0, layer.rows(tokens) / layer.num_experts)
    stored = sum(buffer.nbytes for buffer in layer.buffers())
    return 2 if device == "cpu" else max(2, min(24, math.ceil(4 * L2_BYTES / (share * stored))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=[*COMPILED, *expert_peers.PEERS])
    parser.add_argument("--device", required=True)
    parser.add_argument("--peer-path", type=Path)
    options = parser.parse_args()
    worker = Worker(options.system, options.device, options.peer_path)
    serve(
        {
            "machine": lambda: machine(options.device),
            "ceilings": worker.ceilings,
            "prepare": worker.prepare,
            "time": worker.time,
            "profile": worker.profile,
        }
    )


if __name__ == "__main__":
    main()
