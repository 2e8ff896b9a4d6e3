"""w8a8_group_large_m_sm90 and fp8_group_large_m_sm90 on a GPU: every element, both tiles."""

from __future__ import annotations

import pytest
import torch

import inductor_quant
from inductor_quant.kernels.scaled_mm.group_large_m_sm90 import kernel as group_large_m_sm90
from tests.support.gemms import fp8, w8a8

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.usefixtures("hopper")]

CASES = [
    w8a8.Case(4095, 4008, 1152, group=128),
    w8a8.Case(1030, 2056, 4096, group=512, scale_dtype=torch.bfloat16, w_layout="padded"),
    w8a8.Case(300, 264, 640, group=128, a_scale="none", bias=False, out_dtype=torch.float16),
    fp8.Case(4095, 4008, 1152, group=128),
    fp8.Case(1030, 2056, 4096, group=512, scale_dtype=torch.bfloat16, w_layout="padded"),
    fp8.Case(300, 264, 640, group=128, a_scale="none", bias=False, w_dtype=fp8.e5m2),
    fp8.Case(33000, 136, 128 * 3, group=128, a_scale="tensor", out_dtype=torch.float16),
]


@pytest.mark.parametrize("config", group_large_m_sm90.CONFIGS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{type(case).__module__[-4:]}-{case}")
def test_result_is_close_to_fp64(case, config, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(group_large_m_sm90, "MIN_FILL", 0)
    is_int8 = isinstance(case, w8a8.Case)
    module, name = (w8a8, "w8a8") if is_int8 else (fp8, "fp8")
    pin = f"{name}_group_large_m_sm90 {config}"
    inputs = module.make_inputs(case, "cuda")
    options = {"inductor_quant.on_error": "raise", "inductor_quant.configs": (pin,)}
    with inductor_quant.collect() as report, torch.no_grad():
        compiled = torch.compile(
            module.gemm(case), backend="inductor_quant", options=options, dynamic=False
        )
        got = compiled(*inputs)
    assert [each.chosen for each in report.kernels] == [pin]
    want = module.reference(inputs) if is_int8 else module.reference(case, inputs)
    # Hopper's matrix unit keeps about 14 bits of a sum of FP8 products: too few for fp16's bound.
    w8a8.assert_close(got, want, got.dtype if is_int8 else torch.bfloat16)
