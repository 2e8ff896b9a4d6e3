"""The canonical op by itself: its reference against plain code, spec, fake, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_quant.errors import SpecError
from inductor_quant.ops import weight_only
from inductor_quant.ops.weight_only import dequantize
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat
from tests.support.gemms import formats
from tests.support.gemms.formats import FORMATS, form
from tests.support.gemms.weight_only import (
    Case,
    assert_close,
    gemm,
    laid_out,
    make_inputs,
    reference,
)

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("k", "n"), [(32, 8), (96, 40), (256, 256)])
def test_dequantize_is_what_plain_code_computes(name, k, n):
    """In fp64, which holds every step exactly; divisions round alike."""
    torch.manual_seed(k)
    packed = formats.build(name, k, n)
    weight = packed.make()
    want = packed.dequantized(weight)
    assert torch.equal(dequantize(packed.format, weight, torch.float64), want)
    got = dequantize(packed.format, weight)
    assert got.dtype == f32
    assert got.shape == packed.format.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ["columns", "every_second"])
def test_only_positions_count_not_strides(name, layout):
    packed = formats.build(name, 64, 40)
    weight = packed.make()
    moved = [laid_out(tensor, layout) for tensor in weight]
    assert torch.equal(dequantize(packed.format, moved), dequantize(packed.format, weight))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int8, [-128, -1, 5, 127]),
        (torch.uint8, [0, 1, 128, 255]),
        (torch.int32, [-(2**31), -1, 5, 2**31 - 1]),
        (torch.int64, [-(2**63), -1, 5, 2**63 - 1]),
    ],
)
def test_a_shift_that_is_data_goes_as_far_as_torch_shifts(dtype, values):
    """Below 0 and beyond the word: what is left is the sign."""
    words = torch.tensor(values, dtype=dtype)
    shifts = torch.tensor([-1, 0, 3, 7, 8, 31, 32, 63, 64, 1000])
    element = Field(
        0, (form(("k0", 1)),), form(data=Field(1, (form(("n0", 1)),))), width=4, signed=False
    )
    format = WeightFormat((4,), (10,), element)
    want = (words[:, None].to(torch.int64) >> shifts) & 15
    assert torch.equal(dequantize(format, [words, shifts]), want.float())
    if dtype.itemsize < 8:  # the same in the word's own type
        own = words[:, None] >> shifts[1:9].to(dtype)
        assert torch.equal((own & 15).float(), want[:, 1:9].float())


def test_steps_are_rounded_one_by_one_in_the_type_that_is_asked_for():
    format = WeightFormat(
        (1,),
        (1,),
        Field(0, ()),
        (DequantOp("mul", 3.0), DequantOp("sub", 0.1), DequantOp("div", 7.0)),
    )
    value = torch.tensor(1.1, dtype=f32)
    assert dequantize(format, [value]).item() == (((value * 3) - 0.1) / 7).item()
    want = ((value.double() * 3) - 0.1) / 7
    assert dequantize(format, [value], torch.float64).item() == want.item()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_result_is_close_to_fp64(name, dtype):
    torch.manual_seed(0)
    case = Case(name, 33, 57, 100, dtype, bias=True, column_scale="channel")
    inputs = make_inputs(case, "cpu")
    assert_close(gemm(case)(*inputs), reference(case, inputs))


@pytest.mark.parametrize(
    "case",
    [
        Case("gptq", 1, 64, 64, bf16),
        Case("gptq", 7, 40, 96, bf16, out_dtype=f32),
        Case("int8_channel", 5, 1, 1, f32, column_scale="tensor"),
        Case("int8_group", 5, 3, 96, f32, bias=True),
        Case("awq", 9, 64, 64, f16, layout="columns"),
        Case("hqq", 9, 64, 64, f16, layout="every_second"),
    ],
    ids=str,
)
def test_odd_sizes_types_and_layouts(case):
    torch.manual_seed(0)
    inputs = make_inputs(case, "cpu")
    assert_close(gemm(case)(*inputs), reference(case, inputs))


@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_rows_give_the_weight(name):
    """Rounded to x's type before the scales of whole columns, and where it says nowhere else."""
    case = Case(name, 1, 64, 64, bf16, out_dtype=f32)
    _, _, _, *weight = make_inputs(case, "cpu")
    format = case.packed.format
    got = gemm(case)(torch.eye(format.shape[0]).to(bf16), None, None, *weight)
    columns = format.column_ops
    kept = dataclasses.replace(
        format, dequant_ops=format.dequant_ops[: len(format.dequant_ops) - len(columns)]
    )
    value = dequantize(kept, weight).to(bf16).float()
    for step in columns:
        alone = dataclasses.replace(format, dequant_ops=())
        if isinstance(step.operand, Field):
            alone = dataclasses.replace(alone, element=step.operand)
            operand = dequantize(alone, weight)
        else:
            operand = step.operand
        value = value * operand if step.kind == "mul" else value / operand
    assert torch.equal(got, value)


SPECS = {
    "gptq": "u4/32x1:f16 zero=packed",
    "awq": "u4/32x1:f16 zero=packed",
    "hqq": "u4/32x1:bf16 zero=float",
    "int8_group": "i8/32x1:bf16 zero=int",
    "int8_divisor": "i8/32x1:f32",
    "int8_folded": "u8/32x1:f16 zero=folded",
    "int8_channel": "i8/channel:bf16",
    "int8_shuffled": "i8/channel:bf16",
    "int8_zero_channel": "i8/channel:f32 zero=int",
    "fp8_row": "e4m3/channel:f32",
    "fp8_block": "e4m3/128x128:f32",
    "fp8_words": "e4m3/32x1:bf16",
    "e5m2_group": "e5m2/32x1:bf16",
    "nibble_pairs": "u4/32x1:bf16 zero=const",
    "int4_words": "i4/channel:f16",
    "uint2": "u2 zero=const",
    "uint3": "u3/10x1:f16",
    "ten_parts": "u3/32x1:f16 zero=float",
    "int4_in_int64": "i4",
    "nf4": "u4 lut/32x1:f32",
    "joined_table": "u6 lut",
    "mxfp4": "u4 lut/32x1:e8m0",
    "nvfp4": "u4 lut/32x1:e4m3",
    "shards": "u3/32x1:bf16 zero=float",
    "halves_of_k": "u4/32x1:bf16 zero=const",
    "quarters_of_k": "u2/32x1:bf16 zero=int",
    "crossing": "u3/32x1:f16 zero=packed",
    "groups_of_n": "u4/1x1:bf16 zero=float",
    "act_order": "u4/gatheredx1:f16 zero=packed",
    "shift_table": "u4/channel:f16 zero=const",
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_spec_says_what_the_weight_is_and_no_sizes(name):
    specs = {
        weight_only.spec_of(
            torch.zeros(m, packed.format.shape[0], dtype=bf16),
            packed.make(),
            None,
            None,
            packed.format,
            bf16,
        )
        for m, packed in ((1, formats.build(name, 256, 256)), (7, formats.build(name, 512, 384)))
    }
    [spec] = specs
    assert str(spec) == f"(a=bf16, b={SPECS[name]}, out=bf16)"


def test_a_column_scale_is_the_scale_of_a_weight_that_has_none():
    case = Case("int4_in_int64", 2, 64, 64, column_scale="channel", bias=True)
    x, scale, bias, *weight = make_inputs(case, "cpu")
    spec = weight_only.spec_of(x, weight, scale, bias, case.packed.format, bf16)
    assert str(spec) == "(a=bf16, b=i4/channel:f32, out=bf16+bias)"


def test_properties_of_a_format():
    packs = {name: formats.build(name, 256, 256).format for name in FORMATS}
    assert packs["gptq"].pack_axis == "k"
    assert packs["gptq"].pack_order == tuple(range(0, 32, 4))
    assert packs["awq"].pack_axis == "n"
    assert packs["awq"].pack_order == (0, 16, 4, 20, 8, 24, 12, 28)
    assert packs["hqq"].pack_order == (4, 0)
    assert packs["nf4"].pack_order == (4, 0)
    assert packs["int8_group"].pack_axis is None
    assert packs["shift_table"].pack_order == ()
    assert len(packs["int8_zero_channel"].column_ops) == 2
    assert packs["gptq"].column_ops == ()


def test_opcheck():
    case = Case("gptq", 4, 16, 64, column_scale="channel", bias=True)
    x, scale, bias, *weight = make_inputs(case, "cpu")
    torch.library.opcheck(
        weight_only.op,
        (x, weight, scale, bias),
        {"format": case.packed.format.encode(), "out_dtype": f16},
    )


def _gptq(**change):
    packed = formats.build("gptq", 64, 16)
    arguments = {
        "x": torch.zeros(3, 64, dtype=bf16),
        "weight": packed.make(),
        "column_scale": None,
        "bias": None,
        "format": packed.format,
        "out_dtype": bf16,
        **change,
    }
    if isinstance(arguments["format"], WeightFormat):
        arguments["format"] = arguments["format"].encode()
    return arguments


FORMAT = formats.build("gptq", 64, 16).format
WORDS, ZEROS, SCALES = formats.build("gptq", 64, 16).make()
ELEMENT = FORMAT.element


def _with(**change):
    return {"format": dataclasses.replace(FORMAT, element=dataclasses.replace(ELEMENT, **change))}


BAD = {
    "x is int8": ({"x": torch.zeros(3, 64, dtype=torch.int8)}, "int8"),
    "K differs": ({"x": torch.zeros(3, 65, dtype=bf16)}, "[M, 64]"),
    "x is a vector": ({"x": torch.zeros(64, dtype=bf16)}, "[M, 64]"),
    "column_scale is a column": ({"column_scale": torch.zeros(16, 1)}, "[1, 16] or [1, 1]"),
    "column_scale is fp64": ({"column_scale": torch.zeros(1, 16).double()}, "float64"),
    "bias is short": ({"bias": torch.zeros(1)}, "must be [16]"),
    "out is int8": ({"out_dtype": torch.int8}, "int8"),
    "a tensor is missing": ({"weight": [WORDS, ZEROS]}, "2 were given"),
    "a tensor too many": ({"weight": [WORDS, ZEROS, SCALES, SCALES]}, "4 were given"),
    "the words are short": ({"weight": [WORDS[:-1], ZEROS, SCALES]}, "indices 0 to 7"),
    "the words are flat": ({"weight": [WORDS.flatten(), ZEROS, SCALES]}, "2 indices for 1"),
    "the scales are narrow": ({"weight": [WORDS, ZEROS, SCALES[:, :9]]}, "indices 0 to 15"),
    "the words are bytes": ({"weight": [WORDS.to(torch.int8), ZEROS, SCALES]}, "words of 8"),
    "the words are floats": ({"weight": [WORDS.float(), ZEROS, SCALES]}, "bit field of a float"),
    "the words are booleans": ({"weight": [WORDS > 0, ZEROS, SCALES]}, "unsupported dtype"),
    "an offset below 0": (_with(offset=form(("k2", 4), const=-1)), "bits -1 to"),
    "an offset beyond the word": (_with(offset=form(("k2", 4), const=1)), "bits 1 to 32"),
    "a digit that is not there": (_with(offset=form(("k3", 4))), "no digit k3"),
    "a table of another length": (_with(offset=AffineIndex(tables=(("k2", (0, 4)),))), "2 entries"),
    "a wrap without a width": (_with(width=0, offset=AffineIndex(), wrap=True), "without a width"),
    "an element that is wide": (_with(width=16, offset=AffineIndex()), "wider than 15"),
    "a number of several fields with a sign": (
        _with(signed=True, high=dataclasses.replace(ELEMENT, width=1)),
        "no unsigned bit field",
    ),
    "an empty dimension": ({"format": dataclasses.replace(FORMAT, k=(2, 4, 0))}, "empty"),
    "a position that is a float": (
        {"format": WeightFormat((64,), (16,), Field(0, (form(data=Field(1, ())), AffineIndex())))},
        "not an integer",
    ),
    "a number without an end": (
        {
            "format": dataclasses.replace(
                FORMAT, dequant_ops=(*FORMAT.dequant_ops, DequantOp("mul", float("inf")))
            )
        },
        "inf",
    ),
    "no format": ({"format": "GPTQ"}, "GPTQ"),
}
BAD["a position that is a float"][0]["weight"] = [WORDS, torch.zeros(())]


@pytest.mark.parametrize("call", [weight_only.op, weight_only.fake], ids=["op", "fake"])
@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_such_gemm_is_refused_with_what_is_needed(call, change, message):
    """By the fake too, or a compiled call would read past the end of what it was given."""
    arguments = list(_gptq(**change).items())
    with pytest.raises(SpecError) as error:
        call(*(value for _, value in arguments[:4]), **dict(arguments[4:]))
    assert message in str(error.value)


def test_positions_that_count_from_the_end_are_allowed_and_no_further():
    for const, fits in ((-4, True), (0, True), (-5, False), (1, False)):
        format = WeightFormat((4,), (2,), Field(0, (form(("k0", 1), const=const),)))
        tensors = ((torch.int8, (4,)),)
        if fits:
            assert weight_only.check_format(format, tensors) == (4, 2)
            continue
        with pytest.raises(SpecError):
            weight_only.check_format(format, tensors)


def test_a_symbolic_m_is_not_looked_at():
    case = Case("gptq", 8, 16, 64, bias=True)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(gemm(case), backend=counter)
    for m in (2, 3, 16, 100):
        inputs = make_inputs(dataclasses.replace(case, m=m), "cpu")
        torch._dynamo.mark_dynamic(inputs[0], 0)  # an error where it is specialized
        assert torch.equal(run(*inputs), gemm(case)(*inputs))
    assert counter.frame_count == 1


UNFUSED = ("awq", "act_order")  # a table of offsets; positions that are data


def test_the_op_compiles_on_cpu_without_a_kernel_of_ours():
    """Inductor's C++ backend runs the unfused lowering: one graph of several formats."""
    import inductor_quant.backend  # noqa: F401  registers the lowering

    torch.manual_seed(0)
    cases = [Case(name, 5, 64, 64, bf16, column_scale="channel", bias=True) for name in UNFUSED]
    inputs = [make_inputs(case, "cpu") for case in cases]

    def fn(inputs):
        return [gemm(case)(*args) for case, args in zip(cases, inputs, strict=True)]

    for case, args, got in zip(cases, inputs, torch.compile(fn)(inputs), strict=True):
        want = reference(case, args)
        # the product is rounded before what follows, as in an unfused program
        assert_close(got, want, slack=4)


@pytest.mark.parametrize("size", [1e5, 1e-9])
def test_two_levels_of_scales_do_not_leave_fp16_between_them(size):
    """Groups scaled by ``size``, columns by its inverse: only the whole is a number of fp16."""
    k, n, groups = 64, 32, 4
    q = torch.randint(-128, 128, (k, n), dtype=torch.int8)
    group = torch.full((groups, n), size)
    column = torch.rand(n) / (128 * size)
    fmt = WeightFormat(
        (groups, k // groups),
        (n,),
        Field(0, (AffineIndex(0, (("k0", k // groups), ("k1", 1))), AffineIndex(0, (("n0", 1),)))),
        (
            DequantOp(
                "mul", Field(1, (AffineIndex(0, (("k0", 1),)), AffineIndex(0, (("n0", 1),))))
            ),
            DequantOp("mul", Field(2, (AffineIndex(0, (("n0", 1),)),))),
        ),
    )
    x = torch.randn(8, k).to(f16)
    tensors = [q, group, column]
    got = weight_only.op(x, tensors, None, None, format=fmt.encode(), out_dtype=f16)
    want = x.double() @ dequantize(fmt, tensors, torch.float64)
    assert_close(got, want, slack=2)
