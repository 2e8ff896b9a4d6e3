"""Linear layers of many sizes in one system: the worker of ``random_linears`` and ``formats``.

x is bf16 or fp16; families quantize it in the graph, formats dequantize the weight. 8-bit weights
are views of one pool, so that a worker holds the compiled calls of many layers, and is timed when
nothing compiles any more."""

from __future__ import annotations

import argparse
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import inductor_quant
from examples.benchmarks.harness import serve
from examples.benchmarks.timing import WEIGHT_BYTES, Replay, copies_beyond_l2, machine
from examples.benchmarks.workers import fp8, linear
from examples.benchmarks.workers.formats import FORMATS, Source
from examples.benchmarks.workers.weight_only import Layer
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


def dense_linear(x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    return F.linear(x, weight[0], bias)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x.double() @ w.double().t()


# x, weights for as many calls, the layer (x, weight, bias), what it may give without bias in fp64
Linear = tuple[
    Tensor, list[tuple[Tensor, ...]], Callable[..., Tensor], Callable[[], Iterable[Tensor]]
]
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
PREPACKED = "ours-prepacked"
SYSTEMS = {"stock": "inductor", "bf16": "inductor"}
SYSTEMS |= dict.fromkeys(("ours", PREPACKED), "inductor_quant")
BOUND = 6e-3  # of the relative RMS error: both the sums and the epilogue are rounded to bf16


def prepacked(
    layer: Callable[..., Tensor], stored: tuple[Tensor, ...], x: Tensor
) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]] | None:
    """The tensors that ``prepack_`` makes of those of ``layer(x, stored, bias)``, and the layer of
    them; None if it leaves them as they are."""
    model = nn.Sequential(Layer(lambda x, bias, *weight: layer(x, weight, bias), stored))
    if not inductor_quant.prepack_(model, x):
        return None
    repacked: Any = model[0].prepacked
    names = [name for name, _ in repacked.named_buffers()]

    def call(x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        out = torch.func.functional_call(repacked, dict(zip(names, weight, strict=True)), (x,))
        return out if bias is None else out + bias

    return tuple(repacked.buffers()), call


class Worker:
    def __init__(self, system: str, device: str) -> None:
        self.system, self.device = system, device
        self.replays: dict[int, Replay] = {}
        self.memory = torch.cuda.graph_pool_handle() if device == "cuda" else None

    @functools.cache  # noqa: B019
    def pool(self, dtype: torch.dtype) -> Tensor:
        """Elements of all weights: normally distributed floats, uniform integers."""
        count = (WEIGHT_BYTES if self.device == "cuda" else 2**21) // dtype.itemsize
        generator = torch.Generator(self.device).manual_seed(1 << 20)  # x has the cell's
        options: dict[str, Any] = {"device": self.device, "generator": generator}
        if dtype == torch.int8:
            return torch.randint(-128, 128, (count,), dtype=dtype, **options)
        scale = 50 if dtype.itemsize == 1 else 0.05
        part = (torch.randn(2**20, **options) * scale).to(dtype)
        return part.repeat(-(-count // part.numel()))[:count]

    def prepare(
        self, cell: int, family: str, m: int, n: int, k: int, epilogue: str = ""
    ) -> dict[str, Any]:
        source = Source(self.device, cell)
        found = self.formatted(family, source, m, n, k) if family in FORMATS else None
        x, weights, layer, exact = found or self.eight_bit(family, source, m, n, k)
        bias = source.floats(x.dtype, n) if epilogue == "bias" else None
        residual = source.floats(x.dtype, m, n) if epilogue == "residual" else None

        def fn(x: Tensor, residual: Tensor | None, *weight: Tensor) -> Tensor:
            return EPILOGUES[epilogue](layer(x, weight, bias), residual)

        # Dynamo limits the compilations of a code object.
        own = types.FunctionType(fn.__code__.replace(), fn.__globals__, closure=fn.__closure__)
        compiled = torch.compile(own, backend=SYSTEMS[self.system], dynamic=False)
        calls = [functools.partial(compiled, x, residual, *weight) for weight in weights]
        with torch.no_grad():
            with events.collect() as report:
                out = calls[0]().double()
            error = math.inf
            for expected in exact():
                if bias is not None:
                    expected = expected + bias.double()
                expected = EPILOGUES[epilogue](expected, residual)
                error = min(error, (out - expected).norm().item() / expected.norm().item())
            del expected, out
            self.replays[cell] = Replay(calls, self.device, pool=self.memory)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        kernels = [choice.chosen for choice in report.kernels]
        return {"error_rms": error, "wrong": not error <= BOUND, "kernels": kernels}

    def eight_bit(self, family: str, source: Source, m: int, n: int, k: int) -> Linear:
        dtype, layer, quantize = FAMILIES[family]
        dtype = BF16 if self.system == "bf16" else dtype
        pool = self.pool(dtype)
        count = min(copies_beyond_l2(n * k * dtype.itemsize, self.device), pool.numel() // (n * k))
        weights = [pool[i * n * k : (i + 1) * n * k].view(n, k) for i in range(count)]
        x = source.floats(BF16, m, k)
        sw = source.scales(torch.float32, 1, n)
        if self.system == "bf16":
            return x, [(w,) for w in weights], dense_linear, lambda: [product(x, weights[0])]

        def exact() -> Iterator[Tensor]:
            """With the scales of a division, as a CPU computes them, and of a product with the
            reciprocal, as a GPU does: their last bit decides ties, of which bf16 has many."""
            for at in ("cpu", self.device):
                a, sa = (t.to(self.device) for t in quantize(x.to(at)))
                yield product(a, weights[0]) * sa.double() * sw.double()

        return x, [(w,) for w in weights], lambda x, w, bias: layer(x, *w, sw, bias), exact

    def formatted(self, family: str, source: Source, m: int, n: int, k: int) -> Linear:
        format = FORMATS[family]
        stored = format.make(source, n, k)
        w = format.dequantize(k, *stored)
        x = source.floats(format.dtype, m, k)
        layer = dense_linear
        if self.system == "bf16":
            stored = (w.contiguous(),)
        else:

            def layer(x: Tensor, weight: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
                return F.linear(x, format.dequantize(x.shape[1], *weight), bias)

        if self.system == PREPACKED:
            stored, layer = prepacked(layer, stored, x) or (stored, layer)
        count = copies_beyond_l2(sum(t.nbytes for t in stored), self.device)
        weights = [stored, *(tuple(t.clone() for t in stored) for _ in range(count - 1))]
        return x, weights, layer, lambda: [product(x, w)]

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
