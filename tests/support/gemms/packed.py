"""``Packed``: a packed weight, with what its tensors are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from inductor_quant.spec.weight_format import AffineIndex, Field, WeightFormat

u8, i64 = torch.uint8, torch.int64


@dataclasses.dataclass(frozen=True)
class Packed:
    """One weight: its format, its tensors' (kind, shape, dtype), and the code that reads them.

    Kinds: "bits" all values of the type, "fp8 words" bytes that are e4m3 numbers, "scale" positive,
    "zero" around 8, "float" normal, "group" positions of groups, some counted from the end,
    "shifts" 0, 4, ... 28, "table" 16 rising values, "e2m1" those of FP4, "exponent" 2**-7 to 2**4.
    """

    name: str
    format: WeightFormat
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    read: Callable[..., torch.Tensor]

    def make(self, device: str = "cpu") -> list[torch.Tensor]:
        """Random tensors."""
        groups = next((shape[0] for kind, shape, _ in self.tensors if kind == "scale"), 1)
        return [_random(*tensor, groups, device) for tensor in self.tensors]

    def dequantized(self, weight: Sequence[torch.Tensor]) -> torch.Tensor:
        """W [K, N] in fp64, by the plain code."""
        return self.read(*[t.cpu() for t in weight]).double()


def _random(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, groups: int, device: str
) -> torch.Tensor:
    if kind == "bits":
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, dtype=i64, device=device).to(dtype)
    if kind == "fp8 words":  # no byte of which is NaN
        return torch.randint(0, 127, (*shape, 4), device=device).to(u8).view(dtype)[..., 0]
    if kind == "group":
        return torch.randint(-groups, groups, shape, device=device).to(dtype)
    if kind == "shifts":
        return torch.arange(0, 32, 4, device=device).reshape(shape).to(dtype)
    if kind == "table":
        position = torch.arange(16, device=device)
        return (((position - 7.5) / 7.5) ** 3 + 0.01 * position).to(dtype)
    if kind == "e2m1":
        code = torch.arange(16, device=device)
        low = code & 7
        value = torch.where(low < 2, low * 0.5, (2 + (low & 1)) * torch.exp2((low >> 1) - 2.0))
        return torch.where(code < 8, value, -value).to(dtype)
    if kind == "exponent":
        return torch.randint(120, 132, shape, device=device).to(dtype)
    if kind == "float":
        return torch.randn(shape, device=device).to(dtype)
    low, high = (0.001, 0.021) if kind == "scale" else (4, 12)
    return (torch.rand(shape, device=device) * (high - low) + low).to(dtype)


def form(*terms: tuple[str, int], const: int = 0, data: Field | None = None) -> AffineIndex:
    return AffineIndex(const, terms, fields=((data, 1),) if data else ())
