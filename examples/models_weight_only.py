"""A linear layer with packed weights in the systems of ``bench_gemm.py``; see models_linear.py.

bf16 activations, or fp16. Of 4 bits: unsigned numbers with a packed zero point and a bf16 scale for
each 128 of K, packed as GPTQ, AWQ or HQQ do. Of 8 bits: int8 or e4m3 with a bf16 scale for each
channel. They are dequantized by the plain torch code of such a layer. Only 'linear' is measured:
there is no quantized input."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import inductor_quant

Tensor = torch.Tensor
Call = Callable[[], Tensor]

GROUP = 128


def in_order(position: Tensor) -> Tensor:
    return 4 * position


def interleaved(position: Tensor) -> Tensor:
    """AWQ's: 0, 16, 4, 20, 8, 24, 12, 28."""
    return position % 2 * 16 + position // 2 * 4


def pack(numbers: Tensor, dim: int, shifts: Callable[[Tensor], Tensor]) -> Tensor:
    """Eight neighbours along ``dim`` in an int32, each at its shift."""
    amounts = shifts(torch.arange(8, device=numbers.device))
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    words = (numbers.long().unflatten(dim, (-1, 8)) << amounts.view(shape)).sum(dim + 1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: Tensor, dim: int, shifts: Callable[[Tensor], Tensor]) -> Tensor:
    amounts = shifts(torch.arange(8, dtype=torch.int32, device=words.device))
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    return ((words.unsqueeze(dim + 1) >> amounts.view(shape)) & 15).flatten(dim, dim + 1)


def scaled(q: Tensor, z: Tensor, scales: Tensor) -> Tensor:
    """[K, N] in the type of the scales."""
    w = (q.unflatten(0, (-1, GROUP)) - z[:, None]) * scales[:, None]
    return w.flatten(0, 1)


class Problem:
    """x [M, K], the tensors of a weight, bias [N]; subclasses say how the weight is packed."""

    dtype = torch.bfloat16

    @staticmethod
    def dequantize(*weight: Tensor) -> Tensor:
        """[K, N] in the type of the scales."""
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
        """What ``dequantize`` takes."""
        raise NotImplementedError

    @functools.cached_property
    def tensors(self) -> list[tuple[Tensor, ...]]:
        """Copies of the packed weight, all of the same values."""
        packed = self.packed()
        return [packed, *self.copies(packed)]

    def copies(self, first: tuple[Tensor, ...]) -> list[Any]:
        """As many as put the weights beyond the L2 cache."""
        from models_linear import MAX_CALLS, WEIGHT_BYTES

        size = sum(tensor.nbytes for tensor in first)
        calls = 2 if self.device == "cpu" else min(MAX_CALLS, -(-WEIGHT_BYTES // size))
        return [tuple(tensor.clone() for tensor in first) for _ in range(max(1, calls - 1))]

    @property
    def function(self) -> Callable[..., Tensor]:
        return self.linear

    def calls(self, fn: Callable[..., Tensor]) -> list[Call]:
        """``fn``, ``function`` compiled in some way, on each weight."""
        return [functools.partial(fn, self.x, self.bias, *t) for t in self.tensors]

    @property
    def weight(self) -> Tensor:
        """[K, N] in fp32, not rounded."""
        raise NotImplementedError

    def exact(self) -> Tensor:
        return self.x.double() @ self.weight.double() + self.bias.double()


class GPTQ(Problem):
    """Words along K, zeros along N."""

    shifts = staticmethod(in_order)
    dim = 0

    @classmethod
    def dequantize(cls, words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        return scaled(unpack(words, cls.dim, cls.shifts), unpack(zeros, 1, cls.shifts), scales)

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
    """fp16 in place of bf16."""

    dtype = torch.float16


class AWQ(GPTQ):
    """Words along N in AWQ's order, zeros too."""

    shifts = staticmethod(interleaved)
    dim = 1


class HQQ(GPTQ):
    """Bytes [N / 2, K]: the high half is of the first half of N, the low one of the second. Zeros
    and scales bf16 [N, K / 128]."""

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
    """int8 [N, K], a scale for each row."""

    @classmethod
    def dequantize(cls, numbers: Tensor, scales: Tensor) -> Tensor:  # type: ignore[override]
        return (numbers.to(scales.dtype) * scales[:, None]).t()

    def __init__(self, measure: str, m: int, n: int, k: int, device: str) -> None:
        super().__init__(measure, m, n, k, device)
        self.numbers, self.scales = self.random_numbers(), self.random_scales(n)

    def random_numbers(self) -> Tensor:
        return torch.randint(-128, 128, (self.n, self.k), dtype=torch.int8, **self.options)

    def packed(self) -> tuple[Tensor, ...]:
        return self.numbers, self.scales

    @functools.cached_property
    def weight(self) -> Tensor:
        return (self.numbers.float() * self.scales.float()[:, None]).t()


class E4M3(Int8):
    """float8_e4m3fn [N, K], a scale for each row."""

    def random_numbers(self) -> Tensor:
        return torch.randn(self.n, self.k, **self.options).to(torch.float8_e4m3fn)


def compiled(backend: str, mode: str | None, problem: Problem) -> list[Call]:
    return problem.calls(torch.compile(problem.function, backend=backend, mode=mode, dynamic=False))


def packed_as(kind: type[GPTQ], problem: GPTQ) -> list[Call]:
    """The same numbers in another layout."""
    other = kind("linear", problem.m, problem.n, problem.k, problem.device)
    return compiled("inductor_quant", None, other)


class Layer(nn.Module):
    """A packed layer as packages write it: buffers, and a forward that dequantizes."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.linear = type(problem).linear
        self.register_buffer("bias", problem.bias)
        self.names = [f"weight{i}" for i in range(len(problem.packed()))]
        for name, tensor in zip(self.names, problem.packed(), strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.bias, *(getattr(self, name) for name in self.names))


def prepacked_from(kind: type[GPTQ], problem: GPTQ) -> list[Call]:
    """The same numbers in another layout, which ``prepack_`` has changed."""
    other = kind("linear", problem.m, problem.n, problem.k, problem.device)
    model = nn.Sequential(Layer(other))
    if not inductor_quant.prepack_(model, other.x):
        raise ValueError(f"prepack_ leaves the layout of {kind.__name__} as it is")
    layers = [model[0]]
    for tensors in other.copies(tuple(layers[0].buffers())):
        layers.append(copy.deepcopy(layers[0]))
        for (name, _), tensor in zip(layers[0].named_buffers(), tensors, strict=True):
            setattr(layers[-1], name, tensor)
    # one compilation serves all: their tensors are inputs of the graph
    call = torch.compile(
        lambda layer, x: layer(x), backend="inductor_quant", dynamic=False, fullgraph=True
    )
    return [functools.partial(call, layer, other.x) for layer in layers]


def bf16(problem: Problem) -> list[Call]:
    weight = problem.weight.to(problem.dtype).t().contiguous()
    weights = [weight, *(w for (w,) in problem.copies((weight,)))]
    return [functools.partial(F.linear, problem.x, w, problem.bias) for w in weights]


def dequantize_once(problem: Problem) -> list[Call]:
    """A kernel of stock Inductor that writes the bf16 weight, then cuBLAS."""
    dequantize = torch.compile(type(problem).dequantize, dynamic=False)

    def call(tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.addmm(problem.bias, problem.x, dequantize(*tensors))

    return [functools.partial(call, tensors) for tensors in problem.tensors]


def tinygemm(problem: GPTQ) -> list[Call]:
    """PyTorch's own int4 kernel: ``(q - 8) * scale + zero``, in a layout of its own."""
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

    def call(numbers: Tensor, scales: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(problem.x, numbers, scales) + problem.bias

    return [functools.partial(call, *tensors) for tensors in problem.tensors]


def gemlite_bytes(problem: Int8) -> list[Call]:
    from gemlite import helper

    if problem.numbers.dtype == torch.int8:
        processor = helper.A16W8_INT8(device=problem.device, dtype=problem.dtype)
    else:
        kind = problem.numbers.dtype
        processor = helper.A16W8_FP8(device=problem.device, dtype=problem.dtype, fp8=kind)

    def layer(numbers: Tensor, scales: Tensor) -> Any:
        return processor.from_weights(numbers, problem.bias, scales[:, None])

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
