"""int8 W8A8 with dynamic activation scales, in a few lines of plain PyTorch.

This is what a user writes or a package does; nothing in it knows of inductor_quant, which finds the
product and its scales in the compiled graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SKIP = ("lm_head",)  # stays in bf16 in every system


class Int8Linear(nn.Module):
    """nn.Linear with an int8 weight, a scale for each output channel and each token."""

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


def padded_int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``torch._int_mm``, which on CUDA takes more than 16 rows only."""
    return torch._int_mm(F.pad(a, (0, 0, 0, max(0, 32 - a.shape[0]))), b)[: a.shape[0]]


@contextlib.contextmanager
def any_number_of_rows() -> Iterator[None]:
    """For eager references: batches that stock ``torch._int_mm`` refuses."""
    original = Int8Linear.product
    Int8Linear.product = staticmethod(padded_int_mm)
    try:
        yield
    finally:
        Int8Linear.product = staticmethod(original)


def is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.split(".")[-1] not in SKIP


def plain(model: nn.Module) -> None:
    """Replace each nn.Linear; its bf16 weight is freed before the next one is made."""
    for name, module in list(model.named_modules()):
        if is_quantized(module, name):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Int8Linear(module))


def torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=is_quantized)


QUANTIZERS: dict[str, Callable[[nn.Module], None]] = {"plain": plain, "torchao": torchao}
