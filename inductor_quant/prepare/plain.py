"""Layers of plain tensors, what stands for one, and the comparison of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

_ROWS = (2, 5)  # of the data for a comparison


class PlainLayer(nn.Module):
    """Computes what another layer does from the same tensors, traced as it is written."""

    def hold(self, **tensors: torch.Tensor | None) -> None:
        """Tensors of the replaced layer, in the same memory and under the same names."""
        for name, tensor in tensors.items():
            if type(tensor) is nn.Parameter:
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor if tensor is None else tensor.detach())

    def table(self, name: str, values: torch.Tensor) -> None:
        """A constant that is no part of the state dict."""
        self.register_buffer(name, values, persistent=False)

    def example(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Random inputs, on the CPU; floats become the dtype of the layer."""
        raise NotImplementedError


class PlainLinear(PlainLayer):
    """``activation(x) @ dequantized().T + bias``.

    ``dequantized`` computes the weight [N, K] from the packed tensors, ``activation`` what the
    layer does to x: nothing, or a rounding to fewer bits.
    """

    bias: torch.Tensor | None

    def __init__(self, n: int, k: int, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = k, n
        self.hold(bias=bias)

    def dequantized(self) -> torch.Tensor:
        raise NotImplementedError

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.dequantized().to(x.dtype)
        return nn.functional.linear(self.activation(x), weight, self.bias)

    def example(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """A row is zero."""
        x = torch.randn(*_ROWS, self.in_features, generator=generator, device=generator.device)
        x[0, 0] = 0
        return (x,)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


@dataclasses.dataclass(frozen=True)
class Replacement:
    """``layer`` in place of another, which computes ``reference(*x)`` for x of ``dtype``.

    dropped_hooks  ids of the forward hooks of the old layer that the new one includes
    note           for the report; ``compared`` adds how close both are
    """

    layer: PlainLayer
    reference: Callable[..., torch.Tensor]
    dtype: torch.dtype
    dropped_hooks: tuple[int, ...] = ()
    note: str = ""

    def compared(self, error: float) -> Replacement | str:
        """With its note; if both differ by more than roundings to ``dtype``, why it is dropped."""
        text = f"relative rms difference {error:.1e}"
        # a rounding of every result, or of every weight, is eps / 4 and less
        if not error <= torch.finfo(self.dtype).eps / 2:
            return f"the plain layer would differ: {text}"
        close = f"within a rounding, {text}" if error else "bit for bit"
        notes = filter(None, (f"computes the same, {close}", self.note))
        return dataclasses.replace(self, note="; ".join(notes))


def difference(new: Replacement, module: nn.Module) -> float:
    """The relative rms difference on random data, 0 if every bit is the same."""
    layer = new.layer
    device = next(t.device for t in (*module.parameters(), *module.buffers()))
    inputs = [
        x.to(device, new.dtype if x.is_floating_point() else x.dtype)
        for x in layer.example(torch.Generator().manual_seed(0))
    ]
    ours, theirs = (of(*(x.clone() for x in inputs)) for of in (layer, new.reference))
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if torch.equal(ours, theirs):
        return 0.0
    gap = (ours.double() - theirs.double()).square().mean()
    return float((gap / theirs.double().square().mean()).sqrt()) or float(
        torch.finfo(ours.dtype).tiny
    )


def any_dtype(module: nn.Module, *names: str) -> torch.dtype:
    """The first dtype of 16 or 32 bits among these tensors; else bf16."""
    for name in names:
        value: Any = getattr(module, name, None)
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            return value.dtype
    return torch.bfloat16


def unpacked(words: torch.Tensor, bits: int, dim: int, size: int) -> torch.Tensor:
    """The ``size`` unsigned fields of int32 words in place of ``dim``, the lowest bits first; 32 of
    them fill ``bits`` words."""
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
        shifts = shifts.view(-1, *[1] * (words.dim() - dim - 1))
        codes = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
        return codes.flatten(dim, dim + 1).narrow(dim, 0, size)
    words = words.movedim(dim, -1)
    groups = -(-words.shape[-1] // bits)
    words = nn.functional.pad(words, (0, groups * bits - words.shape[-1]))
    words = words.reshape(*words.shape[:-1], groups, bits)
    parts: list[torch.Tensor] = []
    for start in range(0, 32 * bits, bits):
        word, shift = divmod(start, 32)
        code = words[..., word] >> shift
        low = min(bits, 32 - shift)
        code = code & ((1 << low) - 1)
        if low < bits:
            code = code | ((words[..., word + 1] & ((1 << bits - low) - 1)) << low)
        parts.append(code)
    return torch.stack(parts, -1).flatten(-2).narrow(-1, 0, size).movedim(-1, dim)


def repeated(scale: torch.Tensor, block: Sequence[int], n: int, k: int) -> torch.Tensor:
    """Scales of blocks as [..., N, K]; the last blocks may be shorter."""
    height, width = block
    rows = scale.repeat_interleave(height, -2)[..., :n, :]
    return rows.repeat_interleave(width, -1)[..., :k]
