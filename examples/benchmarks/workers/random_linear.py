"""Quantized linear layers of many sizes in one system: worker of ``benchmarks.random_linears``.

x is bf16 and is quantized in the graph. The weights of all layers are views of one pool, so that a
worker holds the compiled calls of many sizes, and is timed when nothing compiles any more."""

from __future__ import annotations

import argparse
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from examples.benchmarks.harness import serve
from examples.benchmarks.timing import WEIGHT_BYTES, Replay, copies_beyond_l2, machine
from examples.benchmarks.workers import fp8, linear
from inductor_quant.report import events

Tensor = torch.Tensor
BF16 = torch.bfloat16


def fp8_linear(x: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None, *, fast: bool) -> Tensor:
    a, sa = fp8.quantize_rows(x)
    return torch._scaled_mm(a, w.t(), sa, sw, bias, out_dtype=BF16, use_fast_accum=fast)


def int8_linear(x: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None) -> Tensor:
    a, sa = linear.quantize_rows(x)
    out = torch._int_mm(a, w.t()).float() * sa * sw
    return (out if bias is None else out + bias).to(BF16)


def bf16_linear(x: Tensor, w: Tensor, sw: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, w, bias)


# family -> type of the weight, the layer, its quantization
FAMILIES: dict[str, tuple[torch.dtype, Callable[..., Tensor], Any]] = {
    "fp8": (fp8.E4M3, functools.partial(fp8_linear, fast=True), fp8.quantize_rows),
    "fp8_precise": (fp8.E4M3, functools.partial(fp8_linear, fast=False), fp8.quantize_rows),
    "w8a8": (torch.int8, int8_linear, linear.quantize_rows),
}
EPILOGUES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "": lambda out, residual: out,
    "bias": lambda out, residual: out,
    "silu": lambda out, residual: F.silu(out),
    "residual": lambda out, residual: out + residual,
}
SYSTEMS = {"ours": "inductor_quant", "stock": "inductor", "bf16": "inductor"}
BOUND = 6e-3  # of the relative RMS error: both the sums and the epilogue are rounded to bf16


class Worker:
    def __init__(self, system: str, device: str) -> None:
        self.system, self.device = system, device
        self.replays: dict[int, Replay] = {}
        self.memory = torch.cuda.graph_pool_handle() if device == "cuda" else None

    @functools.cache  # noqa: B019
    def pool(self, dtype: torch.dtype) -> Tensor:
        """Elements of all weights: normally distributed floats, uniform integers."""
        count = (WEIGHT_BYTES if self.device == "cuda" else 2**21) // dtype.itemsize
        generator = torch.Generator(self.device).manual_seed(0)
        options: dict[str, Any] = {"device": self.device, "generator": generator}
        if dtype == torch.int8:
            return torch.randint(-128, 128, (count,), dtype=dtype, **options)
        scale = 50 if dtype.itemsize == 1 else 0.05
        part = (torch.randn(2**20, **options) * scale).to(dtype)
        return part.repeat(-(-count // part.numel()))[:count]

    def prepare(
        self, cell: int, family: str, epilogue: str, m: int, n: int, k: int
    ) -> dict[str, Any]:
        dtype, layer, quantize = FAMILIES[family]
        if self.system == "bf16":
            dtype, layer = BF16, bf16_linear
        generator = torch.Generator(self.device).manual_seed(cell)
        options: dict[str, Any] = {"device": self.device, "generator": generator}
        pool = self.pool(dtype)
        count = min(copies_beyond_l2(n * k * dtype.itemsize, self.device), pool.numel() // (n * k))
        weights = [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(count)]
        x = torch.randn(m, k, dtype=BF16, **options)
        bias = torch.randn(n, dtype=BF16, **options) if epilogue == "bias" else None
        sw = torch.rand(1, n, **options) * 1e-3 + 1e-4
        residual = torch.randn(m, n, dtype=BF16, **options) if epilogue == "residual" else None

        def fn(x: Tensor, w: Tensor, residual: Tensor | None) -> Tensor:
            return EPILOGUES[epilogue](layer(x, w, sw, bias), residual)

        # Dynamo limits the compilations of a code object.
        own = types.FunctionType(fn.__code__.replace(), fn.__globals__, closure=fn.__closure__)
        compiled = torch.compile(own, backend=SYSTEMS[self.system], dynamic=False)
        calls = [functools.partial(compiled, x, w, residual) for w in weights]
        with torch.no_grad():
            with events.collect() as report:
                out = calls[0]()
            a, sa = (x, torch.ones(())) if self.system == "bf16" else quantize(x)
            expected = (a.double() * sa.to(x.device)) @ weights[0].double().t()
            expected *= 1 if self.system == "bf16" else sw
            expected += 0 if bias is None else bias
            expected = EPILOGUES[epilogue](expected, residual)
            error = (out - expected).norm().item() / expected.norm().item()
            del a, expected, out
            self.replays[cell] = Replay(calls, self.device, pool=self.memory)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        kernels = [choice.chosen for choice in report.kernels]
        return {"error_rms": error, "wrong": not error <= BOUND, "kernels": kernels}

    def time(self, cell: int) -> dict[str, Any]:
        return {"us": self.replays[cell].seconds() * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    # a cached compilation reports no kernel
    torch.compiler.config.force_disable_caches = True
    worker = Worker(options.system, options.device)
    serve(
        {
            "prepare": worker.prepare,
            "time": worker.time,
            "machine": lambda: machine(options.device),
        }
    )


if __name__ == "__main__":
    main()
