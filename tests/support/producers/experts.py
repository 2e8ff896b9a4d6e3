"""Layers of experts whose stacks are stored quantized and dequantized by plain PyTorch.

The forms are those in which models spell them; ``transformers`` has its own forwards, which run on
any module with these attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
bf16, i8, u8, i32 = torch.bfloat16, torch.int8, torch.uint8, torch.int32

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Format:
    """``make(E, N, K)``: random tensors; ``dequantize``: [..., N, K] of any number of leading
    dimensions, in bf16."""

    make: Callable[[int, int, int], Tensors]
    dequantize: Callable[[Tensors], torch.Tensor]


def _scales(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return (torch.rand(shape) * 0.01 + 0.005).to(dtype)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=u8)


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=i32)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return 4 * torch.arange(8, dtype=i32, device=like.device)


def _scaled(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return (q.to(bf16).unflatten(-1, (-1, GROUP)) * s.unsqueeze(-1)).flatten(-2)


def _int4_words(t: Tensors) -> torch.Tensor:
    """compressed-tensors: words along K, symmetric."""
    return _scaled((t["q"].unsqueeze(-1) >> _shifts(t["q"]) & 15).flatten(-2) - 8, t["s"])


def _gptq(t: Tensors) -> torch.Tensor:
    """[..., K/8, N], zero points [..., K/GROUP, N/8]."""
    q = (t["q"].unsqueeze(-2) >> _shifts(t["q"])[:, None] & 15).flatten(-3, -2)
    z = (t["z"].unsqueeze(-1) >> _shifts(t["z"]) & 15).flatten(-2)
    w = (q.unflatten(-2, (-1, GROUP)) - z.unsqueeze(-2)).to(bf16) * t["s"].unsqueeze(-2)
    return w.flatten(-3, -2).transpose(-1, -2)


def _nibbles(t: Tensors) -> torch.Tensor:
    q = torch.stack((t["q"] & 15, t["q"] >> 4), -1).flatten(-2).to(bf16)
    return _scaled((q.unflatten(-1, (-1, GROUP)) - t["z"].unsqueeze(-1)).flatten(-2), t["s"])


def _blocks(t: Tensors) -> torch.Tensor:
    s = t["s"].repeat_interleave(GROUP, -1).repeat_interleave(GROUP, -2)
    return (t["q"].float() * s).to(bf16)


def _mxfp4(t: Tensors) -> torch.Tensor:
    """gpt-oss, as transformers dequantizes it."""
    lut = torch.tensor(E2M1, dtype=bf16, device=t["q"].device)
    out = torch.empty(*t["q"].shape[:-1], 32, dtype=bf16, device=t["q"].device)
    out[..., 0::2] = lut[(t["q"] & 15).to(torch.int)]
    out[..., 1::2] = lut[(t["q"] >> 4).to(torch.int)]
    torch.ldexp(out, (t["s"].to(i32) - 127).unsqueeze(-1), out=out)
    return out.flatten(-2)


FORMATS = {
    "int8": Format(
        lambda e, n, k: {
            "q": torch.randint(-127, 128, (e, n, k), dtype=i8),
            "s": _scales(e, n, 1, dtype=torch.float32),
        },
        lambda t: t["q"].to(bf16) * t["s"].to(bf16),
    ),
    "fp8": Format(
        lambda e, n, k: {
            "q": torch.randn(e, n, k).to(torch.float8_e4m3fn),
            "s": _scales(e, n, 1, dtype=torch.float32),
        },
        lambda t: t["q"].to(bf16) * t["s"].to(bf16),
    ),
    "fp8_tensor": Format(
        lambda e, n, k: {
            "q": torch.randn(e, n, k).to(torch.float8_e4m3fn),
            "s": _scales(e, 1, 1, dtype=torch.float32),
        },
        lambda t: (t["q"].float() * t["s"]).to(bf16),
    ),
    "fp8_block": Format(
        lambda e, n, k: {
            "q": torch.randn(e, n, k).to(torch.float8_e4m3fn),
            "s": _scales(e, n // GROUP, k // GROUP, dtype=torch.float32),
        },
        _blocks,
    ),
    "int4_words": Format(
        lambda e, n, k: {"q": _words(e, n, k // 8), "s": _scales(e, n, k // GROUP)}, _int4_words
    ),
    "gptq": Format(
        lambda e, n, k: {
            "q": _words(e, k // 8, n),
            "z": _words(e, k // GROUP, n // 8),
            "s": _scales(e, k // GROUP, n),
        },
        _gptq,
    ),
    "nibbles": Format(
        lambda e, n, k: {
            "q": _bytes(e, n, k // 2),
            "z": torch.randint(4, 12, (e, n, k // GROUP)).to(bf16),
            "s": _scales(e, n, k // GROUP),
        },
        _nibbles,
    ),
    "mxfp4": Format(
        lambda e, n, k: {
            "q": _bytes(e, n, k // 32, 16),
            "s": torch.randint(118, 124, (e, n, k // 32), dtype=u8),
        },
        _mxfp4,
    ),
}


class Experts(torch.nn.Module):
    """``forward(x [T, H], ids [T, k], weights [T, k])``: up to [T, 2 I], gated, down to [T, H].

    form  a key of FORMS
    """

    has_gate, has_bias, is_transposed = True, False, False
    _is_expert_parallel = has_post_expert_norm = False  # transformers 5.24

    def __init__(self, format: str, form: str, e: int = 4, h: int = 64, i: int = 64) -> None:
        super().__init__()
        self.format, self.form, self.num_experts = FORMATS[format], FORMS[form], e
        for name, (n, k) in {"up": (2 * i, h), "down": (h, i)}.items():
            for key, tensor in self.format.make(e, n, k).items():
                self.register_buffer(f"{name}_{key}", tensor)

    def stored(self, name: str) -> Tensors:
        found = ((key.split("_"), tensor) for key, tensor in self.named_buffers())
        return {key[-1]: tensor for key, tensor in found if key[0] == name and len(key) == 2}

    def stack(self, name: str) -> torch.Tensor:
        return self.format.dequantize(self.stored(name))

    def gathered(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self.format.dequantize({key: t[ids] for key, t in self.stored(name).items()})

    gate_up_proj = property(lambda self: self.stack("up"))
    down_proj = property(lambda self: self.stack("down"))

    def _apply_gate(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.form(self, x, ids, weights)


class GptOssExperts(Experts):
    """Columns of gate and up alternate, both have a bias, and both are clamped."""

    has_bias = True

    def __init__(self, format: str, form: str, e: int = 4, h: int = 64, i: int = 64) -> None:
        super().__init__(format, form, e, h, i)
        self.register_buffer("gate_up_proj_bias", torch.randn(e, 2 * i).to(bf16))
        self.register_buffer("down_proj_bias", torch.randn(e, h).to(bf16))

    def _apply_gate(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _of_transformers(name: str) -> Callable[..., torch.Tensor]:
    def forward(self: Experts, *args: torch.Tensor) -> torch.Tensor:
        from transformers.integrations import moe

        found: torch.Tensor = getattr(moe, name)(self, *args)
        return found

    return forward


def _grouped(self: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """Rows sorted by expert, back by ``index_add_``."""
    chosen, order = ids.reshape(-1).sort()
    counts = torch.histc(chosen.float(), self.num_experts, 0, self.num_experts - 1)
    offsets = counts.cumsum(0).to(i32)
    rows = order // ids.shape[1]
    up = torch._grouped_mm(x[rows], self.stack("up").transpose(1, 2), offs=offsets)
    y = torch._grouped_mm(self._apply_gate(up), self.stack("down").transpose(1, 2), offs=offsets)
    y = y * weights.reshape(-1)[order].unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add_(0, rows, y)


def _gather_first(self: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """What is gathered is dequantized; the weight is the second operand."""
    chosen, k = ids.reshape(-1), ids.shape[1]
    rows = x.repeat_interleave(k, 0).unsqueeze(1)
    up = torch.bmm(rows, self.gathered("up", chosen).transpose(1, 2))
    y = torch.bmm(self._apply_gate(up), self.gathered("down", chosen).transpose(1, 2))
    return (y.view(x.shape[0], k, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _einsum(self: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """gpt-fast: ids [T, k] gather [T, k, N, K]."""
    up = torch.einsum("ti,taoi->tao", x, self.stack("up")[ids])
    y = torch.einsum("tao,taio->tai", self._apply_gate(up), self.stack("down")[ids])
    return torch.einsum("tai,ta->ti", y, weights.to(x.dtype))


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "grouped": _grouped,
    "gather_first": _gather_first,
    "einsum": _einsum,
    "transformers_grouped": _of_transformers("grouped_mm_experts_forward"),
    "transformers_batched": _of_transformers("batched_mm_experts_forward"),
}


def route(tokens: int, experts: int, k: int = 2, h: int = 64) -> tuple[torch.Tensor, ...]:
    """x, ids and weights of a random routing."""
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(k, -1)
    return torch.randn(tokens, h).to(bf16), ids, weights.to(bf16)


def to_generate(
    format: str, form: str, *, tokens: int, top_k: int, h: int, i: int
) -> tuple[Callable[..., Any], Callable[[str], tuple[Any, ...]]]:
    """A layer of 16 experts as a function of tensors, and what makes these, fake ones on "cuda"."""
    with torch.device("meta"):
        model = Experts(format, form, e=16, h=h, i=i)
    return as_function(model, tokens=tokens, top_k=top_k, h=h)


def as_function(
    model: torch.nn.Module, *, tokens: int, top_k: int, h: int
) -> tuple[Callable[..., Any], Callable[[str], tuple[Any, ...]]]:
    """``to_generate``, of a layer on the meta device."""
    names = [name for name, _ in model.named_buffers()]

    def layer(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *buffers: torch.Tensor
    ) -> Any:
        named = dict(zip(names, buffers, strict=True))
        return torch.func.functional_call(model, named, (x, ids, weights))

    def make(device: str) -> tuple[Any, ...]:
        likes = [(each.shape, each.dtype) for each in model.buffers()]
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in likes]
        x, weights = (torch.empty(tokens, n, dtype=bf16, device=device) for n in (h, top_k))
        return x, torch.empty(tokens, top_k, dtype=torch.int64, device=device), weights, *made

    return layer, make
