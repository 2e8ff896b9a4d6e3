"""Layers with an activation quantized to int8: by the quantizers themselves, and by hand.

Each entry says what the recognizer has to make of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.support.producers.real import source, unchanged_inductor_config
from tests.support.spellings.quantizers import GptFastLinear, Int8Linear, TenLines, TorchaoLinear

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
Tensor = torch.Tensor
K, N = 256, 128


@dataclasses.dataclass(frozen=True)
class ActivationProducer:
    """``build(example input)`` makes a layer of K inputs and N outputs.

    spec    of the match, with "token" where a row has a scale of its own: with one row the report
            says "tensor"
    does    the quantization of the activation, as the match describes it
    needs   the package
    is_2d   it takes no batch of matrices
    """

    name: str
    build: Callable[[Tensor], Callable[[Tensor], Tensor]]
    spec: str
    does: str
    dtype: torch.dtype = bf16
    needs: str | None = None
    is_2d: bool = False

    def __str__(self) -> str:
        return self.name

    def make(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(zlib.crc32(self.name.encode()))
            return self.build(x)


# ------------------------------------------------------------------------------------------
# the quantizers


@contextlib.contextmanager
def integer_products() -> Iterator[None]:
    """torchao chooses the product by the CPU; a GPU always multiplies two int8 matrices."""
    if importlib.util.find_spec("torchao") is None:
        yield
        return
    intmm = "torchao.kernel.intmm"
    with (
        mock.patch(f"{intmm}._cpu_is_amx_tile_supported", return_value=False),
        mock.patch(f"{intmm}._cpu_is_vnni_supported", return_value=False),
    ):
        yield


def _torchao(mapping: str) -> Callable[[Tensor], nn.Module]:
    def build(x: Tensor) -> nn.Module:
        from torchao import quantization

        model = nn.Sequential(source(x.dtype, K, N, bias=True))
        kind = quantization.MappingType[mapping]
        config = quantization.Int8DynamicActivationInt8WeightConfig(act_mapping_type=kind)
        with unchanged_inductor_config():
            quantization.quantize_(model, config)
        return model

    return build


def _torchao_static(x: Tensor) -> nn.Module:
    from torchao import quantization
    from torchao.quantization.granularity import PerRow, PerTensor

    model = nn.Sequential(source(x.dtype, K, N, bias=True))
    config = quantization.Int8StaticActivationInt8WeightConfig(
        act_quant_scale=torch.full((1, 1), 0.03), granularity=[PerTensor(), PerRow()]
    )
    with unchanged_inductor_config():
        quantization.quantize_(model, config)
    return model


class CompressedRun(nn.Module):
    """A compressed layer as compressed-tensors runs it: a float product of the quantized and
    dequantized activation with the decompressed weight."""

    def __init__(self, linear: nn.Linear, activations: Any) -> None:
        super().__init__()
        from compressed_tensors.quantization import QuantizationStatus

        self.activations = activations
        self.quantization_status = QuantizationStatus.FROZEN
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Buffer((linear.weight / scale).round().to(torch.int8))
        self.weight_scale, self.bias = nn.Buffer(scale), linear.bias
        self.input_scale = nn.Buffer(torch.tensor([0.03], dtype=linear.weight.dtype))
        self.input_zero_point = nn.Buffer(torch.zeros(1, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize

        x = forward_quantize(self, x, "input", self.activations)
        weight = self.weight.to(x.dtype) * self.weight_scale
        return nn.functional.linear(x, weight, self.bias)


def _compressed(**args: Any) -> Callable[[Tensor], nn.Module]:
    def build(x: Tensor) -> nn.Module:
        from compressed_tensors.quantization import QuantizationArgs

        made = QuantizationArgs(num_bits=8, type="int", **args)
        return CompressedRun(source(x.dtype, K, N, bias=True), made)

    return build


def _pt2e(*, is_dynamic: bool, offset: float) -> Callable[[Tensor], nn.Module]:
    """Exported for the shape of ``x``, whose marked dimensions are dynamic, and calibrated on
    ``x + offset``."""

    def build(x: Tensor) -> nn.Module:
        from torchao.quantization.pt2e import quantize_pt2e as pt2e
        from torchao.testing.pt2e import _xnnpack_quantizer as xnnpack

        dims = getattr(x, "_dynamo_dynamic_indices", ())
        x, shapes = x.clone(), (dict.fromkeys(dims, torch.export.Dim.DYNAMIC),)
        model = nn.Sequential(source(f32, K, N, bias=True)).eval()
        config = xnnpack.get_symmetric_quantization_config(
            is_per_channel=True, is_dynamic=is_dynamic
        )
        quantizer = xnnpack.XNNPACKQuantizer().set_module_type(nn.Linear, config)
        exported = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
        prepared = pt2e.prepare_pt2e(exported, quantizer)
        prepared(x + offset)
        made: nn.Module = pt2e.convert_pt2e(prepared)
        return made

    return build


# ------------------------------------------------------------------------------------------
# by hand


class Asymmetric(Int8Linear):
    """``spelling``: where the zero point is subtracted. It is an int8; with ``floats`` a float."""

    def __init__(self, spelling: str, *, floats: bool = False, k: int = K, n: int = N) -> None:
        super().__init__(k, n)
        self.spelling, self.floats = spelling, floats
        self.sums = nn.Buffer(self.weight.sum(1).int())

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, x.shape[-1]))
        return (y + self.bias).to(x.dtype).reshape(*x.shape[:-1], -1)

    def product(self, x: Tensor) -> Tensor:
        high, low = x.float().amax(1, keepdim=True), x.float().amin(1, keepdim=True)
        scale = ((high - low) / 255).clamp_min(1e-6)
        zero = -128 - low / scale
        if not self.floats:
            zero = zero.round().clamp(-128, 127).to(torch.int8)
        q = (x / scale + zero).round().clamp(-128, 127).to(torch.int8)
        acc, sums, columns = torch._int_mm(q, self.weight.t()), self.sums, self.scale.reshape(-1)
        if self.spelling == "before":
            return (acc - zero * sums) * scale * columns
        if self.spelling == "computed":
            return (acc - zero * self.weight.sum(1)) * scale * columns
        if self.spelling == "int32":
            total = self.weight.sum(1, dtype=torch.int32)
            return (acc - zero.int() * total).float() * (scale * columns)
        if self.spelling == "between":
            return (acc * scale - (zero * scale) * self.weight.sum(1).float()) * columns
        if self.spelling == "behind":
            row = self.weight.float().sum(1) * columns
            return acc * scale * columns - zero * scale * row
        if self.spelling == "added":
            offset = -zero.float() * scale
            return (acc * scale + offset * sums) * columns
        raise ValueError(self.spelling)


class StaticAsymmetric(Int8Linear):
    """A static scale and zero point; the sums are multiplied by it beforehand, or not."""

    def __init__(self, *, is_prepared: bool) -> None:
        super().__init__(K, N)
        self.is_prepared = is_prepared
        self.offset = nn.Buffer(self.weight.sum(1).int() * -9)

    def forward(self, x: Tensor) -> Tensor:
        q = (x * 32 - 9).round().clamp(-128, 127).to(torch.int8)
        acc = torch._int_mm(q.reshape(-1, K), self.weight.t())
        acc = acc - (self.offset if self.is_prepared else self.weight.sum(1) * -9)
        y = acc * 0.03125 * self.scale.reshape(-1) + self.bias
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)


class Smoothed(TorchaoLinear):
    """SmoothQuant: the activation is first scaled along K; ``divides``: by the factor that the
    weight was multiplied by."""

    def __init__(self, *, divides: bool) -> None:
        super().__init__(K, N)
        self.divides = divides
        self.smooth = nn.Buffer((torch.rand(K) + 0.5).to(bf16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.smooth if self.divides else x * self.smooth)


class FakeQuantized(Int8Linear):
    """Both operands in floats: the activation of ``levels`` (signed, or 0 to 255 with a zero)."""

    def __init__(self, kind: str) -> None:
        super().__init__(K, N)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
        if self.kind == "unsigned":
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            scale = ((high - low) / 255).clamp_min(1e-6)
            zero = (-low / scale).round().clamp(0, 255)
            q = (x / scale + zero).round().clamp(0, 255)
            x = (q - zero) * scale
        elif self.kind == "bytes":
            q = (x * 32 + 100).round().clamp(0, 255).to(torch.uint8)
            x = (q.to(x.dtype) - 100) * 0.03125
        elif self.kind == "behind":  # the integers are multiplied as floats, the scales come later
            scale = x.abs().amax(-1, keepdim=True) / 127
            q = (x / scale).round().clamp(-128, 127)
            y = nn.functional.linear(q, self.weight.to(x.dtype))
            return (y * scale * self.scale.reshape(-1) + self.bias).to(x.dtype)
        return nn.functional.linear(x, weight, self.bias)


class Decomposed(Int8Linear):
    """The ops of PT2E and ExecuTorch as they are written, with a range of each call.

    ``kind``: a symmetric scale for "tensor", or for "token" with a zero point; "plain": a symmetric
    one for a token, by an op whose results have other dtypes than it says.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(K, N)
        import torch.ao.quantization.fx._decomposed  # registers the ops

        self.kind, self.ops = kind, torch.ops.quantized_decomposed
        self.zeros = nn.Buffer(torch.zeros(N, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        ops, ends = self.ops, (-128, 127)
        if self.kind == "tensor":
            scale, zero = ops.choose_qparams_symmetric.tensor(x, *ends, 1e-6, torch.int8)
            x = ops.quantize_per_tensor.tensor(x, scale, zero, *ends, torch.int8)
            x = ops.dequantize_per_tensor.tensor(x, scale, zero, *ends, torch.int8)
        else:
            is_plain = self.kind == "plain"
            choose = ops.choose_qparams_per_token
            choose = choose if is_plain else ops.choose_qparams_per_token_asymmetric
            scale, zero = choose(x, torch.int8)
            x = ops.quantize_per_token(x, scale, zero, *ends, torch.int8)
            x = ops.dequantize_per_token(x, scale, zero, *ends, torch.int8, f32)
        rows = self.scale.reshape(-1), self.zeros, 0
        weight = ops.dequantize_per_channel(self.weight, *rows, *ends, torch.int8)
        return nn.functional.linear(x, weight, self.bias.to(f32))


def _executorch(x: Tensor) -> nn.Module:
    """8da4w, with a group as long as K."""
    from torchao.quantization.linear_quant_modules import Int8DynActInt4WeightLinear

    layer = Int8DynActInt4WeightLinear(K, N, bias=False, groupsize=K)
    layer.weight.copy_(torch.randint(-8, 8, (N, K)))
    layer.scales.copy_(torch.rand(N, 1) * 0.01 + 0.005)
    return layer


def _of(layer: type[Int8Linear], **kwargs: Any) -> Callable[[Tensor], nn.Module]:
    def build(x: Tensor) -> nn.Module:
        return layer(K, N, dtype=x.dtype, **kwargs)

    return build


def _asymmetric(spelling: str, sums: str = "int", **kwargs: Any) -> ActivationProducer:
    kind = "float" if kwargs else sums
    return ActivationProducer(
        f"asymmetric_{spelling}" + ("_floats" if kwargs else ""),
        lambda x: Asymmetric(spelling, **kwargs),
        f"(a=i8/token:f32 zero={kind}, b=i8/channel:f32, out=bf16+bias)",
        "dynamic per_token int8 asymmetric, aminmax/255 in f32",
    )


_BOTH = "(a=i8/token:f32, b=i8/channel:f32, out=bf16+bias)"
_TORCHAO: dict[str, Any] = {"needs": "torchao"}
_COMPRESSED: dict[str, Any] = {"needs": "compressed_tensors"}
GIVEN = [
    ActivationProducer("torchao_dyn_sym", _torchao("SYMMETRIC"), _BOTH,
        "dynamic per_token int8 symmetric, aminmax/127.5 in bf16", **_TORCHAO),
    ActivationProducer("torchao_dyn_asym", _torchao("ASYMMETRIC"),
        "(a=i8/token:f32 zero=int, b=i8/channel:f32, out=bf16+bias)",
        "dynamic per_token int8 asymmetric, aminmax/255 in bf16", **_TORCHAO),
    ActivationProducer("torchao_static_sym", _torchao_static,
        "(a=i8/tensor:f32, b=i8/channel:f32, out=bf16+bias)",
        "static per_tensor int8 symmetric", is_2d=True, **_TORCHAO),
    ActivationProducer("gpt_fast", _of(GptFastLinear), _BOTH,
        "dynamic per_token int8 symmetric, amax/127 in f32", is_2d=True),
    ActivationProducer("ten_lines", _of(TenLines), _BOTH,
        "dynamic per_token int8 symmetric, amax/127 in f32"),
    ActivationProducer("compressed_dyn_token",
        _compressed(strategy="token", dynamic=True, symmetric=True),
        "(a=i8/token:bf16, b=i8/channel:bf16, out=bf16+bias)",
        "dynamic per_token int8 symmetric, aminmax/127.5 in bf16", **_COMPRESSED),
    ActivationProducer("pt2e_static", _pt2e(is_dynamic=False, offset=0.0),
        "(a=i8 zero=const, b=i8/channel:f32 zero=float, out=f32+bias)",
        "static per_tensor int8 asymmetric", dtype=f32, **_TORCHAO),
    ActivationProducer("pt2e_dynamic", _pt2e(is_dynamic=True, offset=0.0),
        "(a=i8/tensor:f32 zero=int, b=i8/channel:f32 zero=float, out=f32+bias)",
        "dynamic per_tensor int8 asymmetric, aminmax/255 in f32", dtype=f32, **_TORCHAO),
]  # fmt: skip
MORE = [
    ActivationProducer("torchao_dyn_sym_f16", _torchao("SYMMETRIC"),
        "(a=i8/token:f32, b=i8/channel:f32, out=f16+bias)",
        "dynamic per_token int8 symmetric, aminmax/127.5 in f16", dtype=f16, **_TORCHAO),
    ActivationProducer("compressed_static", _compressed(strategy="tensor", symmetric=True),
        "(a=i8/tensor:bf16 zero=int, b=i8/channel:bf16, out=bf16+bias)",
        "static per_tensor int8 asymmetric", **_COMPRESSED),
    *(_asymmetric(spelling) for spelling in ("computed", "int32", "between")),
    _asymmetric("before"),
    _asymmetric("added", "float"),
    *(_asymmetric(s, floats=True) for s in ("before", "computed", "between", "added")),
    *(ActivationProducer(f"static_asymmetric{'_prepared' * prepared}",
        lambda x, prepared=prepared: StaticAsymmetric(is_prepared=prepared),
        "(a=i8 zero=const, b=i8/channel:f32, out=bf16+bias)",
        "static per_tensor int8 asymmetric") for prepared in (True, False)),
    *(ActivationProducer(f"smoothed_{'div' if divides else 'mul'}",
        lambda x, divides=divides: Smoothed(divides=divides), _BOTH,
        "dynamic per_token int8 symmetric, aminmax/127.5 in bf16") for divides in (True, False)),
    ActivationProducer("decomposed_tensor", lambda x: Decomposed("tensor"),
        "(a=i8/tensor:f32, b=i8/channel:f32 zero=float, out=f32+bias)",
        "dynamic per_tensor int8 symmetric", dtype=f32),
    ActivationProducer("decomposed_token", lambda x: Decomposed("token"),
        "(a=i8/token:f32 zero=int, b=i8/channel:f32 zero=float, out=f32+bias)",
        "dynamic per_token int8 asymmetric", dtype=f32),
    ActivationProducer("executorch_8da4w", _executorch,
        "(a=i8/token:f32 zero=int, b=i8/channel:f32 zero=float, out=f32)",
        "dynamic per_token int8 asymmetric, aminmax/255 in f32", dtype=f32, **_TORCHAO),
    ActivationProducer("fake_unsigned", lambda x: FakeQuantized("unsigned"),
        "(a=i8/token:bf16 zero=int, b=i8/channel:bf16, out=bf16+bias)",
        "dynamic per_token uint8 asymmetric, aminmax/255 in bf16"),
    ActivationProducer("fake_bytes", lambda x: FakeQuantized("bytes"),
        "(a=i8 zero=const, b=i8/channel:bf16, out=bf16+bias)",
        "static per_tensor uint8 asymmetric"),
    ActivationProducer("fake_scaled_behind", lambda x: FakeQuantized("behind"),
        "(a=i8/token:bf16, b=i8/channel:f32, out=bf16+bias)",
        "dynamic per_token int8 symmetric, amax/127 in bf16"),
]  # fmt: skip
PRODUCERS = [*GIVEN, *MORE]
