"""``QLinear`` of optimum-quanto 0.2 with quantized activations, whose hooks make tensors of a
subclass that Dynamo does not trace. Without these it needs nothing."""

from __future__ import annotations

import abc
import functools
from typing import Any

import torch
from torch import nn

from inductor_quant.prepare.plain import PlainLinear, Replacement


def plain(module: Any) -> Replacement | str:
    if module.activation_qtype is None:
        return ""
    if not module.frozen:
        return "it is not frozen: its weight is rounded in each call"
    weight = module.weight
    data, scale = getattr(weight, "_data", None), getattr(weight, "_scale", None)
    dtypes = (torch.int8, torch.float8_e4m3fn)
    if type(data) is not torch.Tensor or scale is None or data.dtype not in dtypes:
        return "its weight has less than 8 bits, or is packed for a kernel"
    if module.activation_qtype.dtype not in dtypes:
        return f"an activation of {module.activation_qtype.dtype} is not known"
    handles = module._quantize_hooks
    held = {**module._forward_pre_hooks, **module._forward_hooks}
    hooks = {name: handle.id for name, handle in handles.items() if handle.id in held}
    if "input" not in hooks:
        return "its input is not quantized here"
    layer = QLinear(module, data, scale, "output" in hooks)
    reference = functools.partial(_reference, module, "output" in hooks)
    return Replacement(layer, reference, scale.dtype, tuple(hooks.values()))


def _reference(module: Any, quantizes_output: bool, x: torch.Tensor) -> torch.Tensor:
    given = module.quantize_input(module, (x,))
    out = module.forward(given)
    if quantizes_output:
        out = module.quantize_output(module, given, out)
    return out.dequantize() if hasattr(out, "_scale") else out


class _Layout(abc.ABC):  # noqa: B024
    """An object changes its class to one of the same layout; that of a mixin is its base's."""


class QLinear(_Layout, PlainLinear):
    """``(q_x @ weight.T) * (input_scale * scale) + bias``, in 8 bits on both sides, and rounded to
    8 bits by ``output_scale`` where the next layer reads it so: the result is dequantized.

    weight int8 or e4m3 [N, K], weight_scale [N, 1]; input_scale and output_scale are static.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor

    def __init__(
        self, module: Any, data: torch.Tensor, scale: torch.Tensor, quantizes_output: bool
    ) -> None:
        super().__init__(module.out_features, module.in_features, module.bias)
        self.hold(weight=data, weight_scale=scale, input_scale=module.input_scale,
                  output_scale=module.output_scale)  # fmt: skip
        self.dtype = module.activation_qtype.dtype
        self.quantizes_output = quantizes_output

    def dequantized(self) -> torch.Tensor:
        return self.weight.to(self.weight_scale.dtype) * self.weight_scale

    def rounded(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """x / scale in 8 bits."""
        x = x / scale
        if not self.dtype.is_floating_point:
            return x.round().clamp(-128, 127).to(self.dtype)
        return x.clamp(-448, 448).to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.rounded(x, self.input_scale).float()
        scale = (self.input_scale * self.weight_scale).t()
        out = nn.functional.linear(q, self.weight.float()) * scale
        out = out.to(self.weight_scale.dtype)
        if self.bias is not None:
            out = out + self.bias
        if self.quantizes_output:
            q = self.rounded(out, self.output_scale)
            out = q.to(out.dtype) * self.output_scale
        return out
