"""A quantized MLP and attention, split over processes as in Megatron-LM, compared with one process.

torchrun --nproc-per-node 2 -m examples.tensor_parallel

It runs on GPUs if each process has one, and times them there; otherwise on CPUs, with gloo. The
first products of a layer are split along N, so each process computes some features, or heads. The
last one is split along K, and an all-reduce adds the parts. The compiler sees the products of one
process as any others.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from inductor_quant import collect

GROUP = 128
LARGEST = {"int8": 127, "int4": 7, "fp8": 448}
# Where K is split, each part of a row of the activation has its own scale: int8 and FP8 round other
# values. int4 weights have bf16 activations, so only the order of the sum differs.
TOLERANCE = {"int8": 0.05, "int4": 0.01, "fp8": 0.08}


class Linear(nn.Module):
    """``x [M, K] @ W.T``; W [N, K] in ``kind``, with a scale for each row, of int4 for each group.

    ``part = (dim, rank, size)``: only this part of W, of its rows (0) or columns (1).
    """

    def __init__(self, kind: str, n: int, k: int, part: tuple[int, int, int]) -> None:
        super().__init__()
        self.kind = kind
        groups = torch.randn(n, k).div(k**0.5).unflatten(1, (-1, GROUP if kind == "int4" else k))
        scale = groups.abs().amax(-1, keepdim=True) / LARGEST[kind]
        weight = (groups / scale).flatten(1)
        if kind == "int4":
            low, high = (weight.round() + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
            weight = low | high << 4
        else:
            weight = weight.to(torch.float8_e4m3fn) if kind == "fp8" else weight.round().char()
        dim, rank, size = part
        scale = scale.squeeze(-1)
        is_split = scale.shape[dim] > 1
        self.register_buffer("weight", weight.chunk(size, dim)[rank].contiguous())
        self.register_buffer("scale", scale.chunk(size, dim)[rank] if is_split else scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "int4":
            nibbles = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1)
            groups = (nibbles.to(x.dtype) - 8).unflatten(1, (-1, GROUP))
            return F.linear(x, (groups * self.scale[..., None].to(x.dtype)).flatten(1))
        scale = x.float().abs().amax(-1, keepdim=True) / LARGEST[self.kind]
        q = x.float() / scale
        if self.kind == "int8":
            sums = torch._int_mm(q.round().to(torch.int8), self.weight.t())
            return (sums * scale * self.scale.t()).to(x.dtype)
        q = q.to(torch.float8_e4m3fn)
        return F.linear(q.float() * scale, self.weight.float() * self.scale).to(x.dtype)


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
    layer: Callable[..., nn.Module], kind: str, hidden: int, rank: int, size: int
) -> nn.Module:
    torch.manual_seed(0)
    return layer(kind, hidden, rank, size).eval()


def difference(result: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the norm of ``right``."""
    return float((result.double() - right.double()).norm() / right.double().norm())


def microseconds(run: Callable[[], object], repeats: int = 50) -> float:
    """The median on the slowest process. Every process runs ``run`` equally often."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(10):
        run()
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    median = torch.tensor(statistics.median(a.elapsed_time(b) for a, b in events)).cuda()
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return 1e3 * float(median)


def main() -> None:
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpus else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, tokens = (4096, 64) if has_gpus else (64 * size * 4, 32)
    for layer in LAYERS:
        for kind in LARGEST:
            torch.compiler.reset()
            one, part = (
                make(layer, kind, hidden, *where).to(device) for where in ((0, 1), (rank, size))
            )
            x = torch.randn(tokens, hidden, dtype=torch.bfloat16).to(device)
            ours = torch.compile(part, backend="inductor_quant")
            with torch.no_grad(), collect() as report:
                error = difference(ours(x), one(x))
                line = f"{layer.__name__:9} {kind}: {size} processes differ from one by {error:.4f}"
                line += f", {len(report.matches)} products matched"
                if has_gpus:
                    systems = {"ours": ours, "stock": torch.compile(part)}
                    systems["ours in one process"] = torch.compile(one, backend="inductor_quant")
                    times = {name: microseconds(partial(f, x)) for name, f in systems.items()}
                    line += "".join(f", {name} {us:.1f} us" for name, us in times.items())
            if rank == 0:
                print(line, flush=True)
            if not error < TOLERANCE[kind]:
                raise SystemExit(f"{line}: more than {TOLERANCE[kind]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
