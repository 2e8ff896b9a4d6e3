"""The Gluon kernels of 8-bit operands compile if offsets need 64 bits."""

from __future__ import annotations

import pytest
import torch

from inductor_quant import simulate
from inductor_quant._compat import gluon
from inductor_quant.report.events import collect
from tests.support.gemms import fp8, w8a8
from tests.support.gemms.generated import generate

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(not gluon.available(), reason="this Triton has no Gluon"),
]


def assert_compiles(fn, make, kernel):
    with collect() as report:
        generated = generate(fn, make)
    assert report.kernels[0].chosen.startswith(f"{kernel} ")
    [(name, source)] = generated.kernels.items()
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in source
    assert simulate.compile_kernel(name, source).spill_stores == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("of", "case", "kernel"),
    [
        (w8a8, w8a8.Case(300000, 8192, 4096), "w8a8_large_m_sm90"),
        (fp8, fp8.Case(300000, 8192, 4096), "fp8_large_m_sm90"),
    ],
)
def test_a_result_of_more_than_2_31_elements(of, case, kernel):
    assert_compiles(of.gemm(case), lambda device: of.make_inputs(case, device), kernel)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("of", "case", "dtype", "kernel"),
    [
        (w8a8, w8a8.Case(4, 4096, 4096), torch.int8, "w8a8_decode"),
        (
            fp8,
            fp8.Case(4, 4096, 4096, block=(128, 128)),
            torch.float8_e4m3fn,
            "fp8_block_decode",
        ),
        (
            fp8,
            fp8.Case(128, 7168, 2048, block=(128, 128)),
            torch.float8_e4m3fn,
            "fp8_block_two_block_sm90",
        ),
    ],
)
def test_a_weight_at_a_large_offset(of, case, dtype, kernel):
    """One expert of many in one tensor."""

    def fn(experts, a, _, *rest):
        return of.gemm(case)(a, experts[290], *rest)

    def make(device):
        experts = torch.empty(300, case.n, case.k, dtype=dtype, device=device)
        return experts, *of.make_inputs(case, device)

    assert_compiles(fn, make, kernel)
