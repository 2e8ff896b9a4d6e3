"""Weight-only layers by the quantizers themselves: torchao, HQQ, compressed-tensors, quanto.

They are imported when a module is made. Their classes are not known to the type checker.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._inductor import config

from tests.support.producers.base import Producer, Tensor, f16, field

GROUP = 64


def source(dtype: torch.dtype, k: int, n: int, bias: bool, *, group: int = 32) -> nn.Linear:
    """A layer whose groups of ``group`` all differ in range, none around zero."""
    linear = nn.Linear(k, n, bias=bias)
    spread = torch.exp2(3 * torch.rand(n, k // group, 1)) * 0.02
    middle = (torch.rand(n, k // group, 1) - 0.5) * spread
    linear.weight.copy_((torch.randn(n, k // group, group) * spread + middle).flatten(1))
    return linear.to(dtype)


def by_group(values: Tensor, k: int) -> Tensor:
    """[N, groups] as [N, K], in fp64."""
    return values.double().repeat_interleave(k // values.shape[1], dim=1)


@contextlib.contextmanager
def unchanged_inductor_config() -> Iterator[None]:
    """torchao's quantize_ sets options of Inductor for the whole process."""
    saved = config.get_config_copy()
    try:
        yield
    finally:
        config.load_config(saved)


# ------------------------------------------------------------------------------------------
# torchao


def torchao(kind: str, dtype: torch.dtype, k: int, n: int, bias: bool, **options: Any) -> nn.Module:
    """``kind``: the prefix of "WeightOnlyConfig". PerGroup(32) is ``group=32``."""
    from torchao import quantization
    from torchao.quantization.granularity import PerAxis, PerGroup

    group = options.pop("group", None)
    if kind != "Float8" and (group or kind == "Intx"):
        options["granularity"] = PerGroup(group) if group else PerAxis(0)
    if "weight_dtype" in options:
        options["weight_dtype"] = getattr(torch, options["weight_dtype"])
    if "mapping_type" in options:
        options["mapping_type"] = quantization.MappingType[options["mapping_type"]]
    model = nn.Sequential(source(dtype, k, n, bias))
    with unchanged_inductor_config(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind_of_config = getattr(quantization, f"{kind}WeightOnlyConfig")
        quantization.quantize_(model, kind_of_config(**options))
    return model


def torchao_dense(model: Any) -> Tensor:
    weight = model[0].weight
    k = weight.shape[1]
    codes = weight.qdata.double()
    zero = getattr(weight, "zero_point", None)
    if zero is not None:
        codes = codes - by_group(zero.reshape(len(codes), -1), k)
    return codes * by_group(weight.scale.reshape(len(codes), -1), k)


class TorchaoShards(nn.Module):
    """torchao's ``UintxTensor`` in a layer: 3, 5, 6 or 7 bits in tensors of 4, 2 and 1."""

    def __init__(self, bits: int, linear: nn.Linear) -> None:
        from torchao.prototype.dtypes.uintx.bitpacking import pack

        super().__init__()
        grouped = linear.weight.float().unflatten(1, (-1, GROUP))
        low, high = grouped.aminmax(dim=2, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        zero = (-low / scale).round()
        codes = (grouped / scale + zero).round().clamp(0, 2**bits - 1).to(torch.uint8)
        self.bits, self.names = bits, []
        for number, shard in enumerate(pack(codes.flatten(1), bits)):
            self.names.append(f"shard_{number}")
            self.register_buffer(self.names[-1], shard)
        self.scale, self.zero = (
            nn.Buffer(value.to(linear.weight.dtype)) for value in (scale, zero)
        )
        self.bias = linear.bias

    @property
    def shards(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.dtypes.uintx.bitpacking import unpack

        codes = unpack(self.shards, self.bits, dim=-1).unflatten(1, (-1, GROUP))
        weight = (codes.to(x.dtype) - self.zero) * self.scale
        return nn.functional.linear(x, weight.flatten(1), self.bias)


def torchao_shards(bits: int, dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    return TorchaoShards(bits, source(dtype, k, n, bias))


def torchao_shards_dense(layer: Any) -> Tensor:
    """The fields of a byte are as many parts of K; the first shard has the lowest bits."""
    n, k = layer.scale.shape[0], layer.scale.shape[1] * GROUP
    row, column = torch.arange(n)[:, None], torch.arange(k)[None, :]
    codes, done = torch.zeros(n, k, dtype=torch.long), 0
    for shard in layer.shards:
        step = shard.shape[1]
        width = 8 * step // k
        codes |= field(shard[row, column % step], width * (column // step), width) << done
        done += width
    zero, scale = (by_group(value.flatten(1), k) for value in (layer.zero, layer.scale))
    return (codes - zero) * scale


# ------------------------------------------------------------------------------------------
# torchao, before the conversion


def torchao_prepared(dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    """Trained for int4 in groups, and not converted: the weight is rounded in each call."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = nn.Sequential(source(dtype, k, n, bias))
    made = IntxFakeQuantizeConfig(torch.int4, group_size=32, is_symmetric=True)
    with unchanged_inductor_config(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(model, QATConfig(weight_config=made, step="prepare"))
    return model


def torchao_prepared_dense(model: Any) -> Tensor:
    groups = model[0].weight.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(2, keepdim=True) / 7.5).to(model[0].weight.dtype).float()
    return ((groups * (1 / scale)).round().clamp(-8, 7).double() * scale).flatten(1)


# ------------------------------------------------------------------------------------------
# HQQ


def hqq(
    nbits: float, axis: int, dtype: torch.dtype, k: int, n: int, bias: bool, group: int = GROUP
) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear

    made = BaseQuantizeConfig(nbits=nbits, group_size=group, axis=axis)
    made["weight_quant_params"]["optimize"] = False  # a search that takes seconds
    linear = source(dtype, k, n, bias)
    layer: nn.Module = HQQLinear(linear, made, compute_dtype=dtype, device="cpu")
    layer.set_backend(HQQBackend.PYTORCH_FORWARD)  # type: ignore[operator]
    return layer


def hqq_dense(layer: Any) -> Tensor:
    """The matrix of groups; its rows are the bit fields of an element, the highest bits first."""
    meta = layer.meta
    bits, group = math.ceil(meta["nbits"]), meta["group_size"]  # 1.58: three values
    rows, columns = _hqq_shape(meta)
    fields = {8: 1, 3: 10}.get(bits, 8 // bits)
    step = layer.W_q.shape[0]
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    code = field(layer.W_q[row % step, column], bits * (fields - 1 - row // step), bits)
    assert group in (rows, columns)
    values = (code - meta["zero"].double()) * meta["scale"].double()
    return values.reshape(meta["shape"])


def _hqq_shape(meta: Any) -> tuple[int, int]:
    n, k = meta["shape"]
    groups = n * k // meta["group_size"]
    return (groups, meta["group_size"]) if meta["axis"] == 1 else (meta["group_size"], groups)


# ------------------------------------------------------------------------------------------
# compressed-tensors


class Decompressed(nn.Module):
    """A layer that decompresses its weight in each call."""

    def __init__(self, compressor: Any, scheme: Any, linear: nn.Linear, **qparams: Tensor) -> None:
        super().__init__()
        self.compressor, self.scheme = compressor, scheme
        state = compressor.compress({"weight": linear.weight, **qparams}, scheme)
        self.stored = [name for name in state if name != "weight_shape"]
        self.shape = linear.weight.shape
        self.bias = linear.bias
        for name in self.stored:
            self.register_buffer(name, state[name])

    def forward(self, x: Tensor) -> Tensor:
        state = {name: getattr(self, name) for name in self.stored}
        weight = self.compressor.decompress({**state, "weight_shape": self.shape}, self.scheme)
        return nn.functional.linear(x, weight["weight"], self.bias)


def compressed(dtype: torch.dtype, k: int, n: int, bias: bool, **args: Any) -> nn.Module:
    """``args``: of compressed_tensors.quantization.QuantizationArgs."""
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind = "PackedQuantization" if args.pop("packed") else "NaiveQuantization"
    made = QuantizationArgs(**args)
    linear = source(dtype, k, n, bias)
    grouped = linear.weight.float().unflatten(1, (-1, made.group_size or k))
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    most = 448.0 if made.type == "float" else 2.0 ** (made.num_bits - 1) - 1
    scale, zero = torch.maximum(-low, high) / most, torch.zeros_like(low)
    if not made.symmetric:
        scale = (high - low) / (2.0**made.num_bits - 1)
        zero = (-(2.0 ** (made.num_bits - 1)) - low / scale).round()
    scale, zero = scale.to(dtype), zero.to(torch.int8)
    return Decompressed(
        getattr(compressors, f"{kind}Compressor"),
        QuantizationScheme(targets=["Linear"], weights=made),
        linear,
        weight_scale=scale,
        weight_zero_point=zero,
    )


def compressed_dense(layer: Any) -> Tensor:
    """Packed formats, decoded by hand: fields along K, those of the zero points along N."""
    rows, k = layer.shape
    scale, bits = by_group(layer.weight_scale, k), layer.scheme.weights.num_bits
    if "weight_packed" not in layer.stored:
        return layer.weight.double() * scale
    n, column = torch.arange(rows)[:, None], torch.arange(k)[None, :]
    per_word, middle = 32 // bits, 1 << (bits - 1)
    words, shift = layer.weight_packed[n, column // per_word], bits * (column % per_word)
    code = field(words, shift, bits) - middle
    if "weight_zero_point" in layer.stored:
        group = column // (k // layer.weight_scale.shape[1])
        words = layer.weight_zero_point[n // per_word, group]
        code = code - (field(words, bits * (n % per_word), bits) - middle)
    return code * scale


# ------------------------------------------------------------------------------------------
# optimum-quanto


def quanto(qtype: str, dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    from optimum import quanto as package
    from optimum.quanto.library.extensions.cpp import ext

    # Its C++ op for CPUs compiles for half a minute at the first call; its Python op is equivalent.
    unpack = torch.ops.quanto.unpack.default
    anywhere = torch._C.DispatchKey.CompositeExplicitAutograd
    ext._lib = types.SimpleNamespace(unpack=functools.partial(unpack._op_dk, anywhere))

    model = nn.Sequential(source(dtype, k, n, bias))
    package.quantize(model, weights=getattr(package, qtype))
    package.freeze(model)
    return model


def quanto_dense(model: Any) -> Tensor:
    weight = model[0].weight
    if hasattr(weight, "_shift"):
        packed, bits = weight._data._data, weight.qtype.bits
        parts = [field(packed, shift, bits) for shift in range(0, 8, bits)]
        values = torch.cat(parts) * weight._scale.double() - weight._shift.double()
        return values.reshape(weight.shape)
    return weight._data.double() * weight._scale.double()


# ------------------------------------------------------------------------------------------
# BitNet, by transformers


def eager(fn: Any) -> Any:
    """What transformers has decorated with torch.compile."""
    return getattr(fn, "_torchdynamo_orig_callable", fn)


class BitNet(nn.Module):
    """Its packed weight, -1, 0 or 1, with an activation that is not quantized."""

    def __init__(self, dtype: torch.dtype, k: int, n: int, bias: bool) -> None:
        from transformers.integrations.bitnet import BitLinear, pack_weights

        super().__init__()
        self.layer = BitLinear(k, n, bias, dtype=dtype)
        self.layer.weight.copy_(pack_weights(torch.randint(-1, 2, (n, k))))
        self.layer.weight_scale.fill_(12.0)
        self.bias = self.layer.bias
        if bias:
            self.bias.copy_(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        from transformers.integrations.bitnet import unpack_weights

        weight = eager(unpack_weights)(self.layer.weight, dtype=x.dtype)
        y = nn.functional.linear(x, weight) / self.layer.weight_scale
        return y if self.bias is None else y + self.bias


def bitnet_dense(module: Any) -> Tensor:
    """The four fields of a byte are as many parts of N."""
    packed = module.layer.weight
    codes = torch.cat([field(packed, shift, 2) for shift in range(0, 8, 2)])
    return (codes - 1) / module.layer.weight_scale.double()


class BitNetOnline(nn.Linear):
    """A weight in 16 bits that is rounded to -1, 0 or 1 times its mean in each call."""

    def forward(self, x: Tensor) -> Tensor:
        from transformers.integrations.bitnet import WeightQuant

        weight = eager(WeightQuant.forward)(None, self.weight)
        return nn.functional.linear(x, weight, self.bias)


def bitnet_online(dtype: torch.dtype, k: int, n: int, bias: bool) -> nn.Module:
    layer = BitNetOnline(k, n, bias, dtype=dtype)
    layer.load_state_dict(source(dtype, k, n, bias).state_dict())
    return layer


def bitnet_online_dense(layer: Any) -> Tensor:
    weight = layer.weight.float()
    scale = 1 / weight.abs().mean()
    return (weight * scale).round().clamp(-1, 1).double() / scale


# ------------------------------------------------------------------------------------------


def _torchao(name: str, kind: str, bits: int = 8, **fields: Any) -> Producer:
    options = fields.pop("options", {})
    build = functools.partial(torchao, kind, **options)
    group = options.get("group")
    return Producer(f"torchao_{name}", build, bits, torchao_dense, needs="torchao",
                    group_size=group, **fields)  # fmt: skip


def _hqq(name: str, nbits: float, axis: int, **fields: Any) -> Producer:
    build = functools.partial(hqq, nbits, axis)
    usual: dict[str, Any] = {"group_size": GROUP, "signed": False, "zero": "float", "bias": "add"}
    return Producer(
        f"hqq_{name}", build, math.ceil(nbits), hqq_dense, needs="hqq", **usual | fields
    )


def _compressed(name: str, bits: int, args: dict[str, Any], **fields: Any) -> Producer:
    args = {"num_bits": bits, "type": "int", "symmetric": True, "packed": False, **args}
    args["strategy"] = "group" if "group_size" in args else "channel"
    build = functools.partial(compressed, **args)
    fields = {"group_size": args.get("group_size"), **fields}
    return Producer(f"ct_{name}", build, bits, compressed_dense, needs="compressed_tensors",
                    **fields)  # fmt: skip


def _quanto(name: str, qtype: str, bits: int = 8, **fields: Any) -> Producer:
    build = functools.partial(quanto, qtype)
    fields = {"bias": "add", **fields}
    return Producer(f"quanto_{name}", build, bits, quanto_dense, needs="optimum.quanto", **fields)


def _shards(bits: int) -> Producer:
    return Producer(f"torchao_uint{bits}_shards", functools.partial(torchao_shards, bits), bits,
                    torchao_shards_dense, needs="torchao", group_size=GROUP, signed=False,
                    zero="float")  # fmt: skip


_SYM32: dict[str, Any] = {"weight_dtype": "int4", "group": 32}
_ASYM32 = {**_SYM32, "mapping_type": "ASYMMETRIC"}
_PACK: dict[str, Any] = {"signed": False, "zero": "const"}

REAL = [
    _torchao("int8_wo_row", "Int8", bias="add", scaled="result", given=True),
    _torchao("int8_wo_group64", "Int8", bias="add", zero="int", options={"group": 64}, given=True),
    _torchao("fp8_wo_row", "Float8", bias="add", element="e4m3", given=True),
    _torchao("intx4_wo_g32_sym", "Intx", zero="int", options=_SYM32, given=True),
    _torchao("intx4_wo_g32_asym", "Intx", zero="int", options=_ASYM32, given=True),
    _torchao("intx8_wo_axis", "Intx", zero="int", options={"weight_dtype": "int8"}),
    *map(_shards, (3, 5, 6)),
    Producer("torchao_qat_prepared", torchao_prepared, 16, torchao_prepared_dense,
             element="float", needs="torchao", expected_matches=0,
             reason="the weight is stored in 16 bits and rounded in the graph"),
    _hqq("4b_g64_ax1_fwd", 4, 1, given=True),
    _hqq("8b_g64_ax1_fwd", 8, 1, given=True),
    _hqq("2b_g64_ax1_fwd", 2, 1),
    _hqq("1b_g64_ax1_fwd", 1, 1),
    _hqq("1.58b_g64_ax1_fwd", 1.58, 1),
    # 64 equidistant channels share a scale; no two k do.
    _hqq("4b_g64_ax0_fwd", 4, 0, group_size=1),
    _hqq("2b_g64_ax0_fwd", 2, 0, group_size=1),
    _hqq("8b_g64_ax0_fwd", 8, 0, group_size=1),
    _hqq("3b_g64_ax1_fwd", 3, 1),  # ten parts, which divide neither N nor K
    _hqq("3b_g64_ax0_fwd", 3, 0, group_size=1),
    Producer("bitnet_packed", BitNet, 2, bitnet_dense, needs="transformers", signed=False,
             zero="const", group_n=None, bias="add", scaled="result"),
    Producer("bitnet_online", bitnet_online, 16, bitnet_online_dense, element="float",
             needs="transformers", expected_matches=0,
             reason="the weight is stored in 16 bits and rounded in the graph"),
    _compressed("pack_int4_g64_sym", 4, {"group_size": 64, "packed": True}, **_PACK, given=True),
    _compressed("int8_chan_wo", 8, {}, given=True),
    _compressed("pack_int4_chan_sym", 4, {"packed": True}, **_PACK),
    _compressed("pack_int4_g64_asym", 4,
                {"group_size": 64, "packed": True, "symmetric": False},
                signed=False, zero="packed"),
    _compressed("fp8_chan_wo", 8, {"type": "float"}, element="e4m3"),
    _compressed("int8_g64_wo", 8, {"group_size": 64}),
    _quanto("qint8_wo", "qint8", anchors=("quanto.qbytes_mm",), bias="add", given=True),
    _quanto("qfloat8_wo", "qfloat8", element="e4m3", anchors=("quanto.qbytes_mm",)),
    # In bf16 a CPU has its own op and packing.
    _quanto("qint4_wo", "qint4", 4, signed=False, group_size=128, zero="folded", dtypes=(f16,)),
    _quanto("qint2_wo", "qint2", 2, signed=False, group_size=128, zero="folded"),
]  # fmt: skip
