"""The models of ``examples.benchmarks.models``: real sizes, random weights, created on the device.

``CASES[name](device, tiny, dtype)`` returns (model in bf16 or fp16, inputs). ``tiny`` keeps the
structure with small sizes, for tests. The output is one tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextlib.contextmanager
def construction(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Creates new tensors in ``dtype``, on the device, with the same values in every process."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def init(model: nn.Module) -> nn.Module:
    """Normal weights with deviation 0.02; vectors (norms, biases) keep their initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    return model.eval().requires_grad_(False)


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


# ------------------------------------------------------------------------------------------
# Llama 3


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


class LlamaAttention(nn.Module):
    """Grouped-query attention. ``past`` > 0: one new token after ``past`` others in a KV cache."""

    def __init__(self, config: LlamaConfig, batch: int, past: int) -> None:
        super().__init__()
        self.config, self.past = config, past
        inner, kv_inner = config.heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_inner, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden, bias=False)
        if past:
            size = (batch, config.kv_heads, past + 1, config.head_size)
            self.register_buffer("k_cache", torch.randn(size))
            self.register_buffer("v_cache", torch.randn(size))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, self.config.head_size)
        q, k, v = (
            p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.past:
            self.k_cache[:, :, self.past :] = k
            self.v_cache[:, :, self.past :] = v
            k, v = self.k_cache, self.v_cache
        out = F.scaled_dot_product_attention(q, k, v, is_causal=not self.past, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig, batch: int, past: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.self_attn = LlamaAttention(config, batch, past)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.mlp = SwiGLU(config.hidden, config.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Logits of the last token. ``past`` = 0: prefill of all tokens; else one decode step."""

    def __init__(self, config: LlamaConfig, batch: int, tokens: int, past: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(LlamaLayer(config, batch, past) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        cos, sin = rotary(torch.arange(past, past + tokens), config.head_size, config.theta)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.norm(x[:, -1]))


def llama(
    device: str,
    tiny: bool,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch: int,
    tokens: int,
    past: int,
) -> tuple[nn.Module, Any]:
    config = LlamaConfig()
    if tiny:
        config = LlamaConfig(64, 128, 2, 4, 2, 16, 256)
        tokens, past = min(tokens, 32), min(past, 15)
    with construction(device, dtype):
        model = init(Llama(config, batch, tokens, past))
        return model, (torch.randint(0, config.vocabulary, (batch, tokens)),)


# ------------------------------------------------------------------------------------------
# DeepSeek-V3


@dataclasses.dataclass(frozen=True)
class DeepSeekConfig:
    """Defaults: a layer of DeepSeek-V3 with a dense MLP, as its first three have. In the other
    layers a token passes nine experts of 2048, which take as many operations."""

    hidden: int = 7168
    inner: int = 18432
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    plain_size: int = 128  # part of a query or key head without rotary embedding
    rotary_size: int = 64
    v_size: int = 128


class LatentAttention(nn.Module):
    """Multi-head latent attention as in prefill: expands keys and values from the latent."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.config = c = config
        self.q_a_proj = nn.Linear(c.hidden, c.q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(c.q_rank, eps=1e-6)
        self.q_b_proj = nn.Linear(c.q_rank, c.heads * (c.plain_size + c.rotary_size), bias=False)
        self.kv_a_proj = nn.Linear(c.hidden, c.kv_rank + c.rotary_size, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(c.kv_rank, c.heads * (c.plain_size + c.v_size), bias=False)
        self.o_proj = nn.Linear(c.heads * c.v_size, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.heads, -1))
        q_plain, q_rotary = q.transpose(1, 2).split([c.plain_size, c.rotary_size], -1)
        latent, k_rotary = self.kv_a_proj(x).split([c.kv_rank, c.rotary_size], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.heads, -1))
        k_plain, v = kv.transpose(1, 2).split([c.plain_size, c.v_size], -1)
        k_rotary = rotate(k_rotary[:, None], cos, sin).expand(-1, c.heads, -1, -1)
        q = torch.cat([q_plain, rotate(q_rotary, cos, sin)], -1)
        k = torch.cat([k_plain, k_rotary], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DeepSeekBlock(nn.Module):
    def __init__(self, config: DeepSeekConfig, tokens: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.mlp = SwiGLU(config.hidden, config.inner)
        cos, sin = rotary(torch.arange(tokens), config.rotary_size, 10000.0)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), self.cos, self.sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def deepseek(
    device: str, tiny: bool, dtype: torch.dtype = torch.bfloat16, *, tokens: int
) -> tuple[nn.Module, Any]:
    config = DeepSeekConfig(64, 128, 4, 32, 32, 16, 16, 16) if tiny else DeepSeekConfig()
    tokens = min(tokens, 32) if tiny else tokens
    with construction(device, dtype):
        return init(DeepSeekBlock(config, tokens)), (torch.randn(1, tokens, config.hidden),)


# ------------------------------------------------------------------------------------------
# Segment Anything, ViT-H image encoder


def relative_positions(self: nn.Module, q_size: int, k_size: int, rel_pos: Tensor) -> Tensor:
    """``SamVisionAttention.get_rel_pos`` for q_size == k_size, with the index created on the GPU.

    The original creates it on the CPU; the copy in each layer cannot be captured in a CUDA graph.
    """
    index = torch.arange(q_size, device=rel_pos.device)
    return rel_pos[index[:, None] - index[None, :] + k_size - 1]


class SamEncoder(nn.Module):
    """The parts of transformers' SamVisionEncoder, called one after the other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.sam import modeling_sam

        modeling_sam.SamVisionAttention.get_rel_pos = relative_positions
        encoder = modeling_sam.SamVisionEncoder(config)
        self.patch_embed, self.pos_embed = encoder.patch_embed, encoder.pos_embed
        self.layers, self.neck = encoder.layers, encoder.neck

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed(pixels) + self.pos_embed
        for layer in self.layers:
            x = layer(x)
        return self.neck(x)


def sam(
    device: str, tiny: bool, dtype: torch.dtype = torch.bfloat16, *, batch: int
) -> tuple[nn.Module, Any]:
    from transformers import SamVisionConfig

    sizes = {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "mlp_dim": 5120,
    }
    sizes |= {"image_size": 1024, "window_size": 14, "global_attn_indexes": [7, 15, 23, 31]}
    if tiny:
        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "mlp_dim": 128,
        }
        sizes |= {"image_size": 96, "window_size": 4, "global_attn_indexes": [1]}
    config = SamVisionConfig(**sizes)
    batch = 1 if tiny else batch
    with construction(device, dtype):
        model = init(SamEncoder(config))
        return model, (torch.randn(batch, 3, config.image_size, config.image_size),)


Case = Callable[..., tuple[nn.Module, Any]]
CASES: dict[str, Case] = {
    "sam": functools.partial(sam, batch=16),
    "llama-decode-1": functools.partial(llama, batch=1, tokens=1, past=1023),
    "llama-decode-16": functools.partial(llama, batch=16, tokens=1, past=1023),
    "llama-decode-64": functools.partial(llama, batch=64, tokens=1, past=1023),
    "llama-prefill": functools.partial(llama, batch=1, tokens=4096, past=0),
    "deepseek-64": functools.partial(deepseek, tokens=64),
    "deepseek": functools.partial(deepseek, tokens=4096),
}
