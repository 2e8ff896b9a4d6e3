"""Quantizers in plain PyTorch: W8A8 with dynamic activation scales, W4A16 in groups, FP8 in blocks.

They stand for a user's own code. Nothing here refers to inductor_quant, which finds the products,
scales and packed weights in the compiled graph."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SKIP = ("lm_head",)  # not quantized in any system


class Int8Linear(nn.Module):
    """nn.Linear with an int8 weight, per_channel weight scales and per_token activation scales."""

    product: Callable[[Tensor, Tensor], Tensor] = staticmethod(torch._int_mm)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1).float().clamp_min(1e-8) / 127
        weight = (linear.weight / scale[:, None]).round().to(torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(-1, keepdim=True).float().clamp_min(1e-5) / 127
        quantized = (rows / scale).round().to(torch.int8)
        out = self.product(quantized, self.weight.t()).float() * scale * self.scale
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)


class Int4Linear(nn.Module):
    """nn.Linear with an int4 weight, a scale and a zero_point for each group of 128 along K.

    Packed as GPTQ does: qweight int32 [K / 8, N] packed along K, qzeros int32 [K / group, N / 8]
    packed along N, scales [K / group, N].
    """

    group = 128
    bits = 4

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        n, k = linear.weight.shape
        group = math.gcd(self.group, k)
        grouped = linear.weight.t().float().reshape(k // group, group, n)
        low, high = grouped.amin(1), grouped.amax(1)
        scales = ((high - low) / 15).clamp_min(1e-8).to(linear.weight.dtype)
        zeros = (-low / scales).round().clamp(0, 15)
        levels = (grouped / scales[:, None]).round().add(zeros[:, None]).clamp(0, 15)
        self.register_buffer("qweight", pack(levels.reshape(k // 8, 8, n), 1))
        self.register_buffer("qzeros", pack(zeros.reshape(k // group, n // 8, 8), 2))
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, self.bits, device=x.device, dtype=torch.int32)
        levels = (self.qweight[:, None] >> shifts[:, None]) & 15
        zeros = ((self.qzeros[:, :, None] >> shifts) & 15).flatten(1)
        levels = levels.reshape(len(self.scales), -1, levels.shape[-1])
        weight = ((levels - zeros[:, None]) * self.scales[:, None]).flatten(0, 1)
        out = x @ weight
        return out if self.bias is None else out + self.bias


class Fp8BlockLinear(nn.Module):
    """nn.Linear as in DeepSeek-V3: e4m3, scales of 128 x 128 of the weight, 1 x 128 of the input.

    ``torch._scaled_mm`` takes activation scales [M, K / 128] with strides (1, M).
    """

    block = 128
    largest = 448.0  # the largest e4m3 value

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        n, k = linear.weight.shape
        pad = (0, -k % self.block, 0, -n % self.block)
        tiles = F.pad(linear.weight.float(), pad).unflatten(1, (-1, self.block))
        tiles = tiles.unflatten(0, (-1, self.block))  # [N / 128, 128, K / 128, 128]
        scale = tiles.abs().amax((1, 3)).clamp_min(1e-12) / self.largest
        weight = (tiles / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:n, :k]
        self.register_buffer("weight", weight.to(torch.float8_e4m3fn).contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.reshape(-1, x.shape[-1] // self.block, self.block).float()
        scale = blocks.abs().amax(-1).clamp_min(1e-12) / self.largest
        quantized = (blocks / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
        scale = scale.t().contiguous().t()
        out = torch._scaled_mm(quantized, self.weight.t(), scale, self.scale.t(), out_dtype=x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*x.shape[:-1], -1)


def pack(levels: Tensor, dim: int) -> Tensor:
    """Packs the eight int4 values along ``dim`` into an int32, the first in the lowest bits."""
    shape = [1] * levels.dim()
    shape[dim] = 8
    shifts = torch.arange(0, 32, 4, device=levels.device).reshape(shape)
    return (levels.long() << shifts).sum(dim).to(torch.int32)


def padded_int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``torch._int_mm`` for any M; on CUDA it needs M > 16."""
    return torch._int_mm(F.pad(a, (0, 0, 0, max(0, 32 - a.shape[0]))), b)[: a.shape[0]]


@contextlib.contextmanager
def any_batch_size() -> Iterator[None]:
    """Lets eager references take batches that stock ``torch._int_mm`` refuses."""
    original = Int8Linear.product
    Int8Linear.product = staticmethod(padded_int_mm)
    try:
        yield
    finally:
        Int8Linear.product = staticmethod(original)


def is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.split(".")[-1] not in SKIP


def replace(model: nn.Module, kind: Callable[[nn.Linear], nn.Module]) -> None:
    """Replaces each nn.Linear in turn; frees its weight before the next replacement."""
    for name, module in list(model.named_modules()):
        if is_quantized(module, name):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, kind(module))


def torchao(model: nn.Module, config: str, **options: Any) -> None:
    """Without the options of Inductor that ``quantize_`` sets for the process: bf16 has none."""
    from torchao import quantization

    if config.startswith("Float8"):
        options["granularity"] = quantization.PerRow()
    made = getattr(quantization, config)(**options)
    inductor: Any = torch._inductor.config  # noqa: TID251
    saved = inductor.get_config_copy()
    try:
        quantization.quantize_(model, made, filter_fn=is_quantized)
    finally:
        inductor.load_config(saved)


def _torchao(config: str, **options: Any) -> Callable[[nn.Module], None]:
    return functools.partial(torchao, config=config, **options)


def _checkpoint(name: str) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        from examples.benchmarks.workers import checkpoints

        replace(model, checkpoints.LAYERS[name])

    return quantize


QUANTIZERS: dict[str, Callable[[nn.Module], None]] = {
    "plain": functools.partial(replace, kind=Int8Linear),
    "int4": functools.partial(replace, kind=Int4Linear),
    "fp8_block": functools.partial(replace, kind=Fp8BlockLinear),
    "compressed_tensors": _checkpoint("compressed_tensors"),
    "nf4": _checkpoint("nf4"),
    "fine_grained_fp8": _checkpoint("fine_grained_fp8"),
    "torchao": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao_int8_weights": _torchao("Int8WeightOnlyConfig"),
    "torchao_int4_weights": _torchao(
        "Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"
    ),
    "torchao_fp8": _torchao("Float8DynamicActivationFloat8WeightConfig"),
}
