"""Scales that are powers of two: the kernel reads stored exponents, however they are spelled."""

from __future__ import annotations

import itertools

import pytest
import torch

from inductor_quant.spec.exactness import Exactness
from inductor_quant.spec.weight_format import WeightFormat
from tests.support.graphs.post_grad import calls, capture
from tests.support.sampling import sampled

pytestmark = pytest.mark.compiles

f32, bf16, u8, i32 = torch.float32, torch.bfloat16, torch.uint8, torch.int32
e8m0 = torch.float8_e8m0fnu
K, N, GROUP = 128, 64, 32
WEIGHT_ONLY = torch.ops.inductor_quant.weight_only.default


def with_nan(code):
    power = torch.pow(torch.tensor(2.0), (code.to(torch.int16) - 127).float())
    return torch.where(code == 255, float("nan"), power)


# name -> (how a scale is computed from its code, the kind of float8 of ``Field``)
SPELLINGS = {
    "power": (lambda code: 2.0 ** (code.to(i32) - 127).float(), "e8m0_inf"),
    "power in bf16": (lambda code: 2.0 ** (code.to(i32) - 127).to(bf16), "e8m0_inf"),
    "exp2": (lambda code: torch.exp2(code.float() - 127), "e8m0_inf"),
    "power or NaN": (with_nan, "e8m0"),
    "power or NaN, to bf16": (lambda code: with_nan(code).to(bf16), "e8m0"),
    "shift": (lambda code: (code.to(i32) << 23).view(f32), "e8m0_bits"),
    "viewed": (lambda code: code.view(e8m0).float(), "e8m0"),
    "viewed, to bf16": (lambda code: code.view(e8m0).to(bf16), "e8m0"),
    "stored": (lambda code: code.float(), "e8m0"),
    "stored, to bf16 at last": (lambda code: code.float().to(bf16), "e8m0"),
    "stored, its bytes": (lambda code: (code.view(u8).to(i32) << 23).view(f32), "e8m0_bits"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "dtype"), sampled(itertools.product(SPELLINGS, (f32, bf16)), every=2), ids=str
)
def test_the_kernel_reads_exponents(name, dtype):
    """All codes; the weight is that of the graph, bit for bit."""
    torch.manual_seed(0)
    scale, kind = SPELLINGS[name]
    q = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    code = torch.arange(256, dtype=u8).view(N, K // GROUP)
    code = code.view(e8m0) if "stored" in name else code

    def fn(x, q, code):
        wide = scale(code).repeat_interleave(GROUP, 1)
        return x @ (q * wide).to(x.dtype).t()

    with torch.no_grad():
        got, [rewrite] = capture(fn, [torch.eye(K, dtype=dtype), q, code])
    [call] = calls(rewrite.after, WEIGHT_ONLY)
    [step] = WeightFormat.decode(call.kwargs["format"]).dequant_ops
    assert step.operand.float8 == kind
    assert len(call.args[1]) == 2
    [match] = rewrite.report.matches
    is_same = match.exactness is Exactness.SAME_WEIGHT_ROUNDING
    assert is_same == (dtype == bf16 or "bf16" not in name)  # else rounded to bf16 before
    want = (q * scale(code).repeat_interleave(GROUP, 1)).to(dtype).t()
    finite = want.isfinite().all(0)  # else 0 * inf spoils a column
    assert finite.sum() >= N - 2
    assert torch.equal(got[:, finite], want[:, finite])
    assert not got[:, ~finite].isfinite().any()


def joined(code):
    return torch.exp2((code & 15 | (code[:, :1] >> 4) << 4).float() - 127)


def joined_float8(code):
    return (code & 15 | (code[:, :1] >> 4) << 4).view(torch.float8_e4m3fn).float()


def wider(code):
    return (code.view(e8m0).view(torch.int16) & 255).float().repeat_interleave(2, 1)


@pytest.mark.parametrize("scale", [joined, joined_float8, wider])
def test_other_codes_are_not_read_as_exponents(scale):
    torch.manual_seed(0)
    q = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    code = torch.randint(96, 112, (N, K // GROUP), dtype=u8)

    def fn(x, q, code):
        return x @ (q * scale(code).repeat_interleave(GROUP, 1)).to(x.dtype).t()

    with torch.no_grad():
        got, [rewrite] = capture(fn, [torch.eye(K), q, code])
    want = (q * scale(code).repeat_interleave(GROUP, 1)).t()
    assert torch.equal(got, want)
    for call in calls(rewrite.after, WEIGHT_ONLY):
        [step] = WeightFormat.decode(call.kwargs["format"]).dequant_ops
        assert not step.operand.float8


def test_other_powers_are_computed_apart():
    """The exponents of another bias."""
    q, code = torch.ones(N, K, dtype=torch.int8), torch.full((N, K // GROUP), 120, dtype=u8)

    def fn(x, q, code):
        return x @ (q * torch.exp2(code.float() - 128).repeat_interleave(GROUP, 1)).t()

    with torch.no_grad():
        got, [rewrite] = capture(fn, [torch.eye(K), q, code])
    [call] = calls(rewrite.after, WEIGHT_ONLY)
    [step] = WeightFormat.decode(call.kwargs["format"]).dequant_ops
    assert not step.operand.float8
    assert torch.equal(got, torch.full((K, N), 2.0**-8))
