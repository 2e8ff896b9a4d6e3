"""Layers of float activations: the op that quantizes them, its inputs and its meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

Tensor = torch.Tensor
# Recipes of producers: plain fp32, gpt-fast's, torchao's in bf16.
PLAIN = ("to f32", "div 127.0")
GUARDED = ("to f32", "clamp_min 1e-05", "div 127.0")
ROUNDED = ("div 127.5", "to f32", "clamp_min 1.1920928955078125e-07", "to {}", "to f32")
# The same in e4m3: plain fp32, torchao's, compressed-tensors', which divides in bf16.
E4M3 = torch.float8_e4m3fn
FLOAT_PLAIN = ("to f32", "clamp_min 1e-12", "div 448.0")
FLOAT_ROUNDED = ("div 448.0", "to f32")
FLOAT_NARROW = ("div 448.0", "if_zero 0.0078125")


@dataclasses.dataclass(frozen=True)
class Case:
    """``scale_ops`` None: a_scale is given, one value for each row if ``per_token``.

    dtype, element  of x, of the quantized values
    """

    m: int
    n: int
    k: int
    scale_ops: tuple[str, ...] | None = GUARDED
    per_token: bool = False
    low: int = -128
    dtype: torch.dtype = torch.bfloat16
    has_bias: bool = True
    distance: int = 0  # of rows in memory, beside K
    element: torch.dtype = torch.int8
    scale_dtype: torch.dtype = torch.float32  # of a scale that is given

    def __str__(self) -> str:
        kind = "static" if self.scale_ops is None else self.scale_ops[0].replace(" ", "-")
        names = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.element))
        return f"{self.m}x{self.n}x{self.k}-{kind}-{'-'.join(names)}"

    @property
    def kernel(self) -> str:
        return f"{'w8a8' if self.element == torch.int8 else 'fp8'}_decode_quantize"

    def inputs(self, device: str) -> tuple[Tensor | None, ...]:
        """x, weight [N, K], a_scale, scales of columns, bias; rows that differ much in size."""
        x = torch.randn(self.m, self.k + self.distance, device=device)
        x = (x * 3.0 ** torch.arange(self.m, device=device)[:, None]).to(self.dtype)
        w = torch.randint(-128, 128, (self.n, self.k), dtype=torch.int8, device=device)
        if self.element != torch.int8:
            w = (w.float() / 8).to(self.element)
        rows = self.m if self.per_token else 1
        a_scale = None
        if self.scale_ops is None:
            a_scale = (torch.rand(rows, 1, device=device) + 0.02).to(self.scale_dtype)
        b_scale = torch.rand(1, self.n, device=device) * 0.01 + 0.001
        bias = torch.randn(self.n, device=device).to(self.dtype) if self.has_bias else None
        return x[:, : self.k], w, a_scale, b_scale, bias

    @property
    def steps(self) -> list[str]:
        name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
        return [step.format(name[self.dtype]) for step in self.scale_ops or ()]

    def call(self) -> Callable[..., Tensor]:
        def linear(x, w, a_scale, b_scale, bias):
            return torch.ops.inductor_quant.quantized_linear(
                *(x, w.t(), a_scale, b_scale, bias),
                dtype=self.element,
                scale_ops=self.steps,
                low=self.low,
                out_dtype=self.dtype,
            )

        return linear

    def meaning(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """fp64 of the values that eager mode quantizes to: integers by a product with the
        reciprocal, e4m3 by a division."""
        x, w, a_scale, b_scale, bias = inputs
        assert x is not None
        assert w is not None
        assert b_scale is not None
        if a_scale is None:
            a_scale = x.abs().amax(1, keepdim=True)
            for step in self.steps:
                kind, operand = step.split()
                if kind == "to":
                    a_scale = a_scale.to({"f32": torch.float32}.get(operand, self.dtype))
                elif kind == "if_zero":
                    a_scale = a_scale.where(a_scale != 0, float(operand))
                else:
                    a_scale = getattr(torch, kind)(a_scale, float(operand))
        if self.element == torch.int8:
            a = (x.float() * (1 / a_scale)).round().clamp(self.low, 127)
        else:
            a = (x / a_scale).float().clamp(-448, 448).to(self.element)
        out = a.double() @ w.double().t() * a_scale.double() * b_scale.double()
        return out if bias is None else out + bias.double()
