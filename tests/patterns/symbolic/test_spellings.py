"""Decodings as libraries write them in PyTorch: each is read as the weight that it computes.

One for each thing that the reader has to understand; layers are in ``tests/support/producers``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_quant.ops.dequantize import dequantize
from inductor_quant.patterns.weights.decode import Weight
from inductor_quant.spec.decisions import Rejection
from tests.support.graphs.reading import read_weight, tensors_of

N, K, GROUP = 16, 64, 32
u8, i8, i16, i32 = torch.uint8, torch.int8, torch.int16, torch.int32
f16, f32 = torch.float16, torch.float32
Tensor = torch.Tensor
Decode = Callable[..., Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def octets(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape).to(u8)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def nibbles(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def traced(decode: Decode, *inputs: Tensor) -> tuple[Weight | Rejection, dict[fx.Node, Any]]:
    """What ``decode``, which gives [N, K], is read as, and the values of its graph."""
    pure = torch.func.functionalize(decode, remove="mutations")
    module = make_fx(pure, select_decomp_table())(*inputs)
    run = fx.Interpreter(module, garbage_collect_values=False)
    run.run(*inputs)
    [output] = module.graph.find_nodes(op="output")
    return read_weight(output.args[0], transposed=True), run.env


# ------------------------------------------------------------------------------------------
# taken


def bits_of_four_bytes(data: Tensor, scale: Tensor) -> Tensor:
    """GGUF's Q5_0: the fifth bits of 32 numbers are a word, made of four bytes."""
    blocks = data.reshape(-1, 20)
    word = blocks[:, :4].to(i32)
    word = (word[:, 0] | word[:, 1] << 8 | word[:, 2] << 16 | word[:, 3] << 24).unsqueeze(1)
    high = ((word >> torch.arange(32, dtype=i32)) & 1).to(u8)
    shifts = torch.tensor([0, 4], dtype=u8).reshape(1, 1, 2, 1)
    low = (blocks[:, 4:].reshape(len(blocks), -1, 1, 16) >> shifts) & 15
    codes = (low.reshape(len(blocks), -1) | (high << 4)).to(i8) - 16
    return (codes * scale.reshape(-1, 1)).reshape(N, K)


def a_difference_of_fields(low: Tensor, high: Tensor, scale: Tensor) -> Tensor:
    """GGUF's Q3_K: 4 is subtracted where a bit of another tensor is not set."""
    q = torch.stack([(low >> shift) & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    bit = torch.stack([(high >> shift) & 1 for shift in range(8)], 2).flatten(1) ^ 1
    return (q.to(i8) - (bit << 2).to(i8)) * scale


def gathered(packed: Tensor, scale: Tensor) -> Tensor:
    """GGUF's IQ4_NL in ComfyUI: a table that is expanded, and gather."""
    codes = nibbles(packed).unsqueeze(-1).long()
    table = torch.arange(-7.5, 8.5).pow(3).to(i8).expand(*codes.shape[:-1], 16)
    return torch.gather(table, -1, codes).squeeze(-1) * scale


def a_table_of_each_channel(packed: Tensor, table: Tensor) -> Tensor:
    """SqueezeLLM."""
    return torch.gather(table, 1, nibbles(packed).long())


def planes_and_a_table(planes: Tensor, table: Tensor) -> Tensor:
    """Any-precision LLM: a plane for each bit, a table for each channel."""
    bits = ((planes[..., None] >> torch.arange(8, dtype=u8)) & 1).reshape(3, N, K)
    codes = (bits[0] << 2) | (bits[1] << 1) | bits[2]
    return table[torch.arange(N)[:, None], codes.long()]


def codes_in_floats(packed: Tensor, scale: Tensor) -> Tensor:
    """ModelOpt's NVFP4: the codes are kept in bf16 before they index a table."""
    codes = torch.empty(N, K, dtype=torch.bfloat16)
    codes[..., 1::2], codes[..., 0::2] = packed >> 4, packed & 15
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])[codes.reshape(-1).long()]
    return (values.view(N, -1, GROUP) * scale.unsqueeze(-1)).view(N, K)


def floats_across_bytes(packed: Tensor, scale: Tensor) -> Tensor:
    """FP6 (e3m2), four in three bytes, decoded by arithmetic."""
    parts = packed.reshape(N, -1, 3).to(i32)
    words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)
    codes = ((words[..., None] >> torch.tensor([0, 6, 12, 18], dtype=i32)) & 63).reshape(N, K)
    exponent, mantissa = (codes >> 2) & 7, (codes & 3).float()
    value = (1 + mantissa / 4) * torch.exp2((exponent - 3).float())
    value = torch.where(exponent == 0, mantissa / 16, value)
    return torch.where((codes >> 5) == 1, -value, value) * scale


def floats_in_two_tensors(high: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    """FP6-LLM: two bits and four, put where fp16 has them."""
    upper = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    code = (upper << 4) | nibbles(low)
    bits = ((code & 32).to(i16) << 10) | ((code & 31).to(i16) << 8)
    return bits.view(f16).float() * 4096 * scale


def scaled_by_ldexp(packed: Tensor, scale: Tensor) -> Tensor:
    """e4m3 by hand: a mantissa times a power, and a sign."""
    code = packed.int()
    exponent, mantissa = (code >> 3) & 15, (code & 7).float()
    value = torch.ldexp(1 + mantissa / 8, exponent - 7)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, value)
    return (1 - 2 * (code >> 7)) * value * scale


def bits_summed(packed: Tensor, scale: Tensor) -> Tensor:
    bits = ((packed[..., None] >> torch.arange(8, dtype=u8)) & 1).reshape(N, K, 4)
    codes = (bits.to(i32) * torch.tensor([1, 2, 4, 8], dtype=i32)).sum(-1)
    return (codes - 8) * scale


def multiplied_and_added(packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    codes = nibbles(packed).view(N, -1, GROUP).float()
    return torch.addcmul(least.unsqueeze(-1), codes, scale.unsqueeze(-1)).view(N, K)


def a_mask_for_each_place(packed: Tensor, scale: Tensor) -> Tensor:
    masks = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=u8)
    bits = (packed.unsqueeze(-1) & masks) != 0
    return torch.where(bits.reshape(N, K), 1.0, -1.0) * scale


def a_sum_of_two(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Residual quantization, with known factors: a table of both codes."""
    return (nibbles(a) * 0.5 + nibbles(b) * 0.03125) * scale


def halves_with_scales_of_their_own(packed: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    """torchao's NF4: the scale, itself quantized, is repeated for each of two nibbles."""
    absmax = (codes.view(-1, 8) / 3.0).flatten() + 0.25
    repeated = absmax.unsqueeze(-1).expand(-1, GROUP // 2)
    high = table[(packed >> 4).long()] * repeated.flatten()
    low = table[(packed & 15).long()] * repeated.flatten()
    return torch.stack([high.unsqueeze(-1).t(), low.unsqueeze(-1).t()], -1).reshape(N, K)


def words_without_sign(words: Tensor, scale: Tensor) -> Tensor:
    """MLX's: uint32, which has no shifts."""
    codes = (words.to(torch.int64).unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
    return codes.reshape(N, K) * scale


def two_orders(packed: Tensor, low: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Bits in an order within a byte, and scales that cross bytes beside pairs of zero points: no
    digit that is kept whole serves both."""
    order = torch.tensor([1, 7, 2, 3, 5, 4, 0, 6], dtype=u8)
    bytes_ = [((packed[:, i::2].unsqueeze(-1) << (7 - order)) >> 7) for i in (0, 1)]
    bits = torch.stack(bytes_, 2).reshape(N, -1)
    quads = torch.stack([(low >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    parts = scales.reshape(N, -1, 3)
    a, b, c = parts.unbind(-1)
    six = torch.stack([a & 63, (a >> 6 | b << 2) & 63, (b >> 4 | c << 4) & 63, c >> 2], -1)
    pairs = [(zeros[:, i::2, None] >> torch.arange(0, 16, 4, dtype=i16)) & 15 for i in (0, 1)]
    scale, zero = six.reshape(N, -1, 1) * 0.5, torch.stack(pairs, -1).reshape(N, -1, 1) * 0.25
    codes = (quads << 1 | bits).reshape(N, -1, GROUP).float()
    return (codes * scale - zero).reshape(N, -1)


ONE = (N, 1)
TAKEN: list[tuple[Decode, list[Tensor]]] = [
    (bits_of_four_bytes, [octets(N, 40), scales(N, 2)]),
    (a_difference_of_fields, [octets(N, K // 4), octets(N, K // 8), scales(*ONE)]),
    (gathered, [octets(N, K // 2), scales(*ONE)]),
    (a_table_of_each_channel, [octets(N, K // 2), torch.randn(N, 16)]),
    (planes_and_a_table, [octets(3, N, K // 8), torch.randn(N, 8)]),
    (codes_in_floats, [octets(N, K // 2), scales(N, K // GROUP)]),
    (floats_across_bytes, [octets(N, 3 * K // 4), scales(*ONE)]),
    (floats_in_two_tensors, [octets(N, K // 4), octets(N, K // 2), scales(*ONE)]),
    (scaled_by_ldexp, [octets(N, K), scales(*ONE)]),
    (bits_summed, [octets(N, K // 2), scales(*ONE)]),
    (multiplied_and_added, [octets(N, K // 2), scales(N, K // GROUP), scales(N, K // GROUP)]),
    (a_mask_for_each_place, [octets(N, K // 8), scales(*ONE)]),
    (
        halves_with_scales_of_their_own,
        [octets(N * K // 2), octets(N * K // GROUP), torch.randn(16)],
    ),
    (words_without_sign, [torch.randint(0, 2**32, (N, K // 8)).to(torch.uint32), scales(*ONE)]),
    (
        two_orders,
        [octets(N, 32), octets(N, 64), octets(N, 6), torch.randint(0, 2**15, (N, 2)).to(i16)],
    ),
    (a_sum_of_two, [octets(N, K // 2), octets(N, K // 2), scales(*ONE)]),
]


def name(item: object) -> str:
    return getattr(item, "__name__", "")


@pytest.mark.parametrize(("decode", "inputs"), TAKEN, ids=name)
def test_a_decoding_is_read(decode: Decode, inputs: list[Tensor]) -> None:
    found, values = traced(decode, *inputs)
    assert isinstance(found, Weight), found
    got = dequantize(found.format, tensors_of(found, values)).t()
    torch.testing.assert_close(got, decode(*inputs).float(), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------
# declined


def vectors(codes: Tensor, table: Tensor) -> Tensor:
    """AQLM, VPTQ: a code is eight neighbours."""
    return torch.nn.functional.embedding(codes.int(), table).reshape(N, K)


def sums_of_vectors(codes: Tensor, table: Tensor) -> Tensor:
    return vectors(codes, table) + vectors(codes ^ 1, table)


def two_scaled_terms(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return nibbles(a) * scale + nibbles(b) * scale.sqrt()


def integers_that_wrap(packed: Tensor, zero: Tensor, factor: Tensor) -> Tensor:
    """QServe's progressive groups: products in int8."""
    codes = nibbles(packed).to(i8).view(N, -1, GROUP)
    return ((codes - zero.unsqueeze(-1)) * factor.unsqueeze(-1)).view(N, K).float()


def rounded_powers(packed: Tensor) -> Tensor:
    return torch.exp2(nibbles(packed).float() / 3)


BY_GROUP = torch.randint(-128, 128, (N, K // GROUP)).to(i8)
DECLINED: list[tuple[Decode, list[Tensor]]] = [
    (vectors, [octets(N, K // 8), torch.randn(256, 8)]),
    (sums_of_vectors, [octets(N, K // 8), torch.randn(256, 8)]),
    (two_scaled_terms, [octets(N, K // 2), octets(N, K // 2), scales(*ONE)]),
    (integers_that_wrap, [octets(N, K // 2), BY_GROUP, BY_GROUP]),
    (rounded_powers, [octets(N, K // 2)]),
]


@pytest.mark.parametrize(("decode", "inputs"), DECLINED, ids=name)
def test_what_has_no_form_is_declined_with_a_reason(decode: Decode, inputs: list[Tensor]) -> None:
    found, _ = traced(decode, *inputs)
    assert isinstance(found, Rejection)
    assert found.code.value in ("weight_form", "computed_weight")
    assert found.node
