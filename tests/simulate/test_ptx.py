"""Inline PTX in the interpreter, bit for bit: what kernels use, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inductor_quant.kernels.codegen.digits import table_lookup
from inductor_quant.kernels.codegen.packed_layout import BASES, PackedLayout
from inductor_quant.kernels.codegen.unpack_ptx import add_and_scale, unpack
from inductor_quant.simulate.interpreter import ptx
from inductor_quant.spec.weight_format import E2M1

LAYOUTS = [
    (32, tuple(range(0, 32, 4)), 4),
    (32, (0, 16, 4, 20, 8, 24, 12, 28), 4),
    (32, tuple(range(0, 32, 2)), 2),
    (32, (0, 3, 6, 9, 16, 19, 22, 25), 3),
    (8, (0, 4), 4),
    (8, (6, 4, 2, 0), 2),
]


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(("bits", "offsets", "width"), LAYOUTS)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_field_comes_out_with_its_base(bits, offsets, width, signed, dtype):
    words = PackedLayout("k", bits, offsets, width, signed, 0, ((1, 1, 0),))
    base = BASES[dtype]
    kind = np.int32 if bits == 32 else np.uint8
    info = np.iinfo(kind)
    stored = np.random.default_rng(0).integers(info.min, info.max, (64, 32), kind, endpoint=True)
    assembly = unpack(words, base)
    found = ptx.run(assembly.text, [stored], [np.uint16] * assembly.count, assembly.pack)
    for got, offset in zip(found, offsets, strict=True):
        field = stored.astype(np.int64) >> offset & (1 << width) - 1
        if signed:
            field = np.where(field >= 1 << width - 1, field - (1 << width), field)
        want = torch.from_numpy(field + words.bias(base)).to(dtype)
        assert np.array_equal(got, bits_of(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_and_a_product_are_rounded_as_the_hardware_does(dtype):
    torch.manual_seed(0)
    a = torch.randint(128, 144, (4096,)).to(dtype)
    b, c = -torch.randint(128, 144, (4096,)).to(dtype), torch.rand(4096).to(dtype)
    assembly = add_and_scale(dtype)
    [got] = ptx.run(assembly.text, [bits_of(t) for t in (a, b, c)], [np.uint16], assembly.pack)
    want = ((a.double() + b.double()) * c.double()).to(dtype)
    assert np.array_equal(got, bits_of(want))


@pytest.mark.parametrize("places", [(0, 1, 2, 3, 4, 5, 6, 7), (1, 0, 3, 2, 5, 4, 7, 6),
                                    (4, 7, 0, 2, 5, 6, 3, 1)])  # fmt: skip
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_of_a_table_is_looked_up(places, is_scaled, dtype):
    """Each word has a table of its own; some values are rounded, infinite, or below 0."""
    torch.manual_seed(0)
    tables = torch.randn(64, 16) * torch.exp2(torch.randint(-30, 30, (64, 16)).float())
    words = torch.randint(-(1 << 31), 1 << 31, (64, 1), dtype=torch.int32)
    scales = torch.randn(64, 1).to(dtype).expand(64, 8)
    made = table_lookup.planes(dtype, is_uniform=True)
    entries = [column.contiguous().numpy() for column in tables.T]
    planes = ptx.run(made.text, entries, [np.uint32] * made.count, made.pack)
    assembly = table_lookup.look_up(places, dtype, 4 * is_scaled)
    given = [words.numpy(), *(plane.view(np.int32)[:, None] for plane in planes)]
    given = [np.broadcast_to(t, (64, 8)).copy() for t in given]
    given += [bits_of(scales.contiguous())] if is_scaled else []
    [got] = ptx.run(assembly.text, given, [np.uint16], assembly.pack)
    codes = words.long() >> 4 * torch.tensor(places) & 15
    want = tables.gather(1, codes).to(dtype)
    want = want * scales if is_scaled else want
    assert np.array_equal(got, bits_of(want.contiguous()))


@pytest.mark.parametrize("places", [(0, 1, 2, 3, 4, 5, 6, 7), (5, 4, 7, 6, 1, 0, 3, 2),
                                    (4, 7, 0, 2, 5, 6, 3, 1)])  # fmt: skip
@pytest.mark.parametrize("registers", [0, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_of_e2m1_is_computed(places, registers, dtype):
    """Times each power of two that the dtype has: products may be infinite, or lose bits."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    first, last = (int(np.log2(value)) for value in (info.smallest_normal, info.max))
    powers = torch.exp2(torch.arange(first, last + 1).double()).to(dtype)
    words = torch.randint(-(1 << 31), 1 << 31, (len(powers), 1), dtype=torch.int32)
    scales = powers[:, None].expand(-1, 8)
    assembly = table_lookup.e2m1(places, dtype, registers)
    given = [np.broadcast_to(words.numpy(), (len(powers), 8)).copy()]
    if registers == 4:
        given.append(bits_of(scales.contiguous()))
    elif registers == 8:  # both halves in each register
        halves = bits_of(scales.contiguous()).astype(np.uint32)
        given.append((halves | halves << 16).view(np.int32))
    [got] = ptx.run(assembly.text, given, [np.uint16], assembly.pack)
    codes = torch.stack([words[:, 0] >> 4 * place & 15 for place in places], 1)
    want = torch.tensor(E2M1, dtype=torch.float64)[codes.long()]
    want = want * scales.double() if registers else want
    assert np.array_equal(got, bits_of(want.to(dtype)))


def test_another_instruction_is_refused():
    with pytest.raises(NotImplementedError, match=r"sin\.approx"):
        ptx.run("sin.approx.f32 $0, $1;", [np.zeros(2, np.uint32)], [np.uint32], 1)


def test_rounding_to_a_byte_goes_to_even_and_saturates():
    x = np.array([0.5, 1.5, -2.5, 126.5, 127.6, 3e38, -128.4, -np.inf, np.nan], np.float32)
    [got] = ptx.run("cvt.rni.sat.s8.f32 $0, $1;", [x], [np.uint32], 1)
    assert got.view(np.int32).tolist() == [0, 2, -2, 126, 127, 127, -128, -128, 0]
