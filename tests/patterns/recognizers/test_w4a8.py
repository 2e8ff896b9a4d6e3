"""int4 weights and int8 activations: every spelling is one op; what is no int4 weight is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_quant.options import Options
from inductor_quant.spec.exactness import Exactness
from tests.support.graphs.post_grad import calls, capture, count

M, N, K, G = 20, 24, 64, 16
W4A8 = torch.ops.inductor_quant.w4a8.default
bf16, f16, f32, i8, u8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8
Fn = Callable[..., Any]


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape).to(dtype)


def pairs(w: torch.Tensor) -> torch.Tensor:
    """The nibbles of each byte, the low one first: [N, K]."""
    return torch.stack([w & 15, w >> 4], -1).reshape(N, K)


def words(w: torch.Tensor) -> torch.Tensor:
    """Eight nibbles of each int32 along K: [K, N]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((w.unsqueeze(1) >> shifts[None, :, None]) & 15).reshape(K, N)


def awq_words(w: torch.Tensor) -> torch.Tensor:
    """Eight nibbles of each int32 along N, in AWQ's order: [K, N]."""
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
    return ((w.unsqueeze(-1) >> shifts) & 15).reshape(K, N)


def sampled(cases: dict[str, Any], *often: str) -> list[Any]:
    """The names of ``cases``; all but ``often`` are slow."""
    marks: dict[bool, Any] = {True: (), False: pytest.mark.slow}
    return [pytest.param(name, marks=marks[name in often]) for name in cases]


BYTES, SIGNED = (N, K // 2), i8
# int8 [K, N] of a packed weight: its shape, its dtype, and how it is unpacked
INT8: dict[str, tuple[tuple[int, ...], torch.dtype, Fn]] = {
    "minus 8": (BYTES, u8, lambda w: (pairs(w).to(i8) - 8).t()),
    "minus 8 before the cast": (BYTES, u8, lambda w: (pairs(w).to(torch.int32) - 8).to(i8).t()),
    "the high half": (
        BYTES, u8, lambda w: torch.stack([w << 4, w & 0xF0], -1).reshape(N, K).view(i8).t()),
    "arithmetic shifts": (
        BYTES, SIGNED, lambda w: torch.stack([(w << 4) >> 4, w >> 4], -1).reshape(N, K).t()),
    "xor and minus": (BYTES, u8, lambda w: ((pairs(w).to(i8) ^ 8) - 8).t()),
    "where": (
        BYTES, u8,
        lambda w: torch.where(pairs(w).long() >= 8, pairs(w).long() - 16, pairs(w).long())
        .to(i8).t()),
    "where, 16 times": (
        BYTES, u8,
        lambda w: (torch.where(pairs(w).int() >= 8, pairs(w).int() - 16, pairs(w).int())
                   .float() * 16).to(i8).t()),
    "16 times, wrapped": (BYTES, u8, lambda w: (pairs(w).to(i8) * 16).t()),
    "through floats": (BYTES, u8, lambda w: (pairs(w).float() - 8).to(i8).t()),
    "unsigned": (BYTES, u8, lambda w: pairs(w).to(i8).t()),
    "another zero point": (BYTES, u8, lambda w: (pairs(w).to(i8) - 5).t()),
    "words along K": ((K // 8, N), torch.int32, lambda w: words(w).to(i8) - 8),
    "words along N": ((K, N // 8), torch.int32, lambda w: awq_words(w).to(i8) - 8),
    "the high nibble first": (
        BYTES, u8, lambda w: torch.stack([w >> 4, w & 15], -1).reshape(N, K).to(i8).t() - 8),
    "halves": (BYTES, u8, lambda w: torch.cat([w & 15, w >> 4], 1).to(i8).t() - 8),
}  # fmt: skip


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / s).round().clamp(-128, 127).to(i8), s


@pytest.mark.parametrize("name", sampled(INT8, "minus 8", "the high half", "words along N"))
def test_an_unpacked_weight_of_int_mm_is_read_packed(name: str) -> None:
    shape, dtype, unpack = INT8[name]

    def fn(a, w, s, c):  # type: ignore[no-untyped-def]
        return torch._int_mm(a, unpack(w)).float() * s * c

    inputs = [bits((M, K), i8), bits(shape, dtype), torch.rand(M, 1), torch.rand(1, N)]
    result, [rewrite] = capture(fn, inputs)
    [match] = rewrite.report.matches
    assert (match.family, match.exactness) == ("w4a8", Exactness.BIT_EXACT)
    [call] = calls(rewrite.after, W4A8)
    assert [node.meta["val"].shape for node in call.args[1]] == [torch.Size(shape)]
    assert torch.equal(result, fn(*inputs))
    assert count(rewrite.after, torch.ops.aten.cat.default) == 0


def test_a_whole_layer_quantizes_its_activation_and_is_one_gemm() -> None:
    def fn(x, w, c, bias):  # type: ignore[no-untyped-def]
        a, s = quantized(x)
        return (torch._int_mm(a, pairs(w).to(i8).t() - 8).float() * c * s).to(bf16) + bias

    inputs = [torch.randn(M, K).to(bf16), bits(BYTES, u8), torch.rand(N), torch.randn(N).to(bf16)]
    result, [rewrite] = capture(fn, inputs)
    [match] = rewrite.report.matches
    assert (match.family, str(match.spec.a), match.spec.bias) == ("w4a8", "i8/token:f32", True)
    assert match.activation is not None
    assert match.activation.is_dynamic
    assert torch.allclose(result.float(), fn(*inputs).float(), rtol=2e-2, atol=1e-1)


def test_a_zero_point_of_the_activation_stays_a_term() -> None:
    def fn(a, w, z, s):  # type: ignore[no-untyped-def]
        q = pairs(w).to(i8).t() - 8
        return (torch._int_mm(a, q) - z.int() * q.sum(0, dtype=torch.int32)).float() * s

    z = torch.randint(-90, 90, (M, 1)).to(i8)
    inputs = [bits((M, K), i8), bits(BYTES, u8), z, torch.rand(M, 1)]
    result, [rewrite] = capture(fn, inputs)
    [match] = rewrite.report.matches
    assert match.family == "w4a8"
    assert match.spec.a.zero
    assert torch.allclose(result, fn(*inputs), rtol=1e-6)


def test_strict_numerics_keep_the_product_and_its_scales() -> None:
    def fn(a, w, s, c):  # type: ignore[no-untyped-def]
        return (torch._int_mm(a, pairs(w).to(i8).t() - 8).float() * s * c).to(bf16)

    inputs = [bits((M, K), i8), bits(BYTES, u8), torch.rand(M, 1), torch.rand(1, N)]
    options = Options(on_error="raise", numerics="strict")
    with torch._inductor.config.patch(emulate_precision_casts=True):
        result, [rewrite] = capture(fn, inputs, options=options)
    assert [match.family for match in rewrite.report.matches] == ["w4a8"]
    assert torch.equal(result, fn(*inputs))


# x, packed weight, scales of rows, groups and columns -> the layer in floats
def groups(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return ((pairs(w).to(g.dtype) - 8).view(N, K // G, G) * g[..., None]).view(N, K)


def q(x: torch.Tensor) -> torch.Tensor:
    return x.round().clamp(-128, 127)


FLOATS: dict[str, tuple[Fn, str]] = {
    "groups": (lambda x, w, s, g, c: F.linear(q(x) * s, groups(w, g)), "u4/16x1"),
    "groups of signed nibbles": (
        lambda x, w, s, g, c: F.linear(
            q(x) * s,
            ((pairs(w).to(i8) ^ 8) - 8).float().view(N, K // G, G).mul(g[..., None]).view(N, K)),
        "i4/16x1"),
    "channels": (lambda x, w, s, g, c: F.linear(q(x) * s, (pairs(w).float() - 8) * c), "u4/ch"),
    "a tensor": (
        lambda x, w, s, g, c: F.linear(q(x) * s[:1], (pairs(w).float() - 8) * c.mean()), "u4/te"),
    "groups and channels": (
        lambda x, w, s, g, c: F.linear(q(x) * s, groups(w, g) * c), "u4/16x1"),
    "scales behind": (
        lambda x, w, s, g, c: F.linear(q(x), pairs(w).float() - 8) * s * c.t(), "u4/ch"),
    "through int8": (
        lambda x, w, s, g, c: F.linear(q(x).to(i8).float() * s, groups(w, g)), "u4/16x1"),
    "a zero point": (
        lambda x, w, s, g, c: F.linear((q(x) - q(s * 99)) * s, groups(w, g)), "u4/16x1"),
    "bytes": (
        lambda x, w, s, g, c: F.linear((x.round().clamp(0, 255) - 100) * s, groups(w, g)),
        "u4/16x1"),
    "no scales": (lambda x, w, s, g, c: F.linear(q(x), pairs(w).float() - 8), "u4"),
    "three dimensions": (
        lambda x, w, s, g, c: F.linear((q(x) * s).reshape(2, M // 2, K), groups(w, g)), "u4/16x1"),
    "one row": (lambda x, w, s, g, c: F.linear(q(x[:1]) * s[:1], groups(w, g)), "u4/16x1"),
}  # fmt: skip


def float_inputs() -> list[torch.Tensor]:
    return [
        torch.randn(M, K) * 40,
        bits(BYTES, u8),
        torch.rand(M, 1) * 0.02 + 0.01,
        torch.rand(N, K // G) * 0.02 + 0.01,
        torch.rand(N, 1) * 0.02 + 0.01,
    ]


@pytest.mark.parametrize("name", sampled(FLOATS, "groups and channels", "a zero point"))
def test_a_product_of_dequantized_operands_is_one_of_integers(name: str) -> None:
    fn, of_b = FLOATS[name]
    inputs = float_inputs()
    result, [rewrite] = capture(fn, inputs)
    [match] = rewrite.report.matches
    assert match.family == "w4a8"
    assert str(match.spec.b).startswith(of_b)
    [call] = calls(rewrite.after, W4A8)
    assert call.args[0].meta["val"].dtype == i8
    want = fn(*inputs)
    assert torch.allclose(result, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


LEFT: dict[str, Fn] = {
    "not rounded": lambda x, w, s, g, c: F.linear(x.clamp(-128, 127) * s, groups(w, g)),
    "nine bits": lambda x, w, s, g, c: F.linear((x * 3).round().clamp(-256, 255), groups(w, g)),
    "a fraction as zero point": lambda x, w, s, g, c: F.linear(
        q(x) * s, (pairs(w).float() - 7.5) * c),
    "an offset behind the scale": lambda x, w, s, g, c: F.linear(
        q(x) * s, groups(w, g) - c),
    "a table": lambda x, w, s, g, c: F.linear(
        q(x) * s, torch.linspace(-1, 1, 16).pow(3)[pairs(w).long()] * c),
    "a square": lambda x, w, s, g, c: F.linear(q(x) * s, pairs(w).float().square() * c),
    "a scale of k": lambda x, w, s, g, c: F.linear(q(x) * torch.arange(K), groups(w, g)),
    "a scale of every weight": lambda x, w, s, g, c: F.linear(
        q(x) * s, pairs(w).float() * torch.linspace(1, 2, N * K).view(N, K)),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(LEFT, "a fraction as zero point", "a table"))
def test_what_is_not_proved_is_left_to_others(name: str) -> None:
    inputs = float_inputs()
    result, [rewrite] = capture(LEFT[name], inputs)
    assert count(rewrite.after, W4A8) == 0
    want = LEFT[name](*inputs)
    assert torch.allclose(result, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())


def test_a_weight_that_is_divided_by_zero_is_left() -> None:
    def fn(x, w, s, g, c):  # type: ignore[no-untyped-def]
        return F.linear(q(x) * s, (pairs(w).float() + 1) / 0.0)

    inputs = float_inputs()
    result, [rewrite] = capture(fn, inputs)
    assert count(rewrite.after, W4A8) == 0
    assert not torch.isfinite(result).any()


NEAR_MISSES: dict[str, Fn] = {
    "five bits": lambda w: (torch.cat([w & 31, w >> 3], 1).to(i8)).t(),
    "a square": lambda w: (pairs(w).to(i8) * pairs(w).to(i8) // 2).t(),
    "two zero points": lambda w: pairs(w).to(i8).t() - torch.arange(K).to(i8)[:, None],
}


@pytest.mark.parametrize("name", sampled(NEAR_MISSES, "five bits"))
def test_other_int8_weights_stay_computed_and_the_report_says_so(name: str) -> None:
    def fn(a, w, s):  # type: ignore[no-untyped-def]
        return torch._int_mm(a, NEAR_MISSES[name](w)).float() * s

    inputs = [bits((M, K), i8), bits(BYTES, u8), torch.rand(M, 1)]
    result, [rewrite] = capture(fn, inputs)
    assert count(rewrite.after, W4A8) == 0
    [match] = rewrite.report.matches
    assert (match.family, bool(match.computed)) == ("w8a8", True)
    assert torch.equal(result, fn(*inputs))


def test_a_family_that_is_excluded_leaves_the_gemm_to_the_others() -> None:
    def fn(a, w, s):  # type: ignore[no-untyped-def]
        return torch._int_mm(a, pairs(w).to(i8).t() - 8).float() * s

    inputs = [bits((M, K), i8), bits(BYTES, u8), torch.rand(M, 1)]
    for families, family in ((("w8a8",), "w8a8"), (("w4a8",), "w4a8")):
        _, [rewrite] = capture(fn, inputs, options=Options(families=families))
        assert [match.family for match in rewrite.report.matches] == [family]
    _, [rewrite] = capture(fn, inputs, options=Options(families=("fp8",)))
    assert rewrite.codes == ["family_disabled"]


def test_a_weight_that_the_graph_writes_is_left() -> None:
    def fn(a, w, s):  # type: ignore[no-untyped-def]
        out = torch._int_mm(a, pairs(w).to(i8).t() - 8).float() * s
        w.add_(1)
        return out

    inputs = [bits((M, K), i8), bits(BYTES, u8), torch.rand(M, 1)]
    want = fn(inputs[0], inputs[1].clone(), inputs[2])
    result, [rewrite] = capture(fn, inputs)
    assert count(rewrite.after, W4A8) == 0
    assert torch.equal(result, want)
