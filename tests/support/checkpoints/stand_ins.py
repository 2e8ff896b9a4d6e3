"""Layers of packages that a CPU cannot run or that cannot be installed beside the tests.

Kernels from the hub: ``Hub`` computes what ``tests/utils.py: ref_matmul`` of
kernels-community/finegrained-fp8 does. GPTQModel 7.7 asks for another torch: its layers are there
with the tensors, the names and the class paths of the package, and compute by a formula of their
own (its ``PackableQuantLinear.dequantize_weight``, its ``dequantize_gemm``).
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn

from tests.support.producers.base import field

E4M3 = torch.float8_e4m3fn
GROUP = 128


class Hub:
    """In place of the module of transformers that loads the kernel."""

    @staticmethod
    def matmul(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        block_size: Any,
        output_dtype: torch.dtype,
        activation_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        n, k = len(weight), x.shape[-1]
        if weight.dtype == torch.int8:  # e2m1, whatever the blocks of the model's FP8
            block_size, codes = (1, 32), torch.stack([weight & 15, weight >> 4 & 15], -1).flatten(1)
            entries = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
            values = torch.tensor(entries, device=weight.device)
            weight = torch.where(codes > 7, -1.0, 1.0) * values[codes.long() % 8]
        height, width = block_size or (n, k)
        rows = x.reshape(-1, k).float()
        if activation_scale is not None:
            a = (rows / activation_scale).clamp(-448, 448).to(E4M3).float() * activation_scale
        else:
            groups = rows.reshape(len(rows), k // width, width)
            s = (groups.abs().amax(-1) / 448).clamp(min=1e-12)[..., None]
            if width == 32:
                mantissa, exponent = torch.frexp(s)
                s = torch.exp2((exponent - (mantissa == 0.5).int()).float())
            a = ((groups / s).to(E4M3).float() * s).reshape(len(rows), k)
        i, j = (torch.arange(size, device=x.device) for size in (n, k))
        index = i[:, None] // height, j[None] // width
        if block_size is None and scale.dim() == 2:  # one for all columns, or for each half
            scale = scale.repeat_interleave(n // len(scale), 0)
        b = weight.float() * (scale.float()[index] if block_size else scale)
        return (a @ b.T).to(output_dtype).reshape(*x.shape[:-1], n)

    @staticmethod
    def batched_matmul(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        *,
        block_size: Any,
        expert_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Rows without an expert are not written."""
        out = x.new_full((len(x), weight.shape[1]), float("nan"))
        for row, expert in enumerate(expert_ids.tolist()):
            if expert < len(weight):
                s = scale[expert].float()
                if block_size is None:  # one for all columns, or for each half
                    s = s.repeat_interleave(weight.shape[1] // len(s), 0)
                w = weight[expert]
                out[row] = Hub.matmul(x[row : row + 1], w, s, block_size, x.dtype)
        return out

    @staticmethod
    def grouped_matmul(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        *,
        offsets: torch.Tensor,
        block_size: Any,
        tokens_per_expert: torch.Tensor,
    ) -> torch.Tensor:
        ids = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
        return Hub.batched_matmul(x, weight, scale, block_size=block_size, expert_ids=ids)


def fp8_linear(
    layer: nn.Linear, block: Any = (128, 128), scheme: str = "dynamic", scale_fmt: str = "float"
) -> nn.Module:
    """transformers' own class, its weight rounded from the layer's."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    k, n = layer.in_features, layer.out_features
    made = FP8Linear(k, n, block, scheme, scale_fmt, layer.bias is not None).requires_grad_(False)
    weight = layer.weight.float()
    if block is None:
        scale = weight.abs().amax() / 448
        made.weight.copy_((weight / scale).to(E4M3))
    else:
        blocks = weight.view(n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        if scale_fmt == "ue8m0":
            scale = torch.exp2(scale.log2().ceil())
        made.weight.copy_((blocks / scale[:, None, :, None]).view(n, k).to(E4M3))
    made.weight_scale_inv.copy_(scale.to(made.weight_scale_inv.dtype))
    if scheme == "static":
        made.activation_scale.fill_(0.02)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.clone(), False)
    return made


def fp8_experts(
    implementation: str,
    block: Any = (128, 128),
    *,
    scheme: str = "dynamic",
    scale_fmt: str = "float",
    is_parallel: bool = False,
    has_gate: bool = True,
    **gate: float,
) -> nn.Module:
    """transformers' own class for four experts of 256 x 128, with random weights; ``gate``: what
    the configuration says of it."""
    from transformers import Qwen3MoeConfig
    from transformers.integrations import finegrained_fp8, moe

    config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=4)
    for name, value in gate.items():
        setattr(config, name, value)
    config._experts_implementation = implementation
    # The package decorates its class in place, once for each layer.
    kind = type(
        "FP8Experts", (finegrained_fp8.FP8Experts,), {"__module__": finegrained_fp8.__name__}
    )
    kind = moe.use_experts_implementation(
        kind, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS, has_gate=has_gate
    )
    made = kind(config, block, scheme, scale_fmt, has_gate=has_gate)
    generator = torch.Generator().manual_seed(0)
    for name, held in made.named_parameters():
        values = torch.rand(held.shape, generator=generator)
        scaled = values * 2e-3 + 1e-3 if "scale" in name else 2 * values - 1
        held.data = scaled.to(held.dtype)
    made._is_expert_parallel = is_parallel
    return made.requires_grad_(False)


def mx_linear(layer: nn.Linear, is_fp4: bool) -> nn.Module:
    """The same class with an MX weight: random codes, scales that all differ from row to row."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    k, n = layer.in_features, layer.out_features
    made = FP8Linear(k, n, (1, 32), "dynamic", "ue8m0", layer.bias is not None)
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(-128, 128, (n, k // 2), generator=generator).to(torch.int8)
    weight = codes if is_fp4 else torch.randn(n, k, generator=generator).to(E4M3)
    made.weight = nn.Parameter(weight, False)
    scale = torch.exp2(torch.randint(-9, -5, (n, k // 32), generator=generator).float())
    made.weight_scale_inv = nn.Parameter(scale.to(torch.float8_e8m0fnu), False)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.clone(), False)
    return made.requires_grad_(False)


# ------------------------------------------------------------------------------------------
# GPTQModel


class PackableQuantLinear(nn.Module):
    """qweight [K * bits / 32, N], qzeros [groups, N * bits / 32], scales, g_idx [K]."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, bits: int, k: int, n: int) -> None:
        super().__init__()
        self.bits, self.in_features, self.out_features = bits, k, n
        self.group_size, self.adapter = GROUP, None
        for name in ("qweight", "qzeros", "scales", "g_idx", "bias"):
            self.register_buffer(name, None)

    def dequantize_weight(self) -> torch.Tensor:
        device = self.qweight.device
        k, n = (torch.arange(size, device=device) for size in (self.in_features, self.out_features))
        q = _stream(self.qweight.t(), k, self.bits).t()
        z = _stream(self.qzeros, n, self.bits)
        group: Any = self.g_idx
        return self.scales[group] * (q - z[group])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # its cache asks each tensor for its memory, which Dynamo does not trace
        self.key = (self.qweight.data_ptr(), self.qweight.is_inference())
        out = x.reshape(-1, x.shape[-1]) @ self.dequantize_weight().to(x.dtype)
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class TorchLinear(PackableQuantLinear):
    pass


class AwqTorchLinear(PackableQuantLinear):
    def dequantize_weight(self) -> torch.Tensor:
        names = ("qweight", "qzeros", "scales", "bits", "group_size")
        return dequantize_gemm(*(getattr(self, name) for name in names))


def dequantize_gemm(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """AutoAWQ's order: output channel 8 j + i is field (i // 2 + 4 (i % 2)) of word j."""
    n = torch.arange(scales.shape[1], device=scales.device)
    i = n % 8
    shift = 4 * (i // 2 + 4 * (i % 2))
    q, z = (field(words[:, n // 8], shift, bits) for words in (qweight, qzeros))
    scales, z = (t.repeat_interleave(group_size, 0) for t in (scales, z))
    return (q - z) * scales


def _stream(words: torch.Tensor, i: torch.Tensor, bits: int) -> torch.Tensor:
    """Element i of a row: bits i * bits ... of all its words, one after another."""
    parts = [
        (words[:, (i * bits + b) // 32].long() >> ((i * bits + b) % 32)) & 1 for b in range(bits)
    ]
    return sum(part << b for b, part in enumerate(parts))  # type: ignore[return-value]


for _kind, _module in ((TorchLinear, "torch"), (AwqTorchLinear, "torch_awq")):
    _kind.__module__ = f"gptqmodel.nn_modules.qlinear.{_module}"


def packed(kind: str, layer: nn.Linear, bits: int = 4, act_order: bool = False) -> nn.Module:
    """A layer of GPTQModel with the layer's bias, any bits, and scales of its size."""
    _register()
    n, k = layer.weight.shape
    generator = torch.Generator().manual_seed(n * k + bits)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).int()

    made: Any = (AwqTorchLinear if kind == "awq" else TorchLinear)(bits, k, n)
    groups = k // GROUP
    shape = (k, n * bits // 32) if kind == "awq" else (k * bits // 32, n)
    made.qweight, made.qzeros = words(*shape), words(groups, n * bits // 32)
    spread = torch.rand(groups, n, generator=generator) + 0.5
    made.scales = (spread * layer.weight.std().item() * 4 / 2**bits).to(layer.weight.dtype)
    if kind != "awq":
        order = torch.randperm(k, generator=generator) if act_order else torch.arange(k)
        made.g_idx = (order // GROUP).int()
    made.bias = None if layer.bias is None else layer.bias.detach().clone()
    return made.eval()  # type: ignore[no-any-return]


def _register() -> None:
    """Where the package's functions are looked up."""
    name = "gptqmodel.quantization.awq.utils.packing_utils"
    if name not in sys.modules:
        module: Any = types.ModuleType(name)
        module.dequantize_gemm = dequantize_gemm
        sys.modules[name] = module
