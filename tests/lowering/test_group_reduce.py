"""A norm and the quantization in groups behind it: one kernel, its code and its numbers."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor import config

from inductor_quant import simulate
from inductor_quant._compat.group_reduce import takes
from inductor_quant.ops.fusion import group_reduce as op
from tests.support.gemms.generated import generate
from tests.support.spellings import group_reduce as groups
from tests.support.spellings.group_reduce import GROUP, Case, exact_norm, exact_scale, returning

Tensor = torch.Tensor
bf16, f32 = torch.bfloat16, torch.float32


def before_the_product(generated):
    """The kernels that are no templates, but for the last, which adds up parts of K."""
    names = [name for name in generated.kernels if not re.match(r"triton_(tem|poi)", name)]
    return [(name, generated.kernels[name]) for name in names]


ONE_KERNEL = [
    Case("llama"),
    Case("rms", residual=True, gate=True, products=2),
    Case("rms", "of_both_ends", m=1, k=4096),
    Case("layer", "repeated", residual=True, dynamic=True),
    Case("rms", "around_zero", residual=True),
    Case("deepseek", "power_of_two", m=4096, k=512, along_m=True),
]


@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize("case", ONE_KERNEL, ids=str)
def test_a_norm_and_its_quantization_in_groups_are_one_kernel(case):
    """It reads what the norm reads, once; it stores the elements, the scales, and what others
    read."""
    [(name, source)] = before_the_product(generate(case.fn, case.make))
    assert name.startswith("triton_per")
    assert source.count("tl.load(") == 2 + case.residual
    assert source.count("tl.store(") == 2 + case.residual + case.gate
    assert "for r0_offset" not in source
    compiled = simulate.compile_kernel(name, source)
    assert compiled.spill_stores == 0
    # the scales are stored once: for each element these would be 32 stores more
    assert compiled.ptx.count("st.global") <= 12


@pytest.mark.compiles
def test_rows_in_two_dimensions_behind_a_sum_of_parts_are_read_once():
    """As behind a product that splits K: Inductor would compute the sum in each of two kernels."""

    def fn(parts, residual, weight, w, w_scale):
        x = residual + parts.sum(0).to(bf16).reshape(residual.shape)
        a, scale = groups.in_blocks(groups.rms(x, weight).reshape(-1, x.shape[-1]))
        return groups.product(a, scale.t().contiguous().t(), w, w_scale), x[..., :GROUP] * 2

    def make(device):
        _, _, weight, _, w, w_scale = Case().make(device)
        parts = torch.empty(3, 64, 7168, device=device)
        return parts, torch.empty(2, 32, 7168, dtype=bf16, device=device), weight, w, w_scale

    [(_, source)] = before_the_product(generate(fn, make))
    assert "for r0_offset" not in source
    assert "group_reduce" in source


# sm_80 has no FP8
@pytest.mark.one_in(3)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("arch", "quantization"), [(80, "integers"), (90, "in_blocks"), (100, "in_blocks")]
)
def test_the_longest_row_does_not_spill(arch, quantization):
    case = Case("rms", quantization, k=8192, residual=True, along_m=True)
    [(name, source)] = before_the_product(generate(case.fn, case.make, arch=arch))
    assert simulate.compile_kernel(name, source).spill_stores == 0


# ------------------------------------------------------------------------------------------
# numbers


NUMBERS = [
    Case("rms", "in_blocks", 5, 512, 128, residual=True),
    Case("llama", "of_both_ends", 1, 640, 128),
    Case("deepseek", "power_of_two", 9, 384, 128, dynamic=True, residual=True),
    Case("layer", "integers", 4, 384, 128),
]


@pytest.mark.one_in(2)
@pytest.mark.interp
@pytest.mark.parametrize("case", NUMBERS, ids=str)
def test_every_element_and_every_scale(case):
    torch.manual_seed(0)
    inputs = groups.random_inputs(case)
    generated = generate(returning(case), case.make)
    assert "group_reduce" in generated.wrapper
    a, scale, _, _ = simulate.interpret(generated, inputs)
    y = exact_norm(case, *inputs[:3])
    # within the rounding of the row's statistic and of a few products in fp32
    wanted = exact_scale(case, y)
    assert ((scale.double() - wanted).abs() <= 2**-20 * wanted).all()
    quotient = (y.unflatten(1, (-1, GROUP)) / scale.double()[..., None]).flatten(1)
    assert groups.is_nearest(a, quotient, 2**-20).all()


@pytest.mark.interp
def test_where_the_norm_is_exact_so_are_elements_and_scales():
    """Rows of one magnitude, a power of two: the norm is the weight, with signs."""
    case = Case("rms", "in_blocks", 6, 640, 128)
    torch.manual_seed(0)
    inputs = groups.random_inputs(case)
    x = torch.randint(0, 2, (case.m, case.k)) * 2.0 - 1
    inputs[0] = (x * 2.0 ** torch.arange(case.m)[:, None]).to(bf16)

    def fn(x, more, weight, gate, *rest):
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True)) * weight
        a, scale = groups.in_blocks(y)
        return groups.product(a, scale, *rest), a.clone(), scale.clone()

    _, a, scale = simulate.interpret(generate(fn, case.make), inputs)
    wanted_a, wanted_scale = groups.in_blocks(x * inputs[2].float())
    # Inductor multiplies by 1 / 448
    assert ((scale - wanted_scale).abs() <= 2**-23 * wanted_scale).all()
    blocks = (x * inputs[2].float()).unflatten(1, (-1, GROUP)) / scale[..., None]
    assert torch.equal(a.float(), blocks.to(wanted_a.dtype).flatten(1).float())


@pytest.mark.interp
@pytest.mark.parametrize("along_m", [False, True])
def test_the_product_reads_the_scales_in_the_layout_that_was_stored(along_m):
    case = Case("rms", "in_blocks", 7, 512, 128, along_m=along_m, residual=True, gate=True)
    torch.manual_seed(0)
    inputs = groups.random_inputs(case)
    out, gated, residual = simulate.interpret(generate(case.fn, case.make), inputs)
    y = exact_norm(case, *inputs[:3])
    scale = exact_scale(case, y)
    quantized = (y.unflatten(1, (-1, GROUP)) / scale[..., None]).float().to(torch.float8_e4m3fn)
    x = (quantized.double() * scale[..., None]).flatten(1)
    wide = inputs[5].double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    # an element beside a tie may be rounded to the other side: one step of one product
    for got, wanted in (
        (out, x @ (inputs[4].double() * wide).t()),
        (gated, y @ inputs[3].double().t()),
    ):
        assert (got - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert torch.equal(residual, inputs[0] + inputs[1])


@pytest.mark.interp
def test_nan_and_infinity_are_what_eager_makes_of_them():
    case = Case("rms", "in_blocks", 6, 512, 128)
    torch.manual_seed(0)
    inputs = groups.random_inputs(case)
    inputs[0][0, 3], inputs[0][3, 3] = torch.nan, torch.inf
    inputs[2][200] = torch.nan
    a, scale, *_ = simulate.interpret(generate(returning(case), case.make), inputs)
    y = groups.rms(inputs[0], inputs[2])
    wanted_a, wanted_scale = groups.in_blocks(y)
    assert torch.equal(scale.isnan(), wanted_scale.isnan())
    assert scale.isnan().sum() > case.m
    assert torch.equal(a.float().isnan(), wanted_a.float().isnan())


# ------------------------------------------------------------------------------------------
# the ops by themselves


def test_what_can_be_lowered():
    assert takes(7168, 128)
    assert takes(8192, 32)
    assert not any((takes(8320, 128), takes(7168, 56), takes(0, 128), takes(100, 8)))
    for option in ("combo_kernels", "triton.dense_indexing"):
        with config.patch({option: True}):
            assert not takes(7168, 128)
    with config.patch({"triton.persistent_reductions": False}):
        assert not takes(7168, 128)


@pytest.mark.parametrize(("kind", "dtype"), [("amax", f32), ("amin", bf16), ("absmax", bf16)])
def test_each_element_has_what_its_group_has(kind, dtype):
    x = torch.randn(3, 2, 32).to(dtype)
    x[0, 0, 11] = torch.nan
    blocks = x.unflatten(-1, (4, 8))
    most = blocks.abs().amax(-1, True) if kind == "absmax" else getattr(blocks, kind)(-1, True)
    got = op.reduce_op(x, kind, 8)
    assert torch.equal(got.nan_to_num(77), most.expand_as(blocks).flatten(-2).nan_to_num(77))
    torch.library.opcheck(op.reduce_op, (x[1:], kind, 8))


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 5, 32)])
def test_one_value_of_each_group(shape):
    x = torch.randn(*shape)
    for along_rows in (False, True):
        got = op.value_op(x, 8, along_rows)
        assert torch.equal(got, x.reshape(-1, 32)[:, ::8])
        assert (got.t() if along_rows else got).is_contiguous()
        torch.library.opcheck(op.value_op, (x, 8, along_rows))


@pytest.mark.interp
@pytest.mark.parametrize(("shape", "size"), [((2, 3, 32), 8), ((3, 36), 12)])
def test_the_ops_are_lowered_wherever_they_stand(shape, size):
    """Without a norm, and with groups that are no power of two."""

    def fn(x):
        most = op.reduce_op(x, "absmax", size)
        range_ = most - op.reduce_op(x, "amin", size)
        return op.value_op(range_, size), op.value_op(range_, size, True), x / most

    torch.manual_seed(0)
    x = torch.randn(shape)
    generated = generate(fn, lambda device: (torch.empty(shape, device=device),))
    got = simulate.interpret(generated, (x,))
    blocks = x.unflatten(-1, (-1, size))
    high, low = blocks.abs().amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    for value in got[:2]:
        assert torch.equal(value, (high - low).reshape(-1, shape[-1] // size))
    assert torch.allclose(got[2], (blocks / high).flatten(-2))
