"""``weight_only_bytes`` on a GPU, in every configuration."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.kernels.weight_only.bytes.kernel import MAX_M_FIELDS, WEIGHT_ONLY_BYTES
from inductor_quant.ops import weight_only
from inductor_quant.report.events import collect
from tests.kernels.weight_only.few_rows.test_bytes_interpreted import MAKE, every_byte, plain
from tests.support.gemms import formats
from tests.support.gemms.generated import device
from tests.support.gemms.weight_only import Case, assert_right, described, gemm, make_inputs

pytestmark = pytest.mark.gpu

bf16, f16 = torch.bfloat16, torch.float16
i8, u8, e4m3, e5m2 = torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = {"inductor_quant.on_error": "raise"}


@pytest.fixture(autouse=True)
def large_groups(monkeypatch):
    monkeypatch.setattr(formats, "GROUP", 128)


def run(fn, inputs, *configs):
    torch._dynamo.reset()
    options = OPTIONS | {"inductor_quant.configs": configs}
    with collect() as report:
        got = torch.compile(fn, backend="inductor_quant", dynamic=False, options=options)(*inputs)
    return got, report.kernels[-1].chosen


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize("kind", [i8, u8, e4m3, e5m2, *MAKE], ids=str)
def test_every_byte_is_read_bit_for_bit(kind, dtype):
    """Identity rows. Bytes that are not finite would make their column NaN, and are set to 0."""
    format, weight = MAKE.get(kind, lambda: plain(kind))()
    if kind in (e4m3, e5m2):
        weight.view(u8)[~weight.float().isfinite()] = 0
    weight = weight.cuda()
    want = weight_only.dequantize(format, [weight]).to(dtype)
    text = format.encode()

    def fn(x, weight):
        return weight_only.op(x, [weight], None, None, format=text, out_dtype=dtype)

    rows = torch.eye(256, dtype=dtype, device="cuda")
    for m, config in (
        (16, "16x32x128_w1_s3_g8"),
        (64, "64x64x64_w4_s3_g8"),
        (8, "8x32x64_w1_s5_g8_k2"),
    ):
        if kind == "halves" and m > MAX_M_FIELDS:
            continue
        for part, wanted in zip(rows.split(m)[:4], want.split(m), strict=False):
            got, chosen = run(fn, (part, weight), f"weight_only_bytes {config}")
            assert chosen == f"weight_only_bytes {config}"
            assert torch.equal(got, wanted)


def test_what_is_not_finite_stays():
    format, weight = plain(e5m2)
    bytes = torch.zeros_like(weight.view(u8))
    special = every_byte(u8)[0][~torch.arange(256).to(u8).view(e5m2).float().isfinite()]
    bytes[: len(special), 3] = special
    weight = bytes.view(e5m2).cuda()
    text = format.encode()

    def fn(x, weight):
        return weight_only.op(x, [weight], None, None, format=text, out_dtype=bf16)

    for m in (1, 64):
        got, chosen = run(fn, (torch.ones(m, 256, dtype=bf16, device="cuda"), weight))
        assert chosen.startswith("weight_only_")
        want = weight.float().sum(1).expand(m, 64)
        torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize("name", ["int8_channel", "int8_folded", "fp8_block", "hqq"])
def test_every_configuration(name, m):
    torch.manual_seed(0)
    case = Case(name, m, 1024, 2048, f16 if name == "int8_folded" else bf16, bias=True)
    inputs = make_inputs(case, "cuda")
    spec, problem = described(case)
    if WEIGHT_ONLY_BYTES.rejection(spec, problem, device(90)) is not None:
        pytest.skip("not this kernel's")
    for config in WEIGHT_ONLY_BYTES.configs(spec, problem, device(90)):
        got, chosen = run(gemm(case), inputs, f"weight_only_bytes {config}")
        assert chosen == f"weight_only_bytes {config}"
        assert_right(got, case, inputs)


@pytest.mark.parametrize("name", ["int8_channel", "fp8_row"])
@pytest.mark.parametrize(("n", "k"), [(1152, 4304), (4310, 1168)])
@pytest.mark.parametrize("m", [1, 5, 16, 33, 64, 128])
def test_tiles_that_end_beyond_n_and_k_are_close_to_fp64(m, n, k, name):
    torch.manual_seed(0)
    case = Case(name, m, n, k, bias=True)
    inputs = make_inputs(case, "cuda")
    got, chosen = run(gemm(case), inputs)
    assert chosen.startswith("weight_only_bytes")
    assert_right(got, case, inputs)
