"""Layers of bitsandbytes 0.50: ``Linear4bit`` (NF4, FP4) and ``Linear8bitLt`` without outliers."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from inductor_quant.prepare.plain import PlainLinear, Replacement, any_dtype
from inductor_quant.spec import formulas


def plain(module: Any) -> Replacement | str:
    return _plain8(module) if hasattr(module, "state") else _plain4(module)


def _plain4(module: Any) -> Replacement | str:
    state = getattr(module.weight, "quant_state", None) or module.quant_state
    if state is None:
        return "it is not quantized yet: move it to its device"
    if getattr(state, "packing_format_for_cpu", False):
        return "it is packed for a CPU"
    if tuple(state.shape) != (module.out_features, module.in_features):
        return "its weight is transposed"
    if module.in_features % state.blocksize:
        return f"blocks of {state.blocksize} elements straddle its rows"
    reference = functools.partial(_reference4, module, state)
    dtype = module.compute_dtype or any_dtype(module, "bias")
    return Replacement(Linear4bit(module, state), reference, dtype)


def _reference4(module: Any, state: Any, x: torch.Tensor) -> torch.Tensor:
    dequantize = sys.modules["bitsandbytes.functional"].dequantize_4bit
    dtype = module.compute_dtype or x.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    weight = dequantize(module.weight.data, state).to(dtype)
    return nn.functional.linear(x.to(dtype), weight, bias).to(x.dtype)


class Linear4bit(PlainLinear):
    """``W = code[q] * absmax`` in fp32, rounded to the dtype of the product: ``compute_dtype``, or
    that of x.

    weight uint8 [N * K / 2, 1], even k in the high nibble; absmax fp32 [N * K / blocksize], or with
    double quantization uint8, with a table, a scale for each 256 and an offset.
    """

    def __init__(self, module: Any, state: Any) -> None:
        super().__init__(module.out_features, module.in_features, module.bias)
        self.compute_dtype, self.blocksize = module.compute_dtype, state.blocksize
        self.hold(weight=module.weight.data.view(torch.uint8), absmax=state.absmax)
        self.table("code", state.code.float())
        self.is_nested = bool(state.nested)
        if self.is_nested:
            self.nested_blocksize = state.state2.blocksize
            self.hold(nested_absmax=state.state2.absmax, nested_code=state.state2.code,
                      offset=state.offset)  # fmt: skip

    def dequantized(self) -> torch.Tensor:
        held: Any = self
        absmax = held.absmax
        if self.is_nested:
            absmax = formulas.nested_absmax(
                absmax, held.nested_absmax, held.nested_code, held.offset, self.nested_blocksize
            )
        shape = (self.out_features, self.in_features)
        return formulas.codes_times_absmax(held.weight, held.code, absmax, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        weight = self.dequantized().to(dtype)
        return nn.functional.linear(x.to(dtype), weight, bias).to(x.dtype)


def _plain8(module: Any) -> Replacement | str:
    state = module.state
    if state.has_fp16_weights:
        return "its weight is quantized in each call"
    if state.threshold > 0:
        return (
            f"columns of outliers (threshold {state.threshold:g}) are another product of a size "
            "that only data tells: load with llm_int8_threshold=0"
        )
    weight = module.weight.CB if getattr(module.weight, "CB", None) is not None else state.CB
    scales = module.weight.SCB if getattr(module.weight, "SCB", None) is not None else state.SCB
    if weight is None or scales is None:
        return "it is not quantized yet: move it to its device"
    layer = Linear8bit(module, weight.data, scales.data)
    reference = functools.partial(_reference8, module, layer)
    return Replacement(layer, reference, any_dtype(module, "bias"))


def _reference8(module: Any, layer: Linear8bit, x: torch.Tensor) -> torch.Tensor:
    ops: Any = torch.ops.bitsandbytes
    flat = x.reshape(-1, x.shape[-1])
    q, rows, _ = ops.int8_vectorwise_quant(flat.to(torch.float16), 0.0)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    out = ops.int8_scaled_mm(q, layer.weight, rows, layer.SCB, bias=bias, dtype=x.dtype)
    return out.reshape(*x.shape[:-1], -1)


class Linear8bit(PlainLinear):
    """``sum(q_x * q_w) * (s_x * s_w) / 127^2``: weight int8 [N, K], SCB fp32 [N], the largest
    absolute value of each channel; x is rounded per row, from fp16."""

    weight: torch.Tensor
    SCB: torch.Tensor

    def __init__(self, module: Any, weight: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__(module.out_features, module.in_features, module.bias)
        self.hold(weight=weight, SCB=scales)

    def dequantized(self) -> torch.Tensor:
        return self.weight * (self.SCB / 127).unsqueeze(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, rows = formulas.int8_rows(x.reshape(-1, x.shape[-1]).to(torch.float16))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = formulas.int8_scaled_mm(q, self.weight, rows, self.SCB, bias, x.dtype)
        return out.reshape(*x.shape[:-1], self.out_features)
