"""``FP8Experts`` of transformers 5.17: the experts of a layer in fine-grained FP8, computed by a
kernel from the hub or by DeepGEMM. The formulas are those of ``finegrained_fp8.py``."""

from __future__ import annotations

from typing import Any

import torch

from inductor_quant.prepare.finegrained_fp8 import quantized_rows, statically_quantized
from inductor_quant.prepare.plain import PlainLayer, Replacement, repeated

# What ``_apply_gate`` of the layer reads.
_GATE = ("act_fn", "limit", "swiglu_alpha", "swiglu_limit", "gate_softcap", "up_softcap")


def plain(module: Any) -> Replacement | str:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if weight.dtype != torch.float8_e4m3fn:
            return f"{name} is {weight.dtype}"
        experts, n, k = weight.shape
        if module.block_size is None:
            is_known = scale.shape[0] == experts and n % scale.shape[1] == 0 and scale.shape[2] == 1
        else:
            height, width = module.block_size
            is_known = tuple(scale.shape) == (experts, -(-n // height), k // width)
            is_known &= k % width == 0
        if not is_known:
            return f"{name} of shape {list(weight.shape)} with scales of shape {list(scale.shape)}"
    note = "for one token"
    return Replacement(FP8Experts(module, first), module.forward, torch.bfloat16, note=note)


class FP8Experts(PlainLayer):
    """``sum over the experts e of a token of w[e] * down_e(act(up_e(x)))``.

    A product is ``a * s_a @ (weight[e] * scale_inv[e]).T``: weight e4m3 [E, N, K], scale_inv fp32
    or e8m0 [E, ceil(N / 128), K / 128], or [E, 1 or 2, 1]: one for each half of the columns; a is
    x / s_a in e4m3, s_a = amax / 448 of 128 neighbours along K (of a row, without blocks), or the
    static gate_up_proj_activation_scale[e] and down_proj_activation_scale[e], fp32 [E].

    One token: the weights that its ids choose, in fp32. Else rows are sorted by expert, and the
    stack is in bf16, as ``_grouped_mm`` takes it. Ids from E on have no expert, and add 0.
    """

    act_fn: Any

    def __init__(self, module: Any, first: str) -> None:
        super().__init__()
        self.first, self.has_gate, self.block_size = first, module.has_gate, module.block_size
        self.num_experts, self.hidden_dim = module.num_experts, module.hidden_dim
        self.intermediate_dim = module.intermediate_dim
        self.config = module.config
        self._is_expert_parallel = getattr(module, "_is_expert_parallel", True)
        self.apply_gate = type(module)._apply_gate
        for name in _GATE:
            setattr(self, name, getattr(module, name, None))
        self.is_static = module.activation_scheme == "static"
        for name in (first, "down_proj"):
            scale = f"{name}_scale_inv"
            self.hold(**{name: getattr(module, name), scale: getattr(module, scale)})
            if self.is_static:
                own = "gate_up_proj" if name == first else name  # without a gate, too
                static = getattr(module, f"{own}_activation_scale")
                self.hold(**{f"{name}_activation_scale": static})

    def example(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """A token: the library and we dequantize a whole stack for more."""
        device = generator.device
        ids = torch.arange(min(4, self.num_experts), device=device).unsqueeze(0)
        x = torch.randn(1, self.hidden_dim, generator=generator, device=device)
        return x, ids, torch.rand(ids.shape, generator=generator, device=device)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        choices = top_k_index.shape[-1]
        ids, factors = top_k_index.reshape(-1), top_k_weights.reshape(-1, 1)
        if hidden_states.shape[0] == 1:
            chosen = ids.clamp(max=self.num_experts - 1) if self._is_expert_parallel else ids
            x = hidden_states.repeat_interleave(choices, 0)
            out = self._gated(x, chosen) * factors.to(x.dtype)
            out = self._of_experts(out, ids)
        else:
            ids, order = ids.sort()
            counted = ids.float() if ids.device.type == "cpu" else ids.int()
            counts = torch.histc(counted, self.num_experts, min=0, max=self.num_experts - 1)
            x = hidden_states[order // choices]
            out = self._gated(x, ids, counts.cumsum(0, dtype=torch.int32))
            out = self._of_experts(out * factors[order].to(x.dtype), ids)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.shape[0], device=order.device)
            out = out[inverse]
        return out.view(-1, choices, self.hidden_dim).sum(1).to(hidden_states.dtype)

    def _of_experts(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """0 in rows without an expert, which may be anything."""
        if not self._is_expert_parallel:
            return rows
        return rows.masked_fill((ids >= self.num_experts).unsqueeze(-1), 0.0)

    def _gated(self, x: torch.Tensor, *route: torch.Tensor) -> torch.Tensor:
        up = self._product(x, self.first, *route)
        up = self.apply_gate(self, up) if self.has_gate else self.act_fn(up)
        return self._product(up, "down_proj", *route)

    def _product(
        self, x: torch.Tensor, name: str, ids: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``ids``: the expert of each row; with ``offsets`` rows are sorted by it."""
        weight, scale = getattr(self, name), getattr(self, f"{name}_scale_inv")
        rows = self._activation(x, name, ids)
        if offsets is None:
            dense = self._dequantized(weight[ids], scale[ids])
            return torch.bmm(dense, rows.unsqueeze(-1)).squeeze(-1).to(x.dtype)
        dense = self._dequantized(weight, scale).to(torch.bfloat16).transpose(1, 2)
        return torch._grouped_mm(rows.to(torch.bfloat16), dense, offs=offsets).to(x.dtype)

    def _activation(self, x: torch.Tensor, name: str, ids: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        if not self.is_static:
            return quantized_rows(x, self.block_size[1] if self.block_size else x.shape[-1])
        scale = getattr(self, f"{name}_activation_scale")
        return statically_quantized(x, scale[ids.clamp(max=self.num_experts - 1)].unsqueeze(-1))

    def _dequantized(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        n, k = weight.shape[-2:]
        block = self.block_size or (n // scale.shape[-2], k)
        return weight.float() * repeated(scale.float(), block, n, k)
