"""The weight-only problems of ``workers.linear``, and the systems that run them.

Activations are bf16 or fp16. int4 weights are unsigned, with a packed zero_point and a 16-bit scale
for each group of 128 along K, packed as GPTQ, AWQ or HQQ do. int8 and e4m3 weights have per_channel
scales. Plain torch code dequantizes them. The only measure is 'linear'."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import inductor_quant
from examples.benchmarks.timing import copies_beyond_l2

Tensor = torch.Tensor
Call = Callable[[], Tensor]

GROUP = 128


def in_order(position: Tensor) -> Tensor:
    """GPTQ's shifts: 0, 4, 8, ... 28."""
    return 4 * position


def interleaved(position: Tensor) -> Tensor:
    """AWQ's shifts: 0, 16, 4, 20, 8, 24, 12, 28."""
    return position % 2 * 16 + position // 2 * 4


def pack(q: Tensor, dim: int, shifts: Callable[[Tensor], Tensor]) -> Tensor:
    """Packs eight int4 neighbours along ``dim`` into an int32, each at its shift."""
    amounts = shifts(torch.arange(8, device=q.device))
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    packed = (q.long().unflatten(dim, (-1, 8)) << amounts.view(shape)).sum(dim + 1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack(packed: Tensor, dim: int, shifts: Callable[[Tensor], Tensor]) -> Tensor:
    amounts = shifts(torch.arange(8, dtype=torch.int32, device=packed.device))
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    return ((packed.unsqueeze(dim + 1) >> amounts.view(shape)) & 15).flatten(dim, dim + 1)


def scaled(q: Tensor, z: Tensor, scales: Tensor) -> Tensor:
    """(q - z) * scales of each group: [K, N] in the dtype of the scales."""
    w = (q.unflatten(0, (-1, GROUP)) - z[:, None]) * scales[:, None]
    return w.flatten(0, 1)


class Problem:
    """x [M, K], bias [N] and a packed weight. Subclasses define the format."""

    dtype = torch.bfloat16

    @staticmethod
    def dequantize(*weight: Tensor) -> Tensor:
        """The weight [K, N], in the dtype of the scales."""
        raise NotImplementedError

    @classmethod
    def linear(cls, x: Tensor, bias: Tensor, *weight: Tensor) -> Tensor:
        return x @ cls.dequantize(*weight) + bias

    def __init__(self, measure: str, m: int, n: int, k: int, device: str) -> None:
        self.m, self.n, self.k, self.device = m, n, k, device
        self.options: dict[str, Any] = {"device": device}
        self.options["generator"] = torch.Generator(device).manual_seed(0)
        self.x = torch.randn(m, k, dtype=self.dtype, **self.options)
        self.bias = torch.randn(n, dtype=self.dtype, **self.options)

    def random_scales(self, *size: int) -> Tensor:
        return (torch.rand(*size, **self.options) * 0.01 + 0.001).to(self.dtype)

    def packed(self) -> tuple[Tensor, ...]:
        """The arguments of ``dequantize``."""
        raise NotImplementedError

    @functools.cached_property
    def tensors(self) -> list[tuple[Tensor, ...]]:
        """Equal copies of the packed weight, beyond the L2 cache together."""
        packed = self.packed()
        return [packed, *self.copies(packed)]

    def copies(self, first: tuple[Tensor, ...]) -> list[Any]:
        """Further copies of a weight, which exceed the L2 cache together with it."""
        count = copies_beyond_l2(sum(tensor.nbytes for tensor in first), self.device)
        return [tuple(tensor.clone() for tensor in first) for _ in range(count - 1)]

    @property
    def function(self) -> Callable[..., Tensor]:
        return self.linear

    def calls(self, fn: Callable[..., Tensor]) -> list[Call]:
        """Calls of ``fn``, a compiled ``function``, one for each weight."""
        return [functools.partial(fn, self.x, self.bias, *t) for t in self.tensors]

    @property
    def weight(self) -> Tensor:
        """The weight [K, N] in fp32, without rounding."""
        raise NotImplementedError

    def exact(self) -> Tensor:
        return self.x.double() @ self.weight.double() + self.bias.double()


class GPTQ(Problem):
    """int32 [K / 8, N] packed along K, zero points int32 [K / 128, N / 8] packed along N."""

    shifts = staticmethod(in_order)
    dim = 0

    @classmethod
    def dequantize(cls, packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        return scaled(unpack(packed, cls.dim, cls.shifts), unpack(zeros, 1, cls.shifts), scales)

    def __init__(self, measure: str, m: int, n: int, k: int, device: str) -> None:
        super().__init__(measure, m, n, k, device)
        self.q = torch.randint(0, 16, (k, n), dtype=torch.uint8, **self.options)
        self.z = torch.randint(0, 16, (k // GROUP, n), dtype=torch.uint8, **self.options)
        self.scales = self.random_scales(k // GROUP, n)

    def packed(self) -> tuple[Tensor, ...]:
        return pack(self.q, self.dim, self.shifts), pack(self.z, 1, self.shifts), self.scales

    @functools.cached_property
    def weight(self) -> Tensor:
        z, s = (t.float().repeat_interleave(GROUP, 0) for t in (self.z, self.scales))
        return (self.q.float() - z) * s


class GPTQHalf(GPTQ):
    """GPTQ in fp16."""

    dtype = torch.float16


class AWQ(GPTQ):
    """int32 [K, N / 8] packed along N in AWQ's order, zero points likewise."""

    shifts = staticmethod(interleaved)
    dim = 1


class HQQ(GPTQ):
    """uint8 [N / 2, K]: high nibbles hold the first half of N, low nibbles the second half. Zero
    points and scales bf16 [N, K / 128]."""

    @classmethod
    def dequantize(cls, halves: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        q = torch.cat([halves >> 4, halves & 15]).to(scales.dtype)
        w = (q.unflatten(1, (-1, GROUP)) - zeros[:, :, None]) * scales[:, :, None]
        return w.flatten(1, 2).t()

    def packed(self) -> tuple[Tensor, ...]:
        high, low = self.q.t().contiguous().chunk(2)
        zeros, scales = (t.to(self.dtype).t().contiguous() for t in (self.z, self.scales))
        return high << 4 | low, zeros, scales


class Int8(Problem):
    """int8 [N, K] with per_channel scales [N]."""

    @classmethod
    def dequantize(cls, q: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        return (q.to(scales.dtype) * scales[:, None]).t()

    def __init__(self, measure: str, m: int, n: int, k: int, device: str) -> None:
        super().__init__(measure, m, n, k, device)
        self.q, self.scales = self.random_values(), self.random_scales(n)

    def random_values(self) -> Tensor:
        return torch.randint(-128, 128, (self.n, self.k), dtype=torch.int8, **self.options)

    def packed(self) -> tuple[Tensor, ...]:
        return self.q, self.scales

    @functools.cached_property
    def weight(self) -> Tensor:
        return (self.q.float() * self.scales.float()[:, None]).t()


class E4M3(Int8):
    """float8_e4m3fn [N, K] with per_channel scales [N]."""

    def random_values(self) -> Tensor:
        return torch.randn(self.n, self.k, **self.options).to(torch.float8_e4m3fn)


def compiled(backend: str, mode: str | None, problem: Problem) -> list[Call]:
    return problem.calls(torch.compile(problem.function, backend=backend, mode=mode, dynamic=False))


def packed_as(kind: type[GPTQ], problem: GPTQ) -> list[Call]:
    """The same quantized values in another layout."""
    other = kind("linear", problem.m, problem.n, problem.k, problem.device)
    return compiled("inductor_quant", None, other)


class Layer(nn.Module):
    """A packed layer as quantizers write it: buffers, and a forward that dequantizes them,
    ``linear(x, bias, *tensors)``."""

    def __init__(
        self, linear: Callable[..., Tensor], tensors: Sequence[Tensor], bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("bias", bias)
        self.names = [f"weight{i}" for i in range(len(tensors))]
        for name, tensor in zip(self.names, tensors, strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.bias, *(getattr(self, name) for name in self.names))


def prepacked_from(kind: type[GPTQ], problem: GPTQ) -> list[Call]:
    """The same quantized values in another layout, repacked by ``prepack_``."""
    other = kind("linear", problem.m, problem.n, problem.k, problem.device)
    model = nn.Sequential(Layer(type(other).linear, other.packed(), other.bias))
    if not inductor_quant.prepack_(model, other.x):
        raise ValueError(f"prepack_ leaves the layout {kind.__name__} as it is")
    layers = [model[0].prepacked]
    for tensors in other.copies(tuple(layers[0].buffers())):
        layers.append(copy.deepcopy(layers[0]))
        for (name, _), tensor in zip(layers[0].named_buffers(), tensors, strict=True):
            setattr(layers[-1], name, tensor)
    # one compilation serves all layers: their tensors are inputs of the graph
    call = torch.compile(
        lambda layer, x: layer(x), backend="inductor_quant", dynamic=False, fullgraph=True
    )
    return [functools.partial(call, layer, other.x) for layer in layers]


def bf16(problem: Problem) -> list[Call]:
    weight = problem.weight.to(problem.dtype).t().contiguous()
    weights = [weight, *(w for (w,) in problem.copies((weight,)))]
    return [functools.partial(F.linear, problem.x, w, problem.bias) for w in weights]


def dequantize_once(problem: Problem) -> list[Call]:
    """A stock Inductor kernel writes the weight in bf16, then cuBLAS multiplies."""
    dequantize = torch.compile(type(problem).dequantize, dynamic=False)

    def call(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.addmm(problem.bias, problem.x, dequantize(*tensors))

    return [functools.partial(call, tensors) for tensors in problem.tensors]


def tinygemm(problem: GPTQ) -> list[Call]:
    """PyTorch's own int4 kernel: ``(q - 8) * scale + zero``, in its own layout."""
    q = problem.q.t().contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(q[:, ::2] << 4 | q[:, 1::2], 8)
    scales = problem.scales.float()
    zeros = (8 - problem.z.float()) * scales
    both = torch.stack([scales, zeros], 2).to(problem.dtype)
    sets = [(packed, both), *problem.copies((packed, both))]

    def call(packed: Tensor, both: Tensor) -> Tensor:
        out = torch.ops.aten._weight_int4pack_mm(problem.x, packed, GROUP, both)
        return out + problem.bias

    return [functools.partial(call, *tensors) for tensors in sets]


def int8pack(problem: Int8) -> list[Call]:
    """PyTorch's own int8 kernel."""

    def call(q: Tensor, scales: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(problem.x, q, scales) + problem.bias

    return [functools.partial(call, *tensors) for tensors in problem.tensors]


def gemlite_8bit(problem: Int8) -> list[Call]:
    from gemlite import helper

    if problem.q.dtype == torch.int8:
        processor = helper.A16W8_INT8(device=problem.device, dtype=problem.dtype)
    else:
        kind = problem.q.dtype
        processor = helper.A16W8_FP8(device=problem.device, dtype=problem.dtype, fp8=kind)

    def layer(q: Tensor, scales: Tensor) -> Any:
        return processor.from_weights(q, problem.bias, scales[:, None])

    return [functools.partial(layer(*t), problem.x) for t in problem.tensors]


def gemlite(problem: GPTQ) -> list[Call]:
    from gemlite.core import DType, GemLiteLinear

    dtype = DType.FP16 if problem.dtype == torch.float16 else DType.BF16

    def layer() -> Any:
        made = GemLiteLinear(
            4,
            group_size=GROUP,
            in_features=problem.k,
            out_features=problem.n,
            input_dtype=dtype,
            output_dtype=dtype,
        )
        grouped = (t.t().reshape(-1, 1).contiguous() for t in (problem.scales, problem.z))
        scales, zeros = (t.to(problem.dtype) for t in grouped)
        made.pack(problem.q.t().contiguous(), scales, zeros, problem.bias)
        return made

    return [functools.partial(layer(), problem.x) for _ in problem.tensors]
