"""Layers of FP8: by torchao, by compressed-tensors, after DeepSeek-V3, and of torch's own products.

Each entry of ``LAYERS`` says what the recognizer has to make of it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

from inductor_quant.simulate import virtual_gpu
from tests.support.gemms.fp8 import e4m3
from tests.support.producers.activation import CompressedRun
from tests.support.producers.real import source, unchanged_inductor_config

N, K = 256, 512
BLOCKS = "(a=e4m3/1x128:f32, b=e4m3/128x128:f32, out=bf16)"
bf16 = torch.bfloat16
Tensor = torch.Tensor


@functools.cache
def torchao() -> Any:
    """torchao's module of block FP8, which registers its ops only if there is a GPU."""
    found = importlib.import_module("torchao.kernel.blockwise_quantization")
    with virtual_gpu():
        found._get_triton_impls()
    return found


def quantized(granularity: str) -> nn.Module:
    """By torchao, which requires a GPU."""
    from torchao import quantization
    from torchao.quantization import granularity as kinds

    torchao()
    chosen: Any = {
        "row": kinds.PerRow(),
        "tensor": kinds.PerTensor(),
        "block": [kinds.PerBlock([1, 128]), kinds.PerBlock([128, 128])],
    }[granularity]
    model = nn.Sequential(source(bf16, K, N, bias=True))
    with (
        unchanged_inductor_config(),
        mock.patch("torchao.quantization.quant_api._check_hardware_support"),
    ):
        config = quantization.Float8DynamicActivationFloat8WeightConfig(granularity=chosen)
        quantization.quantize_(model, config)
    return model


class Loop(nn.Module):
    """DeepSeek-V3's formula, written out over the blocks of K."""

    def __init__(self) -> None:
        super().__init__()
        linear = source(torch.float32, K, N, bias=True)
        blocks = linear.weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        self.weight = nn.Buffer(
            (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(e4m3)
        )
        self.scale, self.bias = nn.Buffer(scale), nn.Buffer(linear.bias.detach().to(bf16))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(-1, K // 128, 128).float()
        scale = parts.abs().amax(-1) / 448
        q = (parts / scale[..., None]).to(e4m3).flatten(1)
        out = torch.zeros(len(q), N, device=x.device)
        for i in range(K // 128):
            part = slice(128 * i, 128 * i + 128)
            product = q[:, part].float() @ self.weight[:, part].float().t()
            columns = self.scale.repeat_interleave(128, 0)[:, i]
            out = out + product * scale[:, i : i + 1] * columns
        return (out.to(bf16) + self.bias).reshape(*x.shape[:-1], N)


class Rows(nn.Module):
    """``_scaled_mm`` with a scale per row, then GELU; ``is_v2``: by recipe."""

    def __init__(self, *, is_v2: bool) -> None:
        super().__init__()
        linear = source(torch.float32, K, N, bias=True)
        scale = linear.weight.abs().amax(1, keepdim=True) / 448
        self.weight, self.scale = nn.Buffer((linear.weight / scale).to(e4m3)), nn.Buffer(scale)
        self.bias, self.is_v2 = nn.Buffer(linear.bias.detach().to(bf16)), is_v2

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, K).float()
        scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        a, w, w_scale = (rows / scale).to(e4m3), self.weight.t(), self.scale.t()
        if self.is_v2:
            by_row = nn.functional.ScalingType.RowWise
            y = nn.functional.scaled_mm(a, w, scale, by_row, w_scale, by_row, output_dtype=bf16)
        else:
            y = torch._scaled_mm(a, w, scale, w_scale, out_dtype=bf16)
        return nn.functional.gelu(y + self.bias).reshape(*x.shape[:-1], N)


class CompressedFloat8(CompressedRun):
    """A compressed-tensors layer in FP8 as it runs after loading: activations by
    ``strategy`` ("token", "tensor": dynamic; "static"; "group": blocks, of the weight too)."""

    def __init__(self, strategy: str) -> None:
        from compressed_tensors.quantization import QuantizationArgs

        linear, is_static = source(bf16, K, N, bias=True), strategy == "static"
        args: dict[str, Any] = {"group_size": 128} if strategy == "group" else {}
        args |= {"strategy": "tensor" if is_static else strategy, "dynamic": not is_static}
        with torch.no_grad():
            super().__init__(linear, QuantizationArgs(num_bits=8, type="float", **args))
            blocks = self._blocks(linear.weight.float(), strategy)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            self.weight = nn.Buffer((blocks / scale).to(e4m3))
        self.weight_scale = nn.Buffer(scale.to(bf16))
        self.input_scale = nn.Buffer(torch.tensor([0.01], dtype=bf16))
        self.input_zero_point = None  # a compressed model has none where it is symmetric

    @staticmethod
    def _blocks(weight: Tensor, strategy: str) -> Tensor:
        n, k = (128, 128) if strategy == "group" else (1, K)
        return weight.reshape(N // n, n, K // k, k)

    def forward(self, x: Tensor) -> Tensor:
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize

        x = forward_quantize(self, x, "input", self.activations)
        weight = (self.weight.to(x.dtype) * self.weight_scale).reshape(N, K)
        return nn.functional.linear(x, weight, self.bias)


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torchao rows": (
        lambda: quantized("row"),
        "(a=e4m3/token:f32, b=e4m3/channel:f32, out=bf16+bias, fast_accum)",
    ),
    "torchao tensors": (
        lambda: quantized("tensor"),
        "(a=e4m3/tensor:f32, b=e4m3/tensor:f32, out=bf16+bias, fast_accum)",
    ),
    "torchao blocks": (lambda: quantized("block"), BLOCKS),
    "loop": (Loop, BLOCKS.replace("out=bf16", "out=f32")),
    "rows": (lambda: Rows(is_v2=False), "(a=e4m3/token:f32, b=e4m3/channel:f32, out=bf16)"),
    "rows by recipe": (
        lambda: Rows(is_v2=True),
        "(a=e4m3/token:f32, b=e4m3/channel:f32, out=bf16)",
    ),
    **{
        f"compressed {strategy}": (
            lambda strategy=strategy: CompressedFloat8(strategy),  # type: ignore[misc]
            f"(a=e4m3/{a}:bf16, b=e4m3/{b}:bf16, out=bf16+bias)",
        )
        for strategy, a, b in (
            ("token", "token", "channel"),
            ("tensor", "tensor", "channel"),
            ("static", "tensor", "channel"),
            ("group", "1x128", "128x128"),
        )
    },
}
