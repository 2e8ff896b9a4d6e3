"""GEMMs of one activation, as one canonical op and each alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from inductor_quant.ops import fp8 as fp8_op
from inductor_quant.ops import w8a8 as op
from inductor_quant.ops.fusion import horizontal
from tests.support.gemms import fp8, w4a8, w8a8, weight_only
from tests.support.producers.packed import GptqCat


class DecoderLayer(nn.Module):
    """Grouped-query attention and an MLP; ``linear(K, N)`` makes its layers."""

    def __init__(self, linear: Callable[[int, int], nn.Module], hidden: int) -> None:
        super().__init__()
        self.head = hidden // 4
        self.q, self.k, self.v = (linear(hidden, self.head * count) for count in (4, 2, 2))
        self.o, self.down = linear(hidden, hidden), linear(2 * hidden, hidden)
        self.gate, self.up = linear(hidden, 2 * hidden), linear(hidden, 2 * hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], -1, self.head)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def words(k: int, n: int) -> nn.Module:
    """A layer of 4-bit weights in GPTQ's words."""
    return GptqCat(torch.bfloat16, k, n, False)


Fn = Callable[..., list[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """weight_only GEMMs that differ in their columns; ``case.n`` does not count."""

    case: weight_only.Case
    columns: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.case}-{','.join(map(str, self.columns))}"

    @property
    def cases(self) -> list[weight_only.Case]:
        return [dataclasses.replace(self.case, n=n) for n in self.columns]

    def make_inputs(self, device: str) -> tuple[Any, ...]:
        """x, then column_scale, bias and weight tensors of each."""
        made = [weight_only.make_inputs(case, device) for case in self.cases]
        return made[0][0], *(tensor for x, *rest in made for tensor in rest)

    def parts(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The inputs of each as those of one GEMM."""
        x, *rest = inputs
        count = len(rest) // len(self.columns)
        return [(x, *rest[i : i + count]) for i in range(0, len(rest), count)]

    @property
    def grouped(self) -> Fn:
        texts = [case.packed.format.encode() for case in self.cases]
        out_dtype = self.case.out_dtype or self.case.dtype

        def fn(*inputs: Any) -> list[torch.Tensor]:
            _, scales, biases, *weights = zip(*self.parts(inputs), strict=True)
            tensors = [tensor for weight in zip(*weights, strict=True) for tensor in weight]
            return horizontal.weight_only_op(
                inputs[0], tensors, list(scales), list(biases), format=texts, out_dtype=out_dtype
            )

        return fn

    @property
    def alone(self) -> Fn:
        fns = [weight_only.gemm(case) for case in self.cases]
        return lambda *inputs: [fn(*p) for fn, p in zip(fns, self.parts(inputs), strict=True)]

    def exact(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        parts = self.parts(inputs)
        return [weight_only.exact(case, part) for case, part in zip(self.cases, parts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Integers:
    """w8a8 GEMMs likewise: as the op takes them, [K, N] and scales of two dimensions."""

    case: w8a8.Case
    columns: tuple[int, ...]
    groups: int = 1

    def __str__(self) -> str:
        groups = f"-{self.groups}groups" if self.groups > 1 else ""
        return f"{self.case}-{','.join(map(str, self.columns))}{groups}"

    def make_inputs(self, device: str) -> tuple[Any, ...]:
        """a, a_scale, then b, b_scale and bias of each. Scales are powers of two: with an output in
        fp32, which holds the sums, and without bias, results are exact."""
        made = [w8a8.make_inputs(dataclasses.replace(self.case, n=n), device) for n in self.columns]
        a, _, a_scale, _, _ = made[0]
        found = [a, self._scale(a_scale, (-1, self.groups))]
        for _, w, _, b_scale, bias in made:
            assert w is not None
            found += [w.t(), self._scale(b_scale, (self.groups, -1)), bias]
        return tuple(found)

    def _scale(self, scale: torch.Tensor | None, shape: tuple[int, int]) -> torch.Tensor | None:
        if scale is None:
            return None
        size = scale.numel() * self.groups
        powers = torch.randint(-3, 4, (size,), device=scale.device).to(scale.dtype)
        return powers.exp2().reshape(shape)

    def parts(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        a, a_scale, *rest = inputs
        return [(a, rest[i], a_scale, *rest[i + 1 : i + 3]) for i in range(0, len(rest), 3)]

    @property
    def grouped(self) -> Fn:
        def fn(*inputs: Any) -> list[torch.Tensor]:
            _, b, _, b_scale, bias = map(list, zip(*self.parts(inputs), strict=True))
            a, a_scale, *_ = inputs
            return horizontal.w8a8_op(a, b, a_scale, b_scale, bias, out_dtype=self.case.out_dtype)

        return fn

    @property
    def alone(self) -> Fn:
        out_dtype = self.case.out_dtype
        return lambda *inputs: [op.op(*p, out_dtype=out_dtype) for p in self.parts(inputs)]

    def exact(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        """In fp64; without groups."""
        return [
            w8a8.reference((a, b.t(), a_scale, b_scale, bias))
            for a, b, a_scale, b_scale, bias in self.parts(inputs)
        ]


@dataclasses.dataclass(frozen=True)
class Floats:
    """fp8 GEMMs likewise."""

    case: fp8.Case
    columns: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.case}-{','.join(map(str, self.columns))}"

    @property
    def options(self) -> dict[str, Any]:
        return {"fast_accum": self.case.fast_accum, "out_dtype": self.case.out_dtype}

    def make_inputs(self, device: str) -> tuple[Any, ...]:
        """a, a_scale, then b, b_scale and bias of each."""
        made = [fp8.make_inputs(dataclasses.replace(self.case, n=n), device) for n in self.columns]
        found = [made[0][0], made[0][2]]
        for _, w, _, b_scale, bias in made:
            assert w is not None
            found += [w.t(), b_scale, bias]
        return tuple(found)

    def parts(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        a, a_scale, *rest = inputs
        return [(a, rest[i], a_scale, *rest[i + 1 : i + 3]) for i in range(0, len(rest), 3)]

    @property
    def grouped(self) -> Fn:
        def fn(*inputs: Any) -> list[torch.Tensor]:
            _, b, _, b_scale, bias = map(list, zip(*self.parts(inputs), strict=True))
            a, a_scale, *_ = inputs
            return horizontal.fp8_op(a, b, a_scale, b_scale, bias, **self.options)

        return fn

    @property
    def alone(self) -> Fn:
        return lambda *inputs: [fp8_op.op(*part, **self.options) for part in self.parts(inputs)]

    def exact(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        """In fp64."""
        return [
            fp8.reference(self.case, (a, b.t(), a_scale, b_scale, bias))
            for a, b, a_scale, b_scale, bias in self.parts(inputs)
        ]


@dataclasses.dataclass(frozen=True)
class Int4:
    """w4a8 GEMMs likewise."""

    case: w4a8.Case
    columns: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.case}-{','.join(map(str, self.columns))}"

    @property
    def cases(self) -> list[w4a8.Case]:
        return [dataclasses.replace(self.case, n=n) for n in self.columns]

    def make_inputs(self, device: str) -> tuple[Any, ...]:
        """a, a_scale, then b_scale, bias and weight tensors of each."""
        made = [w4a8.make_inputs(case, device) for case in self.cases]
        own = (tensor for _, _, b_scale, bias, _, _, *w in made for tensor in (b_scale, bias, *w))
        return (*made[0][:2], *own)

    def parts(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The inputs of each as those of one GEMM."""
        a, a_scale, *rest = inputs
        count = len(rest) // len(self.columns)
        each = [rest[i : i + count] for i in range(0, len(rest), count)]
        return [(a, a_scale, *own[:2], None, None, *own[2:]) for own in each]

    @property
    def grouped(self) -> Fn:
        texts = [case.format.encode() for case in self.cases]

        def fn(*inputs: Any) -> list[torch.Tensor]:
            _, _, scales, biases, _, _, *weights = zip(*self.parts(inputs), strict=True)
            tensors = [tensor for weight in zip(*weights, strict=True) for tensor in weight]
            return horizontal.w4a8_op(
                *(inputs[0], tensors, inputs[1], list(scales), list(biases)),
                format=texts,
                out_dtype=self.case.out_dtype,
            )

        return fn

    @property
    def alone(self) -> Fn:
        fns = [w4a8.gemm(case) for case in self.cases]
        return lambda *inputs: [fn(*p) for fn, p in zip(fns, self.parts(inputs), strict=True)]

    def exact(self, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
        parts = self.parts(inputs)
        return [w4a8.reference(case, p) for case, p in zip(self.cases, parts, strict=True)]


Group = PackedLayout | Integers | Floats | Int4
