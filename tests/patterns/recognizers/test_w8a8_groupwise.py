"""int8 GEMMs with group scales along K: every spelling matches, near misses keep their value."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant.report.events import collect
from tests.support.gemms.generated import generate
from tests.support.gemms.w8a8 import assert_close
from tests.support.graphs.post_grad import capture

bf16, f32 = torch.bfloat16, torch.float32
M, N, K, G = 20, 48, 192, 64
TOKEN = "(a=i8/token:f32, b=i8/64x1:f32, out={})"
BOTH = "(a=i8/1x64:f32, b=i8/64x1:f32, out={})"


def quantized(device="cpu", *, grouped=False):
    """a [M, K], w [N, K], sa [M, 1] or [M, K / G], sb [N, K / G]; no two scales are equal."""

    def integers(rows):
        return torch.randint(-128, 128, (rows, K), dtype=torch.int8, device=device)

    sa = torch.rand(M, K // G if grouped else 1, device=device) * 0.02 + 0.001
    return integers(M), integers(N), sa, torch.rand(N, K // G, device=device) * 0.02 + 0.001


def exact(a, w, sa, sb):
    sa = sa.double().expand(M, K // G).repeat_interleave(G, 1)
    return (a.double() * sa) @ (w.double() * sb.double().repeat_interleave(G, 1)).t()


def real_views(q, scale):
    return (q.float().view(-1, K // G, G) * scale[..., None]).view(-1, K)


def in_views(a, w, sa, sb):
    return ((a.float() * sa) @ real_views(w, sb).t()).to(bf16)


def in_bf16(a, w, sa, sb):
    weight = w.to(bf16) * sb.to(bf16).repeat_interleave(G, 1)
    return torch.nn.functional.linear(a.to(bf16) * sa.to(bf16), weight)


def both_in_groups(a, w, sa, sb):
    return real_views(a, sa) @ real_views(w, sb).t()


def slice_by_slice(a, w, sa, sb, *, product=torch._int_mm, scale_of=lambda i: i, slices=(0, 1, 2)):
    out = 0.0
    for i in slices:
        part, j = slice(G * i, G * i + G), scale_of(i)
        scale = sa if sa.shape[1] == 1 else sa[:, i : i + 1]
        out = out + product(a[:, part], w[:, part].t()) * scale * sb[:, j]
    return out.to(bf16)


def slices_of_floats(*given):
    return slice_by_slice(*given, product=lambda a, w: a.float() @ w.float())


def batched(a, w, sa, sb):
    left = a.view(M, K // G, G).transpose(0, 1).float()
    right = w.view(N, K // G, G).permute(1, 2, 0).float() * sb.t()[:, None, :]
    return torch.bmm(left, right).sum(0).to(bf16)


SPELLINGS = {
    "views": (in_views, False, TOKEN.format("bf16").replace("bf16", "f32")),
    "bf16": (in_bf16, False, TOKEN.format("bf16").replace(":f32", ":bf16")),
    "both": (both_in_groups, True, BOTH.format("f32")),
    "int_mm by slices": (slice_by_slice, False, TOKEN.format("f32")),
    "int_mm by slices, both": (slice_by_slice, True, BOTH.format("f32")),
    "mm by slices": (slices_of_floats, True, BOTH.format("f32")),
    "batched": (batched, False, "(a=i8, b=i8/64x1:f32, out=f32)"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_recognized_and_keeps_its_value(name):
    fn, grouped, spec = SPELLINGS[name]
    torch.manual_seed(0)
    inputs = quantized(grouped=grouped)
    result, [rewrite] = capture(fn, inputs, dynamic=False)
    assert [str(match.spec) for match in rewrite.report.matches] == [spec]
    assert not rewrite.report.rejections
    want = (
        exact(*inputs)
        if name != "batched"
        else exact(inputs[0], inputs[1], torch.ones(1), inputs[3])
    )
    assert_close(result, want, slack=2)


def no_scale_by_group(a, w, sa, sb):
    return slice_by_slice(a, w, sa, sb, scale_of=lambda i: 0)


def shorter_last_group(a, w, sa, sb):
    """Slices of 128 and 64 of K: the op needs groups of one length, here 96."""
    weight = w.float() * (sb[:, :2] + sb[:, 1:]).repeat_interleave(2 * G, 1)[:, :K]
    return (a.float() * sa) @ weight.t()


NEAR_MISSES = {
    "a last group that is shorter": shorter_last_group,
    "one scale for all slices": no_scale_by_group,
    "scales in another order": lambda *given: slice_by_slice(*given, scale_of=lambda i: 2 - i),
    "a slice twice": lambda *given: slice_by_slice(*given, slices=(0, 1, 1)),
    "a slice left out": lambda *given: slice_by_slice(*given, slices=(0, 2)),
    "a zero point": lambda a, w, sa, sb: ((a.float() - 3) * sa) @ real_views(w, sb).t(),
    "a computed weight": lambda a, w, sa, sb: in_views(a, w + 1, sa, sb),
    "a float activation": lambda a, w, sa, sb: in_views(a.float() + 0.5, w, sa, sb),
    "columns that share": lambda a, w, sa, sb: in_views(a, w, sa, sb[:1].expand(N, -1)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_keeps_its_value(name):
    torch.manual_seed(0)
    inputs = quantized()
    result, [rewrite] = capture(NEAR_MISSES[name], inputs, dynamic=False)
    assert not [
        match
        for match in rewrite.report.matches
        if match.spec.a.dtype == torch.int8 and match.spec.group_size
    ]
    [before] = rewrite.before(*rewrite.inputs)
    torch.testing.assert_close(result, before, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_activation_is_described_in_groups(is_dynamic):
    def fn(x, a, w, sa, sb):
        if is_dynamic:
            parts = x.view(M, K // G, G)
            sa = parts.abs().amax(-1) / 127
            a = (parts / sa[..., None]).round().clamp(-128, 127).to(torch.int8).view(M, K)
        return slice_by_slice(a, w, sa, sb)

    _, [rewrite] = capture(fn, [torch.randn(M, K), *quantized(grouped=True)])
    [match] = rewrite.report.matches
    what = "dynamic per_group int8 symmetric, amax/127 in f32"
    assert str(match.activation) == (what if is_dynamic else "static per_group int8 symmetric")


def test_a_last_group_that_is_shorter_is_left():
    """Repeated scales, of which the last covers half a group."""
    a, w, sa, sb = quantized()

    def fn(a, w, sa, sb):
        weight = w.float() * sb.repeat_interleave(G, 1)[:, : K - 32]
        return (a.float() * sa) @ weight.t()

    inputs = a[:, : K - 32].contiguous(), w[:, : K - 32].contiguous(), sa, sb
    _, [rewrite] = capture(fn, inputs, dynamic=False)
    assert not any(match.family == "w8a8" for match in rewrite.report.matches)
    assert "internal_error" not in rewrite.codes


def test_any_number_of_rows_is_matched():
    inputs = quantized()
    for tensor in (inputs[0], inputs[2]):
        torch._dynamo.mark_dynamic(tensor, 0)
    result, [rewrite] = capture(in_views, inputs)
    assert [match.m for match in rewrite.report.matches] != [M]
    assert [match.family for match in rewrite.report.matches] == ["w8a8"]
    assert_close(result, exact(*inputs), slack=2)


# ------------------------------------------------------------------------------------------
# the kernel


@pytest.mark.interp
@pytest.mark.parametrize(
    ("fn", "grouped"), [(in_views, False), (slice_by_slice, True)], ids=["weight", "both"]
)
def test_the_kernel_is_one_and_right(fn, grouped):
    torch.manual_seed(0)
    inputs = quantized(grouped=grouped)

    def make(device):
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in inputs)

    def model(*given):
        return torch.nn.functional.silu(fn(*given).float()).to(bf16)

    with collect() as report:
        generated = generate(model, make)
    [choice] = report.kernels
    assert choice.chosen.startswith("w8a8_mm ")
    [name] = generated.kernels
    assert "silu" in name
    want = torch.nn.functional.silu(exact(*inputs))
    assert_close(simulate.interpret(generated, inputs), want, slack=2)
