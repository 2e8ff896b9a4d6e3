"""Quantized models through the libraries' own calls: one ``Case`` for each configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.support.checkpoints import models, stand_ins

Build = Callable[[nn.Module], nn.Module]


@dataclasses.dataclass(frozen=True)
class Case:
    """``build`` quantizes a tiny model; ``family`` of its GEMMs, "" where they stay as they are.

    needs      the package; "stand-in": its layers are written after its source
    prepares   whether it takes ``prepare_``
    rms        a bound of the relative rms of the logits, ours against the library's own
    context    what must be in place while the model runs
    """

    name: str
    library: str
    build: Build
    family: str
    needs: str
    prepares: bool = True
    rms: float = 1e-2
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __str__(self) -> str:
        return f"{self.library}-{self.name}".replace(" ", "_")


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(parent, name, layer) of the linear layers of the decoder."""
    for parent in list(model.get_submodule("model").modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                yield parent, name, child


def replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for parent, name, layer in linears(model):
        setattr(parent, name, make(layer))
    return model.eval()


# ------------------------------------------------------------------------------------------
# compressed-tensors


def compressed(scheme: str, model: nn.Module) -> nn.Module:
    """Calibrated to the largest values, saved compressed, loaded by ``from_pretrained``."""
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    groups: Any = {scheme: ["Linear"]}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for _, _, layer in linears(model):
        _calibrate(layer)
    with tempfile.TemporaryDirectory() as folder:
        compressor = ModelCompressor.from_pretrained_model(model)
        assert compressor is not None
        compressor.compress_model(model)
        model.save_pretrained(folder)  # type: ignore[operator]
        compressor.update_config(folder)
        kind = transformers.AutoModelForCausalLM
        loaded: nn.Module = kind.from_pretrained(folder, dtype=torch.bfloat16)
    return loaded.eval()


def _calibrate(layer: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams

    args, weight = layer.quantization_scheme.weights, layer.weight.data.float()
    strategy = getattr(args.strategy, "value", args.strategy)
    grouped = {
        "channel": lambda: weight.unsqueeze(1),
        "group": lambda: weight.unflatten(1, (-1, args.group_size)),
        "tensor_group": lambda: weight.unflatten(1, (-1, args.group_size)),
        "tensor": lambda: weight.reshape(1, 1, -1),
        "block": lambda: _blocks(weight, args.block_structure),
    }[strategy]()
    known = {}
    if hasattr(layer, "weight_global_scale"):
        layer.weight_global_scale.data.fill_(448 * 6 / weight.abs().max().item())
        known["global_scale"] = layer.weight_global_scale.data
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, **known)
    for name, value in (("scale", scale), ("zero_point", zero)):
        held = getattr(layer, f"weight_{name}", None)
        if held is not None:
            held.data.copy_(value.reshape(held.shape).to(held.dtype))
    if getattr(layer, "input_scale", None) is not None:
        layer.input_scale.data.fill_(0.02)


def _blocks(weight: torch.Tensor, shape: list[int]) -> torch.Tensor:
    height, width = shape
    blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return blocks.permute(0, 2, 1, 3).flatten(2)


# ------------------------------------------------------------------------------------------
# bitsandbytes, GPTQModel, transformers' fine-grained FP8, quanto, torchao


def bitsandbytes(model: nn.Module, **options: Any) -> nn.Module:
    import transformers

    config = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **options)
    # With AVX512-BF16 its layers would pack their weights again for that CPU.
    with mock.patch("bitsandbytes.nn.modules.has_avx512bf16", return_value=False):
        return models.reloaded(model, quantization_config=config, device_map="cpu")


def gptq(kind: str, model: nn.Module, **options: Any) -> nn.Module:
    return replaced(model, functools.partial(stand_ins.packed, kind, **options))


def finegrained_fp8(model: nn.Module, **options: Any) -> nn.Module:
    return replaced(model, functools.partial(stand_ins.fp8_linear, **options))


def mx(model: nn.Module, is_fp4: bool) -> nn.Module:
    return replaced(model, functools.partial(stand_ins.mx_linear, is_fp4=is_fp4))


@contextlib.contextmanager
def uncompiled_bitnet() -> Iterator[None]:
    """Without the library's own torch.compile, which calls a C++ compiler for each size."""
    from transformers.integrations import bitnet as package

    from tests.support.producers.real import eager

    kinds = ((package, "unpack_weights"), (package.BitLinear, "activation_quant"),
             (package.BitLinear, "post_quant_process"))  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name in kinds:
            stack.enter_context(mock.patch.object(owner, name, eager(getattr(owner, name))))
        yield


def bitnet(model: nn.Module, use_rms_norm: bool = False) -> nn.Module:
    """``BitLinear`` with random ternary weights of the layers' magnitude."""
    from transformers.integrations.bitnet import BitLinear, pack_weights

    def packed(layer: nn.Linear) -> nn.Module:
        n, k = layer.weight.shape
        made: Any = BitLinear(k, n, layer.bias is not None, dtype=torch.bfloat16,
                              use_rms_norm=use_rms_norm)  # fmt: skip
        scale = layer.weight.float().abs().mean().clamp_min(1e-5)
        made.weight = pack_weights((layer.weight.float() / scale).round().clamp(-1, 1))
        made.weight_scale.fill_(1 / scale)
        return made.to(torch.bfloat16).requires_grad_(False)  # type: ignore[no-any-return]

    return replaced(model, packed)


def quanto(weights: str, activations: str, model: nn.Module) -> nn.Module:
    from optimum import quanto as package

    package.quantize(model, getattr(package, weights), getattr(package, activations),
                     exclude="lm_head")  # fmt: skip
    with torch.no_grad(), package.Calibration():
        models.Logits(model)(models.tokens())
    package.freeze(model)
    return model


def torchao(config: str, model: nn.Module, **options: Any) -> nn.Module:
    from torchao import quantization

    from tests.support.producers.real import unchanged_inductor_config

    def is_ours(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "lm_head" not in name

    with unchanged_inductor_config(), models.quiet():
        made = getattr(quantization, config)(**options)
        quantization.quantize_(model, made, filter_fn=is_ours)
    return model


def lora(build: Build, model: nn.Module) -> nn.Module:
    """PEFT's LoRA with random adapters on every linear layer of a quantized model."""
    import peft

    targets = [*dict.fromkeys(name for _, name, _ in linears(model))]
    config = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(build(model), config)
    return wrapped.to(torch.bfloat16).eval()


# ------------------------------------------------------------------------------------------


def _compressed(scheme: str, family: str, rms: float = 1e-2) -> Case:
    build = functools.partial(compressed, scheme)
    return Case(scheme, "compressed-tensors", build, family, "compressed_tensors", rms=rms)


def _bnb(name: str, family: str = "weight_only", rms: float = 1e-2, **options: Any) -> Case:
    build = functools.partial(bitsandbytes, **options)
    return Case(name, "bitsandbytes", build, family, "bitsandbytes", bool(family), rms)


def _gptq(name: str, kind: str = "gptq", **options: Any) -> Case:
    build = functools.partial(gptq, kind, **options)
    return Case(name, "gptqmodel", build, "weight_only", "stand-in")


def _fp8(name: str, family: str, make: Any = finegrained_fp8, **options: Any) -> Case:
    build = functools.partial(make, **options)
    return Case(name, "fine-grained FP8", build, family, "transformers", rms=5e-2,
                context=functools.partial(mock.patch, "transformers.integrations."
                "finegrained_fp8._FINEGRAINED_FP8", stand_ins.Hub))  # fmt: skip


_STEPS = 5e-2  # activations of 8 bits: a rounding of one layer is a step of the next
CASES = [
    _compressed("W4A16", "weight_only"),
    _compressed("W4A16_ASYM", "weight_only"),
    _compressed("W8A16", "weight_only"),
    _compressed("W3A16", "weight_only"),
    _compressed("W8A8", "w8a8", _STEPS),
    _compressed("FP8", "fp8", _STEPS),
    _compressed("FP8_DYNAMIC", "fp8", _STEPS),
    _compressed("FP8_BLOCK", "fp8_block", _STEPS),
    _compressed("NVFP4A16", "weight_only"),
    _compressed("MXFP4A16", "weight_only"),
    _gptq("4 bits", bits=4),
    _gptq("4 bits, act-order", bits=4, act_order=True),
    _gptq("2 bits", bits=2),
    _gptq("3 bits", bits=3),
    _gptq("8 bits", bits=8),
    _gptq("AWQ", "awq", bits=4),
    _bnb("NF4", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    _bnb("NF4, double", load_in_4bit=True, bnb_4bit_quant_type="nf4",
         bnb_4bit_use_double_quant=True),
    _bnb("FP4", load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    _bnb("FP4, double", load_in_4bit=True, bnb_4bit_quant_type="fp4",
         bnb_4bit_use_double_quant=True),
    _bnb("int8, threshold 0", "w8a8", _STEPS, load_in_8bit=True, llm_int8_threshold=0.0),
    _bnb("int8, threshold 6", "", load_in_8bit=True),
    _fp8("128 x 128, dynamic", "fp8_block"),
    _fp8("128 x 128, e8m0", "fp8_block", scale_fmt="ue8m0"),
    _fp8("128 x 128, static", "fp8_block", scheme="static"),
    _fp8("per tensor, dynamic", "fp8", block=None),
    _fp8("per tensor, static", "fp8", block=None, scheme="static"),
    _fp8("MX, FP4 weights", "weight_only", mx, is_fp4=True),
    _fp8("MX, FP8 weights", "fp8_block", mx, is_fp4=False),
    Case("1.58 bits", "bitnet", bitnet, "weight_only", "transformers", rms=_STEPS,
         context=uncompiled_bitnet),
    Case("W8A8", "quanto", functools.partial(quanto, "qint8", "qint8"), "w8a8", "optimum.quanto",
         rms=_STEPS),
    Case("FP8, FP8", "quanto", functools.partial(quanto, "qfloat8", "qfloat8"), "fp8",
         "optimum.quanto", rms=_STEPS),
    Case("int8 weights", "torchao", functools.partial(torchao, "Int8WeightOnlyConfig"),
         "weight_only", "torchao", prepares=False),
    Case("int8, dynamic", "torchao",
         functools.partial(torchao, "Int8DynamicActivationInt8WeightConfig"), "w8a8", "torchao",
         prepares=False, rms=_STEPS,
         # with AVX512-VNNI it would multiply uint8 on the CPU, unlike on a GPU
         context=functools.partial(mock.patch, "torchao.kernel.intmm._cpu_is_vnni_supported",
                                   return_value=False)),
    Case("LoRA on NF4", "peft", functools.partial(lora, functools.partial(
        bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4")), "weight_only", "peft"),
    Case("LoRA on int8 weights", "peft", functools.partial(lora, functools.partial(
        torchao, "Int8WeightOnlyConfig")), "weight_only", "peft", prepares=False, rms=2e-2),
]  # fmt: skip
