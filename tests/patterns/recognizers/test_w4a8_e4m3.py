"""int4 weights and e4m3 activations: every spelling is one op; what is no int4 weight is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_quant.spec.exactness import Exactness
from tests.support.graphs.post_grad import calls, capture, count

M, N, K, G = 20, 32, 64, 16
W4A8 = torch.ops.inductor_quant.w4a8.default
bf16, f32, i8, u8, e4m3 = (
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
)
Fn = Callable[..., Any]


def pairs(w: torch.Tensor) -> torch.Tensor:
    """The nibbles of each byte, the low one first: [N, K]."""
    return torch.stack([w & 15, w >> 4], -1).reshape(N, K)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 448
    return (x.float() / s).clamp(-448, 448).to(e4m3), s


def inputs() -> list[torch.Tensor]:
    """x, packed weight, scales of columns and of groups."""
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (N, K // 2), dtype=u8)
    return [torch.randn(M, K).to(bf16), packed, torch.rand(1, N) + 0.1, torch.rand(N, K // G) + 0.1]


def scaled_mm(weight: Fn) -> Fn:
    """The library's product with ``weight`` of the packed bytes, e4m3 [N, K]."""

    def fn(x, w, c, g):  # type: ignore[no-untyped-def]
        a, s = quantized(x)
        return torch._scaled_mm(a, weight(w).t(), scale_a=s, scale_b=c, out_dtype=bf16)

    return fn


def signed(w: torch.Tensor) -> torch.Tensor:
    return (((pairs(w).to(i8) ^ 8) - 8).float()).to(e4m3)


def dequantized(w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return ((pairs(w).to(bf16) - 8).view(N, K // G, G) * g.to(bf16)[..., None]).view(N, K)


def groups(x, w, c, g):  # type: ignore[no-untyped-def]
    a, s = quantized(x)
    return F.linear((a.float() * s).to(bf16), dequantized(w, g))


def scale_behind(x, w, c, g):  # type: ignore[no-untyped-def]
    a, s = quantized(x)
    return (F.linear(a.to(bf16), dequantized(w, g)).float() * s).to(bf16)


def static_scale(x, w, c, g):  # type: ignore[no-untyped-def]
    a = (x / 0.01).clamp(-448, 448).to(e4m3)
    return F.linear(a.to(bf16) * 0.01, dequantized(w, g))


def channels(x, w, c, g):  # type: ignore[no-untyped-def]
    a, s = quantized(x)
    return F.linear((a.float() * s).to(bf16), ((pairs(w).float() - 8) * c.t()).to(bf16))


FORMS: dict[str, tuple[Fn, str]] = {
    "scaled_mm": (scaled_mm(lambda w: (pairs(w).to(i8) - 8).to(bf16).to(e4m3)), "u4/channel:f32"),
    "scaled_mm, signed": (scaled_mm(signed), "i4/channel:f32"),
    "scaled_mm, 16 times": (
        scaled_mm(lambda w: ((pairs(w).float() - 8) * 16).to(e4m3)),
        "u4/channel:f32",
    ),
    "groups": (groups, "u4/16x1:bf16"),
    "a scale behind": (scale_behind, "u4/16x1:bf16"),
    "a static scale": (static_scale, "u4/16x1:bf16"),
    "channels": (channels, "u4/channel:"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("scaled_mm", "groups") else pytest.mark.slow)
        for name in FORMS
    ],
)
def test_a_packed_weight_is_read_by_the_product(name: str) -> None:
    fn, of_b = FORMS[name]
    given = inputs()
    result, [rewrite] = capture(fn, given)
    [match] = rewrite.report.matches
    assert (match.family, match.exactness) == ("w4a8", Exactness.REASSOCIATED)
    assert str(match.spec.a).startswith("e4m3")
    assert str(match.spec.b).startswith(of_b)
    [call] = calls(rewrite.after, W4A8)
    assert call.args[0].meta["val"].dtype == e4m3
    assert count(rewrite.after, torch.ops.aten.cat.default) == 0
    want = fn(*given).float()
    assert (result.float() - want).abs().max() <= 2**-7 * want.abs().max()


LEFT: dict[str, Fn] = {
    "rounded": scaled_mm(lambda w: ((pairs(w).float() - 8) * 1.1).to(e4m3)),
    "more than e4m3 has": scaled_mm(lambda w: (pairs(w).float() + 20).to(e4m3)),
    "e5m2": lambda x, w, c, g: F.linear(
        x.to(torch.float8_e5m2).to(bf16), dequantized(w, g)),
    "a zero point": lambda x, w, c, g: F.linear(
        (quantized(x)[0].float() - 3).to(bf16), dequantized(w, g)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "rounded" else pytest.mark.slow) for name in LEFT],
)
def test_what_is_not_proved_is_left_to_others(name: str) -> None:
    given = inputs()
    result, [rewrite] = capture(LEFT[name], given)
    assert count(rewrite.after, W4A8) == 0
    want = LEFT[name](*given).float()
    assert (result.float() - want).abs().max() <= 2**-6 * want.abs().max()
