"""Layers of experts for ``workers.experts``: formats of stacks, the layer, one product of it.

Forwards are those of ``transformers``: ``batched_mm`` for one token, as its ``generate`` does, else
``grouped_mm``. Rows of ``fp8_block`` are quantized 1 x 128, of ``w8a8`` with a scale for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

from examples.benchmarks.experts import Model

GROUP, BLOCK, FP4_GROUP = 128, 128, 16
bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
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


def nvfp4(e: int, n: int, k: int) -> dict[str, Tensor]:
    codes = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8)
    divisor = 1 / (torch.rand(e, 1, 1) * 1e-4 + 1e-4)
    return {"q": codes, "s": (torch.rand(e, n, k // FP4_GROUP) * 50 + 1).to(e4m3), "d": divisor}


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
    return torch.ldexp(of_fp4(q), (s.int() - 127).unsqueeze(-1)).flatten(-2)


def of_nvfp4(q: Tensor, s: Tensor, d: Tensor) -> Tensor:
    """As compressed-tensors: the scale of an expert divides those of its groups."""
    scale = (s.to(bf16) / d).unsqueeze(-1)
    return (of_fp4(q).unflatten(-1, (-1, FP4_GROUP)) * scale).flatten(-2).to(bf16)


def of_fp4(q: Tensor) -> Tensor:
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=bf16, device=q.device)
    return torch.stack((table[(q & 15).int()], table[(q >> 4).int()]), -1).flatten(-2)


FORMATS: dict[str, tuple[Callable[..., dict[str, Tensor]], Callable[..., Tensor]]] = {
    "int8": (int8, of_int8),
    "int4": (int4, of_int4),
    "w8a8": (int8, of_int8),
    "fp8_block": (fp8_block, of_fp8_block),
    "mxfp4": (mxfp4, of_mxfp4),
    "nvfp4": (nvfp4, of_nvfp4),
    "bf16": (dense, lambda q: q),
}


# ------------------------------------------------------------------------------------------
# layers


class Stacks(nn.Module):
    """``named``: name -> (N, K) of a stack of ``experts`` weights in ``format``."""

    def __init__(self, experts: int, format: str, named: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.num_experts, self.format, self.named = experts, format, named
        self.quantize = QUANTIZERS.get(format)  # of rows
        make, self.dequantize = FORMATS[format]
        for name, (n, k) in named.items():
            for key, tensor in make(experts, n, k).items():
                self.register_buffer(f"{name}_{key}", tensor)

    def stored(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{name}_{k}") for k in "qsd" if hasattr(self, f"{name}_{k}")]

    def stack(self, name: str, expert: int | None = None) -> Tensor:
        """Of all experts, or the weight of one."""
        return self.dequantize(*(t if expert is None else t[expert] for t in self.stored(name)))

    def rounded(self, x: Tensor) -> Tensor:
        """Rows as the format stores them, dequantized again."""
        return dequantized(*self.quantize(x)).to(x.dtype) if self.quantize else x

    def least(self, rows: int, hit: float) -> list[tuple[float, float]]:
        """Of each product: bytes to be moved by ``rows`` rows that hit so many experts, and
        operations."""
        found = []
        for name, (n, k) in self.named.items():
            stored = sum(t.nbytes for t in self.stored(name))
            moved = stored * hit / self.num_experts + rows * (k + n) * bf16.itemsize
            found.append((moved, 2.0 * rows * n * k))
        return found


class Experts(Stacks):
    """With the attributes that the forwards of ``transformers`` read."""

    has_gate, is_transposed = True, False
    _is_expert_parallel = has_post_expert_norm = False  # transformers 5.24

    def __init__(self, model: Model, format: str) -> None:
        h, i = model.hidden, model.inner
        super().__init__(model.experts, format, {"up": (2 * i, h), "down": (h, i)})
        self.model, self.has_bias = model, model.is_gpt_oss
        for name, n in {"gate_up_proj_bias": 2 * i, "down_proj_bias": h}.items():
            if self.has_bias:
                self.register_buffer(name, torch.randn(model.experts, n).to(bf16))

    gate_up_proj = property(lambda self: self.stack("up"))
    down_proj = property(lambda self: self.stack("down"))

    def draw(self, tokens: int, skew: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """x, and the chosen experts of each token with their weights; uniform without ``skew``, the
        deviation of the experts' logits for all tokens beside 1 for each."""
        experts, top_k = self.num_experts, self.model.top_k
        logits = torch.randn(tokens, experts) + skew * torch.randn(experts)
        weights, ids = logits.softmax(-1).topk(top_k, -1)
        return torch.randn(tokens, self.model.hidden).to(bf16), ids, weights.to(bf16)

    def hit(self, x: Tensor, ids: Tensor, weights: Tensor) -> int:
        return len(ids.unique())

    def rows(self, tokens: int) -> int:
        return tokens * self.model.top_k

    def _apply_gate(self, y: Tensor) -> Tensor:
        if self.model.is_gpt_oss:
            gate, up = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
            out = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        else:
            gate, up = y.chunk(2, -1)
            out = F.silu(gate) * up
        return self.rounded(out)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.rounded(x)
        name = "batched" if len(x) == 1 else "grouped"
        out: Tensor = getattr(moe, f"{name}_mm_experts_forward")(self, x, ids, weights)
        return out

    def one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What ``forward`` computes, in fp32; one expert is dense in memory at a time."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        x = self.rounded(x)
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


class Product(Stacks):
    """One product of rows that are sorted by expert, as many for each. Those of ``fp8_block`` come
    as e4m3 with an fp32 scale for 1 x 128."""

    def __init__(self, experts: int, n: int, k: int, format: str) -> None:
        super().__init__(experts, format, {"up": (n, k)})

    def draw(self, each: int, skew: float = 0.0) -> tuple[Tensor, ...]:
        """``each``: rows of an expert; ``skew`` is not used."""
        ends = torch.arange(1, self.num_experts + 1, dtype=torch.int32) * each
        x = torch.randn(self.rows(each), self.named["up"][1]).to(bf16)
        return (*(self.quantize(x) if self.quantize else (x,)), ends)

    def hit(self, *args: Tensor) -> int:
        return self.num_experts

    def rows(self, each: int) -> int:
        return each * self.num_experts

    def forward(self, *args: Tensor) -> Tensor:
        *x, ends = args
        return torch._grouped_mm(self._read(x), self.stack("up").transpose(1, 2), offs=ends)

    def one_by_one(self, *args: Tensor) -> Tensor:
        *x, ends = args
        parts = self._read(x).float().chunk(len(ends))
        return torch.cat([part @ self.stack("up", e).float().t() for e, part in enumerate(parts)])

    def _read(self, x: Sequence[Tensor]) -> Tensor:
        return dequantized(*x) if self.quantize else x[0]


def by_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in e4m3, and their scales, 1 x 128."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448
    return (groups / scale).to(e4m3).flatten(-2), scale.squeeze(-1)


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in int8, and a scale for each."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def dequantized(q: Tensor, scale: Tensor) -> Tensor:
    groups = q.float().unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale.unsqueeze(-1)).flatten(-2).to(bf16)


QUANTIZERS = {"fp8_block": by_block, "w8a8": by_row}
