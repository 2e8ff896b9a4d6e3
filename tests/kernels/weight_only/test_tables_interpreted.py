"""Numerics of weights that are read as tables of codes, or from several fields, from the graph to
the kernel, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.report.events import collect
from inductor_quant.spec.formulas import int4pack_mm
from tests.support.gemms.generated import generate

pytestmark = [pytest.mark.interp, pytest.mark.usefixtures("large_groups")]

bf16, u8, i32 = torch.bfloat16, torch.uint8, torch.int32
M, N, K, GROUP = 5, 64, 128, 32


def nibbles(packed):
    return torch.stack([packed & 15, packed >> 4], -1).reshape(N, K)


def e2m1(x, packed, scale):
    """By arithmetic on the bits of an fp32."""
    code = nibbles(packed)
    sign, number = code & 8, code & 7
    bits = ((number >> 1) - 1 + 127).to(i32) << 23 | (number & 1).to(i32) << 22
    bits = torch.where(number == 0, 0, torch.where(number == 1, 126 << 23, bits))
    value = (bits | sign.to(i32) << 28).view(torch.float32)
    weight = (value.reshape(N, -1, GROUP) * scale[:, :, None]).reshape(N, K)
    return x @ weight.to(bf16).t()


def shards(x, low, high, scale):
    """The two lowest bits of four numbers in a byte, the four highest of two in another."""
    low = torch.stack([low & 3, low >> 2 & 3, low >> 4 & 3, low >> 6], -1).reshape(N, K)
    code = (low | nibbles(high) << 2).to(torch.int8) - 32
    weight = (code.reshape(N, -1, GROUP) * scale[:, :, None]).reshape(N, K)
    return x @ weight.to(bf16).t()


def exponents(x, packed, table, scale):
    """A stored table times a sign, and a scale that is a power of two."""
    code = nibbles(packed)
    sign = torch.where((code & 8).to(torch.bool), -1.0, 1.0).to(bf16)
    value = (table[(code & 7).long()] * sign).reshape(N, -1, GROUP)
    weight = torch.ldexp(value, scale.to(i32)[:, :, None] - 127).reshape(N, K)
    return x @ weight.t()


def tile_packed(x, words, scales_and_zeros):
    """In an order of fragments; a multiply-add of a scale and a zero point."""
    return int4pack_mm(x, words, GROUP, scales_and_zeros)


def packed_bytes(fields):
    return torch.randint(0, 256, (N, K // fields), dtype=u8)


CASES = {
    "e2m1": (e2m1, lambda: [packed_bytes(2), torch.rand(N, K // GROUP) + 0.5]),
    "shards": (
        shards,
        lambda: [packed_bytes(4), packed_bytes(2), torch.rand(N, K // GROUP) + 0.5],
    ),
    "exponents": (
        exponents,
        lambda: [
            packed_bytes(2),
            torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=bf16),
            torch.randint(120, 133, (N, K // GROUP), dtype=u8),
        ],
    ),
    "tile_packed": (
        tile_packed,
        lambda: [
            torch.randint(-(1 << 31), 1 << 31, (N // 8, K // 128, 32, 4), dtype=i32),
            torch.randn(K // GROUP, N, 2).to(bf16),
        ],
    ),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", CASES)
def test_the_product_is_close_to_fp64(name, arch):
    torch.manual_seed(0)
    fn, draw = CASES[name]
    weight = draw()
    x = torch.randn(M, K).to(bf16)
    eye = torch.eye(K, dtype=bf16)

    def make(device):
        shapes = [(x.shape, bf16), *((t.shape, t.dtype) for t in weight)]
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)

    with collect() as report:
        generated = generate(fn, make, arch=arch)
    assert [match.family for match in report.matches] == ["weight_only"]
    [kernel] = report.kernels
    kind = "mm" if name == "shards" else "direct"
    assert kernel.chosen.startswith(f"weight_only_{kind} ")
    got = simulate.interpret(generated, (x, *weight))
    want = x.double() @ fn(eye, *weight).double()
    error = (got.double() - want).abs().max() / want.square().mean().sqrt()
    assert error < 2e-2, error
