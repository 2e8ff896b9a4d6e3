"""Dynamic quantization of an activation is one kernel, with unchanged values."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.ops.fusion import quantize, row_reduce
from inductor_quant.patterns.fusion.row_quant import mark_row_reductions
from tests.support.gemms.generated import generate


def linear(x, w, w_scale):
    a_scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    a = (x / a_scale).round().clamp(-128, 127).to(torch.int8)
    return (torch._int_mm(a, w.t()).float() * a_scale * w_scale).to(x.dtype)


def min_max_linear(x, w, w_scale):
    """As torchao: the larger of -amin and amax."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    a_scale = torch.maximum(-low, high).float().div(127.5).clamp_min(1e-7)
    a = (x * (1 / a_scale)).round().clamp(-128, 127).to(torch.int8)
    return (torch._int_mm(a, w.t()).float() * a_scale * w_scale).to(x.dtype)


def float_linear(x, w, w_scale):
    """As torchao, in e4m3."""
    a_scale = (x.abs().amax(-1, keepdim=True) / 448).float()
    a = (x.float() / a_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    w, scales = w.view(a.dtype).t(), (a_scale, w_scale[None])
    return torch._scaled_mm(a, w, *scales, out_dtype=x.dtype, use_fast_accum=True)


def make(m, k, device, n=64):
    if device == "cuda":
        return (
            torch.empty(m, k, dtype=torch.bfloat16, device=device),
            torch.empty(n, k, dtype=torch.int8, device=device),
            torch.empty(n, device=device),
        )
    return (
        torch.randn(m, k).to(torch.bfloat16),
        torch.randint(-128, 128, (n, k), dtype=torch.int8),
        torch.rand(n) * 0.01,
    )


def compiled(fn, m, k, **kwargs):
    return generate(fn, lambda d: make(m, k, d), **kwargs)


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("fn", "m"),
    [*((fn, m) for fn in (linear, min_max_linear) for m in (1, 16, 256)), (float_linear, 1)],
)
def test_long_rows_are_quantized_in_one_kernel(fn, m):
    """Without our op Inductor splits the reduction at this size: three kernels before the GEMM."""
    kernels = list(compiled(fn, m, 14336, fuse_quantization=False).kernels)
    quantizing, product, *adding = kernels
    assert quantizing.startswith(("triton_red", "triton_per"))
    assert product.startswith("triton_tem")
    assert not adding or fn is float_linear, kernels  # its GEMM splits K


@pytest.mark.one_in(2)
@pytest.mark.compiles
@pytest.mark.parametrize("k", [1280, 16384])
def test_a_row_is_read_and_its_gelu_computed_once(k):
    """It stays in registers between the reduction and the quantization."""

    def fn(x, w, w_scale):
        return linear(torch.nn.functional.gelu(x), w, w_scale)

    name, source = next(iter(compiled(fn, 256, k).kernels.items()))
    assert name.startswith("triton_per")
    assert source.count("tl.load(") == 1
    assert source.count("ex2.approx") == 1  # of its error function
    assert simulate.compile_kernel(name, source).spill_stores == 0


@pytest.mark.compiles
def test_longer_rows_and_other_reductions_are_treated_as_before():
    def fn(x, w, w_scale):
        return linear(x, w, w_scale), w.float().exp().amax(-1)

    names = [name.split("_fused")[0] for name in compiled(fn, 512, 4096).kernels]
    assert sorted(names) == ["triton_per", "triton_red", "triton_tem"]
    names = list(compiled(linear, 512, 20480).kernels)
    assert names[0].startswith("triton_red")


@pytest.mark.compiles
def test_a_norm_before_it_is_in_the_same_kernel():
    def fn(x, w, w_scale):
        x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return linear(x, w, w_scale)

    kernels = list(compiled(fn, 64, 4096).kernels)
    assert len(kernels) == 2, kernels


@pytest.mark.interp
@pytest.mark.parametrize("fn", [linear, min_max_linear])
def test_the_quantized_linear_computes_what_eager_does(fn):
    torch.manual_seed(0)
    inputs = make(5, 300, "cpu")
    got = simulate.interpret(compiled(fn, 5, 300), inputs)
    want = fn(*inputs)
    # an activation at a rounding boundary may round the other way: one step of one product
    assert (got.float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()
    assert (got != want).float().mean() < 0.05


@pytest.mark.interp
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_e4m3_has_the_bits_of_eager_mode(scale_dtype):
    torch.manual_seed(0)
    x = torch.randn(9, 256)
    # Some quotients are halfway between two numbers, where a product with the reciprocal is not.
    x[0], x[0, 0] = torch.arange(256) / 512, 196
    x[1], x[2, 3], x[3, 4], x[4], x[5] = 0, torch.inf, torch.nan, x[4] * 1e-30, x[5] * 1e30
    x[6] = torch.randint(-128, 128, (256,)) * 2.0**-133  # a scale below the normal numbers
    x = x.to(torch.bfloat16)
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).to(scale_dtype)
    scale[7], scale[8] = 1e-3, 0  # saturates; nothing is finite

    def fn(x, scale):
        return quantize.op(x, scale, dtype=torch.float8_e4m3fn)

    def make(device):
        sizes = ((x.shape, x.dtype), (scale.shape, scale_dtype))
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]

    generated = generate(fn, make)
    got, want = simulate.interpret(generated, (x, scale)), fn(x, scale)
    assert torch.equal(got.isnan(), want.isnan())
    differs = got.float().nan_to_num(500.0) != want.float().nan_to_num(500.0)
    assert differs.nonzero()[:, 0].unique().tolist() in ([], [6])
    assert not differs[:6].any()


@pytest.mark.parametrize("kind", ["amax", "amin"])
@pytest.mark.parametrize("keepdim", [True, False])
def test_the_op_is_the_reduction(kind, keepdim):
    x = torch.randn(3, 4, 5)
    got = row_reduce.op(x, kind, keepdim)
    assert torch.equal(got, getattr(x, kind)(-1, keepdim))
    torch.library.opcheck(row_reduce.op, (x, kind, keepdim))


@pytest.mark.compiles
def test_a_tensor_with_one_scale_is_reduced_by_many_ctas():
    """Flattened to one row of 16 million elements, which would take one CTA milliseconds."""

    def fn(x, w, w_scale):
        scale = x.float().abs().reshape(1, -1).amax(-1, keepdim=True) / 127
        a = (x / scale).round().clamp(-128, 127).to(torch.int8)
        return torch._int_mm(a, w.t()).float() * scale * w_scale

    kernels = list(compiled(fn, 4096, 4096).kernels)
    assert len(kernels) > 2, kernels


def test_a_keepdim_given_by_name_is_kept():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 5)
    amax = graph.call_function(torch.ops.aten.amax.default, (x, [-1]), {"keepdim": True})
    amax.meta["val"] = torch.empty(3, 1)
    graph.output(amax)
    mark_row_reductions(amax)
    [node] = graph.find_nodes(op="call_function", target=row_reduce.op)
    assert node.args[1:] == ("amax", True)
