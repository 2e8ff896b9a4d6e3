"""W8A8 on a GPU: group scales along K, horizontal launches, weights contiguous along N."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inductor_quant.report.events import collect

pytestmark = pytest.mark.gpu

OPTIONS = {"inductor_quant.on_error": "raise"}
bf16, i8 = torch.bfloat16, torch.int8


def compiled(fn):
    return torch.compile(fn, backend="inductor_quant", options=OPTIONS, dynamic=False)


def powers_of_two(*shape):
    return 2.0 ** torch.randint(-3, 0, shape, device="cuda").float()


def integers(*shape, most=8):
    return torch.randint(-most, most + 1, shape, dtype=i8, device="cuda")


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("m", [1, 16, 130, 1024])
@pytest.mark.parametrize(("n", "k", "group"), [(512, 512, 128), (577, 1024, 64), (96, 96, 32)])
def test_groups_along_k_are_exact_on_powers_of_two(m, n, k, group, both):
    torch.manual_seed(0)
    a, w = integers(m, k), integers(n, k)
    sa, sb = powers_of_two(m, k // group if both else 1), powers_of_two(n, k // group)

    def fn(a, w, sa, sb):
        spread = sa.repeat_interleave(group, 1) if both else sa
        return (a.float() * spread) @ (w.float() * sb.repeat_interleave(group, 1)).t()

    with collect() as report:
        got = compiled(fn)(a, w, sa, sb)
    assert [match.family for match in report.matches] == ["w8a8"], report
    a, w = a.double(), w.double()
    spread = sa.double().repeat_interleave(k // sa.shape[1], 1)
    assert torch.equal(
        got.double(), (a * spread) @ (w * sb.double().repeat_interleave(group, 1)).t()
    )


class Projections(nn.Module):
    """q, k and v of one quantized activation."""

    def __init__(self, k, widths):
        super().__init__()
        for i, n in enumerate(widths):
            self.register_buffer(f"weight{i}", integers(n, k, most=127))
            self.register_buffer(f"scale{i}", powers_of_two(n))
        self.count = len(widths)

    def forward(self, a, row):
        return [
            torch._int_mm(a, getattr(self, f"weight{i}").t()) * row * getattr(self, f"scale{i}")
            for i in range(self.count)
        ]


@pytest.mark.parametrize("m", [1, 16, 130])
def test_frozen_projections_of_one_activation_are_exact(m):
    torch.manual_seed(0)
    model = Projections(512, (512, 128, 136)).eval()
    a, row = integers(m, 512, most=127), powers_of_two(m, 1)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True), collect() as report:
        got = compiled(model)(a, row)
    assert {match.family for match in report.matches} == {"w8a8"}, report
    for i, y in enumerate(got):
        weight, scale = getattr(model, f"weight{i}").double(), getattr(model, f"scale{i}").double()
        assert torch.equal(y.double(), (a.double() @ weight.t()) * row.double() * scale)


@pytest.mark.parametrize("m", [16, 2048])
def test_a_weight_along_n_is_exact(m):
    torch.manual_seed(0)
    a, w, row, column = (
        integers(m, 520),
        integers(520, 640),
        powers_of_two(m, 1),
        powers_of_two(640),
    )

    def fn(a, w, row, column):
        return torch._int_mm(a, w) * row * column

    got = compiled(fn)(a, w, row, column)
    assert torch.equal(got.double(), (a.double() @ w.double()) * row.double() * column.double())
