"""FP4 and FP8 in small groups with a scale of 8 bits: NVFP4, MXFP4, MXFP8, by the quantizers.

They are imported when a module is made. Their classes are not known to the type checker.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn

from tests.support.producers.base import PackedLinear, Producer, Tensor, bf16, field, octets
from tests.support.producers.real import Decompressed, source, unchanged_inductor_config


def e2m1(code: Tensor) -> Tensor:
    """The values of FP4 codes: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = 1 - 2 * (code >> 3), (code >> 1) & 3, code & 1
    value = torch.where(exponent == 0, mantissa, (2 + mantissa) * 2.0 ** (exponent - 1))
    return sign * value.double() / 2


def e8m0(code: Tensor) -> Tensor:
    """The values of exponents of 8 bits."""
    return torch.exp2(code.double() - 127)


def pairs(packed: Tensor) -> Tensor:
    """The codes [N, K] of two in a byte along K, the low one first."""
    n, k = torch.arange(len(packed))[:, None], torch.arange(2 * packed.shape[1])
    return field(packed[n, k // 2], 4 * (k % 2), 4)


def repeated(scale: Tensor, group: int) -> Tensor:
    return scale.double().repeat_interleave(group, dim=1)


# ------------------------------------------------------------------------------------------
# torchao


def torchao_nvfp4(dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig
    from torchao.quantization import quantize_

    model = nn.Sequential(source(dtype, k, n, bias))
    with unchanged_inductor_config(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, NVFP4WeightOnlyConfig())
    return model


def torchao_nvfp4_dense(model: Any) -> Tensor:
    """The scales are in blocks of 128 channels and 4 groups, as tensor cores read them."""
    weight = model[0].weight
    n, groups = weight.shape[0], weight.shape[1] // 16
    row, group = torch.arange(n)[:, None], torch.arange(groups)
    block = row // 128 * -(-groups // 4) + group // 4
    at = 512 * block + 16 * (row % 32) + 4 * (row // 32 % 4) + group % 4
    scale = weight.scale.flatten().double()[at] * weight.per_tensor_scale.double()
    return e2m1(pairs(weight.qdata)) * repeated(scale, 16)


class TorchaoMx(nn.Module):
    """``MXTensor`` with an activation that is not quantized, for which torchao has no product."""

    def __init__(self, element: str, linear: nn.Linear) -> None:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        super().__init__()
        made = MXTensor.to_mx(linear.weight, getattr(torch, element))
        self.weight = nn.Parameter(made, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight.dequantize(x.dtype), self.bias)


def torchao_mx(element: str, dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    return TorchaoMx(element, source(dtype, k, n, bias))


def torchao_mx_dense(module: Any) -> Tensor:
    weight = module.weight
    packed = weight.qdata.dtype == torch.uint8
    values = e2m1(pairs(weight.qdata)) if packed else weight.qdata.double()
    return values * repeated(e8m0(weight.scale.view(torch.uint8)), 32)


# ------------------------------------------------------------------------------------------
# compressed-tensors


class DecompressedFp4(Decompressed):
    """As the compressor does, less the parameter that it makes of the scale, at which Dynamo would
    break the graph."""

    def forward(self, x: Tensor) -> Tensor:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        values = unpack_fp4_from_uint8(self.weight_packed, *self.shape)
        weight = dequantize(
            x_q=values,
            scale=self.compressor._decompress_scale(self.weight_scale, values.dtype),
            args=self.scheme.weights,
            global_scale=getattr(self, "weight_global_scale", None),
            dtype=values.dtype,
        )
        return nn.functional.linear(x, weight, self.bias)


def compressed_fp4(group: int, dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    """NVFP4 with groups of 16, MXFP4 with groups of 32."""
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    is_nv = group == 16
    made: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": group}
    made["strategy"] = "tensor_group" if is_nv else "group"
    linear = source(dtype, k, n, bias)
    largest = linear.weight.float().unflatten(1, (-1, group)).abs().amax(2)
    qparams: dict[str, Tensor] = {}
    if is_nv:
        qparams["weight_global_scale"] = 448 * 6 / largest.amax().reshape(1)
        scale = (largest / 6 * qparams["weight_global_scale"]).to(torch.float8_e4m3fn)
    else:
        scale = torch.exp2(torch.ceil(torch.log2(largest / 6)))
    return DecompressedFp4(
        getattr(compressors, "NVFP4PackedCompressor" if is_nv else "MXFP4PackedCompressor"),
        QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**made)),
        linear,
        weight_scale=scale.to(dtype),
        **qparams,
    )


def compressed_fp4_dense(layer: Any) -> Tensor:
    values, scale = e2m1(pairs(layer.weight_packed)), layer.weight_scale
    if "weight_global_scale" in layer.stored:
        return values * repeated(scale, 16) / layer.weight_global_scale.double()
    return values * repeated(e8m0(scale), 32)


# ------------------------------------------------------------------------------------------
# gpt-oss


class GptOss(PackedLinear):
    """One expert of gpt-oss, dequantized by transformers: 16 bytes for each group of 32."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(blocks=octets(1, n, k // 32, 16))
        self.keep(scales=torch.randint(118, 124, (1, n, k // 32)).to(torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        weight = convert_moe_packed_tensors(self.blocks, self.scales, dtype=x.dtype)
        return self.add_bias(x @ weight[0])

    def dense(self) -> Tensor:
        values = e2m1(pairs(self.blocks[0].flatten(1)))
        return values * repeated(e8m0(self.scales[0]), 32)


# ------------------------------------------------------------------------------------------

_fp4: Any = functools.partial(
    Producer, bits=4, element="e2m1", signed=False, dtypes=(bf16,), group_size=32
)
_torchao: Any = {"needs": "torchao"}
_compressed: Any = {"dense": compressed_fp4_dense, "needs": "compressed_tensors"}

MICROSCALING = [
    _fp4("torchao_nvfp4_wo", torchao_nvfp4, dense=torchao_nvfp4_dense, group_size=16, **_torchao),
    _fp4("torchao_mxfp4_dequantized", functools.partial(torchao_mx, "float4_e2m1fn_x2"),
         dense=torchao_mx_dense, **_torchao),
    Producer("torchao_mxfp8_dequantized", functools.partial(torchao_mx, "float8_e4m3fn"), bits=8,
             dense=torchao_mx_dense, element="e4m3", group_size=32, dtypes=(bf16,), **_torchao),
    _fp4("ct_nvfp4_pack", functools.partial(compressed_fp4, 16), group_size=16, **_compressed),
    _fp4("ct_mxfp4_pack", functools.partial(compressed_fp4, 32), **_compressed),
    _fp4("gpt_oss_mxfp4", GptOss, bias="add", needs="transformers"),
]  # fmt: skip
