"""A Llama with a static KV cache, as servers run it: prompts one by one, tokens in batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.benchmarks.workers.architectures import construction, init


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Defaults: Llama-3-8B."""

    hidden: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128256
    theta: float = 500000.0


EIGHT_LAYERS = LlamaConfig(layers=8)
TINY = LlamaConfig(64, 128, 2, 4, 2, 16, 256)


def rotary(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, size] of rotary embeddings."""
    frequencies = theta ** -(torch.arange(0, size, 2, device=positions.device).float() / size)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention that writes its keys and values [sequences, heads, context, size]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        inner, kv_inner = config.heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_inner, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor | None
    ) -> Tensor:
        """``at`` [sequences]: the position of each one's token; None: prompts, from position 0."""
        shape = (*x.shape[:2], -1, self.config.head_size)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if at is None:
            keys[:, :, : x.shape[1]] = k
            values[:, :, : x.shape[1]] = v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.o_proj(out.transpose(1, 2).flatten(2))
        each = torch.arange(len(x), device=x.device)
        keys[each, :, at] = k[:, :, 0]
        values[each, :, at] = v[:, :, 0]
        # the query heads of one key head are the rows of its product, which reads the cache once
        q = q.reshape(len(x), self.config.kv_heads, -1, self.config.head_size)
        scores = (q @ keys.transpose(2, 3)).float() * self.config.head_size**-0.5
        is_later = torch.arange(keys.shape[2], device=x.device) > at[:, None, None, None]
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1).to(x.dtype)
        return self.o_proj((weights @ values).reshape(len(x), 1, -1))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.mlp = SwiGLU(config.hidden, config.inner)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, keys, values, at)
        return x + self.mlp(self.post_attention_layernorm(x))


Cache = list[tuple[Tensor, Tensor]]


class ServedLlama(nn.Module):
    """The next token [sequences, 1] of ``ids`` [sequences, tokens], which the cache then holds."""

    def __init__(self, config: LlamaConfig, context: int) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        cos, sin = rotary(torch.arange(context), config.head_size, config.theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(
        self, ids: Tensor, cache: Cache, at: Tensor | None, call: Callable[..., Tensor]
    ) -> Tensor:
        """``call(layer, x, cos, sin, keys, values, at)`` runs a layer."""
        where = slice(ids.shape[1]) if at is None else at[:, None, None]
        x, cos, sin = self.embed_tokens(ids), self.cos[where], self.sin[where]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            x = call(layer, x, cos, sin, keys, values, at)
        return self.lm_head(self.norm(x[:, -1])).argmax(-1, keepdim=True)

    def cache(self, sequences: int) -> Cache:
        c, like = self.config, self.embed_tokens.weight
        size = (sequences, c.kv_heads, self.context, c.head_size)
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in self.layers]


def served_llama(device: str, context: int, *, is_tiny: bool) -> ServedLlama:
    config = TINY if is_tiny else EIGHT_LAYERS
    with construction(device, torch.bfloat16):
        model = ServedLlama(config, context)
        init(model)
    return model
