"""Layers of experts that quantize their rows too, each written in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.producers import experts
from tests.support.producers.experts import Experts, bf16, i32

f32, e4m3, i8 = torch.float32, torch.float8_e4m3fn, torch.int8
Quantized = tuple[torch.Tensor, torch.Tensor]


def by_row(x: torch.Tensor) -> Quantized:
    s = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448
    return (x.float() / s).to(e4m3), s


def by_group(x: torch.Tensor) -> Quantized:
    groups = x.float().unflatten(-1, (-1, experts.GROUP))
    s = groups.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448
    return (groups / s).to(e4m3).flatten(-2), s.squeeze(-1)


def by_row_int8(x: torch.Tensor) -> Quantized:
    s = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (x.float() / s).round().clamp(-127, 127).to(i8), s


def dequantized(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    size = q.shape[-1] // s.shape[-1]
    return (q.float().unflatten(-1, (-1, size)) * s.unsqueeze(-1)).flatten(-2).to(bf16)


# format of the weights -> how rows are quantized
QUANTIZERS = {
    "fp8": by_row,
    "fp8_tensor": by_row,
    "fp8_block": by_group,
    "int8": by_row_int8,
}


class ScaledExperts(Experts):
    """``form``: a key of FORMS."""

    def __init__(self, format: str, form: str, **sizes: int) -> None:
        super().__init__(format, "grouped", **sizes)
        self.quantize, self.form = QUANTIZERS[format], FORMS[form]
        for name, least in {"up": 0.01, "down": 0.1}.items():  # static scales of rows
            scales = torch.linspace(least, 2 * least, self.num_experts)
            self.register_buffer(f"{name}_static", scales)


def _routing(self: Experts, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    chosen, order = ids.reshape(-1).sort()
    counts = torch.histc(chosen.float(), self.num_experts, 0, self.num_experts - 1)
    return chosen, order, counts.cumsum(0).to(i32)


def _finished(x: torch.Tensor, y: torch.Tensor, order: Any, weights: torch.Tensor) -> torch.Tensor:
    y = y * weights.reshape(-1)[order].unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add_(0, order // weights.shape[1], y.to(x.dtype))


def _rows_first(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """Rows are quantized, and back, before they are gathered."""
    _, order, offsets = _routing(self, ids)
    rows = dequantized(*self.quantize(x))[order // ids.shape[1]]
    up = torch._grouped_mm(rows, self.stack("up").transpose(1, 2), offs=offsets)
    rows = dequantized(*self.quantize(self._apply_gate(up)))
    y = torch._grouped_mm(rows, self.stack("down").transpose(1, 2), offs=offsets)
    return _finished(x, y, order, weights)


def _gathered_first(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    _, order, offsets = _routing(self, ids)
    rows = dequantized(*self.quantize(x[order // ids.shape[1]]))
    up = torch._grouped_mm(rows, self.stack("up").transpose(1, 2), offs=offsets)
    rows = dequantized(*self.quantize(self._apply_gate(up)))
    y = torch._grouped_mm(rows, self.stack("down").transpose(1, 2), offs=offsets)
    return _finished(x, y, order, weights)


def _static(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """A scale of each expert for all of its rows."""
    chosen, order, offsets = _routing(self, ids)

    def product(a: torch.Tensor, name: str) -> torch.Tensor:
        s = getattr(self, f"{name}_static")[chosen].unsqueeze(1)
        q = (a.float() / s).clamp(-448, 448).to(e4m3)
        rows = (q.float() * s).to(bf16)
        return torch._grouped_mm(rows, self.stack(name).transpose(1, 2), offs=offsets)

    up = product(x[order // ids.shape[1]], "up")
    return _finished(x, product(self._apply_gate(up), "down"), order, weights)


def _scaled_behind(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """Quantized values as bf16; the scales of the row and of its expert follow the product."""
    chosen, order, offsets = _routing(self, ids)

    def product(a: torch.Tensor, name: str) -> torch.Tensor:
        (q, s), t = self.quantize(a), self.stored(name)
        out = torch._grouped_mm(q.to(bf16), t["q"].to(bf16).transpose(1, 2), offs=offsets)
        return (out.float() * s * t["s"].squeeze(-1)[chosen]).to(bf16)

    up = product(x[order // ids.shape[1]], "up")
    return _finished(x, product(self._apply_gate(up), "down"), order, weights)


def _of_ids(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """A weight for each row, gathered; no sort."""
    chosen, k = ids.reshape(-1), ids.shape[1]

    def product(a: torch.Tensor, name: str) -> torch.Tensor:
        rows = dequantized(*self.quantize(a)).repeat_interleave(chosen.numel() // len(a), 0)
        return torch.bmm(self.gathered(name, chosen), rows.unsqueeze(2)).squeeze(2)

    y = product(self._apply_gate(product(x, "up")), "down")
    return (y.view(x.shape[0], k, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _integers_of_ids(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """Gathered weights, products in fp32, the scales behind them."""
    chosen, k = ids.reshape(-1), ids.shape[1]

    def product(a: torch.Tensor, name: str) -> torch.Tensor:
        (q, s), t = self.quantize(a), {n: x[chosen] for n, x in self.stored(name).items()}
        out = torch.bmm(t["q"].float(), q.float().unsqueeze(2)).squeeze(2)
        return (out * s * t["s"].squeeze(-1)).to(bf16)

    y = product(self._apply_gate(product(x.repeat_interleave(k, 0), "up")), "down")
    return (y.view(x.shape[0], k, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "rows_first": _rows_first,
    "gathered_first": _gathered_first,
    "static": _static,
    "scaled_behind": _scaled_behind,
    "of_ids": _of_ids,
    "integers_of_ids": _integers_of_ids,
}
# (format, form)
LAYERS = [
    *(("fp8_block", form) for form in ("rows_first", "gathered_first", "of_ids", "static")),
    *(("fp8_tensor", form) for form in ("rows_first", "gathered_first", "of_ids", "static")),
    *(("fp8", form) for form in FORMS if form != "integers_of_ids"),
    *(("int8", form) for form in FORMS if form != "static"),
]
