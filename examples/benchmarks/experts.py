"""The experts of mixture-of-experts models, quantized: products, gate and routing of one layer.

    python -m examples.benchmarks.experts                                     # every model
    python -m examples.benchmarks.experts --models qwen3 --formats int4 --tokens 1 64

``ours`` and ``stock`` compile the same quantized layer, with the plugin and without; ``bf16`` and
``bf16-autotune`` the layer that is not quantized. The forwards are those of ``transformers``:
``batched_mm`` for one token, as its ``generate`` does, else ``grouped_mm``. Rows of ``fp8_block``
are quantized 1 x 128. Each cell is a line of JSON: microseconds, the median of interleaved rounds
of CUDA graphs with a random routing for each call; ``difference`` is that of ours from fp32
products of one expert at a time, as norms; ``floor_us`` the least time of the two products by the
card's measured bandwidth, for the experts that are hit, and the rate of its datasheet. ``--skew 2``
lets some experts have most of the rows. ``--tiny`` tries the script, also without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

from examples.benchmarks.timing import Replay, machine
from inductor_quant.backend import inductor_quant_backend
from inductor_quant.report.roofline import roofs

GROUP, BLOCK = 128, 128
L2_BYTES = 64 * 2**20
bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Model:
    experts: int
    top_k: int
    hidden: int
    inner: int
    formats: tuple[str, ...] = ("int4", "int8", "fp8_block")
    is_gpt_oss: bool = False


MODELS = {
    "qwen3": Model(128, 8, 2048, 768),
    "mixtral": Model(8, 2, 4096, 14336),
    "deepseek": Model(256, 8, 7168, 2048),
    "gpt-oss": Model(32, 4, 2880, 2880, ("mxfp4",), is_gpt_oss=True),
}
TOKENS = (1, 16, 64, 256, 4096)
DENSE = {"bf16", "bf16-autotune"}  # systems of the layer that is not quantized
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# ------------------------------------------------------------------------------------------
# stacks [E, N, K]: how they are stored, and what the layer's code makes of them


def int8(e: int, n: int, k: int) -> dict[str, Tensor]:
    return {"q": torch.randint(-127, 128, (e, n, k), dtype=torch.int8), "s": scales(e, n, 1)}


def int4(e: int, n: int, k: int) -> dict[str, Tensor]:
    words = torch.randint(-(2**31), 2**31 - 1, (e, n, k // 8), dtype=torch.int32)
    return {"q": words, "s": scales(e, n, k // GROUP)}


def fp8_block(e: int, n: int, k: int) -> dict[str, Tensor]:
    q = torch.empty(e, n, k, dtype=e4m3)
    for each in q:
        each.copy_(torch.randn(n, k))
    return {"q": q, "s": scales(e, n // BLOCK, k // BLOCK).float()}


def mxfp4(e: int, n: int, k: int) -> dict[str, Tensor]:
    codes = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
    return {"q": codes, "s": torch.randint(112, 118, (e, n, k // 32), dtype=torch.uint8)}


def dense(e: int, n: int, k: int) -> dict[str, Tensor]:
    return {"q": torch.empty(e, n, k, dtype=bf16).normal_(std=0.02)}


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape) * 0.001 + 0.001).to(bf16)


def of_int8(q: Tensor, s: Tensor) -> Tensor:
    return q.to(bf16) * s


def of_int4(q: Tensor, s: Tensor) -> Tensor:
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=q.device)
    values = ((q.unsqueeze(-1) >> shifts) & 15).flatten(-2) - 8
    return (values.to(bf16).unflatten(-1, (-1, GROUP)) * s.unsqueeze(-1)).flatten(-2)


def of_fp8_block(q: Tensor, s: Tensor) -> Tensor:
    wide = s.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    return (q.float() * wide).to(bf16)


def of_mxfp4(q: Tensor, s: Tensor) -> Tensor:
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=bf16, device=q.device)
    values = torch.stack((table[(q & 15).int()], table[(q >> 4).int()]), -1).flatten(-2)
    return torch.ldexp(values, (s.int() - 127).unsqueeze(-1)).flatten(-2)


FORMATS: dict[str, tuple[Callable[..., dict[str, Tensor]], Callable[..., Tensor]]] = {
    "int8": (int8, of_int8),
    "int4": (int4, of_int4),
    "fp8_block": (fp8_block, of_fp8_block),
    "mxfp4": (mxfp4, of_mxfp4),
    "bf16": (dense, lambda q: q),
}


# ------------------------------------------------------------------------------------------
# layers


class Experts(nn.Module):
    """With the attributes that the forwards of ``transformers`` read."""

    has_gate, is_transposed = True, False

    def __init__(self, model: Model, format: str) -> None:
        super().__init__()
        self.model, self.num_experts, self.format = model, model.experts, format
        self.has_bias, self.quantizes_rows = model.is_gpt_oss, format == "fp8_block"
        make, self.dequantize = FORMATS[format]
        h, i = model.hidden, model.inner
        for name, (n, k) in {"up": (2 * i, h), "down": (h, i)}.items():
            for key, tensor in make(model.experts, n, k).items():
                self.register_buffer(f"{name}_{key}", tensor)
            if self.has_bias:
                bias = "gate_up_proj_bias" if name == "up" else "down_proj_bias"
                self.register_buffer(bias, torch.randn(model.experts, n).to(bf16))

    def stack(self, name: str, expert: int | None = None) -> Tensor:
        """Of all experts, or the weight of one."""
        keys = ("q", "s") if hasattr(self, f"{name}_s") else ("q",)
        stored = [getattr(self, f"{name}_{key}") for key in keys]
        return self.dequantize(*(t if expert is None else t[expert] for t in stored))

    gate_up_proj = property(lambda self: self.stack("up"))
    down_proj = property(lambda self: self.stack("down"))

    def _apply_gate(self, y: Tensor) -> Tensor:
        if self.model.is_gpt_oss:
            gate, up = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
            out = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        else:
            gate, up = y.chunk(2, -1)
            out = F.silu(gate) * up
        return rounded(out) if self.quantizes_rows else out

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = rounded(x) if self.quantizes_rows else x
        name = "batched" if len(x) == 1 else "grouped"
        out: Tensor = getattr(moe, f"{name}_mm_experts_forward")(self, x, ids, weights)
        return out

    def one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What ``forward`` computes, in fp32; one expert is dense in memory at a time."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        x = rounded(x) if self.quantizes_rows else x
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            y = self._apply_gate(self._product(x[row].float(), "up", expert).to(bf16))
            y = self._product(y.float(), "down", expert)
            out.index_add_(0, row, y * weights[row, place].float()[:, None])
        return out

    def _product(self, x: Tensor, name: str, expert: int) -> Tensor:
        y = x @ self.stack(name, expert).float().t()
        bias = {"up": "gate_up_proj_bias", "down": "down_proj_bias"}[name]
        return y + getattr(self, bias)[expert].float() if self.has_bias else y


def rounded(x: Tensor) -> Tensor:
    """Rows quantized to e4m3, 1 x 128, and back."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448
    return ((groups / scale).to(e4m3).float() * scale).flatten(-2).to(x.dtype)


# ------------------------------------------------------------------------------------------
# cells


@dataclasses.dataclass
class Cell:
    """One layer and number of tokens; ``systems``: name -> what is timed."""

    name: str
    format: str
    tokens: int
    hit: float  # experts, in the mean
    difference: float
    floor_us: float
    systems: dict[str, Replay]

    def line(self, rounds: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {name: [] for name in self.systems}
        for _ in range(rounds):
            for name, replay in self.systems.items():
                times[name].append(replay.seconds() * 1e6)
        us = {name: statistics.median(found) for name, found in times.items()}
        return {
            "model": self.name,
            "format": self.format,
            "tokens": self.tokens,
            "hit": round(self.hit, 1),
            "difference": round(self.difference, 4),
            **{f"{name}_us": round(time, 1) for name, time in us.items()},
            **{f"of_{name}": round(us["ours"] / us[name], 3) for name in us if name != "ours"},
            "floor_us": round(self.floor_us, 1),
        }


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Compiled and compared, ready to be timed."""
    device = options.device
    for name in options.models:
        model = MODELS[name]
        if options.tiny:
            model = dataclasses.replace(model, experts=8, top_k=2, hidden=256, inner=128)
        with torch.device(device):
            base = Experts(model, "bf16") if DENSE & set(options.systems) else None
        for format in model.formats:
            if options.formats and format not in options.formats:
                continue
            with torch.device(device):
                layer = Experts(model, format)
            for tokens in options.tokens:
                yield cell(name, layer, base, tokens, options)


@torch.no_grad()
def cell(
    name: str, layer: Experts, base: Experts | None, tokens: int, options: argparse.Namespace
) -> Cell:
    torch.compiler.reset()
    device, model = options.device, layer.model
    with torch.device(device):
        count = calls_of(layer, tokens, device)
        routes = [routing(model, tokens, options.skew) for _ in range(count)]
    hit = statistics.mean(len(ids.unique()) for _, ids, _ in routes)
    backends: dict[str, Any] = {"ours": inductor_quant_backend, "stock": "inductor"}
    systems, difference = {}, 0.0
    for system, backend in backends.items():
        if system == "ours" or system in options.systems:
            run = torch.compile(layer, backend=backend)
            if system == "ours":
                got, want = run(*routes[0]).float(), layer.one_by_one(*routes[0])
                difference = float((got - want).norm() / want.norm())
            systems[system] = replay(run, routes, device)
    for system in sorted(DENSE & set(options.systems)):
        mode = "max-autotune-no-cudagraphs" if system == "bf16-autotune" else "default"
        torch.compiler.reset()
        systems[system] = replay(torch.compile(base, mode=mode), routes, device)
    floor = floor_us(layer, tokens, hit, device)
    return Cell(name, layer.format, tokens, hit, difference, floor, systems)


def floor_us(layer: Experts, tokens: int, hit: float, device: str) -> float:
    """0 where the card's rates are not known."""
    known = roofs(torch.device(device)) if device == "cuda" else {}
    if not known:
        return 0.0
    bandwidth, rate = known["8 bits" if layer.quantizes_rows else "16 bits"]
    model, total = layer.model, 0.0
    for name, n, k in (("up", 2 * model.inner, model.hidden), ("down", model.hidden, model.inner)):
        stored = sum(t.nbytes for key, t in layer.named_buffers() if key.startswith(f"{name}_"))
        rows = tokens * model.top_k
        moved = stored * hit / model.experts + rows * (k + n) * bf16.itemsize
        total += max(moved / bandwidth, 2 * rows * n * k / rate)
    return total / 1e6


def routing(model: Model, tokens: int, skew: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """x, and the chosen experts of each token with their weights; uniform without ``skew``, the
    deviation of the experts' logits for all tokens beside 1 for each."""
    logits = torch.randn(tokens, model.experts) + skew * torch.randn(model.experts)
    weights, ids = logits.softmax(-1).topk(model.top_k, -1)
    return torch.randn(tokens, model.hidden).to(bf16), ids, weights.to(bf16)


def calls_of(layer: Experts, tokens: int, device: str) -> int:
    """How many routings exceed the L2 cache with the weights that they hit."""
    model = layer.model
    share = min(1.0, tokens * model.top_k / model.experts)
    stored = sum(buffer.nbytes for buffer in layer.buffers())
    return 2 if device == "cpu" else max(2, min(24, math.ceil(4 * L2_BYTES / (share * stored))))


def replay(run: Callable[..., Tensor], routes: list[Any], device: str) -> Replay:
    run(*routes[0])
    return Replay([functools.partial(run, *route) for route in routes], device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--systems", nargs="*", default=["stock", "bf16"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    print(json.dumps(machine(options.device)), flush=True)
    for each in cells(options):
        print(json.dumps(each.line(options.rounds)), flush=True)


if __name__ == "__main__":
    main()
