"""One compiled model in one system: the worker process of ``examples.benchmarks.models``."""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

import inductor_quant
from examples.benchmarks.harness import serve
from examples.benchmarks.timing import Replay, machine
from examples.benchmarks.workers.architectures import build
from examples.benchmarks.workers.quantizers import QUANTIZERS, any_batch_size
from inductor_quant.report import events

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
# name -> (is quantized, backend, mode)
SYSTEMS: dict[str, tuple[bool, str, str | None]] = {
    "ours": (True, "inductor_quant", None),
    "ours-apart": (True, "inductor_quant", None),
    "ours-prepacked": (True, "inductor_quant", None),
    "ours-autotune": (True, "inductor_quant", MAX_AUTOTUNE),
    "stock": (True, "inductor", None),
    "stock-autotune": (True, "inductor", MAX_AUTOTUNE),
    "bf16": (False, "inductor", None),
    "bf16-autotune": (False, "inductor", MAX_AUTOTUNE),
    "eager": (True, "eager", None),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# used instead of a mode: each GEMM in its own launch
OPTIONS = {"ours-apart": {"inductor_quant.horizontal_fusion": False}}
# Bounds on the relative RMS error of a compiled model against the same model in eager mode.
# Compilation moves roundings to bf16, and random layers amplify the difference: 4.6e-2 to 5.6e-2
# after Llama's 32 layers in bf16 without the plugin; a dropped layer gives 1e-1. A quantized model
# may differ by about its quantization error, because a difference in the last place flips quantized
# values: stock Inductor differs by 0.9 to 1.04 of it, ours by 0.9 to 1.08.
ROUNDING = 0.08
OF_QUANTIZATION = 1.25


def error(out: Tensor, reference: Tensor) -> dict[str, float]:
    """RMS and maximum of the error, relative to the RMS of the reference."""
    difference = (out.float() - reference.float()).abs()
    scale = reference.float().square().mean().sqrt()
    rms = difference.square().mean().sqrt() / scale
    return {"rms": rms.item(), "max": (difference.max() / scale).item()}


def weights_gb(model: nn.Module) -> float:
    """Size of parameters and buffers in GB, without the KV cache."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(map(nbytes, tensors.values())) / 1e9


def nbytes(tensor: Tensor) -> int:
    """Of what is stored, for a tensor that is made of others (a subclass) too."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(nbytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


def compile_model(model: nn.Module, backend: str, *, per_layer: bool, **how: Any) -> nn.Module:
    """The model compiled as a whole, or ``per_layer``: equal layers share kernels, and a graph too
    if nothing numbers them, as a static cache does.

    ``how``: mode or options.
    """
    options: dict[str, Any] = {"backend": backend, "dynamic": False, **how}
    layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not (per_layer and layers):
        return torch.compile(model, **options)  # type: ignore[return-value]
    config: Any = torch._dynamo.config  # noqa: TID251
    config.recompile_limit = max(config.recompile_limit, len(layers[0]) + 1)
    for layer in layers[0]:
        layer.compile(**options)
    return model


class Worker:
    def __init__(self, system: str, device: str) -> None:
        self.device = device
        self.is_quantized, self.backend, mode = SYSTEMS[system]
        self.is_prepacked = system == "ours-prepacked"
        self.how = {"options": OPTIONS[system]} if system in OPTIONS else {"mode": mode}
        self.replay: Replay | None = None

    @torch.no_grad()
    def prepare(
        self, case: str, quantizer: str, per_layer: bool, tiny: bool, dtype: str, layers: int | None
    ) -> dict[str, Any]:
        self.replay = None
        torch.compiler.reset()
        self._free()
        model, inputs = build(case, self.device, tiny, DTYPES[dtype], layers)
        found: dict[str, Any] = {}
        plain = model(*inputs)
        reference = plain
        if self.is_quantized:
            QUANTIZERS[quantizer](model)
            with any_batch_size():
                reference = model(*inputs)
            found["quantization"] = error(reference, plain)
            if self.is_prepacked:
                found["prepacked"] = len(inductor_quant.prepack_(model, *inputs))
        found["weights_gb"] = weights_gb(model)
        self._free()

        start = time.perf_counter()
        with events.collect() as decisions:
            fn = compile_model(model, self.backend, per_layer=per_layer, **self.how)
            out = fn(*inputs).clone()
            self._synchronize()
        found["compile_s"] = time.perf_counter() - start
        found["fused_gemms"] = len(decisions.matches)
        found["error"] = error(out, reference)
        found["error_bf16"] = error(out, plain)
        costs = found.get("quantization", {"rms": 0.0})["rms"]
        bound = max(ROUNDING, OF_QUANTIZATION * costs)
        found["wrong"] = not found["error"]["rms"] <= bound  # a NaN is wrong
        del out, plain, reference
        found["peak_gb"] = self._peak_gb(fn, inputs)
        self._make_replay(fn, inputs)
        found["graph"] = self.replay is not None and self.replay.graph is not None
        return found

    def _peak_gb(self, fn: Any, inputs: Any) -> float:
        """Peak of the allocated memory during one call, weights included."""
        if self.device == "cpu":
            return 0.0
        self._free()
        torch.cuda.reset_peak_memory_stats()
        fn(*inputs)
        self._synchronize()
        return torch.cuda.max_memory_allocated() / 1e9

    def profile(self) -> dict[str, Any]:
        """Profile of one call: {"kernels": [[name, launches, ms], ...] by descending time,
        "busy_ms": in kernels, "gaps_ms": between kernels}."""
        assert self.replay is not None, "nothing is prepared"
        if self.device == "cpu":
            return {"kernels": [], "busy_ms": 0.0, "gaps_ms": 0.0}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.replay.run()
            torch.cuda.synchronize()
        spans: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spans.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
        ends = [event.time_range for event in profiler.events() if event.name in spans]
        busy = sum(map(sum, spans.values()))
        whole = (max(t.end for t in ends) - min(t.start for t in ends)) / 1e3
        kernels = [[name, len(times), sum(times)] for name, times in spans.items()]
        kernels.sort(key=lambda kernel: -kernel[2])
        return {"kernels": kernels, "busy_ms": busy, "gaps_ms": whole - busy}

    def _make_replay(self, fn: Any, inputs: Any) -> None:
        calls = [functools.partial(fn, *inputs)]
        try:
            self.replay = Replay(calls, self.device)
        except RuntimeError as problem:  # time the calls of a model that cannot be captured
            print("no CUDA graph:", problem)
            self.replay = Replay(calls, self.device, graph=False)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def time(self) -> dict[str, Any]:
        assert self.replay is not None, "nothing is prepared"
        return {"ms": self.replay.seconds() * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", help="empty folder for Inductor's caches")
    options = parser.parse_args()
    if options.cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(options.cache, options.system)
    worker = Worker(options.system, options.device)
    serve(
        {
            "prepare": worker.prepare,
            "time": worker.time,
            "profile": worker.profile,
            "machine": lambda: machine(options.device),
        }
    )


if __name__ == "__main__":
    main()
