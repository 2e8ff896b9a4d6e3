"""A quantized MLP and attention, split over processes as in Megatron-LM, compared with one process.

torchrun --nproc-per-node 2 -m examples.tensor_parallel

It runs on GPUs if each process has one, and times them there beside Inductor without this package
and bf16 weights; otherwise on CPUs, with gloo. The first products of a layer are split along N, so
each process computes some features, or heads. The last one is split along K, and an all-reduce adds
the parts. The compiler sees the products of one process as any others.

Each result is compared twice. "fp64": the same parts, with every product in fp64. "one process":
the whole layer, also with products in fp64.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from inductor_quant import collect

GROUP = 128
LARGEST = {"int8": 127, "int4": 7, "fp8": 448}
# A product that is rounded otherwise moves a few quantized activations of the next one by a step.
ROUNDED = {"int8": 0.02, "int4": 0.01, "fp8": 0.03}
# Where K is split, each part of a row of the activation has its own scale: int8 and FP8 round other
# values. int4 weights have bf16 activations, so only the order of the sum differs.
TOLERANCE = {"int8": 0.05, "int4": 0.01, "fp8": 0.08}


class Linear(nn.Module):
    """``x [M, K] @ W.T``; W [N, K] in ``kind``, with a scale for each row, of int4 for each group.

    ``part = (dim, rank, size)``: only this part of W, of its rows (0) or columns (1).
    ``is_exact``: the product is computed in fp64, of the same quantized operands.
    """

    def __init__(self, kind: str, n: int, k: int, part: tuple[int, int, int]) -> None:
        super().__init__()
        self.kind, self.is_exact = kind, False
        weight = torch.randn(n, k).div(k**0.5)
        dim, rank, size = part
        if kind == "bf16":
            self.register_buffer("weight", weight.bfloat16().chunk(size, dim)[rank].contiguous())
            return
        groups = weight.unflatten(1, (-1, GROUP if kind == "int4" else k))
        scale = groups.abs().amax(-1, keepdim=True) / LARGEST[kind]
        weight = (groups / scale).flatten(1)
        if kind == "int4":
            low, high = (weight.round() + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
            weight = low | high << 4
        else:
            weight = weight.to(torch.float8_e4m3fn) if kind == "fp8" else weight.round().char()
        scale = scale.squeeze(-1)
        is_split = scale.shape[dim] > 1
        self.register_buffer("weight", weight.chunk(size, dim)[rank].contiguous())
        self.register_buffer("scale", scale.chunk(size, dim)[rank] if is_split else scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "bf16":
            return F.linear(x, self.weight)
        if self.kind == "int4":
            nibbles = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1)
            groups = (nibbles.to(x.dtype) - 8).unflatten(1, (-1, GROUP))
            weight = (groups * self.scale[..., None].to(x.dtype)).flatten(1)
            if self.is_exact:
                return F.linear(x.double(), weight.double()).to(x.dtype)
            return F.linear(x, weight)
        scale = x.float().abs().amax(-1, keepdim=True) / LARGEST[self.kind]
        q = x.float() / scale
        q = q.round().to(torch.int8) if self.kind == "int8" else q.to(torch.float8_e4m3fn)
        if self.is_exact:
            product = F.linear(q.double(), self.weight.double()) * scale * self.scale.t()
        elif self.kind == "int8":
            product = torch._int_mm(q, self.weight.t()) * scale * self.scale.t()
        elif x.is_cuda:
            scales = {"scale_a": scale, "scale_b": self.scale.t()}
            product = torch._scaled_mm(
                q, self.weight.t(), **scales, out_dtype=x.dtype, use_fast_accum=True
            )
        else:  # not every CPU has _scaled_mm with scales of rows
            product = F.linear(q.float() * scale, self.weight.float() * self.scale)
        return product.to(x.dtype)


class MLP(nn.Module):
    def __init__(self, kind: str, hidden: int, rank: int, size: int) -> None:
        super().__init__()
        self.size, columns, rows = size, (0, rank, size), (1, rank, size)
        self.gate = Linear(kind, 4 * hidden, hidden, columns)
        self.up = Linear(kind, 4 * hidden, hidden, columns)
        self.down = Linear(kind, hidden, 4 * hidden, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return summed(self.down(F.silu(self.gate(x)) * self.up(x)), self.size)


class Attention(nn.Module):
    """Of one sequence, in heads of 64."""

    def __init__(self, kind: str, hidden: int, rank: int, size: int) -> None:
        super().__init__()
        self.size, columns, rows = size, (0, rank, size), (1, rank, size)
        self.q, self.k, self.v = (Linear(kind, hidden, hidden, columns) for _ in range(3))
        self.out = Linear(kind, hidden, hidden, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(1, (-1, 64)).transpose(0, 1) for f in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return summed(self.out(heads.transpose(0, 1).flatten(1)), self.size)


def summed(x: torch.Tensor, size: int) -> torch.Tensor:
    if size > 1:
        dist.all_reduce(x)
    return x


LAYERS = (MLP, Attention)


def make(
    layer: Callable[..., nn.Module],
    kind: str,
    hidden: int,
    rank: int,
    size: int,
    device: torch.device | None = None,
) -> nn.Module:
    """With the same weights in every process."""
    torch.manual_seed(0)
    with device or torch.device("cpu"):
        return layer(kind, hidden, rank, size).eval()


def exact(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of ``layer`` run op by op, with products in fp64."""
    linears = [module for module in layer.modules() if isinstance(module, Linear)]
    for linear in linears:
        linear.is_exact = True
    try:
        return layer(x)
    finally:
        for linear in linears:
            linear.is_exact = False


def difference(result: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the norm of ``right``."""
    return float((result.double() - right.double()).norm() / right.double().norm())


def microseconds(layer: Callable[..., Any], x: torch.Tensor, calls: int = 20) -> float:
    """The median on the slowest process, of a CUDA graph: without the time to launch kernels."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.synchronize()
    # NCCL's watchdog makes CUDA calls of its own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        layer(x)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
    for start, end in events:
        start.record()
        for _ in range(calls):
            graph.replay()
        end.record()
    torch.cuda.synchronize()
    median = torch.tensor(statistics.median(a.elapsed_time(b) for a, b in events)).cuda()
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return 1e3 * float(median) / calls


def stock_time(layer: nn.Module, x: torch.Tensor) -> str:
    """Of Inductor without this package."""
    torch.compiler.reset()
    try:
        return f"{microseconds(torch.compile(layer, dynamic=False), x):.1f}"
    except Exception:  # _int_mm takes no fewer than 17 rows, on every process
        return "fails"


def compare(part: nn.Module, whole: nn.Module, x: torch.Tensor) -> tuple[list[str], bool]:
    """Cells of the table, and whether the result is right."""
    torch.compiler.reset()
    ours = torch.compile(part, backend="inductor_quant", dynamic=False)
    with collect() as report:
        result = ours(x)
    kinds = [module.kind for module in part.modules() if isinstance(module, Linear)]
    errors = [difference(result, exact(layer, x)) for layer in (part, whole)]
    cells = [f"{len(report.matches)} of {len(kinds)}", *(f"{error:.4f}" for error in errors)]
    if x.is_cuda:
        cells += [f"{microseconds(ours, x):.1f}", stock_time(part, x)]
    return cells, errors[0] < ROUNDED[kinds[0]] and errors[1] < TOLERANCE[kinds[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    layers = {layer.__name__: layer for layer in LAYERS}
    parser.add_argument("--layers", nargs="+", choices=layers, default=list(layers))
    parser.add_argument("--kinds", nargs="+", choices=LARGEST, default=list(LARGEST))
    parser.add_argument("--rows", nargs="+", type=int, help="of x")
    parser.add_argument("--hidden", type=int, help="features of x")
    options = parser.parse_args()
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    # Every process compiles: nothing is reported of a graph that another one left in the cache.
    torch.compiler.config.force_disable_caches = True
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden = options.hidden or (4096 if has_gpus else 64 * size * 4)
    all_rows = options.rows or ((1, 64, 4096) if has_gpus else (32,))

    def show(*cells: object) -> None:
        if rank == 0:
            print("".join(f"{cell:>12}" for cell in cells), flush=True)

    timed = ("ours us", "stock us", "bf16 us") if has_gpus else ()
    show("layer", "weights", "rows", "matched", "fp64", "one process", *timed)
    wrong = 0
    with torch.no_grad():
        for name in options.layers:

            def made(kind: str, rank: int, size: int, name: str = name) -> nn.Module:
                return make(layers[name], kind, hidden, rank, size, device)

            dense = made("bf16", rank, size)  # every process is left with the same random numbers
            inputs = [
                torch.randn(rows, hidden, dtype=torch.bfloat16, device=device) for rows in all_rows
            ]
            bf16 = [(stock_time(dense, x),) if has_gpus else () for x in inputs]
            for kind in options.kinds:
                part, whole = made(kind, rank, size), made(kind, 0, 1)
                for x, dense_time in zip(inputs, bf16, strict=True):
                    cells, is_right = compare(part, whole, x)
                    wrong += not is_right
                    show(name, kind, len(x), *cells, *dense_time, "" if is_right else "wrong")
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"{wrong} results are off")


if __name__ == "__main__":
    main()
