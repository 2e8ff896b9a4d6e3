"""torchao's MX formats with activations that are quantized in each call, on hardware without them:
the product of both, dequantized, becomes FP8 in blocks, or reads FP4 beside a dequantized x."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.graphs.post_grad import capture
from tests.support.producers.real import source, unchanged_inductor_config
from tests.support.producers.registry import need_package

K, N = 256, 128


def layer(element: torch.dtype, bias: bool) -> Any:
    from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    with torch.no_grad():
        model = nn.Sequential(source(torch.bfloat16, K, N, bias))
    options = {"activation_dtype": element, "weight_dtype": element}
    made = MXDynamicActivationMXWeightConfig(**options, kernel_preference=KernelPreference.EMULATED)
    with unchanged_inductor_config(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, made)
    return model.requires_grad_(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("element", "family", "name"),
    [
        ("float8_e4m3fn", "fp8_block", "mxfp8"),
        pytest.param("float4_e2m1fn_x2", "weight_only", "mxfp4", marks=pytest.mark.slow),
    ],
)
def test_both_sides_in_mx(element: str, family: str, name: str) -> None:
    need_package("torchao")
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    torch.manual_seed(0)
    dtype = getattr(torch, element)
    model, x = layer(dtype, bias=True), torch.randn(2, 64, K).bfloat16() * 3
    with torch.no_grad():
        result, [rewrite] = capture(model, [x])
        weight: Any = model[0].weight
        mode = weight.act_quant_kwargs.scaling_mode
        rows = MXTensor.to_mx(x.reshape(-1, K), dtype, 32, mode).dequantize(x.dtype).double()
    exact = rows @ weight.dequantize(x.dtype).double().t() + model[0].bias.double()
    [match] = rewrite.report.matches
    assert (match.family, match.format) == (family, name)
    error = (result.reshape(-1, N).double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 2**-8 * exact.abs().mean()).all()
