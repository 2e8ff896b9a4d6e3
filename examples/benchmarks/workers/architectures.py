"""The models of ``examples.benchmarks.models``: transformers' classes in real sizes, with random
weights that are created on the device, and those of ``blocks.py``.

``build(name, device, tiny, dtype, layers)`` returns (model in bf16 or fp16, inputs). ``tiny`` keeps
the structure with small sizes, for tests; ``layers`` replaces their number. The output is one
tensor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from examples.benchmarks.workers.blocks import DiffusionBlocks, LinearLayers


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


def init(model: nn.Module, std: float | None = 0.02) -> nn.Module:
    """Normal weights with deviation ``std``, or 1 / sqrt(columns), which keeps the size of x;
    vectors (norms, biases) keep their initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std or parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


class Encoder(nn.Module):
    """The last hidden state of a model that reads its whole input at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.model(x)[0]
        return state


class Decoder(nn.Module):
    """The logits of each sequence's last token, after ``past`` tokens of random keys and values.

    Each call finds and leaves the static cache with ``past`` tokens.
    """

    def __init__(self, model: nn.Module, batch: int, tokens: int, past: int) -> None:
        from transformers import StaticCache

        super().__init__()
        self.model, config = model, model.config
        self.cache = StaticCache(config=config, max_cache_len=past + tokens)
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameter = next(model.parameters())
        self.cache.early_initialization(batch, heads, size, parameter.dtype, parameter.device)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.past = torch.full((), past)

    def forward(self, ids: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length = self.past.clone()
        out = self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
        for layer in self.cache.layers:
            layer.cumulative_length = self.past
        logits: Tensor = out.logits
        return logits


# ------------------------------------------------------------------------------------------
# Segment Anything


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


# ------------------------------------------------------------------------------------------
# sizes


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A class of transformers and its configuration; ``layers``: the key of their number."""

    model: str
    config: str
    sizes: Mapping[str, Any]
    tiny: Mapping[str, Any]
    layers: str = "num_hidden_layers"


TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
TINY_DECODER = {**TINY, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}


def decoder(
    name: str, hidden: int, inner: int, heads: int, kv_heads: int, layers: int, vocabulary: int
) -> Architecture:
    """Heads of 128 elements, or 256 (Gemma)."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256 if name == "Gemma" else 128,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "sliding_window": None,
    }
    return Architecture(f"{name}ForCausalLM", f"{name}Config", sizes, TINY_DECODER)


ARCHITECTURES = {
    "llama": decoder("Llama", 4096, 14336, 32, 8, 32, 128256),  # Llama-3-8B
    "qwen3": decoder("Qwen3", 4096, 12288, 32, 8, 36, 151936),  # Qwen3-8B
    "mistral": decoder("Mistral", 4096, 14336, 32, 8, 32, 32768),  # Mistral-7B-v0.3
    "gemma": decoder("Gemma", 3072, 24576, 16, 16, 28, 256000),  # Gemma-7B
    # The layers with a dense MLP; in the others a token passes nine experts of 2048, which take as
    # many operations. The sizes are the class's defaults.
    "deepseek": Architecture(
        "DeepseekV3Model",
        "DeepseekV3Config",
        {"num_hidden_layers": 1, "first_k_dense_replace": 61, "vocab_size": 1024},
        {**TINY_DECODER, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32}
        | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    ),
    "bert": Architecture(
        "BertModel",
        "BertConfig",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
        | {"num_hidden_layers": 24},
        {**TINY, "vocab_size": 256},
    ),
    "vit": Architecture(
        "ViTModel",
        "ViTConfig",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
        | {"num_hidden_layers": 24, "image_size": 224, "patch_size": 16},
        {**TINY, "image_size": 64},
    ),
    "whisper": Architecture(
        "WhisperEncoder",
        "WhisperConfig",
        {"d_model": 1280, "encoder_ffn_dim": 5120, "encoder_attention_heads": 20}
        | {"encoder_layers": 32, "num_mel_bins": 128, "max_source_positions": 1500},
        {"d_model": 64, "encoder_ffn_dim": 128, "encoder_attention_heads": 4, "vocab_size": 256}
        | {"num_mel_bins": 16, "max_source_positions": 24, "pad_token_id": 0},
        layers="encoder_layers",
    ),
    # T5-v1.1-XXL, which encodes the text for Flux and SD3
    "t5": Architecture(
        "T5EncoderModel",
        "T5Config",
        {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24}
        | {"feed_forward_proj": "gated-gelu"},
        {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 256},
        layers="num_layers",
    ),
    "sam": Architecture(
        "SamVisionEncoder",
        "SamVisionConfig",
        {"hidden_size": 1280, "mlp_dim": 5120, "num_attention_heads": 16, "num_hidden_layers": 32}
        | {"image_size": 1024, "window_size": 14, "global_attn_indexes": [7, 15, 23, 31]},
        {"hidden_size": 64, "mlp_dim": 128, "num_attention_heads": 4, "image_size": 96}
        | {"window_size": 4, "global_attn_indexes": [1]},
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """``tokens`` after ``past`` others, or images, or half minutes of speech: ``batch`` of them."""

    architecture: str
    batch: int
    tokens: int = 0
    past: int = 0


CASES = {
    **{f"{name}-decode-{m}": Case(name, m, 1, 1023)
       for name in ("llama", "qwen3", "mistral", "gemma") for m in (1, 16, 64)},
    **{f"{name}-prefill": Case(name, 1, 4096) for name in ("llama", "qwen3", "mistral", "gemma")},
    **{f"llama-linears-{m}": Case("linears", m) for m in (1, 16)},
    "deepseek-64": Case("deepseek", 1, 64),
    "deepseek": Case("deepseek", 1, 4096),
    "bert": Case("bert", 16, 512),
    "vit": Case("vit", 64),
    "whisper": Case("whisper", 4),
    "t5": Case("t5", 4, 512),
    "sam": Case("sam", 16),
    "flux": Case("flux", 1, 4096 + 512),
    "sd3": Case("sd3", 2, 4096 + 154),
}  # fmt: skip
LINEARS = (4096, 14336, 1024, 4)  # of Llama-3-8B, as many as exceed any L2 cache
# width, heads, blocks of two streams, blocks of one stream, tokens of text
DIFFUSION = {"flux": (3072, 24, 19, 38, 512), "sd3": (2432, 38, 38, 0, 154)}


def build(
    name: str,
    device: str,
    tiny: bool,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and the inputs of ``CASES[name]``."""
    case = CASES[name]
    layers = layers or (2 if tiny else None)
    with construction(device, dtype):
        if case.architecture in DIFFUSION:
            return diffusion(case, tiny, layers)
        if case.architecture == "linears":
            hidden, inner, kv, count = (256, 512, 128, 2) if tiny else LINEARS
            model = init(LinearLayers(hidden, inner, kv, layers or count), std=None)
            return model, (torch.randn(case.batch, hidden),)
        return transformer(case, tiny, layers)


def transformer(case: Case, tiny: bool, layers: int | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    known = ARCHITECTURES[case.architecture]
    sizes = dict(known.sizes) | (known.tiny if tiny else {})
    if layers:
        sizes[known.layers] = layers
        if "global_attn_indexes" in sizes:  # every so many layers
            every = sizes["global_attn_indexes"][0] + 1
            sizes["global_attn_indexes"] = [i for i in range(layers) if (i + 1) % every == 0]
    config = getattr(transformers, known.config)(**sizes)
    kinds = {"WhisperEncoder": WhisperEncoder, "SamVisionEncoder": SamEncoder}
    model = init((kinds.get(known.model) or getattr(transformers, known.model))(config))
    batch, tokens, past = case.batch, case.tokens, case.past
    if tiny:
        batch, tokens, past = min(batch, 2), min(tokens, 32), min(past, 15)
    if tokens:
        ids = torch.randint(0, config.vocab_size, (batch, tokens))
        if known.model.endswith("ForCausalLM"):
            return Decoder(model, batch, tokens, past), (ids,)
        return Encoder(model), (ids,)
    if known.model == "WhisperEncoder":
        frames = 2 * config.max_source_positions
        return Encoder(model), (torch.randn(batch, config.num_mel_bins, frames),)
    pixels = torch.randn(batch, 3, config.image_size, config.image_size)
    return model if known.model == "SamVisionEncoder" else Encoder(model), (pixels,)


def diffusion(case: Case, tiny: bool, layers: int | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, heads, double, single, text = DIFFUSION[case.architecture]
    batch, tokens = case.batch, case.tokens
    if tiny:
        width, heads, text, tokens = 64, 4, 8, 40
    if layers:
        double, single = -(-layers // 2), layers // 2 if single else 0
    model = init(DiffusionBlocks(width, heads, double, single))
    image = torch.randn(batch, tokens - text, width)
    return model, (image, torch.randn(batch, text, width), torch.randn(batch, width))
