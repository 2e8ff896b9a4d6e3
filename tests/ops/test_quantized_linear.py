"""``quantized_linear`` in eager mode: what it computes, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops import fp8, w8a8
from inductor_quant.ops.fusion import quantize, quantized_linear
from inductor_quant.spec import row_scale
from tests.support.gemms.quantizing import E4M3, FLOAT_NARROW, GUARDED, Case


def arguments(case):
    x, w, *rest = case.inputs("cpu")
    return (x, w.t(), *rest)


@pytest.mark.parametrize(
    "case",
    [Case(3, 16, 64), Case(3, 16, 64, scale_ops=None, per_token=True), Case(2, 8, 32, low=-127)],
    ids=str,
)
def test_it_is_quantization_and_gemm(case):
    torch.manual_seed(0)
    x, b, a_scale, b_scale, bias = arguments(case)
    got = quantized_linear.op(
        *(x, b, a_scale, b_scale, bias),
        dtype=torch.int8,
        scale_ops=case.steps,
        low=case.low,
        out_dtype=torch.float32,
    )
    scale = (x.float().abs().amax(1, True).clamp_min(1e-5) / 127) if a_scale is None else a_scale
    a = quantize.op(x, scale, case.low, 127, dtype=torch.int8)
    assert torch.equal(got, w8a8.op(a, b, scale, b_scale, bias, out_dtype=torch.float32))


def test_it_quantizes_to_e4m3_in_the_scale_s_dtype():
    torch.manual_seed(0)
    x, b, _, b_scale, bias = arguments(
        case := Case(3, 16, 64, scale_ops=FLOAT_NARROW, element=E4M3)
    )
    x[1] = 0
    got = quantized_linear.op(
        *(x, b, None, b_scale, bias), dtype=E4M3, scale_ops=case.steps, out_dtype=torch.float32
    )
    scale = x.abs().amax(1, True) / 448
    scale[1] = 0.0078125
    a = (x / scale).clamp(-448, 448).to(E4M3)
    assert torch.equal(got, fp8.op(a, b, scale, b_scale, bias, out_dtype=torch.float32))


def test_fake():
    case = Case(3, 16, 64)
    given = {"dtype": torch.int8, "scale_ops": case.steps, "out_dtype": torch.float16}
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        got = quantized_linear.op(*arguments(case), **given)
    assert (got.shape, got.dtype) == ((3, 16), torch.float16)
    torch.library.opcheck(quantized_linear.op, arguments(case), given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_ops": ["div 127.0"]}, "a scale in bf16, 1 steps"),
        ({"scale_ops": ["to f32", "pow 2.0"]}, "'pow 2.0' is no step"),
        ({"scale_ops": ["to i8"]}, "'to i8' is no step"),
        ({"scale_ops": ["div nan"]}, "'div nan' is no step"),
        ({"x": torch.zeros(3, 64, dtype=torch.int8)}, "x is torch.int8"),
        ({"x": torch.zeros(2, 3, 64)}, r"x is torch.float32 \[2, 3, 64\]"),
        ({"x": torch.zeros(3, 32)}, "w8a8 takes"),
        ({"scale_ops": ["to f32", "clamp_min 1e-40"]}, "'clamp_min 1e-40' is no step"),
        ({"scale_ops": ["to f32", "clamp_min 1e+39"]}, "is no step"),
        ({"a_scale": torch.ones(3, 2), "scale_ops": []}, r"a_scale is \[3, 2\]"),
        ({"b_scale": torch.ones(2, 16)}, r"b_scale is \[2, 16\], it must be \[1, 16\]"),
        ({"a_scale": torch.ones(3, 1)}, "3 steps in scale_ops"),
        ({"a_scale": torch.ones(3, 1).half(), "scale_ops": []}, "a scale in f16"),
        ({"dtype": torch.float8_e5m2}, "no values in torch.float8_e5m2"),
    ],
)
def test_what_forms_no_gemm_is_refused(change, message):
    x, b, a_scale, b_scale, bias = arguments(Case(3, 16, 64))
    given = {"x": x, "b": b, "a_scale": a_scale, "b_scale": b_scale, "bias": bias}
    given |= {"dtype": torch.int8, "scale_ops": list(GUARDED), "out_dtype": torch.bfloat16} | change
    with pytest.raises(SpecError, match=message):
        quantized_linear.op(**given)


@pytest.mark.parametrize(
    "text", ["div 127.0", "to bf16", "clamp_min 1e-05", "mul -0.5", "if_zero 0.25"]
)
def test_steps_read_as_they_are_written(text):
    assert str(row_scale.parse(text)) == text
