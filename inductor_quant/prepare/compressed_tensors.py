"""Layers of compressed-tensors 0.20: a ``Linear`` with a ``quantization_scheme``.

As loaded by transformers they are decompressed to 16 bits at the first call. The formulas are those
of its ``decompress`` and ``forward_quantize``, without its Triton kernels."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from inductor_quant.prepare.e2m1 import E2M1Linear
from inductor_quant.prepare.plain import Replacement, any_dtype, repeated, unpacked

_DENSE = ("decompressed", "frozen")
_RELOAD = "decompressed already: load the model again and prepare it before its first call"
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)


def plain(module: nn.Module) -> Replacement | str:
    scheme: Any = module.quantization_scheme
    status = _text(getattr(module, "quantization_status", ""))
    if scheme.weights is None or status not in ("compressed", *_DENSE):
        return ""
    if status == "frozen":
        return "it is not compressed: its weight is rounded in each call"
    if scheme.output_activations is not None:
        return "its output is quantized"
    if hasattr(module, "weight_g_idx"):
        return "its columns are in another order (weight_g_idx)"
    if not getattr(module, "quantization_enabled", True):
        return "its quantization is switched off"
    format = _text(scheme.format)
    if status == "compressed" and format not in _FORMATS:
        return f"the format {format} is not known"
    why = _unknown_activation(scheme.input_activations)
    if why:
        return why
    packed = sys.modules["compressed_tensors"]
    layer = CompressedLinear(module, scheme, "" if status in _DENSE else format)
    reference = functools.partial(_reference, packed, module, scheme, status)
    dtype = any_dtype(module, "bias", "weight_scale", "weight")
    return Replacement(layer, reference, dtype, note=_RELOAD if status in _DENSE else "")


def _text(member: Any) -> str:
    """The value of a member of an Enum, or a string."""
    return str(getattr(member, "value", member))


def _unknown_activation(args: Any) -> str:
    if args is None:
        return ""
    dynamic, strategy = getattr(args.dynamic, "value", args.dynamic), _text(args.strategy)
    known = (True, "local") if strategy != "tensor" else (True, False)
    if args.num_bits not in (4, 6, 8) or dynamic not in known:
        return f"an activation of {args.num_bits} bits per {strategy} is not known"
    if strategy not in ("token", "tensor", "group", "tensor_group"):
        return f"an activation quantized per {strategy} is not known"
    if _text(args.type) == "float" and args.num_bits != 8:
        return f"an activation of {args.num_bits} bits in floating point stays to its library"
    if args.scale_dtype is not None:
        return f"an activation with scales of {args.scale_dtype} stays to its library"
    return ""


def _reference(packed: Any, module: Any, scheme: Any, status: str, x: torch.Tensor) -> torch.Tensor:
    """What the library computes after its decompression."""
    if scheme.input_activations is not None:
        lifecycle = sys.modules[f"{packed.__name__}.quantization.lifecycle.forward"]
        x = lifecycle.forward_quantize(module, x, "input", scheme.input_activations)
    weight = module.weight if status in _DENSE else None
    if weight is None:
        compressor = packed.compressors.BaseCompressor.get_value_from_registry(_text(scheme.format))
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        weight = compressor.decompress(state, scheme)["weight"]
    return nn.functional.linear(x, weight.to(x.dtype), module.bias)


class CompressedLinear(E2M1Linear):
    """The formats of ``_FORMATS``; "" for a dense weight whose activation is quantized.

    pack-quantized   weight_packed int32 [N, K * bits / 32]: fields along K, the lowest bits first,
                     plus 2^(bits - 1); weight_zero_point likewise, packed along N
    nvfp4, mxfp4     weight_packed uint8 [N, K / 2], even k in the low nibble, e2m1
    others           weight int8 or e4m3 [N, K]

    weight_scale is [N, K / group], [N, 1], [1] or [N / block, K / block]; W = (q - zero) * scale,
    with nvfp4 scale / weight_global_scale, with mx formats 2^(weight_scale - 127).
    """

    weight: torch.Tensor

    def __init__(self, module: Any, scheme: Any, format: str) -> None:
        super().__init__(module.out_features, module.in_features)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.hold(**tensors)
        self.format, self.bits = format, scheme.weights.num_bits
        self.group, self.block = scheme.weights.group_size, scheme.weights.block_structure
        self.is_symmetric = scheme.weights.symmetric
        self.args = _Activation(scheme.input_activations)
        if format.endswith("fp4-pack-quantized"):
            self.hold_e2m1(torch.bfloat16, module.weight_packed.device)

    def dequantized(self) -> torch.Tensor:
        if not self.format:
            return self.weight
        number, scale = self._numbers(), self._scale()
        zero = None if self.is_symmetric else self._zeros()
        number = number.to(scale.dtype)
        if self.block is not None:
            return number * repeated(scale, self.block, self.out_features, self.in_features)
        if scale.dim() > 1:
            number = number.reshape(len(number), scale.shape[1], -1)
            scale = scale.unsqueeze(-1)
        if zero is not None:
            number = number - (zero.unsqueeze(-1) if zero.dim() > 1 else zero).to(scale.dtype)
        weight = number * scale
        return (weight.flatten(1) if weight.dim() > 2 else weight).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the decompressed weight."""
        return torch.bfloat16 if hasattr(self, "e2m1") else self._scale().dtype

    def _numbers(self) -> torch.Tensor:
        held: Any = self
        if self.format == "pack-quantized":
            codes = unpacked(held.weight_packed, self.bits, 1, self.in_features)
            return codes - (1 << self.bits - 1)
        if hasattr(self, "e2m1"):
            return self.of_codes(held.weight_packed)
        return held.weight

    def _scale(self) -> torch.Tensor:
        scale: Any = self.weight_scale
        if self.format.startswith("nvfp4"):
            return scale.to(torch.bfloat16) / self.weight_global_scale
        if self.format.startswith("mx"):
            return 2.0 ** (scale.to(torch.int32) - 127).to(torch.bfloat16)
        return scale

    def _zeros(self) -> torch.Tensor:
        zero: Any = self.weight_zero_point
        if self.format != "pack-quantized" or zero.dtype != torch.int32:
            return zero
        return unpacked(zero, self.bits, 0, self.out_features) - (1 << self.bits - 1)

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = self
        return self.args(x, getattr(held, "input_scale", None),
                         getattr(held, "input_zero_point", None))  # fmt: skip


class _Activation:
    """``fake_quantize`` of an input, as ``args`` say: (round(x / s + z) - z) * s."""

    def __init__(self, args: Any) -> None:
        self.is_on = args is not None
        if args is None:
            return
        self.strategy, self.group = _text(args.strategy), args.group_size
        self.is_dynamic, self.is_symmetric = bool(args.dynamic), args.symmetric
        self.is_float = _text(args.type) == "float"
        top = 448.0 if self.is_float else 2.0 ** (args.num_bits - 1)
        self.low, self.high = -top, top if self.is_float else top - 1

    def __call__(
        self, x: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.is_on:
            return x
        shape = x.shape
        if "group" in self.strategy:
            x = x.reshape(*shape[:-1], shape[-1] // self.group, self.group)
        if self.is_dynamic:
            scale, zero = self._measured(x)
        assert scale is not None
        scaled = x / scale
        if zero is not None:
            scaled = scaled + zero.to(x.dtype)
        q = scaled.clamp(self.low, self.high)
        q = q.to(torch.float8_e4m3fn).to(x.dtype) if self.is_float else q.round()
        q = q.to(scale.dtype)
        if zero is not None:
            q = q - zero.to(scale.dtype)
        return (q * scale).reshape(shape)

    def _measured(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        # "token" keeps the first two dimensions: of a matrix it is the whole tensor
        dims = [-1] if "group" in self.strategy else list(range(2, x.dim()))
        if self.strategy == "tensor" or not dims:
            # beside the rows' own a zero, which is in the range anyway: there may be no rows
            rows = (of(-1).flatten() for of in (x.amin, x.amax))
            low, high = (nn.functional.pad(each, (0, 1)) for each in rows)
            low, high = low.amin(), high.amax()
        else:
            low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        low, high = low.clamp_max(0), high.clamp_min(0)
        extent = self.high - self.low
        if self.is_symmetric:
            scale, zero = torch.maximum(low.abs(), high) / (extent / 2), None
        else:
            scale = (high - low) / extent
            zero = (self.low - low / scale).clamp(self.low, self.high)
            zero = zero.clamp(-128, 127).round().to(torch.int8)
        return scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps), zero
