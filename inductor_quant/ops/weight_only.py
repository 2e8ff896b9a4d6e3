"""``torch.ops.inductor_quant.weight_only``: a GEMM with a quantized weight, as one op."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from inductor_quant.errors import SpecError
from inductor_quant.ops.checks import check, differ
from inductor_quant.ops.dequantize import (
    EXPONENTS,
    FLOAT8,
    INTEGERS,
    Evaluator,
    dequantize,
    is_float,
)
from inductor_quant.ops.registration import define
from inductor_quant.spec.gemm import GATHERED, OperandSpec, QuantGemmSpec, ScaleSpec
from inductor_quant.spec.weight_format import AffineIndex, DequantOp, Field, WeightFormat

__all__ = ["check_format", "dequantize", "fake", "make_spec", "op", "reference", "spec_of"]

SCHEMA = (
    "weight_only(Tensor x, Tensor[] weight, Tensor? column_scale, Tensor? bias, *, "
    "str format, ScalarType out_dtype) -> Tensor"
)
X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32),
)
FLOAT_DTYPES = (*SCALE_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
# fp16 ends at 65504: an integer must not overflow before its column scale is applied.
MAX_ELEMENT_BITS = 15


def reference(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    format: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``out[m, n] = (sum over k of x[m, k] * W[k, n]) * column_scale[n] + bias[n]``.

    Shapes and dtypes:
        x             [M, K]            bf16, fp16 or fp32
        weight        any shapes        the tensors that the format's fields index: packed weights
                                        of 8 to 64 bits, int8, fp8, scales, zero points, tables
        column_scale  [1, N] or [1, 1]  fp32, bf16 or fp16; None: 1
        bias          [N]               fp32, bf16 or fp16; None: 0
        format        ``WeightFormat.encode()``: ``W = dequantize(format, weight)`` [K, N]
    Returns [M, N] in ``out_dtype`` (bf16, fp16 or fp32), contiguous.

    Rounding. W is dequantized in fp32. It is rounded to x's dtype once, after the last op that
    depends on k, for the matrix unit (or not at all: a kernel may apply the ops of a group of K to
    its sum); without such ops, or with integer ones alone, that rounding is exact (integers up to
    256 in bf16, 2048 in fp16; fp8). The column scales that end ``format``
    (``WeightFormat.column_ops``), column_scale and bias are applied to the sum. Sum and epilogue
    are fp32 (this reference: sum in fp64), rounded once at the end. fp32 x: no rounding of W, no
    TF32.

    Raises SpecError for other shapes or dtypes, or if ``format`` does not fit the tensors.
    """
    parsed = decode(format)
    spec_of(x, weight, column_scale, bias, parsed, out_dtype)
    out = product(x, parsed, weight)
    if column_scale is not None:
        out = out * column_scale.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def product(
    x: torch.Tensor, format: WeightFormat, weight: Sequence[torch.Tensor], expert: int | None = None
) -> torch.Tensor:
    """``x @ W`` in fp32, summed in fp64, with W rounded as ``reference`` says."""
    kept, columns = split_dequant_ops(format, x.dtype, weight[format.element.source].dtype)
    evaluator = Evaluator(format, weight, x.device, expert=expert)
    value = evaluator.convert(evaluator.field(format.element), torch.float32)
    value = evaluator.apply(value, kept, torch.float32).to(x.dtype).expand(format.shape)
    out = (x.double() @ value.double()).float()
    return evaluator.apply(out, columns, torch.float32)


def fake(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    format: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    parsed = decode(format)
    spec_of(x, weight, column_scale, bias, parsed, out_dtype)
    return torch.empty((x.shape[0], parsed.shape[1]), dtype=out_dtype, device=x.device)


def split_dequant_ops(
    format: WeightFormat, x_dtype: torch.dtype, element_dtype: torch.dtype
) -> tuple[tuple[DequantOp, ...], tuple[DequantOp, ...]]:
    """(ops applied to W, ops applied to the sum over k); together: ``format.dequant_ops``."""
    # a difference of integers that are not small is not rounded before its scale
    columns = () if format.element.minus else format.column_ops
    kept = format.dequant_ops[: len(format.dequant_ops) - len(columns)]
    # Before the last scale, an element in bf16 or fp32, or one that was scaled, may exceed fp16.
    is_wide = element_dtype in (torch.bfloat16, torch.float32)
    is_scaled = any(step.kind in ("mul", "div") for step in kept)
    if x_dtype == torch.float16 and (is_wide or is_scaled):
        return format.dequant_ops, ()
    return kept, columns


def preferred_rows(
    format: WeightFormat, x_dtype: torch.dtype, dtypes: Sequence[torch.dtype]
) -> int:
    """The largest M for which fused kernels beat dequantizing W once and calling cuBLAS.

    Fused kernels dequantize W for each tile of M; a weight that is only converted costs less a
    tile. Set between measured values of M where the one and the other was faster; a number of
    several fields has only the general kernel, which dequantizes it slowly (not measured); one
    whose place is computed is dequantized once, as the graph does.
    """
    code = format.code
    places = (*code.index, code.offset)
    if any(place.is_position for form in places for place, _ in form.fields):
        return 0
    if format.element.high:
        return 16
    kept, _ = split_dequant_ops(format, x_dtype, dtypes[format.element.source])
    is_converted = not kept and not format.element.width and format.element == format.code
    return 512 if is_converted else 128


def spec_of(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: WeightFormat,
    out_dtype: torch.dtype,
) -> QuantGemmSpec:
    """The spec of a call. Raises SpecError for arguments that form no such GEMM.

    Symbolic sizes are not checked: that would add a guard.
    """
    k, n = check_format(format, tuple((t.dtype, tuple(t.shape)) for t in weight))
    if format.e or format.to_int8:
        raise SpecError(f"weight_only: {format} is a stack of weights, or rounded to int8")
    if x.dtype not in X_DTYPES or x.dim() != 2 or differ(x.shape[1:], (k,)):
        raise SpecError(
            f"weight_only: x is {x.dtype} {list(x.shape)}, it must be [M, {k}] of one of {X_DTYPES}"
        )
    check(
        "weight_only",
        {
            "column_scale": (column_scale, ((1, n), (1, 1)), SCALE_DTYPES),
            "bias": (bias, ((n,),), SCALE_DTYPES),
        },
    )
    if out_dtype not in SCALE_DTYPES:
        raise SpecError(f"weight_only returns one of {SCALE_DTYPES}, not {out_dtype}")
    return make_spec(
        format,
        [t.dtype for t in weight],
        x_dtype=x.dtype,
        column_scale=column_scale_spec(column_scale),
        out_dtype=out_dtype,
        bias=bias is not None,
    )


def column_scale_spec(scale: Any) -> ScaleSpec | None:
    """The ScaleSpec of ``column_scale``, [1, N] or [1, 1]."""
    if scale is None:
        return None
    return ScaleSpec(scale.dtype, (-1, -1 if scale.shape[1] == 1 else 1))


def make_spec(
    format: WeightFormat,
    dtypes: Sequence[torch.dtype],
    *,
    x_dtype: torch.dtype,
    column_scale: ScaleSpec | None,
    out_dtype: torch.dtype,
    bias: bool,
) -> QuantGemmSpec:
    """The spec of a weight_only GEMM whose weight tensors have these ``dtypes``.

    b's scale is the one with the smallest block; ``column_scale`` if the format has none.
    """
    scales = [
        ScaleSpec(_value_dtype(step.operand, dtypes), _spec_block(format, step.operand))
        for step in format.scales
        if isinstance(step.operand, Field)
    ]
    if column_scale is not None:
        scales.append(column_scale)
    code = format.code
    dtype, bits = _number(code, dtypes[code.source])
    return QuantGemmSpec(
        a=OperandSpec(x_dtype),
        b=OperandSpec(
            dtype,
            min(scales, key=lambda scale: _size(scale.block), default=None),
            bits=bits,
            zero=_zero(format, dtypes),
            lut=format.element != code,
        ),
        out_dtype=out_dtype,
        bias=bias,
    )


def _number(code: Field, dtype: torch.dtype) -> tuple[torch.dtype, int | None]:
    """The dtype of an unpacked element, and its width if the dtype is wider."""
    if not code.width or code.float8:
        return FLOAT8.get(code.float8, dtype), None
    signed = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    unsigned = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}
    types = signed if code.signed else unsigned
    total = code.total_width
    width, dtype = next(pair for pair in types.items() if pair[0] >= total)
    return dtype, None if width == total else total


def _value_dtype(field: Field, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    if field.float8 in EXPONENTS:
        return torch.float8_e8m0fnu
    return FLOAT8.get(field.float8, dtypes[field.source])


def _spec_block(format: WeightFormat, field: Field) -> tuple[int, int]:
    rows, columns = format.block(field)
    if any(format.block(part)[0] == 1 for part in field.nested):
        rows = GATHERED
    return rows, columns


def _size(block: tuple[int, int]) -> tuple[float, float]:
    rows, columns = (float("inf") if size == -1 else size for size in block)
    return rows, columns


def _zero(format: WeightFormat, dtypes: Sequence[torch.dtype]) -> str:
    step = format.zero
    if format.element.minus:
        return "int"
    if step is None:
        return "const" if format.element.add else ""
    if any(
        earlier.kind in ("mul", "div")
        for earlier in format.dequant_ops[: format.dequant_ops.index(step)]
    ):
        return "folded"
    if not isinstance(step.operand, Field):
        return "const"
    if is_float(_value_dtype(step.operand, dtypes)):
        return "float"
    return "packed" if step.operand.width else "int"


@functools.lru_cache(maxsize=1024)
def decode(text: str) -> WeightFormat:
    """``WeightFormat.decode``; raises SpecError."""
    try:
        return WeightFormat.decode(text)
    except ValueError as error:
        raise SpecError(f"weight_only: format={text!r}: {error}") from error


TensorType = tuple[torch.dtype, tuple[Any, ...]]


def check_format(format: WeightFormat, tensors: tuple[TensorType, ...]) -> tuple[int, int]:
    """(K, N) of a format that fits tensors of these (dtype, shape). Raises SpecError otherwise.

    Every index that the digits can reach must be within its tensor, every bit field within its
    word. Indices and offsets that are data are not checked, nor are symbolic sizes.
    """
    if all(isinstance(size, int) for _, shape in tensors for size in shape):
        _check_cached(format, tensors)
    else:
        _check(format, tensors)
    return format.shape


@functools.lru_cache(maxsize=4096)
def _check_cached(format: WeightFormat, tensors: tuple[TensorType, ...]) -> None:
    _check(format, tensors)


def _check(format: WeightFormat, tensors: tuple[TensorType, ...]) -> None:
    if not format.k or not format.n or min(format.k + format.n + format.e) < 1:
        raise SpecError(f"weight_only: {format} has an empty dimension")
    fields = list(format.fields())
    used = {field.source for field in fields}
    if used != set(range(len(tensors))):
        raise SpecError(
            f"weight_only: {format} reads tensors {sorted(used)}, {len(tensors)} were given"
        )
    for field in fields:
        dtype, shape = tensors[field.source]
        problem = _problem(format, field, dtype, shape)
        if problem:
            raise SpecError(
                f"weight_only: field {field} of {format}: {problem} (tensor {field.source} is "
                f"{dtype} {list(shape)})"
            )
        for part in field.nested:
            if part.is_position:
                _check_position(format, part)
            elif part.float8 or is_float(tensors[part.source][0]):
                raise SpecError(f"weight_only: position {part} of {format} is not an integer")
    for step in format.dequant_ops:
        if not isinstance(step.operand, Field) and not math.isfinite(step.operand):
            raise SpecError(f"weight_only: {step} of {format} is not finite")
    minus = format.element.minus
    if minus and (is_float(tensors[minus.source][0]) or format.element.bits not in INTEGERS):
        raise SpecError(f"weight_only: {minus} of {format} is no integer of 16, 32 or 64 bits")
    if any(field.minus for field in fields if field != format.element):
        raise SpecError(f"weight_only: a field of {format} that is not the element has a minus")
    joined = format.element
    while joined.high:
        joined = joined.high
        if not joined.width or is_float(tensors[joined.source][0]) or joined.signed or joined.add:
            raise SpecError(f"weight_only: {joined} of {format} is no unsigned bit field")
    if any(field.high and (field.wrap or field.signed or not field.width) for field in fields):
        raise SpecError(
            f"weight_only: a field of {format} with a high part wraps, or is no unsigned bit field"
        )
    if format.code.float8 in EXPONENTS:
        raise SpecError(f"weight_only: the element of {format} is a power of two, as scales are")
    dtype = tensors[format.element.source][0]
    if format.element.total_width > MAX_ELEMENT_BITS or (
        not format.element.width and dtype not in (*FLOAT_DTYPES, *_SMALL_INTS)
    ):
        raise SpecError(
            f"weight_only: the element of {format} is wider than {MAX_ELEMENT_BITS} bits"
        )


def _check_position(format: WeightFormat, field: Field) -> None:
    """That a digit of a position is one. Raises SpecError otherwise."""
    is_digit = field.divisor > 0 and field.modulus > 0 and len(field.table) in (0, field.modulus)
    if is_digit and len(field.index) == 1 and not field.index[0].is_data:
        own = dataclasses.replace(field, source=0)
        low, high = field.index[0].bounds(format.radix)
        if low >= 0 and _problem(format, own, torch.int64, (high + 1,)) is None:
            return
    raise SpecError(f"weight_only: {field} of {format} is no digit of a position")


_SMALL_INTS = (torch.int8, torch.uint8, torch.int16)


def _problem(
    format: WeightFormat, field: Field, dtype: torch.dtype, shape: tuple[Any, ...]
) -> str | None:
    """What is wrong with a field of a tensor of this dtype and shape."""
    for name in {name for form in (*field.index, field.offset) for name in _own_digits(form)}:
        is_digit = name[0] in "kne" and name[1:].isdecimal()
        if not is_digit or int(name[1:]) >= len(format.radices(name[0])):
            return f"there is no digit {name}"
    for form in (*field.index, field.offset):
        for name, table in form.tables:
            if len(table) != format.radix(name):
                return f"the table of {name} has {len(table)} entries, not {format.radix(name)}"
    if dtype not in INT_DTYPES and dtype not in FLOAT_DTYPES:
        return "an unsupported dtype"
    if len(field.index) != len(shape):
        return f"{len(field.index)} indices for {len(shape)} dimensions"
    for dim, (form, size) in enumerate(zip(field.index, shape, strict=True)):
        low, high = form.bounds(format.radix)
        if not form.is_data and isinstance(size, int) and (low < -size or high >= size):
            return f"indices {low} to {high} in dimension {dim} of {size}"
    if not field.width:
        if field.offset != AffineIndex() or field.signed or field.wrap or field.float8:
            return "a field without a width can have no offset, sign or wrap"
        if (field.add or field.size) and dtype not in INT_DTYPES:
            return "add and size need an integer tensor"
        return None
    if field.float8 and (
        field.float8 not in (*FLOAT8, *EXPONENTS)
        or field.width != 8
        or field.add
        or field.wrap
        or field.size
    ):
        return "float8 needs a width of 8, and no add, wrap or size"
    if dtype not in INT_DTYPES:
        return "a bit field of a float tensor"
    low, high = field.offset.bounds(format.radix)
    word = 8 * dtype.itemsize
    if field.width > word or (not field.offset.is_data and (low < 0 or high + field.width > word)):
        return f"bits {low} to {high + field.width - 1} of words of {word}"
    return None


def _own_digits(form: Any) -> set[str]:
    """The digits of an index itself, without those of its fields."""
    return {name for name, _ in form.linear} | {name for name, _ in form.tables}


op = define(SCHEMA, reference, fake, flexible_layout=True)
