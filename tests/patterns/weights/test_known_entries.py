"""A table whose values the graph tells is named in the format; one that the model stores is not."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.spec.weight_format import E2M1, WeightFormat
from tests.support.graphs.post_grad import calls, capture

pytestmark = pytest.mark.compiles

bf16, u8, f16 = torch.bfloat16, torch.uint8, torch.float16
N, K, GROUP = 64, 128, 32
OTHER = (*E2M1[:-1], -5.0)
UNSIGNED = (*E2M1[:8], 0.0, *E2M1[9:])  # no -0.0
WEIGHT_ONLY = torch.ops.inductor_quant.weight_only.default


def product(values):
    """``values(codes)``: of each code."""

    def fn(x, packed, scale):
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        number = values(codes).unflatten(1, (-1, GROUP)) * scale.unsqueeze(-1)
        return x @ number.flatten(1).t()

    return fn


def literal(entries, dtype=bf16):
    return lambda codes: torch.tensor(entries, dtype=dtype)[codes.int()].to(bf16)


def of_bits(codes):
    magnitude = codes & 7
    power = torch.exp2(((magnitude >> 1).float() - 1).clamp(min=0))
    normal = (magnitude >> 1 > 0).float() + (magnitude & 1).float() / 2
    return (normal * power * torch.where(codes > 7, -1.0, 1.0)).to(bf16)


def entries_of(values, n=N) -> str:
    x, scale = torch.randn(5, K).to(bf16), torch.rand(n, K // GROUP).to(bf16)
    packed = torch.randint(0, 256, (n, K // 2), dtype=u8)
    fn = product(values)
    got, [rewrite] = capture(fn, (x, packed, scale))
    torch.testing.assert_close(got, fn(x, packed, scale), rtol=0.02, atol=0.2)
    [call] = calls(rewrite.after, WEIGHT_ONLY)
    format = WeightFormat.decode(call.kwargs["format"])
    assert WeightFormat.decode(format.encode()) == format
    return format.element.entries


@pytest.mark.parametrize(
    "values",
    [literal(E2M1), literal(E2M1, torch.float32), literal(E2M1, f16), of_bits],
    ids=["bf16", "fp32", "fp16", "bits"],
)
def test_e2m1(values):
    assert entries_of(values) == "e2m1"


def test_the_default_dtype_does_not_matter():
    """Of a user who calls ``torch.set_default_dtype``, as a model's loading does."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(bf16)
        assert entries_of(literal(E2M1), n=N + 8) == "e2m1"  # read for the first time
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("entries", [OTHER, UNSIGNED], ids=["other", "unsigned"])
def test_near_misses(entries):
    assert entries_of(literal(entries)) == ""


def test_a_stored_table_may_change():
    table = torch.tensor(E2M1, dtype=bf16)
    assert entries_of(lambda codes: table[codes.int()]) == ""
