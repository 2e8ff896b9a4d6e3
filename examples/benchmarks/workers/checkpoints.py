"""Layers as ``inductor_quant.prepare_`` makes them of checkpoints of other libraries, from the
weights of an nn.Linear: the same packed tensors and formulas, without the libraries."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from examples.benchmarks.workers.quantizers import Fp8BlockLinear
from inductor_quant.prepare import bitsandbytes, compressed_tensors, finegrained_fp8
from inductor_quant.spec.formulas import NF4


def w4a16(linear: nn.Linear, group: int = 128) -> nn.Module:
    """compressed-tensors' W4A16: int32 [N, K / 8], bf16 scales [N, K / 128], symmetric."""
    grouped = linear.weight.float().unflatten(1, (-1, group))
    scale = (grouped.abs().amax(-1) / 7.5).to(linear.weight.dtype)
    codes = (grouped / scale[..., None].float()).round().clamp(-8, 7).add(8).flatten(1)
    shifts = torch.arange(0, 32, 4, device=codes.device)
    words = (codes.long().unflatten(1, (-1, 8)) << shifts).sum(-1).to(torch.int32)
    held = nn.Module()
    held.in_features, held.out_features = linear.in_features, linear.out_features  # type: ignore
    held.register_buffer("weight_packed", words)
    held.register_buffer("weight_scale", scale)
    held.register_buffer("bias", linear.bias)
    weights = SimpleNamespace(num_bits=4, group_size=group, block_structure=None, symmetric=True)
    scheme = SimpleNamespace(weights=weights, input_activations=None)
    return compressed_tensors.CompressedLinear(held, scheme, "pack-quantized")


def nf4(linear: nn.Linear, size: int = 64) -> nn.Module:
    """bitsandbytes' NF4: uint8 [N * K / 2, 1], fp32 absmax of 64 neighbours along K."""
    table = torch.tensor(NF4).to(linear.weight.device)
    blocks = linear.weight.float().reshape(-1, size)
    absmax = blocks.abs().amax(1)
    edges = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / absmax[:, None], edges).to(torch.uint8).flatten()
    state = SimpleNamespace(absmax=absmax, code=table, blocksize=size, nested=False)
    packed = (codes[::2] << 4 | codes[1::2])[:, None]
    return bitsandbytes.Linear4bit(_layer(linear, packed, compute_dtype=linear.weight.dtype), state)


def fine_grained_fp8(linear: nn.Linear) -> nn.Module:
    """transformers' FP8Linear: e4m3, fp32 scales of 128 x 128, x by 1 x 128."""
    made = Fp8BlockLinear(linear)
    held = _layer(linear, made.weight, weight_scale_inv=made.scale, activation_scale=None)
    return finegrained_fp8.FP8Linear(held, (128, 128))


def _layer(linear: nn.Linear, weight: Tensor, **others: Any) -> SimpleNamespace:
    sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
    return SimpleNamespace(weight=nn.Buffer(weight), bias=linear.bias, **sizes, **others)


LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "compressed_tensors": w4a16,
    "nf4": nf4,
    "fine_grained_fp8": fine_grained_fp8,
}
