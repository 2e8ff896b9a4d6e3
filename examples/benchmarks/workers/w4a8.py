"""The W4A8 problems of ``workers.linear``: two int4 in a byte along K, int8 activations.

'w4a8' has a bf16 scale for each group of 128 along K, and a product of floats whose operands are
dequantized; 'w4a8_channel' has per_channel scales after ``_int_mm``. Peers: 'w8a8', the same
integers in int8 with per_channel scales; 'w4a16', the same packed weight and a bf16 activation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from examples.benchmarks.timing import copies_beyond_l2

Tensor = torch.Tensor
Call = Callable[[], Tensor]
GROUP = 128


def unpacked(w: Tensor) -> Tensor:
    """int8 [N, K] of bytes [N, K / 2], the low nibble first."""
    return torch.stack([w & 15, w >> 4], -1).reshape(w.shape[0], -1).to(torch.int8) - 8


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return (x / scale).round().clamp(-128, 127).to(torch.int8), scale


class Channel:
    """a [M, K], bytes [N, K / 2], scales of rows [M, 1] and columns [N], bias [N]."""

    def __init__(self, measure: str, m: int, n: int, k: int, device: str) -> None:
        self.measure, self.m, self.n, self.k, self.device = measure, m, n, k, device
        options: dict[str, Any] = {"device": device}
        options["generator"] = torch.Generator(device).manual_seed(0)
        self.bias = torch.randn(n, dtype=torch.bfloat16, **options)
        self.x = torch.randn(m, k, dtype=torch.bfloat16, **options)
        self.a = torch.randint(-128, 128, (m, k), dtype=torch.int8, **options)
        self.sa = torch.rand(m, 1, **options) * 0.01 + 0.001
        self.scale = self.scales(options)
        self.packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, **options)

    def scales(self, options: dict[str, Any]) -> Tensor:
        return torch.rand(self.n, **options) * 0.01 + 0.001

    def dense(self, w: Tensor, scale: Tensor) -> Tensor:
        """The weight [N, K] in the dtype of the scales."""
        return unpacked(w).to(scale.dtype) * scale[:, None]

    def gemm(self, a: Tensor, w: Tensor, sa: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return (torch._int_mm(a, unpacked(w).t()).float() * sa * scale + bias).to(bias.dtype)

    def of_bf16(self, x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, self.dense(w, scale.bfloat16()), bias)

    def exact(self) -> Tensor:
        """In fp64, of the quantized activation."""
        a, sa = quantized(self.x) if self.measure == "linear" else (self.a, self.sa)
        return a.double() @ self.dense(self.packed, self.scale.double()).t() * sa + self.bias

    def unquantized(self) -> Tensor:
        """Likewise, of the activation before its quantization; 'gemm' has it in bf16."""
        x = self.x if self.measure == "linear" else self.a.bfloat16()
        return x.double() @ self.dense(self.packed, self.scale.double()).t() + self.bias

    def integers(self) -> Tensor:
        """The peer 'w8a8' has no groups."""
        a, sa = quantized(self.x) if self.measure == "linear" else (self.a, self.sa)
        return a.double() @ unpacked(self.packed).double().t() * sa + self.bias

    def copies(self, first: Tensor) -> list[Tensor]:
        count = copies_beyond_l2(first.nbytes, self.device)
        return [first, *(first.clone() for _ in range(count - 1))]


class Groups(Channel):
    """The scales are [N, K / 128], in bf16."""

    def scales(self, options: dict[str, Any]) -> Tensor:
        found = torch.rand(self.n, self.k // GROUP, **options) * 0.01 + 0.001
        return found.bfloat16()

    def dense(self, w: Tensor, scale: Tensor) -> Tensor:
        q = unpacked(w).unflatten(1, (-1, GROUP)).to(scale.dtype)
        return (q * scale[..., None]).flatten(1)

    def gemm(self, a: Tensor, w: Tensor, sa: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        out = F.linear(a.bfloat16(), self.dense(w, scale)).float() * sa + bias
        return out.to(bias.dtype)


def compiled(backend: str, problem: Channel) -> list[Call]:
    def linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        a, sa = quantized(x)
        return problem.gemm(a, w, sa, scale, bias)

    weights, rest = problem.copies(problem.packed), (problem.scale, problem.bias)
    if problem.measure == "linear":
        fn = torch.compile(linear, backend=backend, dynamic=False)
        return [functools.partial(fn, problem.x, w, *rest) for w in weights]
    fn = torch.compile(problem.gemm, backend=backend, dynamic=False)
    return [functools.partial(fn, problem.a, w, problem.sa, *rest) for w in weights]


def w8a8(problem: Channel) -> list[Call]:
    def gemm(a: Tensor, w: Tensor, sa: Tensor, bias: Tensor) -> Tensor:
        return (torch._int_mm(a, w.t()).float() * sa + bias).to(bias.dtype)

    def linear(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        a, sa = quantized(x)
        return gemm(a, w, sa, bias)

    weights = problem.copies(unpacked(problem.packed))
    is_linear = problem.measure == "linear"
    fn = torch.compile(linear if is_linear else gemm, backend="inductor_quant", dynamic=False)
    if is_linear:
        return [functools.partial(fn, problem.x, w, problem.bias) for w in weights]
    return [functools.partial(fn, problem.a, w, problem.sa, problem.bias) for w in weights]


def w4a16(problem: Channel) -> list[Call]:
    fn = torch.compile(problem.of_bf16, backend="inductor_quant", dynamic=False)
    x = problem.x if problem.measure == "linear" else problem.a.bfloat16()
    rest = (problem.scale, problem.bias)
    return [functools.partial(fn, x, w, *rest) for w in problem.copies(problem.packed)]


def bf16(problem: Channel) -> list[Call]:
    fn = torch.compile(F.linear, dynamic=False)
    weights = problem.copies(problem.dense(problem.packed, problem.scale.bfloat16()))
    return [functools.partial(fn, problem.x, w, problem.bias) for w in weights]
