"""Which quantizations move into the GEMM, and with which scale_ops."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config

from inductor_quant.ops import fp8
from inductor_quant.ops.fusion import quantize, quantized_linear, row_reduce
from inductor_quant.options import Options
from tests.support.graphs.post_grad import W8A8, calls, capture, count
from tests.support.spellings.quantizers import GptFastLinear, TenLines, TorchaoLinear

K, N = 64, 48
E4M3 = torch.float8_e4m3fn
LINEAR = quantized_linear.op
APART = Options(on_error="raise", fuse_quantization=False)


@pytest.fixture(autouse=True)
def same_products():
    with config.patch(shape_padding=False):
        yield


def integers(x, scale, low=-128, high=127):
    return (x / scale).round().clamp(low, high).to(torch.int8)


def product(a, w):
    return torch._int_mm(a, w.t()).float()


def scale_of(x):
    return x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127


def rewritten(fn, *args, options=None):
    with torch.no_grad():
        result, [rewrite] = capture(fn, args, options=options)
    return result, rewrite.after


def of_rows(m, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(m, K) * 10.0 ** torch.arange(m)[:, None]
    return x.to(dtype), torch.randint(-128, 128, (N, K), dtype=torch.int8)


def plain(x, w):
    scale = scale_of(x)
    return product(integers(x, scale), w) * scale


def one_sided(x, w):
    scale = scale_of(x)
    return product(integers(x, scale, -100, 90), w) * scale


def in_its_own_type(x, w):
    scale = (x.abs().amax(-1, keepdim=True) * (1 / 127) + 1e-6).float()
    return product(integers(x, scale), w) * scale


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("m", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (4, torch.float32)], ids=str
)
@pytest.mark.parametrize(
    ("fn", "steps", "bounds"),
    [
        (plain, ["to f32", "clamp_min 1e-05", "div 127.0"], (-128, 127)),
        (one_sided, ["to f32", "clamp_min 1e-05", "div 127.0"], (-100, 90)),
        (in_its_own_type, ["mul 0.007874015748031496", "add 1e-06", "to f32"], (-128, 127)),
    ],
)
def test_steps_to_the_scale(fn, steps, bounds, m, dtype):
    x, w = of_rows(m, dtype)
    got, after = rewritten(fn, x, w)
    [call] = calls(after, LINEAR)
    if dtype == torch.float32:  # a cast of fp32 to fp32 is none
        steps = [step for step in steps if step != "to f32"]
    assert call.kwargs["scale_ops"] == steps
    assert (call.kwargs["low"], call.kwargs["high"]) == bounds
    assert call.kwargs["dtype"] == torch.int8
    assert call.args[0].op == "placeholder"
    assert [count(after, op) for op in (W8A8, quantize.op, row_reduce.op)] == [0, 0, 0]
    assert torch.equal(got, rewritten(fn, x, w, options=APART)[0])


# ------------------------------------------------------------------------------------------
# e4m3


def float_product(a, w, scale):
    return (a.float() @ w.float().t()) * scale


def clamped(x, w):
    scale = (x.abs().amax(-1, keepdim=True) / 448).float()
    return float_product((x.float() / scale).clamp(-448, 448).to(E4M3), w, scale)


def unclamped(x, w):
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return float_product((x / scale).to(E4M3), w, scale)


def narrow(x, w):
    """As compressed-tensors: the quotient has the type of x."""
    low, high = (reduce(x, -1, keepdim=True) for reduce in (torch.amin, torch.amax))
    zero = torch.zeros_like(low)
    scale = torch.maximum(torch.minimum(low, zero).abs(), torch.maximum(high, zero).abs()) / 448
    scale = torch.where(scale == 0, x.new_full((), 0.0078125), scale)
    quotient = torch.clamp(x.div(scale).float(), x.new_full((), -448.0), x.new_full((), 448.0))
    return float_product(quotient.to(x.dtype).to(E4M3), w, scale.float())


def of_all(x, w):
    scale = (x.abs().amax() / 448).float()
    return float_product((x.float() / scale).clamp(-448, 448).to(E4M3), w, scale)


FLOATS = {
    clamped: ["div 448.0", "to f32"],
    unclamped: ["to f32", "clamp_min 1e-12", "div 448.0"],
    narrow: ["div 448.0", "if_zero 0.0078125"],
    of_all: ["div 448.0", "to f32"],
}


def float_rows(m, dtype=torch.bfloat16):
    x, w = of_rows(m, dtype)
    return x, (w.float() / 8).to(E4M3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("fn", FLOATS, ids=lambda fn: fn.__name__)
def test_steps_to_the_scale_of_e4m3(fn, m):
    x, w = float_rows(m)
    got, after = rewritten(fn, x, w)
    if fn is of_all and m > 1:
        assert not calls(after, LINEAR)
        return
    [call] = calls(after, LINEAR)
    assert (call.kwargs["dtype"], call.kwargs["scale_ops"]) == (E4M3, FLOATS[fn])
    assert count(after, row_reduce.op) == 0
    assert torch.equal(got, rewritten(fn, x, w, options=APART)[0])


def half_clamped(x, w):
    scale = x.float().abs().amax(-1, keepdim=True) / 500
    return float_product((x / scale).clamp_max(448).to(E4M3), w, scale)


def clamped_to_less(x, w):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return float_product((x / scale).clamp(-440, 440).to(E4M3), w, scale)


def rounded_to_bf16_in_between(x, w):
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    quotient = (x.float() / scale).clamp(-448, 448).to(torch.bfloat16)
    return float_product(quotient.to(E4M3), w, scale)


@pytest.mark.parametrize("fn", [half_clamped, clamped_to_less, rounded_to_bf16_in_between])
def test_another_quantization_to_e4m3_stays(fn):
    x, w = float_rows(4)
    got, after = rewritten(fn, x, w)
    assert not calls(after, LINEAR)
    assert count(after, quantize.op) == 0
    assert calls(after, fp8.op)
    want = rewritten(fn, x, w, options=APART)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", [TorchaoLinear, GptFastLinear, TenLines])
def test_producers(layer):
    torch.manual_seed(0)
    module = layer(K, N)
    x = torch.randn(1, 3, K, dtype=torch.bfloat16)
    x = x[0] if layer is GptFastLinear else x
    got, after = rewritten(module, x)
    [call] = calls(after, LINEAR)
    assert call.kwargs["scale_ops"][-1] in ("to f32", "div 127.0")
    apart, before = rewritten(module, x, options=APART)
    assert len(calls(before)) == 1
    # torchao multiplies by the reciprocal, in eager mode the op divides: an integer may be another
    assert (got != apart).sum() <= (0 if layer is not TorchaoLinear else got.numel())
    torch.testing.assert_close(got, apart, rtol=0.02, atol=0.02)


def test_torchao_s_two_reductions_are_one():
    torch.manual_seed(0)
    x = torch.randn(5, K, dtype=torch.bfloat16)
    x[1] = x[1].abs()
    x[2] = -x[2].abs()
    x[3] = 0
    module = TorchaoLinear(K, N)
    got, after = rewritten(module, x)
    assert [call.args[1] for call in calls(after, row_reduce.op)] == ["absmax"]
    with torch.no_grad():
        want = torch.compile(module, backend="eager")(x)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_two_reductions_of_promoted_types_stay():
    """The zeros promote bf16 to fp32."""

    def fn(x, w):
        zero = torch.zeros(5, 1)
        low = torch.minimum(x.amin(-1, keepdim=True), zero)
        high = torch.maximum(x.amax(-1, keepdim=True), zero)
        scale = (torch.maximum(-low, high) / 127.5).clamp_min(1e-7)
        return product(integers(x, scale), w) * scale, scale

    x, w = of_rows(5)
    got, after = rewritten(fn, x, w)
    assert {call.args[1] for call in calls(after, row_reduce.op)} == {"amin", "amax"}
    assert got[1].dtype == torch.float32
    assert torch.equal(got[1], fn(x, w)[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "scale", [torch.tensor(0.05), torch.tensor([[0.05]]), torch.tensor([[0.02], [0.05], [0.2]])]
)
def test_stored_scale(scale):
    x, w = of_rows(3)

    def fn(x, w, scale):
        return product(integers(x.float(), scale), w) * scale

    got, after = rewritten(fn, x, w, scale)
    [call] = calls(after, LINEAR)
    assert call.kwargs["scale_ops"] == []
    assert call.args[2].meta["val"].shape == ((3, 1) if scale.numel() > 1 else (1, 1))
    assert torch.equal(got, rewritten(fn, x, w, scale, options=APART)[0])


def test_stored_scales_of_groups():
    x, w = of_rows(4)
    scale = torch.rand(4, 2, 1) + 0.02

    def fn(x, w, scale):
        a = integers(x.reshape(4, 2, K // 2).float(), scale)
        return (a.float() * scale).reshape(4, K) @ w.float().t()

    got, after = rewritten(fn, x, w, scale)
    assert len(calls(after)) == 1
    torch.testing.assert_close(got, fn(x, w, scale), rtol=1e-4, atol=1e-2)  # of about 300


def five_rows(x, w):
    return plain(torch.cat([x, x[:2]]), w)


def shared(x, w):
    scale = scale_of(x)
    a = integers(x, scale)
    return product(a, w) * scale, product(a, w + 1) * scale


def returned(x, w):
    scale = scale_of(x)
    a = integers(x, scale)
    return product(a, w) * scale, a


def of_another(x, w):
    scale = scale_of(x + 1)
    return product(integers(x, scale).clamp(-128, 127), w) * scale


def another_behind(x, w):
    return product(integers(x, scale_of(x)), w) * (scale_of(x) * 2)


def asymmetric(x, w):
    scale = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)).float() / 255
    return product(integers(x.float(), scale), w) * scale


def of_the_tensor(x, w):
    scale = x.abs().amax().float() / 127
    return product(integers(x.float(), scale), w) * scale


def squared(x, w):
    scale = scale_of(x) ** 2
    return product(integers(x, scale), w) * scale


def with_a_zero_point(x, w):
    scale = scale_of(x)
    a = integers(x, scale)
    return (product(a, w) - 3 * w.sum(1, dtype=torch.int32)) * scale


def of_columns(x, w):
    x = x[:4, :4]
    scale = x.abs().amax(-1).float() / 127  # one value a row, which divides columns
    a = (x.float() * (1 / scale)).round().clamp(-128, 127).to(torch.int8)
    return product(a, w[:, :4]) * scale[:, None]


def of_one_longer_row(x, w):
    x = x.reshape(1, 4 * K)
    scale = scale_of(x)
    return product(integers(x, scale).reshape(4, K), w) * scale


def of_the_flattened_tensor(x, w):
    scale = scale_of(x.flatten())
    return product(integers(x.flatten(), scale).reshape(4, K), w) * scale


def guarded_by_a_subnormal(x, w):
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-40)
    return product(integers(x, scale), w) * scale


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "fn",
    [
        *(of_one_longer_row, of_the_flattened_tensor, guarded_by_a_subnormal),
        *(five_rows, shared, returned, of_another, another_behind, asymmetric, of_the_tensor),
        *(squared, with_a_zero_point, of_columns),
    ],
)
def test_what_stays_a_kernel_of_its_own(fn):
    x, w = of_rows(4)
    got, after = rewritten(fn, x, w)
    assert not calls(after, LINEAR)
    assert calls(after) or fn is shared, "no GEMM was recognized"
    want = rewritten(fn, x, w, options=APART)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_option():
    x, w = of_rows(2)
    assert len(calls(rewritten(plain, x, w, options=APART)[1])) == 1
    for options in ({"numerics": "strict"}, {"verify": True}):
        after = rewritten(plain, x, w, options=Options(on_error="raise", **options))[1]
        assert not calls(after, LINEAR)


def test_symbolic_rows():
    def fn(x, w):
        return plain(x, w)

    x, w = of_rows(4)
    with torch.no_grad():
        _, [rewrite] = capture(fn, [x, w], dynamic=True)
    assert not calls(rewrite.after, LINEAR)
