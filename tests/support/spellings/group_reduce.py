"""A norm, and a quantization in groups of 128 behind it, as people spell them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
bf16, f32, e4m3, i8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
GROUP = 128
LARGEST = 448.0  # of e4m3


# ------------------------------------------------------------------------------------------
# norms of x [..., K] with a weight [K]


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """transformers' LlamaRMSNorm."""
    wide = x.to(f32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def deepseek(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * weight.float()).to(x.dtype)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, weight)


NORMS = {"llama": llama, "rms": rms, "deepseek": deepseek, "layer": layer}


# ------------------------------------------------------------------------------------------
# quantizations of x [M, K]: the elements, and the scales [M, K / 128]


def in_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.float().reshape(x.shape[0], -1, GROUP)
    scale = blocks.abs().amax(-1).clamp_min(1e-12) / LARGEST
    return (blocks / scale[..., None]).to(e4m3).reshape(x.shape), scale


def repeated(x: Tensor) -> tuple[Tensor, Tensor]:
    """torchao: the maximum in bf16, each scale 128 times."""
    scale = x.unflatten(1, (-1, GROUP)).abs().amax(2, keepdim=True).float() / LARGEST
    scale = scale.reshape(x.shape[0], -1)
    wide = scale.repeat_interleave(GROUP, 1)
    return (x.float() / wide).clamp(-LARGEST, LARGEST).to(e4m3), scale


def of_both_ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """compressed-tensors: the smallest and the largest."""
    blocks = x.float().unflatten(-1, (-1, GROUP))
    low, high = torch.aminmax(blocks, dim=-1)
    scale = (torch.max(low.abs(), high.abs()) / LARGEST).clamp(min=1e-6)
    return (blocks / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(e4m3).flatten(-2), scale


def around_zero(x: Tensor) -> tuple[Tensor, Tensor]:
    """compressed-tensors' layers: the smallest and the largest with zero, all in the dtype of x."""
    blocks = x.unflatten(-1, (-1, GROUP))
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    zero = torch.zeros_like(low)
    scale = torch.max(torch.min(low, zero).abs(), torch.max(high, zero).abs()) / LARGEST
    scale = torch.where(scale == 0, x.new_full((), 2.0**-7), scale)
    return (blocks.float() / scale.float()).to(e4m3).flatten(-2), scale.squeeze(-1).float()


def power_of_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3.1."""
    blocks = x.float().reshape(x.shape[0], -1, GROUP)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(1e-4) / LARGEST
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (blocks * (1.0 / scale)).to(e4m3).reshape(x.shape), scale.squeeze(-1)


def integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 in groups."""
    blocks = x.float().unflatten(-1, (-1, GROUP))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return (blocks / scale).round().clamp(-128, 127).to(i8).flatten(-2), scale.squeeze(-1)


QUANTIZATIONS = {
    fn.__name__: fn
    for fn in (in_blocks, repeated, of_both_ends, around_zero, power_of_two, integers)
}


@dataclasses.dataclass(frozen=True)
class Case:
    """``m`` rows of ``k`` behind a norm. What else is in the graph: the ``residual`` that is added
    before and goes on, a GEMM in bf16 of the normalized rows (``gate``), several ``products`` of
    the quantized ones, whose scales lie ``along_m``; ``dynamic``: any number of rows."""

    norm: str = "rms"
    quantization: str = "in_blocks"
    m: int = 64
    k: int = 7168
    n: int = 256
    residual: bool = False
    gate: bool = False
    products: int = 1
    along_m: bool = False
    dynamic: bool = False

    def __str__(self) -> str:
        text = f"{self.norm}-{self.quantization}-{self.m}x{self.k}"
        flags = ("residual", "gate", "along_m", "dynamic")
        return "-".join((text, *(flag for flag in flags if getattr(self, flag))))

    @property
    def fn(self) -> Callable[..., tuple[Tensor, ...]]:
        def fn(x: Tensor, more: Tensor, weight: Tensor, gate: Tensor, *rest: Tensor) -> Any:
            x = x + more if self.residual else x
            y = NORMS[self.norm](x, weight)
            a, scale = QUANTIZATIONS[self.quantization](y)
            if self.along_m:
                scale = scale.t().contiguous().t()
            pairs = zip(rest[::2], rest[1::2], strict=True)
            outs = [product(a, scale, w, w_scale) for w, w_scale in pairs]
            outs += [F.linear(y, gate)] if self.gate else []
            return (*outs, x) if self.residual else tuple(outs)

        return fn

    def make(self, device: str) -> tuple[Tensor, ...]:
        def empty(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        x, more = empty(self.m, self.k), empty(self.m, self.k)
        if self.dynamic:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(more, 0)
        dtype = i8 if self.quantization == "integers" else e4m3
        rest = []
        for _ in range(self.products):
            rest.append(empty(self.n, self.k, dtype=dtype))
            rest.append(empty(self.n // GROUP, self.k // GROUP, dtype=f32))
        return (x, more, empty(self.k), empty(GROUP, self.k), *rest)


def product(a: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """DeepSeek-V3's GEMM as its formula says it: operands dequantized in blocks."""
    (m, k), n = a.shape, w.shape[0]
    x = (a.float().view(m, -1, GROUP) * scale[..., None]).view(m, k)
    wide = w_scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return (x @ (w.float() * wide[:n, :k]).t()).to(bf16)


def random_inputs(case: Case) -> list[Tensor]:
    """For the interpreter: one row of zeros, one with a large element, and no two scales equal."""
    found = []
    for fake in case.make("cpu"):
        if fake.dtype == f32:
            found.append(torch.rand(fake.shape) * 0.02 + 0.001)
        elif fake.dtype == i8:
            found.append(torch.randint(-128, 128, fake.shape, dtype=i8))
        else:
            found.append(torch.randn(fake.shape).to(fake.dtype))
    if case.m > 2:
        found[0][1] = found[1][1] = 0
        found[0][2, 5] = 300
    return found


def is_nearest(q: Tensor, exact: Tensor, slack: float) -> Tensor:
    """Whether each of ``q`` is what ``exact`` is rounded to, or would be with an error up to
    ``slack``, of the element and of the largest: beside a tie either neighbour is right."""
    error = slack * (exact.abs() + (127 if q.dtype == i8 else LARGEST))
    ends = [exact - error, exact + error]
    if q.dtype == i8:
        low, high = (end.round().clamp(-128, 127) for end in ends)
    else:
        low, high = (end.clamp(-LARGEST, LARGEST).to(f32).to(q.dtype).double() for end in ends)
    return (torch.minimum(low, high) <= q.double()) & (q.double() <= torch.maximum(low, high))


def returning(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """The case with its quantized elements and scales in place of the product."""

    def fn(x: Tensor, more: Tensor, weight: Tensor, gate: Tensor, *rest: Tensor) -> Any:
        x = x + more if case.residual else x
        y = NORMS[case.norm](x, weight)
        a, scale = QUANTIZATIONS[case.quantization](y)
        return a.clone(), scale.clone(), product(a, scale, *rest), x

    return fn


def exact_norm(case: Case, x: Tensor, more: Tensor, weight: Tensor) -> Tensor:
    """In fp64. The sum with the residual is not rounded, as it is not in one kernel."""
    x = x.double() + more.double() if case.residual else x.double()
    if case.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight.double(), weight.double())
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def exact_scale(case: Case, y: Tensor) -> Tensor:
    """[M, K / 128] of the normalized rows ``y``, in fp64."""
    most = y.unflatten(1, (-1, GROUP)).abs().amax(-1)
    if case.quantization == "power_of_two":
        return (most.clamp(1e-4) / LARGEST).log2().ceil().exp2()
    if case.quantization == "integers":
        return most.clamp_min(1e-5) / 127
    if case.quantization == "of_both_ends":
        return (most / LARGEST).clamp(min=1e-6)
    return most.clamp_min(1e-12) / LARGEST
